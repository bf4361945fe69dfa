//! The **looker**: a process that reads `/proc/PID/stat` and `/proc/PID/status` for the daemon.
//!
//! While the kernel reads them, it holds the memory of that process. If the process ends at this moment, whoever reads takes its memory
//! apart. That takes as long as the memory is large, and for ever if there are asynchronous reads into it (`io_submit`) that a file
//! system of the program's own does not answer. No signal ends that. So it happens to a looker, which is killed if it does not answer, and
//! not waited for, and the next one answers: the memory of the process has gone then.
#![allow(unsafe_code)] // A process without `exec`, see `forked`.

use super::stat::{Seen, Stat, read, user_of};
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

/// The number of lookers that looked for a user and do not end, from which on that user's programs cannot connect.
const STUCK: usize = 4;

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
    /// `None` if the last one was abandoned, and no other has been needed.
    present: Option<Present>,
    /// Those that may be held up, and for which user they looked.
    abandoned: Vec<(u32, Abandoned)>,
    user: u32,
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
        let mut looker = Self { present: Some(Present::start()?), abandoned: Vec::new(), user: 0 };
        match looker.look(std::process::id()) {
            Seen::Is(_) => Ok(looker),
            _ => Err(io::Error::other(
                "it does not see this process (is /proc there, and close_range allowed?)",
            )),
        }
    }

    /// Says for whom it looks from now on.
    pub fn for_user(&mut self, user: u32) {
        self.user = user;
    }

    /// Returns whether so many lookers are held up that looked for this user that it must stop.
    pub fn is_held_up_by(&mut self, user: u32) -> bool {
        if user == 0 || self.abandoned.is_empty() {
            return false;
        }
        self.abandoned.retain(|(_, looker)| !looker.is_buried());
        self.abandoned.iter().filter(|(of, _)| *of == user).count() >= STUCK
    }

    /// Does what [`read`] does.
    pub fn look(&mut self, pid: u32) -> Seen<Stat> {
        match self.ask(Question { pid, what: STAT }) {
            Seen::Is([started, code, stack]) => Seen::Is(Stat::new(started, code, stack)),
            Seen::Gone => Seen::Gone,
            Seen::Unknown => Seen::Unknown,
        }
    }

    /// Does what [`user_of`] does.
    pub fn user_of(&mut self, pid: u32) -> Option<u32> {
        let [user, ..] = self.ask(Question { pid, what: USER }).known()?;
        u32::try_from(user).ok()
    }

    fn ask(&mut self, question: Question) -> Seen<[u64; 3]> {
        let pid = question.pid;
        for patience in PATIENCE {
            let present = match self.present.take().map_or_else(Present::start, Ok) {
                Ok(present) => present,
                Err(error) => {
                    tracing::error!(pid, %error, "no process can be started that looks at this one");
                    return Seen::Unknown;
                }
            };
            if let Some(answer) = present.ask(question, patience) {
                self.present = Some(present);
                return (answer.found != 0).then_some(answer.fields).into();
            }
            // What it may still say is not for the next question.
            self.abandoned.retain(|(_, looker)| !looker.is_buried());
            self.abandoned.push((self.user, present.child.abandon()));
            tracing::warn!(
                pid,
                user = self.user,
                held_up = self.abandoned.len(),
                "a process that looks at others does not answer, or was killed; another takes its place"
            );
        }
        tracing::error!(pid, "nothing can be found out about this process");
        Seen::Unknown
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
    use rustix::process::{Pid, Signal, kill_process};

    #[test]
    fn it_sees_what_this_process_sees() {
        let mut looker = Looker::start().unwrap();
        let me = std::process::id();
        assert!(read(me).is_some());
        assert_eq!(looker.look(me), read(me).into());
        assert_eq!(looker.look(u32::MAX), Seen::Gone);
        assert_eq!(looker.look(me), read(me).into());
        assert_eq!(looker.user_of(me), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(looker.user_of(u32::MAX), None);
    }

    fn child(looker: &Looker) -> Pid {
        looker.present.as_ref().unwrap().child.pid()
    }

    #[test]
    fn one_that_is_held_up_or_killed_is_replaced() {
        let mut looker = Looker::start().unwrap();
        let me = std::process::id();
        for signal in [Signal::STOP, Signal::KILL] {
            let first = child(&looker);
            kill_process(first, signal).unwrap();
            assert_eq!(looker.look(me), read(me).into());
            assert_ne!(child(&looker), first);
        }
        wait_until("their ends", || {
            looker.abandoned.retain(|(_, looker)| !looker.is_buried());
            looker.abandoned.is_empty()
        });
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "the looker waits for it")]
    fn who_holds_up_several_is_known_until_they_end() {
        let mut looker = Looker::start().unwrap();
        let me = std::process::id();
        looker.for_user(7);
        for n in 0..STUCK {
            assert!(!looker.is_held_up_by(7), "{n}");
            kill_process(child(&looker), Signal::STOP).unwrap();
            assert_eq!(looker.look(me), read(me).into());
            // A process that runs stands for one that does not end.
            let runs = std::process::Command::new("sleep").arg("600").spawn().unwrap();
            looker.abandoned.last_mut().unwrap().1 = Abandoned::of(Pid::from_child(&runs));
        }
        assert!(looker.is_held_up_by(7) && !looker.is_held_up_by(8) && !looker.is_held_up_by(0));
        for (_, looker) in &looker.abandoned {
            kill_process(looker.pid(), Signal::KILL).unwrap();
        }
        wait_until("their ends", || !looker.is_held_up_by(7));
    }
}
