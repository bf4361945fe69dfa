//! The **looker**: a process that reads `/proc/PID/stat` for the daemon.
//!
//! While the kernel reads it, it holds the memory of that process. If the process ends at this moment, whoever reads takes its memory
//! apart. That takes as long as the memory is large, and for ever if there are asynchronous reads into it (`io_submit`) that a file
//! system of the program's own does not answer. No signal ends that. So it happens to a looker, which is killed if it does not answer, and
//! not waited for, and the next one answers: the memory of the process has gone then.

use super::stat::{Stat, read};
use crate::forked::{Abandoned, Child, exit, name, part_from_daemon};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{read as receive, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// How long lookers may take, one after another. The first is not waited for long, because all others wait meanwhile.
const PATIENCE: [Duration; 3] = [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10)];

/// What a looker has found.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Answer {
    /// 0 if there is no such process.
    found: u64,
    started: u64,
    code: u64,
    stack: u64,
}

/// The daemon's side of the looker.
#[derive(Debug)]
pub struct Looker {
    present: Present,
    abandoned: Vec<Abandoned>,
}

/// A looker with a connection of its own, so that what it says too late is not taken for the answer of the next one.
#[derive(Debug)]
struct Present {
    socket: OwnedFd,
    /// Its end of the connection, which it has a copy of.
    _theirs: OwnedFd,
    child: Child,
}

impl Looker {
    /// Starts the process.
    pub fn start() -> io::Result<Self> {
        Ok(Self { present: Present::start()?, abandoned: Vec::new() })
    }

    /// Reads `/proc/PID/stat`. Returns `None` if there is no such process.
    pub fn look(&mut self, pid: u32) -> Option<Stat> {
        for patience in PATIENCE {
            if let Some(answer) = self.present.ask(pid, patience) {
                return (answer.found != 0).then(|| Stat::new(answer.started, answer.code, answer.stack));
            }
            self.abandoned.retain(|looker| !looker.is_buried());
            tracing::warn!(
                pid,
                held_up = self.abandoned.len(),
                "a process that looks at others does not answer, or was killed; another takes its place"
            );
            match Present::start() {
                Ok(next) => {
                    let last = std::mem::replace(&mut self.present, next);
                    self.abandoned.push(last.child.abandon());
                }
                Err(error) => tracing::error!(%error, "no process can be started that looks at others"),
            }
        }
        tracing::error!(pid, "nothing can be found out about this process, so it counts as ended");
        None
    }
}

impl Present {
    fn start() -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = Child::start(|| {
            part_from_daemon(&[&theirs]);
            serve(&theirs);
        })?;
        Ok(Self { socket, _theirs: theirs, child })
    }

    fn ask(&self, pid: u32, patience: Duration) -> Option<Answer> {
        let end = Instant::now() + patience;
        write(&self.socket, pid.as_bytes()).ok()?;
        loop {
            let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok()?;
            let mut events = [
                PollFd::new(&self.socket, PollFlags::IN),
                PollFd::from_borrowed_fd(self.child.ended(), PollFlags::IN),
            ];
            match poll(&mut events, Some(&left)) {
                Ok(0) => return None,
                Ok(_) if events[0].revents().contains(PollFlags::IN) => {
                    let mut bytes = [0; size_of::<Answer>()];
                    let len = receive(&self.socket, &mut bytes).ok()?;
                    return Answer::read_from_bytes(&bytes[..len]).ok();
                }
                Ok(_) => return None,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// What the looker does. It makes system calls only, because it may have been forked while another thread had locked the allocator.
fn serve(socket: &OwnedFd) -> ! {
    name(c"ginneld-looker");
    let mut pid = 0_u32;
    // The other end is closed, or shut down, when the daemon ends.
    while receive(socket, pid.as_mut_bytes()) == Ok(size_of::<u32>()) {
        let answer = match read(pid) {
            Some(Stat { started, image }) => {
                Answer { found: 1, started, code: image.code, stack: image.stack }
            }
            None => Answer { found: 0, started: 0, code: 0, stack: 0 },
        };
        if write(socket, answer.as_bytes()).is_err() {
            break;
        }
    }
    exit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;
    use rustix::process::{Signal, kill_process};

    #[test]
    fn it_sees_what_this_process_sees() {
        let mut looker = Looker::start().unwrap();
        let me = std::process::id();
        assert!(read(me).is_some());
        assert_eq!(looker.look(me), read(me));
        assert_eq!(looker.look(u32::MAX), None);
        assert_eq!(looker.look(me), read(me));
        assert!(looker.abandoned.is_empty());
    }

    #[test]
    fn one_that_is_held_up_or_killed_is_replaced() {
        let mut looker = Looker::start().unwrap();
        let me = std::process::id();
        for signal in [Signal::STOP, Signal::KILL] {
            let first = looker.present.child.pid();
            kill_process(first, signal).unwrap();
            assert_eq!(looker.look(me), read(me));
            assert_ne!(looker.present.child.pid(), first);
        }
        wait_until("their ends", || {
            looker.abandoned.retain(|looker| !looker.is_buried());
            looker.abandoned.is_empty()
        });
    }
}
