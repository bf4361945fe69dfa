//! One line of a report.

use std::borrow::Cow;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize, Serializer};

/// No line is longer, its newline included.
pub const LINE: usize = 4096;

/// Longer texts are cut to so many bytes. Even if JSON needs six bytes for each of theirs, a record fits in a [`LINE`].
pub const TEXT: usize = 160;

/// A process, or a connection as it is at this moment.
///
/// What is `None`, zero or empty need not be in the line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record<'a> {
    /// What has happened.
    pub event: Event,
    /// The process, in its own process namespace.
    pub pid: u32,
    /// The program that it runs.
    #[serde(serialize_with = "cut", skip_serializing_if = "str::is_empty")]
    pub program: Cow<'a, str>,
    /// The connection's number in this process. It begins anew when the process executes another program.
    #[serde(skip_serializing_if = "is_zero")]
    pub connection: u64,
    /// This end's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<SocketAddr>,
    /// The other end's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<SocketAddr>,
    /// Which end this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// The segment that it has memory in.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut")]
    pub segment: Cow<'a, str>,
    /// The channel's number in that segment, as `ginnel sockets` shows it.
    #[serde(skip_serializing_if = "is_zero")]
    pub channel: u64,
    /// Data bytes of the ring that this end sends into.
    #[serde(skip_serializing_if = "is_zero")]
    pub ring_bytes: u64,
    /// Microseconds from the connection's begin until what this end sends changed over to shared memory. `None`: it has not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_after_us: Option<u64>,
    /// The same of what it receives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received_after_us: Option<u64>,
    /// Bytes of the program that this end has sent over TCP.
    #[serde(skip_serializing_if = "is_zero")]
    pub tcp_sent: u64,
    /// Bytes that the program has received over TCP.
    #[serde(skip_serializing_if = "is_zero")]
    pub tcp_received: u64,
    /// Bytes that it has sent over shared memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_sent: u64,
    /// Bytes that it has received over shared memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared_received: u64,
    /// How often this end has woken the other one by a byte on the connection.
    #[serde(skip_serializing_if = "is_zero")]
    pub wakes_sent: u64,
    /// How often this end was woken so.
    #[serde(skip_serializing_if = "is_zero")]
    pub wakes_received: u64,
    /// How often this end has woken the other one by its doorbell.
    #[serde(skip_serializing_if = "is_zero")]
    pub rings_sent: u64,
    /// How often TCP has carried a direction again, because the other end did not receive for a while.
    #[serde(skip_serializing_if = "is_zero")]
    pub returns: u64,
    /// Directions that TCP carries again now, until they change over once more.
    #[serde(skip_serializing_if = "is_zero")]
    pub returned: u64,
    /// The cache out of whose memory gets on this connection are answered: its segment and name.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut_short")]
    pub cache: Cow<'a, str>,
    /// Gets that were answered out of memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub gets_from_memory: u64,
    /// Gets that the server was asked instead, while it was known to be a cache.
    #[serde(skip_serializing_if = "is_zero")]
    pub gets_passed_on: u64,
    /// Why the connection stays on TCP or has ended, or why the whole process uses nothing but TCP. For people.
    #[serde(skip_serializing_if = "str::is_empty", serialize_with = "cut")]
    pub reason: Cow<'a, str>,
}

/// What has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// The library has begun to work in a process, or in another program that the process has executed. The first record of each.
    Process,
    /// The connection has rings, and each direction changes over as soon as it can.
    Joined,
    /// The connection stays on TCP.
    Stays,
    /// The connection has ended in this process, which had rings for it.
    Ended,
    /// Of a later version than the reader's.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It has called `connect`.
    Connector,
    /// It was accepted.
    Acceptor,
    /// Of a later version than the reader's.
    #[serde(other)]
    Unknown,
}

impl Record<'_> {
    /// Whether both directions have changed over, and have carried something since.
    pub fn has_changed_over(&self) -> bool {
        let is_changed = self.sent_after_us.is_some() && self.received_after_us.is_some();
        is_changed && self.shared_sent.saturating_add(self.shared_received) > 0
    }

    /// Hands the record's line to `write`, which has to append it to the file with a single call; what `write` returns.
    ///
    /// Neither allocates nor calls the kernel, so a library that interposes `write` and `malloc` can use it anywhere. Needs
    /// somewhat more than [`LINE`] bytes of stack.
    pub fn append<R>(&self, write: impl FnOnce(&[u8]) -> R) -> R {
        let mut line = [0; LINE];
        let mut rest = &mut line[..LINE - 1];
        // It fits, as the tests show; half a line would be left out by readers.
        let whole = serde_json::to_writer(&mut rest, self).is_ok();
        let used = if whole { LINE - 1 - rest.len() } else { 0 };
        line[used] = b'\n';
        write(&line[..=used])
    }
}

/// The name of a cache is not longer than its name and its segment's.
const SHORT: usize = 64;

/// At most [`TEXT`] bytes of a text.
fn cut<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    cut_to(TEXT, text, to)
}

/// At most [`SHORT`] bytes of a text.
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
    fn a_line_has_these_names() {
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
            reason: "x".into(),
        };
        let expected = concat!(
            r#"{"event":"joined","pid":7,"program":"redis-server","connection":3,"local":"10.0.0.1:6379","#,
            r#""remote":"[fd00::1]:40000","role":"acceptor","segment":"web","channel":12,"ring_bytes":4096,"#,
            r#""sent_after_us":0,"received_after_us":900,"tcp_sent":1,"tcp_received":2,"shared_sent":3,"shared_received":4,"#,
            r#""wakes_sent":5,"wakes_received":6,"rings_sent":7,"returns":8,"returned":1,"cache":"web/c","#,
            r#""gets_from_memory":9,"gets_passed_on":10,"reason":"x"}"#,
            "\n"
        );
        assert_eq!(line(&record), expected);
        assert_eq!(parse(expected), record);
        let process = Record { event: Event::Process, pid: 1, ..Record::default() };
        assert_eq!(line(&process), "{\"event\":\"process\",\"pid\":1}\n");
    }

    #[test]
    fn what_a_later_version_says_is_read() {
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
            reason: text,
        };
        assert!(address.is_some());
        let line = line(&record);
        assert!(line.len() <= LINE && line.len() > 3 * 6 * TEXT, "{}", line.len());
        assert_eq!(parse(&line).reason.len(), TEXT);
    }

    proptest! {
        #[test]
        fn texts_of_any_content_come_back(program in ".{0,80}", reason in "\\PC{0,40}", event in 0..4_usize) {
            let event = [Event::Process, Event::Joined, Event::Stays, Event::Ended][event];
            let record = Record { event, program: program.clone().into(), reason: reason.into(), ..Record::default() };
            let line = line(&record);
            prop_assert_eq!(line.matches('\n').count(), 1);
            let read = parse(&line);
            prop_assert!(program.starts_with(&*read.program));
            // No more is cut off than has to be, which a character of up to four bytes decides.
            prop_assert!(read.program.len() + 4 > program.len().min(TEXT));
            prop_assert_eq!(&read.reason, &record.reason);
            prop_assert_eq!(read.event, event);
        }
    }
}
