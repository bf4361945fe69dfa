//! Finds out what the kernel says about processes.

mod looker;
mod stat;

use crate::packet;
use ginnel_broker::process::{Image, Process};
use looker::Looker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
pub use stat::user_of as read_user_of;
use stat::{Seen, Stat};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Returns the process that has this number now; `None` if there is none, or if nobody could look.
pub fn process(pid: u32) -> Option<Process> {
    look(pid).known().map(|stat| Process { pid, started: stat.started })
}

/// Returns the process that has made a connection, whose number then was `pid`; `None` if it has ended. The number may be another
/// process's by now. (Kernels before Linux 6.5 do not tell.)
pub fn connected(connection: BorrowedFd<'_>, pid: u32) -> Option<Process> {
    let pidfd = match packet::peer_pidfd(connection) {
        Ok(pidfd) => Some(pidfd),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => None,
        Err(_) => return None,
    };
    let process = process(pid)?;
    // As long as a process is there, its number is its own. So what was seen is true if it is still there.
    pidfd.is_none_or(|pidfd| has_ended(&pidfd) == Ok(false)).then_some(process)
}

/// Returns whether a thread of the process still runs. A process that has ended and waits for its parent is not alive. A
/// process whose first thread has ended while others run is alive, although `/proc` shows it as a zombie.
pub fn is_alive(process: &Process) -> bool {
    match watch(process) {
        Ok(watch) => watch.is_some(),
        // There is no free descriptor for a watch, so this uses `/proc` alone.
        Err(_) => match look(process.pid) {
            Seen::Is(stat) => stat.started == process.started,
            // A process that cannot be seen is there until the contrary is known.
            Seen::Gone | Seen::Unknown => std::fs::metadata(format!("/proc/{}", process.pid)).is_ok(),
        },
    }
}

/// Returns a descriptor that becomes readable when the last thread of the process ends; `None` if it has ended. Fails if there is a
/// process with this number, and nobody can see which.
pub fn watch(process: &Process) -> rustix::io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    // The number may have been given to another process before the descriptor was opened, but not after that, unless the
    // descriptor reports that its process has ended.
    let seen = look(process.pid);
    if has_ended(&fd)? {
        return Ok(None);
    }
    match seen {
        Seen::Is(stat) => Ok((stat.started == process.started).then_some(fd)),
        Seen::Gone | Seen::Unknown => Err(rustix::io::Errno::ACCESS),
    }
}

/// Returns the program that the process runs. `None` if that is not known: the process is ending, or is in the middle of an
/// `exec`, or belongs to another user and this daemon is not root.
pub fn image_of(process: &Process) -> Option<Image> {
    let stat = look(process.pid).known().filter(|stat| stat.started == process.started)?;
    // The kernel shows 0 for a process without memory, and 1 to a caller that lacks permission.
    (stat.image.code > 1).then_some(stat.image)
}

/// Returns the user on whose behalf a process runs, whose connection would be that user's. `None` if the process has ended.
pub fn user_of(pid: u32) -> Option<u32> {
    match &mut *LOOKER.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(looker) => looker.user_of(pid),
        None => stat::user_of(pid),
    }
}

/// Returns whether all threads of a pidfd's process have ended.
fn has_ended(pidfd: &OwnedFd) -> rustix::io::Result<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Why a user cannot connect for whom [`is_held_up_by`] returns true.
pub const HELD_UP: &str = "processes of this user that have ended hold up those that look at them (asynchronous reads from FUSE?): make \
     the file system answer, or unmount it";

/// The process that looks at others for this one, once there is one.
static LOOKER: Mutex<Option<Looker>> = Mutex::new(None);

/// From now on, lets a process of its own look at others. A daemon, which serves everybody, must not be held up by that.
pub fn look_from_elsewhere() -> io::Result<()> {
    *LOOKER.lock().unwrap_or_else(PoisonError::into_inner) = Some(Looker::start()?);
    Ok(())
}

/// Says for which user this process looks at others from now on.
pub fn look_for(user: u32) {
    if let Some(looker) = &mut *LOOKER.lock().unwrap_or_else(PoisonError::into_inner) {
        looker.for_user(user);
    }
}

/// Returns whether looks for this user have been held up so often that it must not connect.
pub fn is_held_up_by(user: u32) -> bool {
    let mut looker = LOOKER.lock().unwrap_or_else(PoisonError::into_inner);
    looker.as_mut().is_some_and(|looker| looker.is_held_up_by(user))
}

