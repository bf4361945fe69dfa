//! Processes, told apart from their successors: a process number is used again, number and start time are not.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;

/// One process, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Process {
    /// Its number; 0 for a process that cannot be seen from here.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

impl Process {
    /// The process that has this number now; `None` if there is none.
    pub fn of(pid: u32) -> Option<Self> {
        look(pid).map(|(_, started)| Self { pid, started })
    }

    /// Whether it still runs. One that has ended and waits for its parent does not.
    pub fn is_alive(&self) -> bool {
        look(self.pid)
            .is_some_and(|(state, started)| started == self.started && !matches!(state, 'Z' | 'X' | 'x'))
    }

    /// A descriptor that becomes readable when the process ends; `None` if it has.
    pub fn watch(&self) -> rustix::io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // The number may have been given to another since; the descriptor cannot any more.
            Ok(fd) => Ok(self.is_alive().then_some(fd)),
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

/// State and start time.
fn look(pid: u32) -> Option<(char, u64)> {
    if pid == 0 {
        return None;
    }
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The second field is a name in parentheses that may contain anything, so counting begins behind its last one.
fn parse(stat: &str) -> Option<(char, u64)> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_name_with_parentheses_confuses_nobody() {
        let stat = "42 (a) b) S) R 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 77 2 3";
        assert_eq!(parse(stat), Some(('R', 77)));
        assert_eq!(parse("1 (x"), None);
        assert_eq!(parse("1 (x) R 2"), None);
    }

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(process.is_alive());
        assert!(!Process { started: process.started + 1, ..process }.is_alive());
        let fd = process.watch().unwrap().unwrap();
        child.kill().unwrap();
        let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, None), Ok(1));
        assert!(!process.is_alive(), "a zombie is not alive");
        child.wait().unwrap();
        assert!(process.watch().unwrap().is_none());
    }
}
