//! A client for QEMU's control socket, with as much of QMP (the QEMU Machine Protocol) as a fence needs.
//!
//! QMP consists of JSON objects, one per line (QEMU, `docs/interop/qmp-spec`). QEMU speaks to one client at a time; another
//! client that connects waits, and is greeted when the first one has gone. So this client sends nothing before the greeting,
//! because QEMU would execute a command that lay in the socket. Afterwards it sends commands without waiting for answers, because
//! QEMU executes them in order. Nothing here blocks: if a socket does not take a hundred bytes, nobody reads from it, and the
//! connection is given up.

use crate::closer::Connected;
use crate::packet;
use ginnel_fdpass::{RecvFlags, receive};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{SendFlags, send};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The bytes that are read before others get their turn.
const READ: usize = 64 << 10;
/// The longest line: a list of devices has some 80 bytes for each.
const LONGEST: usize = 256 << 10;

/// How messages begin about a QEMU whose process has the number 0 here.
const INVISIBLE: &str = "the VM's QEMU is in a process namespace that is not visible from here";

/// A command. Devices and memory objects are paths in QEMU's object model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Enter command mode, which QMP requires first.
    Negotiate,
    /// Stop the VM's processors and devices.
    Stop,
    /// List the contents of a folder of the object model.
    List(&'static str),
    /// Ask for the memory object of a device.
    MemoryOf {
        /// The path of the device.
        device: String,
    },
    /// Ask for the file of a device's memory.
    FileOf {
        /// The path of the memory object.
        memory: String,
        /// The path of the device.
        device: String,
    },
    /// Unplug a device, or ask the guest to release it.
    Unplug {
        /// The path of the device.
        device: String,
        /// The file of the device's memory.
        file: String,
    },
}

impl Command {
    fn json(&self) -> Value {
        let get = |path: &str, property: &str| json!({ "execute": "qom-get", "arguments": { "path": path, "property": property } });
        match self {
            Self::Negotiate => json!({ "execute": "qmp_capabilities" }),
            Self::Stop => json!({ "execute": "stop" }),
            Self::List(path) => json!({ "execute": "qom-list", "arguments": { "path": path } }),
            Self::MemoryOf { device } => get(device, "memdev"),
            Self::FileOf { memory, .. } => get(memory, "mem-path"),
            Self::Unplug { device, .. } => json!({ "execute": "device_del", "arguments": { "id": device } }),
        }
    }
}

/// A message from QEMU.
#[derive(Debug, PartialEq)]
pub enum Said {
    /// The result of a command, or the reason why QEMU refused it.
    Answer(Command, Result<Value, String>),
    /// The VM was reset: the guest's kernel is gone.
    Reset,
    /// The VM continues after it was stopped.
    Resumed,
}

/// A connection to the control socket of a QEMU.
#[derive(Debug)]
pub struct Monitor {
    fd: Connected,
    /// The beginning of a line whose end has not arrived yet.
    line: Vec<u8>,
    greeted: bool,
    /// The commands to send when QEMU has greeted.
    waiting: Vec<Command>,
    unanswered: BTreeMap<u64, Command>,
    next: u64,
}

/// The QEMU that must be at the other end of a control socket.
#[derive(Clone, Copy, Debug)]
pub struct Qemu<'a> {
    /// The number of its process; 0 if it is not visible from here.
    pub pid: u32,
    /// Its ivshmem connection; `None` if it was connected to an earlier daemon.
    pub connection: Option<BorrowedFd<'a>>,
}

impl Qemu<'_> {
    /// Fails if it can never be known whether it is at the other end of a control socket.
    pub fn can_be_told(&self) -> Result<(), String> {
        match (self.pid, self.connection) {
            (0, None) => Err(format!(
                "{INVISIBLE}, and after a restart of the daemon nothing else tells which process it is: restart the VM"
            )),
            _ => Ok(()),
        }
    }

    /// Checks that its process listens at the other end of this connection.
    fn check(&self, control: BorrowedFd<'_>) -> Result<(), String> {
        self.can_be_told()?;
        let listener = packet::peer(control).map_err(|error| error.to_string())?.pid;
        let is_same = self.connection.and_then(|connection| packet::have_same_peer(control, connection));
        match (self.pid, listener, is_same) {
            (0, 0, None) => Err(format!(
                "{INVISIBLE}, and this kernel does not tell whether it is the one that listens there (Linux does from 6.9 on)"
            )),
            (0, 0, Some(false)) => Err(format!("{INVISIBLE}, and another process listens there")),
            (qemu, listener, _) if qemu != listener => {
                Err(format!("process {listener} listens there, and the VM's QEMU is process {qemu}"))
            }
            (qemu, _, Some(false)) => Err(format!(
                "a process that has ended listens there, and had the number {qemu} of the VM's QEMU"
            )),
            _ => Ok(()),
        }
    }
}

