//! The files of segments, watched for what others do to them.
//!
//! Above all, files that were truncated get their size back. A program that maps a truncated file dies when it touches the missing
//! pages (SIGBUS), unless it handles the signal, which QEMU does not. So the files are watched: inotify reports a truncation, but
//! not stores through mappings. The truncated contents are lost: the pages are zeros, and the segment stays broken.

use super::file_jobs::{FileJobs, Identity, Restoring};
use super::file_work::Args;
use super::token::Token;
use crate::length;
use crate::poller::{Interest, Poller};
use rustix::fs::{fstat, inotify};
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// The bytes of the events that are fetched at once. These events have no names.
const EVENTS: usize = 64 * size_of::<[u32; 4]>();

/// The time after which memory is asked for again that was not there.
const RETRY: Duration = Duration::from_secs(1);

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
#[derive(Debug, Default)]
pub struct WatchedFiles {
    /// `None` if files cannot be watched.
    inotify: Option<OwnedFd>,
    all: BTreeMap<Identity, Watched>,
}

impl WatchedFiles {
    /// Starts without files. Changes of them are events of this poller.
    pub fn new(poller: &Poller) -> Self {
        let watch = || {
            let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
            poller.add(&inotify, Token::Files.into(), Interest::READ)?;
            Ok::<_, io::Error>(inotify)
        };
        let inotify = watch().inspect_err(|error| {
            warn!(%error, "files of segments cannot be watched: a truncation is noticed within a second; raise fs.inotify.max_user_instances");
        });
        Self { inotify: inotify.ok(), all: BTreeMap::new() }
    }

    /// Watches a file. `size` is its proper size; a file that grows, because segments share it, has its proper size now.
    pub fn watch(&mut self, identity: Identity, path: &Path, file: &Arc<OwnedFd>, size: Option<u64>) {
        let (grows, size) = (size.is_none(), size.unwrap_or_else(|| length::of(file)));
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
        self.all.get(&identity).is_some_and(|file| length::of(&file.file) < file.size)
    }

    /// Returns whether a file has its size, and not all of its memory: somebody has punched a hole.
    fn has_holes(&self, identity: Identity) -> bool {
        self.all.get(&identity).is_some_and(|file| {
            let recently = file.failed.is_some_and(|failed| failed.elapsed() < RETRY);
            !recently
                && fstat(&file.file).is_ok_and(|stat| {
                    let has = u64::try_from(stat.st_blocks).unwrap_or(u64::MAX).saturating_mul(512);
                    length::of_stat(&stat) >= file.size && has < file.size
                })
        })
    }

    /// Lets processes undo what somebody who may write to a file can do to it: give memory back, and make it longer. (A file that is
    /// shorter may be the fault of somebody with more rights: see [`WatchedFiles::restore`].)
    pub fn mend(&self, identity: Identity, jobs: &mut FileJobs) {
        if self.has_holes(identity) {
            self.restore(identity, jobs);
        }
        let Some(watched) = self.all.get(&identity) else { return };
        if !watched.grows && length::of(&watched.file) > watched.size {
            let work = Args { shorten: Some(watched.size), path: watched.path.clone(), ..Args::default() };
            if let Err(error) = jobs.change(identity, &watched.file, &work, Duration::ZERO) {
                warn!(%error, "a segment's file is too long");
            }
        }
    }

    /// Lets a process restore the size and the memory of a file, unless one does so.
    pub fn restore(&self, identity: Identity, jobs: &mut FileJobs) {
        let Some(watched) = self.all.get(&identity) else { return };
        if let Err(error) = jobs.restore(identity, &watched.file, &watched.path, watched.size) {
            error!(%error, "no process can be started: the truncated file of a segment stays short");
        }
    }

    /// Handles what a process says that restores a file. Returns the file if it has got its size back.
    pub fn restored(&mut self, news: Restoring, jobs: &mut FileJobs) -> Option<Identity> {
        let Restoring { identity, has_size, ended } = news;
        if let Some(ended) = ended {
            if let (false, Some(file)) = (ended.done, self.all.get_mut(&identity)) {
                file.failed = Some(Instant::now());
            }
            if (ended.done || ended.again) && self.is_short(identity) || self.has_holes(identity) {
                self.restore(identity, jobs);
            }
        }
        has_size.then_some(identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use std::ffi::OsString;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

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
        let mut files = WatchedFiles::new(&poller);
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
        let (mut files, mut jobs) = (WatchedFiles::new(&poller), FileJobs::new(&poller));
        jobs.start_by(start);
        let (cut, identity, watched) = file();
        files.watch(identity, Path::new("/cut"), &watched, None);
        for len in [0, 4096, 16 << 20] {
            cut.set_len(len).unwrap();
            assert!(files.is_short(identity));
            files.restore(identity, &mut jobs);
            let mut restored = Vec::new();
            while restored.is_empty() || !jobs.is_idle() {
                let tokens = wait(&poller);
                files.take_modified();
                for token in tokens {
                    if let Some(Token::FileWork(number)) = Token::parse(token) {
                        restored.extend(jobs.ready(number).and_then(|news| files.restored(news, &mut jobs)));
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
        let (mut files, mut jobs) = (WatchedFiles::new(&poller), FileJobs::new(&poller));
        let (cut, identity, watched) = file();
        files.watch(identity, Path::new("/cut"), &watched, None);
        cut.set_len(0).unwrap();
        jobs.start_by(|_| kit::program::command(failing_worker));
        files.restore(identity, &mut jobs);
        // It is truncated once more before anybody knows how the process has ended.
        files.restore(identity, &mut jobs);
        jobs.start_by(start);
        while files.is_short(identity) || !jobs.is_idle() {
            for token in wait(&poller) {
                if let Some(Token::FileWork(number)) = Token::parse(token) {
                    let _ = jobs.ready(number).and_then(|news| files.restored(news, &mut jobs));
                }
            }
            files.take_modified();
        }
    }
}