fn look(pid: u32) -> Seen<Stat> {
    match &mut *LOOKER.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(looker) => looker.look(pid),
        None => stat::read(pid).into(),
    }
}

/// Processes whose connection has ended, and which may run another program now. While a process is in the middle of an `exec`
/// its program cannot be seen, so it is examined again later, once for all that belongs to it.
#[derive(Debug)]
pub struct ExecChecks<T> {
    all: HashMap<Process, ExecCheck<T>>,
    /// When to look at which process.
    due: BTreeSet<(Instant, Process)>,
}

#[derive(Debug)]
struct ExecCheck<T> {
    /// What belongs to the process, and which program it ran when that connection was opened.
    things: Vec<(Image, T)>,
    again: Instant,
    pause: Duration,
}

impl<T> Default for ExecChecks<T> {
    fn default() -> Self {
        Self { all: HashMap::new(), due: BTreeSet::new() }
    }
}

impl<T> ExecChecks<T> {
    /// The pauses between two looks: the first one, and the one after which the process is not examined any more.
    const FIRST: Duration = Duration::from_millis(1);
    const LAST: Duration = Duration::from_millis(512);
    /// The most processes that are looked at in one go. Others are served between two of them.
    const LOOKS: usize = 16;

    /// Adds a process that ran `image` when its connection was opened. Returns `what` if the process runs another program now. If
    /// that cannot be seen yet, [`ExecChecks::take_changed`] may return `what` later.
    #[must_use]
    pub fn add(&mut self, process: Process, image: Image, what: T) -> Option<T> {
        // Its program could not be seen a moment ago. The next look is for all that belongs to it.
        let now = if self.all.contains_key(&process) { None } else { image_of(&process) };
        match now {
            Some(now) => (now != image).then_some(what),
            None => {
                self.examine_later(process, image, what);
                None
            }
        }
    }

    /// Has a process examined from now on, also if it was almost given up: the `exec` may be another one.
    fn examine_later(&mut self, process: Process, image: Image, what: T) {
        let mut check = self.take(&process).unwrap_or_else(|| ExecCheck::new(Vec::new()));
        check.things.push((image, what));
        self.put(process, ExecCheck::new(check.things));
    }

    fn take(&mut self, process: &Process) -> Option<ExecCheck<T>> {
        let check = self.all.remove(process)?;
        self.due.remove(&(check.again, *process));
        Some(check)
    }

    fn put(&mut self, process: Process, check: ExecCheck<T>) {
        self.due.insert((check.again, process));
        self.all.insert(process, check);
    }

    /// Returns and removes those that turn out to run another program, as far as so many were looked at as may be in one go.
    pub fn take_changed(&mut self) -> Vec<T> {
        if self.due.is_empty() {
            return Vec::new(); // This returns without reading the clock, which is slow in many VMs.
        }
        let now = Instant::now();
        let mut changed = Vec::new();
        for _ in 0..Self::LOOKS {
            let Some(&(_, process)) = self.due.first().filter(|(again, _)| *again <= now) else { break };
            let Some(mut check) = self.take(&process) else { break };
            match image_of(&process) {
                Some(image) => {
                    changed.extend(check.things.into_iter().filter(|(old, _)| *old != image).map(|(_, t)| t));
                }
                None if check.pause >= Self::LAST => {} // The process is ending, which others watch, or it hides its program.
                None => {
                    check.pause *= 2;
                    check.again = now + check.pause;
                    self.put(process, check);
                }
            }
        }
        changed
    }

    /// Removes what belongs to a process and for which `is_settled` returns true.
    pub fn settle(&mut self, process: &Process, is_settled: impl Fn(&T) -> bool) {
        let Some(mut check) = self.take(process) else { return };
        check.things.retain(|(_, what)| !is_settled(what));
        if !check.things.is_empty() {
            self.put(*process, check);
        }
    }

    /// Returns the time until [`ExecChecks::take_changed`] has something to do.
    pub fn until_next(&self) -> Option<Duration> {
        let (next, _) = self.due.first()?;
        Some(next.saturating_duration_since(Instant::now()))
    }
}

