//! One line of a report.

use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::net::SocketAddr;

/// The longest line in bytes, including its newline.
pub const LINE: usize = 4608;

/// Longer texts are cut to this number of bytes. Even if JSON needs six bytes for each of them, a record fits in a [`LINE`].
pub const TEXT: usize = 160;

/// A process, or a connection as it is at this moment.
///
/// A field that is `None`, zero or empty may be missing in the line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record<'a> {
    /// What has happened.
    pub event: Event,
    /// The process number in the process's own namespace.
    pub pid: u32,
    /// The program that the process runs.
    #[serde(serialize_with = "cut", skip_serializing_if = "str::is_empty")]
    pub program: Cow<'a, str>,
    /// The connection's number in this process. Numbers begin anew when the process executes another program.
    #[serde(skip_serializing_if = "is_zero")]
    pub connection: u64,
    /// The address of this end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<SocketAddr>,
    /// The address of the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<SocketAddr>,
    /// Which end of the connection this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// The segment that holds the connection's rings.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut")]
    pub segment: Cow<'a, str>,
    /// The channel's number in that segment, as `ginnel sockets` shows it.
    #[serde(skip_serializing_if = "is_zero")]
    pub channel: u64,
    /// Data bytes of the ring that this end sends into.
    #[serde(skip_serializing_if = "is_zero")]
    pub ring_bytes: u64,
    /// Microseconds from the start of the connection until the sending direction changed over to shared memory; `None` if it has
    /// not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_after_us: Option<u64>,
    /// Microseconds from the start of the connection until the receiving direction changed over; `None` if it has not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received_after_us: Option<u64>,
    /// Bytes that the program has sent over TCP.
    #[serde(skip_serializing_if = "is_zero")]
    pub tcp_sent: u64,
    /// Bytes that the program has received over TCP.
    #[serde(skip_serializing_if = "is_zero")]
    pub tcp_received: u64,
    /// Bytes that the program has sent over shared memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_sent: u64,
    /// Bytes that the program has received over shared memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_received: u64,
    /// The number of times this end has woken the other end with a byte on the TCP connection.
    #[serde(skip_serializing_if = "is_zero")]
    pub wakes_sent: u64,
    /// The number of times the other end has woken this end with a byte on the TCP connection.
    #[serde(skip_serializing_if = "is_zero")]
    pub wakes_received: u64,
    /// The number of times this end has woken the other end with its doorbell.
    #[serde(skip_serializing_if = "is_zero")]
    pub rings_sent: u64,
    /// The number of times a direction went back to TCP, for example because the other end did not receive for a while.
    #[serde(skip_serializing_if = "is_zero")]
    pub returns: u64,
    /// The number of directions that are back on TCP now, until they change over once more.
    #[serde(skip_serializing_if = "is_zero")]
    pub returned: u64,
    /// The segment and name of the cache whose memory answers the gets on this connection.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut_short")]
    pub cache: Cow<'a, str>,
    /// Gets that were answered from the cache's memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub gets_from_memory: u64,
    /// Gets that went to the server although it was known to be a cache.
    #[serde(skip_serializing_if = "is_zero")]
    pub gets_passed_on: u64,
    /// Why no gets are answered from a cache's memory, if the connection is to a port of caches. This is text for people.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut_short")]
    pub no_cache: Cow<'a, str>,
    /// Why the connection stays on TCP or has ended, or why the whole process uses only TCP. This is text for people.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut")]
    pub reason: Cow<'a, str>,
}

/// What has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// The library has started in a process, or in another program that the process has executed. This is the first record of
    /// each.
    Process,
    /// The connection has rings, and each direction changes over as soon as it can.
    Joined,
    /// The connection stays on TCP.
    Stays,
    /// The connection has ended in this process, and it had rings.
    Ended,
    /// An event that a later version has added.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// This end called `connect`.
    Connector,
    /// This end was accepted.
    Acceptor,
    /// A role that a later version has added.
    #[serde(other)]
    Unknown,
}

impl Record<'_> {
    /// Returns whether both directions have changed over and have carried data since.
    pub fn has_changed_over(&self) -> bool {
        let is_changed = self.sent_after_us.is_some() && self.received_after_us.is_some();
        is_changed && self.shared_sent.saturating_add(self.shared_received) > 0
    }

    /// Passes the record's line to `write`, which must append it to the file with a single call. Returns what `write` returns.
    ///
    /// This function neither allocates memory nor calls the kernel, so a library that interposes `write` and `malloc` can use it
    /// anywhere. It needs a little more than [`LINE`] bytes of stack.
    pub fn append<R>(&self, write: impl FnOnce(&[u8]) -> R) -> R {
        let mut line = [0; LINE];
        let mut rest = &mut line[..LINE - 1];
        // The record always fits, as the tests show. Readers would ignore half a line.
        let whole = serde_json::to_writer(&mut rest, self).is_ok();
        let used = if whole { LINE - 1 - rest.len() } else { 0 };
        line[used] = b'\n';
        write(&line[..=used])
    }
}

