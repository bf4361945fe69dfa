//! Changes of segments' files, which processes of their own make ([`super::file_making`], [`super::file_work`]): each may wait for ever for
//! the lock of the file's inode, or of its folder.

use super::file_making::{self, ALLOCATED, NewFile};
use super::file_work::Args;
use super::token::Token;
use crate::at_hand;
use crate::poller::Poller;
use crate::spawned::{Speaker, own_program};
use ginnel_config::Problem;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tracing::error;

/// How long a file that has its memory may wait for its name until it counts as held up.
const PATIENCE: Duration = Duration::from_secs(2);

/// The device and inode of a file.
pub type Identity = (u64, u64);

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    /// It restores the size of this file.
    Restore(Identity),
    /// It changes this file in another way.
    Change(Identity),
    /// It removes the name of a file.
    Remove,
    /// It removes a file unless others have it.
    RemoveUnused,
    /// It makes a file.
    Make,
}

#[derive(Debug)]
struct Job {
    task: Task,
    path: PathBuf,
    /// It says a byte each time that the file has its size, or how a file that it makes comes along.
    speaker: Speaker,
    /// The same is to be done again when it has ended.
    again: bool,
}

/// News of a process that restores a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restoring {
    /// The file.
    pub identity: Identity,
    /// The file has got its size, at least for a moment.
    pub has_size: bool,
    /// The process has ended.
    pub ended: Option<Ended>,
}

/// How a process that restores a file has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// It has done its work.
    pub done: bool,
    /// Somebody wanted the file restored again meanwhile: it may have been truncated after the process's last look.
    pub again: bool,
}

/// The processes that change files.
#[derive(Debug)]
pub struct FileJobs {
    /// `None` only in tests of what needs no processes.
    poller: Option<Poller>,
    /// The processes at work, by even numbers: of the tokens of what they say. The tokens of their ends have the numbers after these.
    jobs: BTreeMap<u64, Job>,
    /// The files that were to be made, and whether they are.
    made: Vec<(PathBuf, Result<(), Problem>)>,
    /// The last file that was to be made still has no name, so the lock of its folder is held.
    is_held_up: bool,
    numbers: u64,
    /// A process has removed a file that nobody has.
    removed: bool,
    /// Makes the command that starts a process with these arguments.
    command: fn(Vec<OsString>) -> Command,
}

impl Default for FileJobs {
    /// Makes a set that starts no process.
    fn default() -> Self {
        Self {
            poller: None,
            jobs: BTreeMap::new(),
            made: Vec::new(),
            is_held_up: false,
            numbers: 0,
            removed: false,
            command: |args| own_program(args),
        }
    }
}

impl FileJobs {
    /// Starts without jobs. Their processes have tokens in this poller.
    pub fn new(poller: &Poller) -> Self {
        Self { poller: Some(poller.clone()), ..Self::default() }
    }

    /// Starts processes by another command, because a test's own program is not this one.
    #[cfg(test)]
    pub fn start_by(&mut self, command: fn(Vec<OsString>) -> Command) {
        self.command = command;
    }

    /// Returns whether no process is at work.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Lets a process restore the size and the memory of a file, unless one does so: then it is done again if that one fails.
    pub fn restore(&mut self, identity: Identity, file: &OwnedFd, path: &Path, size: u64) -> io::Result<()> {
        let task = Task::Restore(identity);
        if let Some(job) = self.jobs.values_mut().find(|job| job.task == task) {
            job.again = true;
            return Ok(());
        }
        let work = Args { path: path.to_owned(), restore: Some(size), ..Args::default() };
        self.start(task, file, &work).map(drop)
    }

    /// Lets a process change a file, and waits for that at most this long. Returns whether it is done.
    pub fn change(
        &mut self,
        identity: Identity,
        file: &OwnedFd,
        work: &Args,
        at_most: Duration,
    ) -> io::Result<bool> {
        let task = Task::Change(identity);
        if self.jobs.values().any(|job| job.task == task) {
            return Ok(false);
        }
        let number = self.start(task, file, work)?;
        if !self.has_ended(number, at_most) {
            return Ok(false);
        }
        if self.end(number) { Ok(true) } else { Err(io::Error::other("the log says why")) }
    }

    /// Lets a process remove a file, and waits for that at most this long. Returns whether it is done.
    pub fn remove(&mut self, path: &Path, at_most: Duration) -> io::Result<bool> {
        if self.is_removing(path) {
            return Ok(false);
        }
        let file = match at_hand::open(path, OFlags::RDONLY | OFlags::NONBLOCK) {
            Ok(Some(file)) => file,
            _ => rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?,
        };
        let work = Args { path: path.to_owned(), remove: true, ..Args::default() };
        let number = self.start(Task::Remove, &file, &work)?;
        if !self.has_ended(number, at_most) {
            return Ok(false);
        }
        if self.end(number) { Ok(true) } else { Err(io::Error::other("the log says why")) }
    }

    /// Lets a process remove a file unless others have it, and waits for that at most this long.
    pub fn remove_unused(&mut self, path: &Path, at_most: Duration) -> io::Result<()> {
        if self.jobs.values().any(|job| job.task == Task::RemoveUnused && job.path == path) {
            return Ok(());
        }
        // The process opens the file itself, because only its own description tells whether there are others.
        let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let work = Args { path: path.to_owned(), remove_unused: true, ..Args::default() };
        let number = self.start(Task::RemoveUnused, &nothing, &work)?;
        if self.has_ended(number, at_most) && !self.end(number) {
            return Err(io::Error::other("the log says why"));
        }
        Ok(())
    }