impl<T> ExecCheck<T> {
    fn new(things: Vec<(Image, T)>) -> Self {
        let pause = ExecChecks::<T>::FIRST;
        Self { things, again: Instant::now() + pause, pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_for;
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::AsFd;
    use std::process::{Child, Command, Stdio};

    kit::program! {
        fn connects() {
            std::os::unix::net::UnixStream::connect(std::env::var_os("TEST_SOCKET").unwrap()).unwrap();
        }
    }

    /// Makes a process with this number, which sleeps.
    #[expect(unsafe_code, reason = "a process with a given number")]
    fn sleeper(number: i32) -> Option<Pid> {
        // SAFETY: zeros are valid arguments; the kernel reads the number, which outlives the call; and the new process makes only
        // system calls.
        let pid = unsafe {
            let mut args: libc::clone_args = std::mem::zeroed();
            args.exit_signal = libc::SIGCHLD as u64;
            (args.set_tid, args.set_tid_size) = ((&raw const number).addr() as u64, 1);
            let pid = libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>());
            if pid == 0 {
                loop {
                    libc::pause();
                }
            }
            pid
        };
        Pid::from_raw(pid as i32).filter(|_| pid > 0)
    }

    #[test]
    fn a_process_with_the_number_of_another_has_not_made_its_connection() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let mut command = kit::program::command(connects);
        let mut child = command.env("TEST_SOCKET", &socket).spawn().unwrap();
        let connection = listener.accept().unwrap().0;
        child.wait().unwrap();
        let number = packet::peer(connection.as_fd()).unwrap().pid;
        assert_eq!(number, child.id());
        let known = packet::peer_pidfd(connection.as_fd());
        kit::require!(
            known.is_ok() || known.is_err_and(|error| error.raw_os_error() != Some(libc::ENOPROTOOPT)),
            "this kernel does not tell who has connected"
        );
        assert_eq!(connected(connection.as_fd(), number), None, "it has ended");
        let other = sleeper(number as i32);
        kit::require!(other.is_some(), "this user may not make a process with a given number");
        let seen = process(number);
        let found = connected(connection.as_fd(), number);
        let other = other.unwrap();
        rustix::process::kill_process(other, rustix::process::Signal::KILL).unwrap();
        rustix::process::waitpid(Some(other), rustix::process::WaitOptions::empty()).unwrap();
        assert!(seen.is_some(), "another process has this number");
        assert_eq!(found, None);
    }

