//! Processes of this program's own code. They do what may block for ever, so nobody waits for them: not even to end.

use crate::poller::{Interest, Poller, becomes_readable};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Returns a command that runs this program with these arguments, even if another has been installed in its place.
pub fn own_program(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(args).env_clear().current_dir("/");
    command
}

/// Lets this process end with the daemon that has started it.
pub fn end_with_parent() -> io::Result<()> {
    // The daemon starts processes from its first thread, which lives as long as the daemon does.
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Lets this process learn how its children end.
#[expect(unsafe_code, reason = "sets the action of a signal to the default")]
pub fn wait_for_children() {
    // SAFETY: the default action runs no code.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// A process that was started.
#[derive(Debug)]
pub struct Spawned {
    child: Child,
    /// Becomes readable when the process has ended.
    ended: OwnedFd,
}

impl Spawned {
    /// Starts a process.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.spawn()?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(ended) => Ok(Self { child, ended }),
            Err(errno) => {
                // It has been given nothing yet, so it ends at once.
                let _ = child.kill().and_then(|()| child.wait());
                Err(errno.into())
            }
        }
    }

    /// Starts a process whose end is an event with this token.
    pub fn start_with(command: &mut Command, poller: &Poller, token: u64) -> io::Result<Self> {
        let mut started = Self::start(command)?;
        match poller.add(&started.ended, token, Interest::READ) {
            Ok(()) => Ok(started),
            Err(error) => {
                let _ = started.child.kill().and_then(|()| started.child.wait());
                Err(error)
            }
        }
    }

    /// Returns the number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process. It may go on to be there.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// Waits for its end, at most for this time. Returns whether it has ended.
    pub fn wait(&self, at_most: Duration) -> bool {
        becomes_readable(self.ended.as_fd(), Some(Instant::now() + at_most))
    }

    /// Forgets a process that has ended. Returns how, if that is known.
    pub fn bury(mut self, poller: &Poller) -> Option<ExitStatus> {
        poller.remove(&self.ended);
        self.try_bury()
    }

    /// Buries a process if it has ended. Returns how it has ended.
    pub fn try_bury(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}

/// A process and what it says on its standard output.
#[derive(Debug)]
pub struct Speaker {
    /// The process.
    pub process: Spawned,
    output: OwnedFd,
    said: Vec<u8>,
}

impl Speaker {
    /// Starts a process.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        Self::start_as(command, Spawned::start)
    }

    /// Starts a process. What it says is an event with the first token, and its end one with the second.
    pub fn start_with(command: &mut Command, poller: &Poller, tokens: [u64; 2]) -> io::Result<Self> {
        let mut started = Self::start_as(command, |command| Spawned::start_with(command, poller, tokens[1]))?;
        match poller.add(&started.output, tokens[0], Interest::READ) {
            Ok(()) => Ok(started),
            Err(error) => {
                // It may take long to end, and is not waited for.
                started.process.kill();
                started.process.bury(poller);
                Err(error)
            }
        }
    }

    fn start_as(
        command: &mut Command,
        start: impl FnOnce(&mut Command) -> io::Result<Spawned>,
    ) -> io::Result<Self> {
        let (output, say) = pipe_with(PipeFlags::CLOEXEC)?;
        ioctl_fionbio(&output, true)?;
        let process = start(command.stdout(Stdio::from(say)));
        // Otherwise the command would keep the other end open.
        command.stdout(Stdio::null());
        Ok(Self { process: process?, output, said: Vec::new() })
    }

    /// Returns what it has said so far.
    pub fn said(&self) -> &[u8] {
        &self.said
    }

    /// Takes what it says. Returns whether it will say nothing more.
    pub fn hear(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match rustix::io::read(&self.output, &mut bytes) {
                Ok(0) => return true,
                Ok(len) => self.said.extend_from_slice(&bytes[..len]),
                Err(Errno::INTR) => {}
                Err(errno) => return errno != Errno::AGAIN,
            }
        }
    }

    /// Forgets what it has said so far.
    pub fn forget(&mut self) {
        self.said.clear();
    }

    /// Waits until it says something, or nothing more; without `until` as long as that takes. Returns whether it did.
    pub fn wait(&self, until: Option<Instant>) -> bool {
        becomes_readable(self.output.as_fd(), until)
    }

    /// Wants no more events of what it says.
    pub fn ignore(&self, poller: &Poller) {
        poller.remove(&self.output);
    }
}
