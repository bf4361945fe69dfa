//! Changes of segments' files, which processes of their own make ([`super::file_work`]): each may wait for ever for the lock of the
//! file's inode.
//!
//! Above all, files that were truncated get their size back. A program that maps a truncated file dies when it touches the missing
//! pages (SIGBUS), unless it handles the signal, which QEMU does not. So the files are watched: inotify reports a truncation, but
//! not stores through mappings. The truncated contents are lost: the pages are zeros, and the segment stays broken.

use super::file_making::{self, ALLOCATED, NewFile};
use super::file_work::Args;
use super::token::Token;
use crate::at_hand;
use crate::poller::{Interest, Poller};
use crate::spawned::{Spawned, own_program};
use ginnel_config::Problem;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, inotify};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// The bytes of the events that are fetched at once. These events have no names.
const EVENTS: usize = 64 * size_of::<[u32; 4]>();

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
    process: Spawned,
    /// What the process says: a byte each time that the file has its size, or how a file that it makes comes along.
    news: OwnedFd,
    said: Vec<u8>,
    /// The same is to be done again when it has ended.
    again: bool,
}

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    file: Arc<OwnedFd>,
    /// The size that the file must have at least, in bytes.
    size: u64,
    watch: Option<i32>,
    /// It grows when segments that share it are added.
    grows: bool,
    /// When a process could not restore it last.
    failed: Option<Instant>,
}

/// The files of segments.
#[derive(Debug)]
pub struct Files {
    /// `None` only in tests of what needs no events.
    poller: Option<Poller>,
    inotify: Option<OwnedFd>,
    all: BTreeMap<Identity, Watched>,
    /// The processes at work, by even numbers: of the tokens of their news. The tokens of their ends have the numbers after these.
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

impl Default for Files {
    /// Makes a set of files that are not watched.
    fn default() -> Self {
        Self {
            poller: None,
            inotify: None,
            all: BTreeMap::new(),
            jobs: BTreeMap::new(),
            made: Vec::new(),
            is_held_up: false,
            numbers: 0,
            removed: false,
            command: |args| own_program(args),
        }
    }
}

/// How long a file that has its memory may wait for its name until it counts as held up.
const PATIENCE: Duration = Duration::from_secs(2);

/// The time after which memory is asked for again that was not there.
const RETRY: Duration = Duration::from_secs(1);

impl Files {
    /// Makes a set of files that are watched, with tokens in this poller.
    pub fn new(poller: &Poller) -> Self {
        let watch = || {
            let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
            poller.add(&inotify, Token::Files.into(), Interest::READ)?;
            Ok::<_, io::Error>(inotify)
        };
        let inotify = watch().inspect_err(|error| {
            warn!(%error, "files of segments cannot be watched: a truncation is noticed within a second; raise fs.inotify.max_user_instances");
        });
        Self { inotify: inotify.ok(), poller: Some(poller.clone()), ..Self::default() }
    }

    /// Starts processes by another command, because a test's own program is not this one.
    #[cfg(test)]
    fn start_by(&mut self, command: fn(Vec<OsString>) -> Command) {
        self.command = command;
    }

    /// Watches a file. `size` is its proper size; a file that grows, because segments share it, has its proper size now.
    pub fn watch(&mut self, identity: Identity, path: &Path, file: &Arc<OwnedFd>, size: Option<u64>) {
        let (grows, size) = (size.is_none(), size.unwrap_or_else(|| length_of(file)));
        if let Some(known) = self.all.get_mut(&identity) {
            known.size = known.size.max(size);
            return;
        }
        let place = format!("/proc/self/fd/{}", file.as_raw_fd());
        let add = |inotify| inotify::add_watch(inotify, &place, inotify::WatchFlags::MODIFY);
        let watch = self.inotify.as_ref().map(add).transpose().unwrap_or_else(|error| {
            warn!(%error, "a segment's file cannot be watched: a truncation is noticed within a second; raise fs.inotify.max_user_watches");
            None
        });
        let (path, file) = (path.to_owned(), file.clone());
        self.all.insert(identity, Watched { path, file, size, grows, watch, failed: None });
    }

    /// Forgets the files for which `needed` returns false.
    pub fn keep(&mut self, needed: impl Fn(Identity) -> bool) {
        self.all.retain(|identity, file| {
            let needed = needed(*identity);
            if let (false, Some(inotify), Some(watch)) = (needed, &self.inotify, file.watch) {
                // This fails if the file is gone, and the watch with it.
                let _ = inotify::remove_watch(inotify, watch);
            }
            needed
        });
    }

    /// Returns the files that were modified since the last call, other than through mappings.
    pub fn take_modified(&mut self) -> Vec<Identity> {
        let Some(inotify) = &self.inotify else { return Vec::new() };
        let mut buffer = [MaybeUninit::uninit(); EVENTS];
        let mut events = inotify::Reader::new(inotify, &mut buffer);
        let mut modified = Vec::new();
        // Files that are modified meanwhile can wait.
        while let Ok(event) = events.next() {
            let lost = event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW);
            let of_event = |file: &Watched| lost || file.watch == Some(event.wd());
            modified
                .extend(self.all.iter().filter(|(_, file)| of_event(file)).map(|(identity, _)| *identity));
            if events.is_buffer_empty() {
                break;
            }
        }
        modified.dedup();
        modified
    }