    #[test]
    fn the_process_that_has_connected_is_found() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let number = packet::peer(near.as_fd()).unwrap().pid;
        assert_eq!(connected(near.as_fd(), number), process(std::process::id()));
    }

    #[test]
    fn the_user_of_a_process_is_known_as_long_as_it_exists() {
        let me = rustix::process::geteuid().as_raw();
        assert_eq!(user_of(std::process::id()), Some(me));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(user_of(child.id()), None);
    }

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = super::process(child.id()).unwrap();
        assert!(is_alive(&process));
        assert!(!is_alive(&Process { started: process.started + 1, ..process }));
        let fd = watch(&process).unwrap().unwrap();
        child.kill().unwrap();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        assert_eq!(poll(&mut polled, None), Ok(1));
        assert!(!is_alive(&process), "a zombie is not alive");
        child.wait().unwrap();
        assert!(watch(&process).unwrap().is_none());
    }

    /// Starts a program that says when it is ready, and ends when its input does.
    fn start<F: Fn()>(program: F) -> Child {
        let mut child =
            kit::program::command(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, READY);
        child
    }

    const READY: &str = "ready\n";

    fn say_ready_and_wait() {
        print!("{READY}");
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    kit::program! {
        fn with_a_name_of_any_bytes() {
            // Each thread has a name of its own; /proc/PID/stat shows that of the first.
            let path = format!("/proc/{0}/task/{0}/comm", std::process::id());
            std::fs::write(path, b"\xff) \xfe(\n").unwrap();
            say_ready_and_wait();
        }
    }

    #[test]
    fn a_name_that_is_not_utf_8_is_the_name_of_a_living_process() {
        let mut child = start(with_a_name_of_any_bytes);
        let stat = std::fs::read(format!("/proc/{}/stat", child.id())).unwrap();
        assert!(String::from_utf8(stat).is_err(), "its name is set");
        let process = super::process(child.id()).expect("it is there");
        assert!(is_alive(&process) && image_of(&process).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(&process));
    }

    kit::program! {
        #[allow(unsafe_code)] // For a system call that ends a thread and not its process.
        fn without_its_first_thread() {
            let first = format!("/proc/{0}/task/{0}/stat", std::process::id());
            std::thread::spawn(move || {
                let state = || std::fs::read_to_string(&first).unwrap().rsplit_once(')').map(|(_, s)| s[1..2].to_owned());
                while state().as_deref() != Some("Z") {
                    std::thread::yield_now();
                }
                say_ready_and_wait();
                std::process::exit(0);
            });
            // SAFETY: this ends the calling thread, which has lent nothing to the other.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_lives_until_the_last_does() {
        let mut child = start(without_its_first_thread);
        let process = super::process(child.id()).expect("it is there");
        assert!(is_alive(&process));
        let watch = watch(&process).unwrap().expect("it can be watched");
        assert!(!has_ended(&watch).unwrap());
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(poll(&mut [PollFd::new(&watch, PollFlags::IN)], None), Ok(1));
        assert!(!is_alive(&process));
        child.wait().unwrap();
    }

    #[test]
    fn another_program_in_the_same_process_is_seen() {
        let mut child = Command::new("sh")
            .args(["-c", "read line; exec sleep 600"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let process = super::process(child.id()).unwrap();
        // The child may not have executed its program yet.
        let image = wait_for("its program", || {
            let running = std::fs::read_link(format!("/proc/{}/exe", child.id())).ok()?;
            (running != std::env::current_exe().unwrap()).then(|| image_of(&process))?
        });
        let mut exec_checks = ExecChecks::default();
        assert_eq!(exec_checks.add(process, image, 1), None);
        assert!(exec_checks.until_next().is_none(), "it runs the same program, so it is not examined again");
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        wait_for("the other program", || (image_of(&process)? != image).then_some(()));
        assert_eq!(exec_checks.add(process, image, 2), Some(2));
        child.kill().unwrap();
        child.wait().unwrap();
        // Nothing is known about a process that has ended, and after a while it is not examined any more.
        assert_eq!(exec_checks.add(process, image, 3), None);
        assert_eq!(exec_checks.add(process, image, 4), None);
        exec_checks.settle(&process, |what| *what == 4);
        let left = exec_checks.all.values().flat_map(|check| &check.things);
        assert_eq!(left.map(|(_, what)| *what).collect::<Vec<_>>(), [3]);
        wait_for("the last look", || {
            assert!(exec_checks.take_changed().is_empty());
            exec_checks.until_next().is_none().then_some(())
        });
    }
    #[test]
    fn all_that_belongs_to_a_process_is_examined_at_once() {
        let process = super::process(std::process::id()).unwrap();
        let image = image_of(&process).unwrap();
        let other = Image { code: image.code + 1, ..image };
        let mut exec_checks = ExecChecks::default();
        for (old, what) in [(other, 1), (image, 2), (other, 3)] {
            exec_checks.examine_later(process, old, what);
        }
        let changed = wait_for("the look", || Some(exec_checks.take_changed()).filter(|all| !all.is_empty()));
        assert_eq!(changed, [1, 3]);
        assert_eq!(exec_checks.until_next(), None);
    }

    /// Its first thread has ended, so `/proc` shows no program for as long as it likes.
    #[test]
    fn a_process_that_hides_its_program_costs_few_looks() {
        let mut child = start(without_its_first_thread);
        let process = super::process(child.id()).expect("it is there");
        let mut exec_checks = ExecChecks::default();
        let image = Image { code: 2, stack: 2 };
        assert!((0..4096).all(|what| exec_checks.add(process, image, what).is_none()));
        assert_eq!(exec_checks.due.len(), 1, "one look is for all that it had");
        // Other processes hide theirs too. There is none with these numbers.
        for number in 0..100 {
            let gone = Process { pid: u32::MAX - number, started: 1 };
            assert_eq!(exec_checks.add(gone, image, 1), None);
        }
        let all = exec_checks.due.last().unwrap().0;
        wait_for("the time of all looks", || (Instant::now() > all).then_some(()));
        assert!(exec_checks.take_changed().is_empty());
        let again = exec_checks.due.iter().filter(|(again, _)| *again > all).count();
        assert_eq!(again, ExecChecks::<i32>::LOOKS);
        assert_eq!(exec_checks.until_next(), Some(Duration::ZERO), "the others have their turn soon");
        wait_for("the last look", || {
            assert!(exec_checks.take_changed().is_empty());
            exec_checks.until_next().is_none().then_some(())
        });
        assert!(exec_checks.all.is_empty());
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        child.wait().unwrap();
    }
}
