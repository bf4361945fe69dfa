//! Host processes that never outlive the test: QEMU, and programs that a test runs beside the VMs.
#![allow(unsafe_code)] // what is done between fork and exec, and moving a thread to a network of its own

use crate::protocol::Exit;
use crate::record::{Output, Record};
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process_group, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A thread that starts all processes of a test bed.
///
/// The kernel kills a child "with its parent" when the *thread* that started it ends, so this thread must live as long as the
/// test bed. A child is also in the network namespace of the thread that started it.
pub(crate) struct Launcher {
    requests: Option<mpsc::Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Launcher {
    pub fn new() -> Result<Launcher> {
        let (requests, todo) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let thread = thread::Builder::new()
            .name("launcher".into())
            .spawn(move || todo.into_iter().for_each(|request| request()))
            .context("cannot start a thread")?;
        Ok(Launcher { requests: Some(requests), thread: Some(thread) })
    }

    /// Runs a closure on the launcher's thread and returns its result.
    pub fn call<T: Send + 'static>(&self, request: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let (tell, answer) = mpsc::channel();
        let request = Box::new(move || {
            let _ = tell.send(request());
        });
        self.requests
            .as_ref()
            .and_then(|requests| requests.send(request).ok())
            .context("the test bed is gone")?;
        answer.recv().context("the launcher of the test bed has failed")
    }

    /// Starts a process that is killed when the test bed or this whole program ends.
    pub fn spawn(&self, mut command: Command) -> Result<Child> {
        let name = command.get_program().to_string_lossy().into_owned();
        let parent = getpid();
        // SAFETY: between fork and exec only two system calls are made, and nothing is allocated or locked.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the line above.
                if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
            });
        }
        self.call(move || command.spawn())?.with_context(|| format!("cannot start {name}"))
    }

    /// Moves the launcher's thread, and so all processes that it starts from now on, to a new network namespace.
    ///
    /// The namespace has no name: it ends with its last process and file descriptor, whatever happens to this program.
    pub fn leave_network(&self) -> Result<OwnedFd> {
        let moved = self.call(|| {
            // SAFETY: the network namespace is a property of this thread; no file descriptor table is unshared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Ok::<_, io::Error>(OwnedFd::from(std::fs::File::open("/proc/thread-self/ns/net")?))
        })?;
        moved.context("cannot make a network namespace; VM tests with a network must run as root")
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A running host process, and how it ended.
pub(crate) struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    end: Arc<Record>,
}

impl Process {
    /// Takes over a child. A thread waits for its end, calls `on_exit`, and then records the end.
    pub fn adopt(mut child: Child, on_exit: impl FnOnce(Exit) + Send + 'static) -> Result<Process> {
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("cannot watch a child")?;
        let end = Arc::new(Record::default());
        let tell = end.clone();
        thread::spawn(move || {
            let exit = exit_of(child.wait());
            on_exit(exit);
            tell.exited(exit);
        });
        Ok(Process { pid, pidfd, end })
    }

    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    pub fn is_running(&self) -> bool {
        self.end.is_running()
    }

    /// Sends a signal. Does nothing if the process has ended.
    pub fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Waits until the process has ended.
    pub fn wait(&self, what: &str, timeout: Duration) -> Result<Exit> {
        self.end.wait_ended(what, timeout).map(|output| output.exit)
    }
}

/// A command that runs on the host, in the network of the test bed if there is one.
///
/// It runs until it ends by itself or its test bed is dropped; dropping this handle does not end it.
pub struct HostJob {
    command: String,
    process: Process,
    record: Arc<Record>,
}

impl HostJob {
    pub(crate) fn start(launcher: &Launcher, name: &str, mut command: Command) -> Result<HostJob> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = launcher.spawn(command)?;
        let record = Arc::new(Record::default());
        record.started(child.id());
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let ended =
            pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).context("cannot watch a child")?;
        let (tell, exit) = mpsc::channel();
        let process = Process::adopt(child, move |exit| {
            let _ = tell.send(exit);
        })?;
        let hear = record.clone();
        thread::spawn(move || {
            if let Err(e) = listen(stdout, stderr, ended, &hear, || exit.recv().ok()) {
                hear.lost(&format!("its output broke off: {e}"));
            }
        });
        Ok(HostJob { command: name.to_owned(), process, record })
    }

    /// Returns the process id on the host.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.record.is_running()
    }

    /// Returns what it has written so far to standard output and standard error.
    pub fn said(&self) -> (String, String) {
        self.record.said()
    }

    /// Waits for its end.
    pub fn wait(&self, timeout: Duration) -> Result<Output> {
        self.record.wait_ended(&self.command, timeout)
    }

    /// Waits until a line of its output contains `pattern` and returns that line.
    pub fn wait_for_line(&self, pattern: &str, timeout: Duration) -> Result<String> {
        self.record.wait_for_line(&self.command, pattern, timeout)
    }

    /// Sends a signal to its whole process group. Does nothing if it has ended.
    pub fn kill(&self, signal: i32) -> Result<()> {
        let signal = signal_of(signal)?;
        if self.process.is_running() {
            let _ = kill_process_group(self.process.pid, signal);
        }
        Ok(())
    }

    /// Sends a signal to the process alone, not to its children.
    pub fn kill_process(&self, signal: i32) -> Result<()> {
        self.process.signal(signal_of(signal)?);
        Ok(())
    }
}

pub(crate) fn signal_of(number: i32) -> Result<Signal> {
    Signal::from_named_raw(number).with_context(|| format!("{number} is not a signal"))
}

fn exit_of(status: io::Result<ExitStatus>) -> Exit {
    match status {
        Ok(status) => match status.signal() {
            Some(signal) => Exit::Signal(signal),
            None => Exit::Code(status.code().unwrap_or(-1)),
        },
        Err(_) => Exit::Code(-1), // Cannot happen, because nobody else waits for this child.
    }
}

/// Records both streams to their end. The exit is recorded after everything that the process itself has written.
fn listen(
    mut stdout: Option<impl Read + AsFd>,
    mut stderr: Option<impl Read + AsFd>,
    ended: OwnedFd,
    record: &Record,
    exit: impl Fn() -> Option<Exit>,
) -> io::Result<()> {
    for fd in [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)].into_iter().flatten() {
        fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
    }
    let mut ended = Some(ended);
    while ended.is_some() || stdout.is_some() || stderr.is_some() {
        let has_ended = wait_readable(
            [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)],
            ended.as_ref().map(AsFd::as_fd),
        )?;
        drain(&mut stdout, |bytes| record.stdout(bytes))?;
        drain(&mut stderr, |bytes| record.stderr(bytes))?;
        if has_ended {
            ended = None;
            match exit() {
                Some(exit) => record.exited(exit),
                None => record.lost("nobody saw it end"),
            }
        }
    }
    Ok(())
}

/// Blocks until a stream is readable or the process has ended. Returns whether it has ended.
fn wait_readable(streams: [Option<BorrowedFd<'_>>; 2], ended: Option<BorrowedFd<'_>>) -> io::Result<bool> {
    let fds = streams.into_iter().flatten().chain(ended);
    let mut set: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    loop {
        match poll(&mut set, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(ended.is_some() && set.last().is_some_and(|entry| !entry.revents().is_empty()))
}

/// Takes what a pipe contains now, at most 128 KiB: twice what a pipe can contain.
fn drain(pipe: &mut Option<impl Read>, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    for _ in 0..8 {
        let Some(source) = pipe else { break };
        match source.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(n) => take(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
