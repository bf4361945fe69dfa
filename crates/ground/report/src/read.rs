//! Reading a report.

use crate::record::{Event, LINE, Record};
use std::collections::HashMap;
use std::io::{self, BufRead, Read};

/// A whole report: the processes, and the latest state of each connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The processes in the order in which they began. Each further program that a process executed has an entry of its own.
    pub processes: Vec<Record<'static>>,
    /// The last record of each connection, in the order in which the connections first appear.
    pub connections: Vec<Record<'static>>,
    /// The number of lines that are not valid records.
    pub unreadable: usize,
}

impl Report {
    /// Reads all lines. Returns the errors of the reader, and blocks when the reader does. Holds one line at a time besides the
    /// result.
    pub fn read(mut from: impl BufRead) -> io::Result<Self> {
        let mut report = Self::default();
        // A process numbers its connections anew when it executes another program. So does a later process with the same number.
        let mut programs: HashMap<u32, u32> = HashMap::new();
        let mut places = HashMap::new();
        let mut line = Vec::new();
        loop {
            line.clear();
            // The rest of a line that is too long is read as separate lines, which are not valid records either.
            if from.by_ref().take(LINE as u64).read_until(b'\n', &mut line)? == 0 {
                return Ok(report);
            }
            let Ok(record) = serde_json::from_slice::<Record<'static>>(&line) else {
                report.unreadable += 1;
                continue;
            };
            let program = programs.entry(record.pid).or_default();
            match record.event {
                Event::Process => {
                    *program += 1;
                    report.processes.push(record);
                }
                Event::Joined | Event::Stays | Event::Ended => {
                    let next = report.connections.len();
                    let place = *places.entry((record.pid, *program, record.connection)).or_insert(next);
                    match report.connections.get_mut(place) {
                        Some(earlier) => *earlier = record,
                        None => report.connections.push(record),
                    }
                }
                Event::Unknown => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: impl AsRef<[u8]>) -> Report {
        Report::read(text.as_ref()).unwrap()
    }

    #[test]
    fn the_last_record_of_a_connection_counts() {
        let report = read(concat!(
            "{\"event\":\"process\",\"pid\":1,\"program\":\"a\"}\n",
            "{\"event\":\"joined\",\"pid\":1,\"connection\":1}\n",
            "{\"event\":\"stays\",\"pid\":1,\"connection\":2,\"reason\":\"no\"}\n",
            "{\"event\":\"process\",\"pid\":2,\"program\":\"b\"}\n",
            "{\"event\":\"joined\",\"pid\":2,\"connection\":1}\n",
            "{\"event\":\"ended\",\"pid\":1,\"connection\":1,\"shared_sent\":9}\n",
            "{\"event\":\"other\",\"pid\":1,\"connection\":1}\n",
        ));
        let programs: Vec<_> = report.processes.iter().map(|p| &*p.program).collect();
        assert_eq!(programs, ["a", "b"]);
        let connections: Vec<_> =
            report.connections.iter().map(|c| (c.pid, c.connection, c.event, c.shared_sent)).collect();
        assert_eq!(connections, [(1, 1, Event::Ended, 9), (1, 2, Event::Stays, 0), (2, 1, Event::Joined, 0)]);
        assert_eq!(report.unreadable, 0);
    }

    #[test]
    fn an_executed_program_numbers_its_connections_anew() {
        let report = read(concat!(
            "{\"event\":\"process\",\"pid\":1,\"program\":\"sh\"}\n",
            "{\"event\":\"joined\",\"pid\":1,\"connection\":1}\n",
            "{\"event\":\"process\",\"pid\":1,\"program\":\"curl\"}\n",
            "{\"event\":\"stays\",\"pid\":1,\"connection\":1}\n",
        ));
        assert_eq!((report.processes.len(), report.connections.len()), (2, 2));
    }

    #[test]
    fn invalid_lines_are_counted_and_skipped() {
        let mut text = vec![b'{'; 3 * LINE];
        text.extend(b"\n\xff\xfe\n\n{\"event\":\"stays\",\"pid\":\"x\"}\n");
        text.extend(
            b"{\"event\":\"stays\",\"pid\":3,\"connection\":1}\n{\"event\":\"ended\",\"pid\":3,\"conn",
        );
        let report = read(&text);
        assert_eq!(report.connections.len(), 1);
        assert_eq!(report.connections[0].pid, 3);
        assert_eq!(report.unreadable, 4 + 3 + 1);
        assert_eq!(read(""), Report::default());
    }
}
