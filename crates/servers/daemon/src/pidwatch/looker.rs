//! The **looker**: a process that reads `/proc/PID/stat` and `/proc/PID/status` for the daemon.
//!
//! While the kernel reads them, it holds the memory of that process. If the process ends at this moment, whoever reads takes its memory
//! apart. That takes as long as the memory is large, and for ever if there are asynchronous reads into it (`io_submit`) that a file
//! system of the program's own does not answer. No signal ends that. So it happens to a looker, which is killed if it does not answer, and
//! not waited for, and the next one answers: the memory of the process has gone then.
#![allow(unsafe_code)] // A process without `exec`, see `forked`.

use super::stat::{Stat, read, user_of};
use crate::forked::{Abandoned, Forked, exit, name, part_from_daemon};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{read as receive, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// How long lookers may take, one after another. The first is not waited for long, because all others wait meanwhile.
const PATIENCE: [Duration; 3] = [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10)];

/// What a looker is asked.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Question {
    pid: u32,
    what: u32,
}

/// For the fields of `/proc/PID/stat`, or for the user.
const STAT: u32 = 0;
const USER: u32 = 1;

/// What a looker has found.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Answer {
    /// 0 if there is no such process.
    found: u64,
    /// The fields of [`Stat`], or the user.
    fields: [u64; 3],
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
    child: Forked,
}

impl Looker {
    /// Starts the process.
    pub fn start() -> io::Result<Self> {
        Ok(Self { present: Present::start()?, abandoned: Vec::new() })
    }

    /// Does what [`read`] does.
    pub fn look(&mut self, pid: u32) -> Option<Stat> {
        let [started, code, stack] = self.ask(Question { pid, what: STAT })?;
        Some(Stat::new(started, code, stack))
    }

    /// Does what [`user_of`] does.
    pub fn user_of(&mut self, pid: u32) -> Option<u32> {
        let [user, ..] = self.ask(Question { pid, what: USER })?;
        u32::try_from(user).ok()
    }

    fn ask(&mut self, question: Question) -> Option<[u64; 3]> {
        let pid = question.pid;
        for patience in PATIENCE {
            if let Some(answer) = self.present.ask(question, patience) {
                return (answer.found != 0).then_some(answer.fields);
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
        // SAFETY: both make system calls only.
        let child = unsafe {
            Forked::start(|| {
                part_from_daemon(&[&theirs]);
                serve(&theirs);
            })
        }?;
        Ok(Self { socket, _theirs: theirs, child })
    }

    fn ask(&self, question: Question, patience: Duration) -> Option<Answer> {
        let end = Instant::now() + patience;
        write(&self.socket, question.as_bytes()).ok()?;
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

/// What the looker does, by system calls only.
fn serve(socket: &OwnedFd) -> ! {
    name(c"ginneld-looker");
    let mut question = Question { pid: 0, what: STAT };
    // The other end is closed, or shut down, when the daemon ends.
    while receive(socket, question.as_mut_bytes()) == Ok(size_of::<Question>()) {
        let fields = match question.what {
            STAT => read(question.pid).map(|stat| [stat.started, stat.image.code, stat.image.stack]),
            _ => user_of(question.pid).map(|user| [user.into(), 0, 0]),
        };
        let answer = Answer { found: fields.is_some().into(), fields: fields.unwrap_or_default() };
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
        assert_eq!(looker.user_of(me), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(looker.user_of(u32::MAX), None);
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