    /// Returns all files.
    pub fn all(&self) -> Vec<Identity> {
        self.all.keys().copied().collect()
    }

    /// Returns whether a file is shorter than it should be.
    pub fn is_short(&self, identity: Identity) -> bool {
        self.all.get(&identity).is_some_and(|file| length_of(&file.file) < file.size)
    }

    /// Returns whether a file has its size, and not all of its memory: somebody has punched a hole.
    fn has_holes(&self, identity: Identity) -> bool {
        self.all.get(&identity).is_some_and(|file| {
            let recently = file.failed.is_some_and(|failed| failed.elapsed() < RETRY);
            !recently
                && fstat(&file.file).is_ok_and(|stat| {
                    let has = u64::try_from(stat.st_blocks).unwrap_or(u64::MAX).saturating_mul(512);
                    u64::try_from(stat.st_size).is_ok_and(|size| size >= file.size) && has < file.size
                })
        })
    }

    /// Lets processes undo what somebody who may write to a file can do to it: give memory back, and make it longer. (A file that is
    /// shorter may be the fault of somebody with more rights: see [`Files::restore`].)
    pub fn mend(&mut self, identity: Identity) {
        if self.has_holes(identity) {
            self.restore(identity);
        }
        let Some(watched) = self.all.get(&identity) else { return };
        if !watched.grows && length_of(&watched.file) > watched.size {
            let (file, path) = (watched.file.clone(), watched.path.clone());
            let work = Args { shorten: Some(watched.size), path, ..Args::default() };
            if let Err(error) = self.change(identity, &file, &work, Duration::ZERO) {
                warn!(%error, "a segment's file is too long");
            }
        }
    }