    /// Lets a process make a file, unless one does so.
    pub fn make(&mut self, new: &NewFile) -> io::Result<()> {
        if self.is_making(&new.path) {
            return Ok(());
        }
        let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        self.start_with(Task::Make, &nothing, &new.path, new.to_command_line()).map(drop)
    }

    /// Returns whether the file with this path is being made.
    pub fn is_making(&self, path: &Path) -> bool {
        self.jobs.values().any(|job| job.task == Task::Make && job.path == path)
    }

    /// Waits until a file is made: at most this long, or, without a limit, as long as it gets memory, and then only as long as others do
    /// not seem to hold the lock of the folder. Returns whether the process has ended.
    pub fn wait_made(&mut self, path: &Path, at_most: Option<Duration>) -> bool {
        let making = self.jobs.iter_mut().find(|(_, job)| job.task == Task::Make && job.path == path);
        let Some((&number, job)) = making else { return true };
        let until = at_most.map(|time| Instant::now() + time);
        // Its end is the end of what it says, too.
        while !job.speaker.said().starts_with(ALLOCATED.as_bytes()) {
            if !job.speaker.wait(until) {
                return false;
            }
            if job.speaker.hear() {
                break;
            }
        }
        let time = match until {
            Some(until) => until.saturating_duration_since(Instant::now()),
            None if self.is_held_up => Duration::ZERO,
            None => PATIENCE,
        };
        self.is_held_up = !job.speaker.process.wait(time);
        if !self.is_held_up {
            self.end(number);
        }
        !self.is_held_up
    }

    /// Returns those of these files that were to be made since the last call, and whether they are.
    pub fn take_made(&mut self, which: impl Fn(&Path) -> bool) -> Vec<(PathBuf, Result<(), Problem>)> {
        let (taken, rest) = std::mem::take(&mut self.made).into_iter().partition(|(path, _)| which(path));
        self.made = rest;
        taken
    }

    /// Returns whether the file with this path is being removed.
    pub fn is_removing(&self, path: &Path) -> bool {
        self.jobs.values().any(|job| job.task == Task::Remove && job.path == path)
    }

    /// Returns whether a process ends within this time.
    fn has_ended(&self, number: u64, at_most: Duration) -> bool {
        self.jobs.get(&number).is_some_and(|job| job.speaker.process.wait(at_most))
    }

    fn start(&mut self, task: Task, file: &OwnedFd, work: &Args) -> io::Result<u64> {
        self.start_with(task, file, &work.path, work.to_command_line())
    }

    fn start_with(
        &mut self,
        task: Task,
        file: &OwnedFd,
        path: &Path,
        arguments: Vec<OsString>,
    ) -> io::Result<u64> {
        let Some(poller) = &self.poller else { return Err(io::Error::other("there is no poller")) };
        let mut command = (self.command)(arguments);
        command.stdin(Stdio::from(file.try_clone()?));
        let number = self.numbers;
        let tokens = [number, number + 1].map(|number| Token::FileWork(number).into());
        let speaker = Speaker::start_with(&mut command, poller, tokens)?;
        self.numbers += 2;
        self.jobs.insert(number, Job { task, path: path.to_owned(), speaker, again: false });
        Ok(number)
    }

    /// Forgets a process that has ended. Returns whether it has done its work.
    fn end(&mut self, number: u64) -> bool {
        let (Some(mut job), Some(poller)) = (self.jobs.remove(&number), &self.poller) else { return true };
        job.speaker.ignore(poller);
        job.speaker.hear();
        let said = String::from_utf8_lossy(job.speaker.said()).into_owned();
        let done = job.speaker.process.bury(poller).is_some_and(|status| status.success());
        if !done {
            error!(path = %job.path.display(), "a process that was to change this file has failed");
        }
        if job.task == Task::Make {
            let failed = || Problem::new("", "the process that makes its file has failed", "see the log");
            let result = match file_making::problem(&said, "") {
                Some(problem) => Err(problem),
                None => done.then_some(()).ok_or_else(failed),
            };
            self.made.push((job.path, result));
        }
        done
    }

    /// Returns whether a process has removed a file that nobody has, since the last call.
    pub fn take_removed(&mut self) -> bool {
        std::mem::take(&mut self.removed)
    }

    /// Handles an event with the token of this number. Returns what a process says that restores a file.
    #[must_use]
    pub fn ready(&mut self, number: u64) -> Option<Restoring> {
        let (number, has_ended) = (number & !1, number & 1 == 1);
        let job = self.jobs.get_mut(&number)?;
        if job.speaker.hear()
            && let Some(poller) = &self.poller
        {
            job.speaker.ignore(poller);
        }
        let (task, again) = (job.task, job.again);
        let Task::Restore(identity) = task else {
            if has_ended {
                self.removed |= task == Task::RemoveUnused && at_hand::stat(&job.path).is_none();
                self.end(number);
            }
            return None;
        };
        let has_size = !job.speaker.said().is_empty();
        job.speaker.forget();
        let ended = has_ended.then(|| Ended { done: self.end(number), again });
        Some(Restoring { identity, has_size, ended })
    }
}