impl Monitor {
    /// Starts the protocol on a new connection. Fails unless the process that listens there is `qemu`.
    pub fn new(fd: Connected, qemu: Qemu<'_>) -> Result<Self, String> {
        // Otherwise a look at its queue would not show all that is there.
        set_socket_oobinline(&fd, true).map_err(|errno| errno.to_string())?;
        qemu.check(fd.as_fd())?;
        Ok(Self {
            fd,
            line: Vec::new(),
            greeted: false,
            waiting: vec![Command::Negotiate],
            unanswered: BTreeMap::new(),
            next: 1,
        })
    }

    /// Returns whether QEMU has greeted, so that this is the client that it speaks to.
    pub fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Sends a command, at once or after QEMU's greeting. The answer comes later as [`Said`].
    pub fn command(&mut self, command: Command) -> io::Result<()> {
        if self.greeted {
            return self.send(command);
        }
        self.waiting.push(command);
        Ok(())
    }

    fn send(&mut self, command: Command) -> io::Result<()> {
        let mut json = command.json();
        json["id"] = self.next.into();
        let line = format!("{json}\n");
        let sent = send(&self.fd, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent < line.len() {
            return Err(Errno::AGAIN.into());
        }
        self.unanswered.insert(self.next, command);
        self.next += 1;
        Ok(())
    }

    /// Returns the messages that have arrived, a bounded amount at a time. An error means the end of the connection.
    pub fn hear(&mut self) -> io::Result<Vec<Said>> {
        let mut bytes = vec![0; READ];
        // Descriptors must not get into this process, not even to be closed (`crate::strangers`), so this looks first.
        let n = match receive(self.fd.as_fd(), &mut bytes, 0, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok(got) if got.fds_lost => return Err(io::Error::other("it sends descriptors")),
            Ok(got) if got.len == 0 => return Err(io::Error::other("QEMU has closed it")),
            Ok(got) => receive(self.fd.as_fd(), &mut bytes[..got.len], 0, RecvFlags::DONTWAIT)?.len,
            Err(Errno::AGAIN) => 0,
            Err(errno) => return Err(errno.into()),
        };
        let (mut said, mut was_reset) = (Vec::new(), false);
        for part in bytes[..n].split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len() > LONGEST {
                return Err(io::Error::other("it sends a line without end"));
            }
            if part.ends_with(b"\n") {
                let new = self.parse()?;
                // One says as much as many: nothing else happens between them.
                let is_reset = new == Some(Said::Reset);
                said.extend(new.filter(|_| !(is_reset && was_reset)));
                was_reset |= is_reset;
                self.line.clear();
            }
        }
        Ok(said)
    }