    /// Lets a process restore the size and the memory of a file, unless one does so.
    pub fn restore(&mut self, identity: Identity) {
        let task = Task::Restore(identity);
        let Some(watched) = self.all.get(&identity) else { return };
        if let Some(job) = self.jobs.values_mut().find(|job| job.task == task) {
            job.again = true;
            return;
        }
        let (file, path, size) = (watched.file.clone(), watched.path.clone(), watched.size);
        let work = Args { path, restore: Some(size), ..Args::default() };
        if let Err(error) = self.start(task, &file, &work) {
            error!(%error, "no process can be started: the truncated file of a segment stays short");
        }
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
        if !self.jobs.get(&number).is_some_and(|job| job.process.wait(at_most)) {
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
        if !self.jobs.get(&number).is_some_and(|job| job.process.wait(at_most)) {
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
        if self.jobs.get(&number).is_some_and(|job| job.process.wait(at_most)) && !self.end(number) {
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
        let left = |until: Instant| Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        // Its end is the end of what it says, too.
        while !job.said.starts_with(ALLOCATED.as_bytes()) {
            let time = until.and_then(left);
            if !poll(&mut [PollFd::new(&job.news, PollFlags::IN)], time.as_ref()).is_ok_and(|n| n > 0)
                && until.is_some_and(|until| Instant::now() >= until)
            {
                return false;
            }
            if job.hear() {
                break;
            }
        }
        let time = match until {
            Some(until) => until.saturating_duration_since(Instant::now()),
            None if self.is_held_up => Duration::ZERO,
            None => PATIENCE,
        };
        self.is_held_up = !job.process.wait(time);
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
        let (news, say) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let mut command = (self.command)(arguments);
        command.stdin(Stdio::from(file.try_clone()?)).stdout(Stdio::from(say));
        let number = self.numbers;
        poller.add(&news, Token::FileWork(number).into(), Interest::READ)?;
        let process = Spawned::start_with(&mut command, poller, Token::FileWork(number + 1).into())?;
        self.numbers += 2;
        let path = path.to_owned();
        self.jobs.insert(number, Job { task, path, process, news, said: Vec::new(), again: false });
        Ok(number)
    }

    /// Forgets a process that has ended. Returns whether it has done its work.
    fn end(&mut self, number: u64) -> bool {
        let (Some(mut job), Some(poller)) = (self.jobs.remove(&number), &self.poller) else { return true };
        poller.remove(&job.news);
        job.hear();
        let done = job.process.bury(poller).is_some_and(|status| status.success());
        if !done {
            error!(path = %job.path.display(), "a process that was to change this file has failed");
        }
        if job.task == Task::Make {
            let said = String::from_utf8_lossy(&job.said);
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

    /// Handles an event with the token of this number. Returns the file if it has got its size back.
    #[must_use]
    pub fn ready(&mut self, number: u64) -> Option<Identity> {
        let (number, has_ended) = (number & !1, number & 1 == 1);
        let job = self.jobs.get_mut(&number)?;
        let Task::Restore(identity) = job.task else {
            if has_ended {
                self.removed |= job.task == Task::RemoveUnused && at_hand::stat(&job.path).is_none();
                self.end(number);
            } else if job.hear()
                && let Some(poller) = &self.poller
            {
                poller.remove(&job.news);
            }
            return None;
        };
        let mut bytes = [0; 64];
        let said = rustix::io::read(&job.news, &mut bytes);
        if said == Ok(0)
            && let Some(poller) = &self.poller
        {
            poller.remove(&job.news);
        }
        // The file was truncated again after the process's last look, even if that process has failed since.
        let again = job.again;
        if has_ended {
            let done = self.end(number);
            if let (false, Some(file)) = (done, self.all.get_mut(&identity)) {
                file.failed = Some(Instant::now());
            }
            if (done || again) && self.is_short(identity) || self.has_holes(identity) {
                self.restore(identity);
            }
        }
        said.is_ok_and(|len| len > 0).then_some(identity)
    }
}

impl Job {
    /// Takes what the process says. Returns whether it will say nothing more.
    fn hear(&mut self) -> bool {
        let mut bytes = [0; 512];
        loop {
            match rustix::io::read(&self.news, &mut bytes) {
                Ok(0) => return true,
                Ok(len) => self.said.extend_from_slice(&bytes[..len]),
                Err(Errno::INTR) => {}
                Err(errno) => return errno != Errno::AGAIN,
            }
        }
    }
}

fn length_of(file: &OwnedFd) -> u64 {
    fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    const SIZE: u64 = 20 << 20;

    kit::program! {
        fn worker() {
            #[derive(clap::Parser)]
            struct Cli {
                #[command(flatten)]
                args: Args,
            }
            let line = std::env::var("TEST_LINE").unwrap();
            let args = <Cli as clap::Parser>::parse_from(line.split('\n')).args;
            crate::host::file_work::run(args).unwrap();
        }
    }

    fn start(args: Vec<OsString>) -> Command {
        let line: Vec<String> = args.into_iter().map(|arg| arg.into_string().unwrap()).collect();
        let mut command = kit::program::command(worker);
        command.env("TEST_LINE", line.join("\n"));
        command
    }

    kit::program! {
        fn failing_worker() {
            std::process::exit(1);
        }
    }

    fn file() -> (File, Identity, Arc<OwnedFd>) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(SIZE).unwrap();
        let stat = file.metadata().unwrap();
        let watched = Arc::new(file.try_clone().unwrap().into());
        (file, (stat.dev(), stat.ino()), watched)
    }

    /// Waits until something is readable, and returns its tokens.
    fn wait(poller: &Poller) -> Vec<u64> {
        poller.wait_until_ready().iter().map(|event| event.token).collect()
    }

    #[test]
    fn a_truncation_is_reported_and_a_store_is_not() {
        let poller = Poller::new().unwrap();
        let mut files = Files::new(&poller);
        files.start_by(start);
        let (cut, identity, watched) = file();
        files.watch(identity, Path::new("/cut"), &watched, None);
        let mapping = Mapping::of_file(&cut, 0, SIZE as usize, Protection::ReadWrite).unwrap();
        mapping.write(4096, b"x");
        assert_eq!(files.take_modified(), []);
        cut.set_len(4096).unwrap();
        assert_eq!(wait(&poller), [u64::from(Token::Files)]);
        assert_eq!(files.take_modified(), [identity]);
        assert!(files.is_short(identity));
        // The file is not needed any more, so there are no more events for it.
        files.keep(|_| false);
        cut.set_len(0).unwrap();
        assert_eq!((files.take_modified(), files.is_short(identity)), (vec![], false));
    }

    #[test]
    fn a_truncated_file_gets_its_size_and_memory_back() {
        let poller = Poller::new().unwrap();
        let mut files = Files::new(&poller);
        files.start_by(start);
        let (cut, identity, watched) = file();
        files.watch(identity, Path::new("/cut"), &watched, None);
        for len in [0, 4096, 16 << 20] {
            cut.set_len(len).unwrap();
            assert!(files.is_short(identity));
            files.restore(identity);
            let mut restored = Vec::new();
            while restored.is_empty() || !files.jobs.is_empty() {
                let tokens = wait(&poller);
                files.take_modified();
                for token in tokens {
                    if let Some(Token::FileWork(number)) = Token::parse(token) {
                        restored.extend(files.ready(number));
                    }
                }
            }
            assert_eq!(restored, [identity]);
            let stat = cut.metadata().unwrap();
            assert_eq!((stat.len(), stat.blocks() * 512), (SIZE, SIZE));
        }
    }

    #[test]
    fn a_file_that_is_truncated_while_a_process_fails_is_restored_nevertheless() {
        let poller = Poller::new().unwrap();
        let mut files = Files::new(&poller);
        let (cut, identity, watched) = file();
        files.watch(identity, Path::new("/cut"), &watched, None);
        cut.set_len(0).unwrap();
        files.start_by(|_| kit::program::command(failing_worker));
        files.restore(identity);
        // It is truncated once more before anybody knows how the process has ended.
        files.restore(identity);
        files.start_by(start);
        while files.is_short(identity) || !files.jobs.is_empty() {
            for token in wait(&poller) {
                if let Some(Token::FileWork(number)) = Token::parse(token) {
                    let _ = files.ready(number);
                }
            }
            files.take_modified();
        }
    }
}