/// The most bytes of [`Record::cache`] and [`Record::no_cache`]; a segment's name and a cache's name fit in it.
const SHORT: usize = 64;

/// Serialises at most [`TEXT`] bytes of a text.
fn cut<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    cut_to(TEXT, text, to)
}

/// Serialises at most [`SHORT`] bytes of a text.
fn cut_short<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    cut_to(SHORT, text, to)
}

fn cut_to<S: Serializer>(most: usize, text: &str, to: S) -> Result<S::Ok, S::Error> {
    let end = (0..=most.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    to.serialize_str(&text[..end])
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(record: &Record<'_>) -> String {
        record.append(|line| String::from_utf8(line.to_vec()).unwrap())
    }

    fn parse(line: &str) -> Record<'static> {
        serde_json::from_str(line).unwrap()
    }

    #[test]
    fn the_names_of_the_fields_are_fixed() {
        let record = Record {
            event: Event::Joined,
            pid: 7,
            program: "redis-server".into(),
            connection: 3,
            local: Some("10.0.0.1:6379".parse().unwrap()),
            remote: Some("[fd00::1]:40000".parse().unwrap()),
            role: Some(Role::Acceptor),
            segment: "web".into(),
            channel: 12,
            ring_bytes: 4096,
            sent_after_us: Some(0),
            received_after_us: Some(900),
            tcp_sent: 1,
            tcp_received: 2,
            shared_sent: 3,
            shared_received: 4,
            wakes_sent: 5,
            wakes_received: 6,
            rings_sent: 7,
            returns: 8,
            returned: 1,
            cache: "web/c".into(),
            gets_from_memory: 9,
            gets_passed_on: 10,
            no_cache: "y".into(),
            reason: "x".into(),
        };
        let expected = concat!(
            r#"{"event":"joined","pid":7,"program":"redis-server","connection":3,"local":"10.0.0.1:6379","#,
            r#""remote":"[fd00::1]:40000","role":"acceptor","segment":"web","channel":12,"ring_bytes":4096,"#,
            r#""sent_after_us":0,"received_after_us":900,"tcp_sent":1,"tcp_received":2,"shared_sent":3,"shared_received":4,"#,
            r#""wakes_sent":5,"wakes_received":6,"rings_sent":7,"returns":8,"returned":1,"cache":"web/c","#,
            r#""gets_from_memory":9,"gets_passed_on":10,"no_cache":"y","reason":"x"}"#,
            "\n"
        );
        assert_eq!(line(&record), expected);
        assert_eq!(parse(expected), record);
        let process = Record { event: Event::Process, pid: 1, ..Record::default() };
        assert_eq!(line(&process), "{\"event\":\"process\",\"pid\":1}\n");
    }

    #[test]
    fn records_of_a_later_version_are_read() {
        let record = parse(r#"{"event":"grown","role":"relay","pid":1,"size":{"a":[1]}}"#);
        assert_eq!((record.event, record.role, record.pid), (Event::Unknown, Some(Role::Unknown), 1));
        assert_eq!(parse("{}"), Record::default());
    }

    #[test]
    fn the_longest_line_fits() {
        // JSON needs six bytes for each of these.
        let text = Cow::from("\u{1}".repeat(10_000));
        let address = "[2001:1db8:1111:1111:1111:1111:1111:1111%4294967295]:65535".parse().ok();
        let most = u64::MAX;
        let record = Record {
            event: Event::Unknown,
            pid: u32::MAX,
            program: text.clone(),
            connection: most,
            local: address,
            remote: address,
            role: Some(Role::Connector),
            segment: text.clone(),
            channel: most,
            ring_bytes: most,
            sent_after_us: Some(most),
            received_after_us: Some(most),
            tcp_sent: most,
            tcp_received: most,
            shared_sent: most,
            shared_received: most,
            wakes_sent: most,
            wakes_received: most,
            rings_sent: most,
            returns: most,
            returned: most,
            cache: text.clone(),
            gets_from_memory: most,
            gets_passed_on: most,
            no_cache: text.clone(),
            reason: text,
        };
        assert!(address.is_some());
        let line = line(&record);
        assert!(line.len() <= LINE && line.len() > 3 * 6 * TEXT, "{}", line.len());
        assert_eq!(parse(&line).reason.len(), TEXT);
    }

    proptest! {
        #[test]
        fn any_text_is_written_and_read_back(program in ".{0,80}", reason in "\\PC{0,40}", event in 0..4_usize) {
            let event = [Event::Process, Event::Joined, Event::Stays, Event::Ended][event];
            let record = Record { event, program: program.clone().into(), reason: reason.into(), ..Record::default() };
            let line = line(&record);
            prop_assert_eq!(line.matches('\n').count(), 1);
            let read = parse(&line);
            prop_assert!(program.starts_with(&*read.program));
            // A cut removes at most three bytes too many, because a character has up to four bytes.
            prop_assert!(read.program.len() + 4 > program.len().min(TEXT));
            prop_assert_eq!(&read.reason, &record.reason);
            prop_assert_eq!(read.event, event);
        }
    }
}