    /// Parses the line, and returns the message if it is of interest.
    fn parse(&mut self) -> io::Result<Option<Said>> {
        #[derive(Deserialize)]
        struct Message {
            #[serde(rename = "QMP")]
            greeting: Option<IgnoredAny>,
            event: Option<String>,
            id: Option<u64>,
            #[serde(rename = "return")]
            result: Option<Value>,
            error: Option<Failure>,
        }
        #[derive(Deserialize)]
        struct Failure {
            desc: String,
        }
        let message: Message = serde_json::from_slice(&self.line)
            .map_err(|error| io::Error::other(format!("what it sends is not QMP: {error}")))?;
        if message.greeting.is_some() && !std::mem::replace(&mut self.greeted, true) {
            std::mem::take(&mut self.waiting).into_iter().try_for_each(|command| self.send(command))?;
        }
        Ok(match message.event.as_deref() {
            Some("RESET") => Some(Said::Reset),
            Some("RESUME") => Some(Said::Resumed),
            Some(_) => None,
            None => message.id.and_then(|id| self.unanswered.remove(&id)).map(|command| {
                let failure = message.error.map(|error| error.desc);
                Said::Answer(command, failure.map_or(Ok(message.result.unwrap_or_default()), Err))
            }),
        })
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;
    use proptest::prelude::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    const GREETING: &[u8] =
        b"{\"QMP\": {\"version\": {\"qemu\": {\"major\": 7}}, \"capabilities\": [\"oob\"]}}\r\n";

    const INVISIBLE_QEMU: Qemu<'_> = Qemu { pid: 0, connection: None };

    fn open(path: &Path, qemu: Qemu<'_>) -> Result<Monitor, String> {
        Monitor::new(Connected::trusted(UnixStream::connect(path).unwrap().into()), qemu)
    }

    fn pair() -> (Monitor, UnixStream, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let monitor = open(&path, Qemu { pid: std::process::id(), connection: None }).unwrap();
        (monitor, listener.accept().unwrap().0, dir)
    }

    #[test]
    fn answers_find_their_commands_among_events() {
        let (mut monitor, mut qemu, _dir) = pair();
        monitor.command(Command::Stop).unwrap();
        assert!(!monitor.is_greeted());
        qemu.set_nonblocking(true).unwrap();
        assert!(io::Read::read(&mut qemu, &mut [0]).is_err(), "a command before the greeting");
        qemu.set_nonblocking(false).unwrap();
        qemu.write_all(GREETING).unwrap();
        assert_eq!(monitor.hear().unwrap(), []);
        let mut lines = BufReader::new(qemu.try_clone().unwrap()).lines();
        for (execute, id) in [("qmp_capabilities", 1), ("stop", 2)] {
            let command: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            assert_eq!(command, json!({ "execute": execute, "id": id }));
        }
        let text = concat!(
            r#"{"return": {}, "id": 1}"#,
            "\r\n",
            r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#,
            "\r\n",
            r#"{"error": {"class": "GenericError", "desc": "no"}, "id": 2}"#,
            "\r\n",
            r#"{"event": "RESET", "data": {"guest": true}}"#,
            "\r\n",
            r#"{"event": "RESUME"}"#,
        );
        qemu.write_all(text.as_bytes()).unwrap();
        let said = monitor.hear().unwrap();
        let negotiated = Said::Answer(Command::Negotiate, Ok(json!({})));
        let refused = Said::Answer(Command::Stop, Err("no".into()));
        assert_eq!(said, [negotiated, refused, Said::Reset]);
        // The end of the last line comes later.
        assert_eq!(monitor.hear().unwrap(), []);
        qemu.write_all(b"\n").unwrap();
        assert_eq!(monitor.hear().unwrap(), [Said::Resumed]);
        drop((qemu, lines));
        // A process that another test starts has a copy of this end until it runs its program.
        wait_until("the end of the connection", || monitor.hear().is_err());
        assert!(monitor.command(Command::Stop).is_err());
    }

    #[test]
    fn a_process_other_than_the_vms_qemu_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let error = open(&path, Qemu { pid: 1, connection: None }).unwrap_err();
        assert!(error.ends_with("the VM's QEMU is process 1"), "{error}");
        let mut said = Vec::new();
        io::Read::read_to_end(&mut listener.accept().unwrap().0, &mut said).unwrap();
        assert_eq!(said, b"");
    }

    #[test]
    fn a_process_that_is_not_visible_is_refused_unless_something_tells_which_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = open(&path, INVISIBLE_QEMU).unwrap_err();
        assert!(error.contains("not visible") && error.contains("restart the VM"), "{error}");
        // One that is not visible is not taken for one that is, and the other way round.
        let (near, _far) = UnixStream::pair().unwrap();
        let error = open(&path, Qemu { connection: Some(near.as_fd()), ..INVISIBLE_QEMU }).unwrap_err();
        assert!(error.ends_with("the VM's QEMU is process 0"), "{error}");
    }

    #[test]
    fn resets_that_arrive_together_are_one() {
        let (mut monitor, mut qemu, _dir) = pair();
        let (reset, resume) = (r#"{"event": "RESET"}"#, r#"{"event": "RESUME"}"#);
        qemu.write_all(format!("{reset}\n{resume}\n{reset}\n{reset}\n").as_bytes()).unwrap();
        assert_eq!(monitor.hear().unwrap(), [Said::Reset, Said::Resumed]);
        qemu.write_all(format!("{reset}\n").as_bytes()).unwrap();
        assert_eq!(monitor.hear().unwrap(), [Said::Reset]);
    }

    #[test]
    fn a_qemu_that_does_not_read_does_not_block_the_daemon() {
        let (mut monitor, mut qemu, _dir) = pair();
        qemu.write_all(GREETING).unwrap();
        assert_eq!(monitor.hear().unwrap(), []);
        assert!((0..1 << 20).any(|_| monitor.command(Command::Stop).is_err()));
    }

    #[test]
    fn a_line_without_end_ends_the_connection() {
        let (mut monitor, mut qemu, _dir) = pair();
        let write = std::thread::spawn(move || qemu.write_all(&vec![b' '; LONGEST + READ]));
        assert!((0..1 << 20).any(|_| {
            std::thread::yield_now();
            monitor.hear().is_err()
        }));
        drop(monitor);
        let _ = write.join();
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 1..300), json in ".{0,100}") {
            let (mut monitor, mut qemu, _dir) = pair();
            for text in [&bytes[..], json.as_bytes(), b"\n", format!("{{\"id\":{json:?}}}\n").as_bytes()] {
                qemu.write_all(text).unwrap();
                if monitor.hear().is_err() {
                    break;
                }
            }
        }
    }
}
