//! Restores the size of files that were truncated.
//!
//! A program that maps a truncated file dies when it touches the missing pages (SIGBUS), unless it handles the signal, which QEMU
//! does not. So the files are watched: inotify reports a truncation, but not stores through mappings. A thread makes the file
//! longer again and then allocates its memory. Either may wait for a lock of the file, which any process with a descriptor of the
//! file can hold for as long as an allocation takes. The truncated contents are lost: the pages are zeros, and the segment stays
//! broken.

use super::server::Token;
use crate::poller::{Interest, Poller};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate, inotify};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use tracing::{error, warn};

/// The memory of a file is allocated in pieces of this size, so that the file's lock is free in between. A multiple of all huge
/// pages that segments can have.
const PIECE: u64 = 16 << 20;
/// The bytes of the events that are fetched at once. These events have no names.
const EVENTS: usize = 64 * size_of::<[u32; 4]>();

/// The device and inode of a file.
pub type Identity = (u64, u64);

/// A message from a thread.
#[derive(Debug)]
enum News {
    /// The file has its size again.
    Size(Identity),
    /// The thread is done; an error says why it could do no more.
    End(Identity, Result<(), Errno>),
}

#[derive(Debug)]
struct Watched {
    file: Arc<OwnedFd>,
    /// The size that the file must have at least, in bytes.
    size: u64,
    watch: Option<i32>,
    /// A thread is working on the file.
    at_work: bool,
}

/// The files of segments.
#[derive(Debug)]
pub struct Files {
    inotify: Option<OwnedFd>,
    /// An eventfd that is readable when a thread has news.
    bell: Option<Arc<OwnedFd>>,
    sender: Sender<News>,
    receiver: Receiver<News>,
    all: BTreeMap<Identity, Watched>,
}

impl Default for Files {
    /// Makes a set of files that are not watched.
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self { inotify: None, bell: None, sender, receiver, all: BTreeMap::new() }
    }
}

impl Files {
    /// Makes a set of files that are watched, with tokens in this poller.
    pub fn new(poller: &Poller) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&bell, Token::Restored.into(), Interest::READ)?;
        let watch = || {
            let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
            poller.add(&inotify, Token::Files.into(), Interest::READ)?;
            Ok::<_, io::Error>(inotify)
        };
        let inotify = watch().inspect_err(|error| {
            warn!(%error, "files of segments cannot be watched: a truncation is noticed within a second; raise fs.inotify.max_user_instances");
        });
        Ok(Self { inotify: inotify.ok(), bell: Some(Arc::new(bell)), ..Self::default() })
    }

    /// Watches a file, which has its proper size now.
    pub fn watch(&mut self, identity: Identity, file: &Arc<OwnedFd>) {
        let size = length_of(file);
        if let Some(known) = self.all.get_mut(&identity) {
            known.size = known.size.max(size);
            return;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let add = |inotify| inotify::add_watch(inotify, &path, inotify::WatchFlags::MODIFY);
        let watch = self.inotify.as_ref().map(add).transpose().unwrap_or_else(|error| {
            warn!(%error, "a segment's file cannot be watched: a truncation is noticed within a second; raise fs.inotify.max_user_watches");
            None
        });
        self.all.insert(identity, Watched { file: file.clone(), size, watch, at_work: false });
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

    /// Starts a thread that restores the size and the memory of a file, unless one is running.
    pub fn restore(&mut self, identity: Identity) {
        let (Some(watched), Some(bell)) = (self.all.get_mut(&identity), &self.bell) else { return };
        if watched.at_work {
            return;
        }
        let (file, size) = (watched.file.clone(), watched.size);
        let (sender, bell) = (self.sender.clone(), bell.clone());
        let work = move || {
            // The daemon holds the other end for as long as it lives, and reads the eventfd.
            let tell = |news| {
                let _ = sender.send(news);
                let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
            };
            let done = restore(&file, size, || tell(News::Size(identity)));
            tell(News::End(identity, done));
        };
        match std::thread::Builder::new().name("restore".into()).spawn(work) {
            Ok(_) => watched.at_work = true,
            Err(error) => {
                error!(%error, "no thread can be started: the truncated file of a segment stays short");
            }
        }
    }

    /// Returns the files that have got their size back since the last call.
    pub fn take_restored(&mut self) -> Vec<Identity> {
        if let Some(bell) = &self.bell {
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
        }
        let mut restored = Vec::new();
        while let Ok(news) = self.receiver.try_recv() {
            match news {
                News::Size(identity) => restored.push(identity),
                News::End(identity, done) => {
                    if let Some(file) = self.all.get_mut(&identity) {
                        file.at_work = false;
                    }
                    if let Err(errno) = done {
                        error!(%errno, "the memory of a truncated file cannot be allocated again: a QEMU that touches the missing part may die");
                    }
                    // The file was truncated again after the thread's last check.
                    if self.is_short(identity) && done.is_ok() {
                        self.restore(identity);
                    }
                }
            }
        }
        restored.dedup();
        restored
    }
}

fn length_of(file: &OwnedFd) -> u64 {
    fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0))
}

/// Restores the size of a file, calls `has_size`, and then allocates its memory; repeats this as long as others truncate it.
fn restore(file: &OwnedFd, size: u64, has_size: impl Fn()) -> Result<(), Errno> {
    let (mut told, mut at) = (false, 0);
    while !told || at < size || length_of(file) < size {
        if !told || length_of(file) < size {
            if length_of(file) < size {
                ftruncate(file, size)?;
            }
            has_size();
            (told, at) = (true, 0);
        }
        match fallocate(file, FallocateFlags::empty(), at, PIECE.min(size - at)) {
            Ok(()) => at += PIECE.min(size - at),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    const SIZE: u64 = PIECE + (4 << 20);

    fn file() -> (File, Identity, Arc<OwnedFd>) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(SIZE).unwrap();
        let stat = file.metadata().unwrap();
        let watched = Arc::new(file.try_clone().unwrap().into());
        (file, (stat.dev(), stat.ino()), watched)
    }

    /// Waits until something is readable, and returns its tokens.
    fn wait(poller: &Poller) -> Vec<u64> {
        let mut ready = Vec::new();
        poller.wait(&mut ready, Some(Duration::from_secs(20))).unwrap();
        assert!(!ready.is_empty(), "waited in vain");
        ready.iter().map(|event| event.token).collect()
    }

    #[test]
    fn a_truncation_is_reported_and_a_store_is_not() {
        let poller = Poller::new().unwrap();
        let mut files = Files::new(&poller).unwrap();
        let (cut, identity, watched) = file();
        files.watch(identity, &watched);
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
        let mut files = Files::new(&poller).unwrap();
        let (cut, identity, watched) = file();
        files.watch(identity, &watched);
        for len in [0, 4096, PIECE] {
            cut.set_len(len).unwrap();
            assert!(files.is_short(identity));
            files.restore(identity);
            let mut restored = Vec::new();
            while restored.is_empty() || files.all[&identity].at_work {
                wait(&poller);
                files.take_modified();
                restored.extend(files.take_restored());
            }
            assert_eq!(restored, [identity]);
            let stat = cut.metadata().unwrap();
            assert_eq!((stat.len(), stat.blocks() * 512), (SIZE, SIZE));
        }
    }

    #[test]
    fn a_file_truncated_meanwhile_is_restored_too() {
        let (cut, _, watched) = file();
        let cuts = std::cell::Cell::new(0);
        cut.set_len(0).unwrap();
        let again = || {
            if cuts.replace(cuts.get() + 1) < 5 {
                cut.set_len(4096).unwrap();
            }
        };
        assert_eq!(restore(&watched, SIZE, again), Ok(()));
        assert_eq!(cuts.get(), 6);
        let stat = cut.metadata().unwrap();
        assert_eq!((stat.len(), stat.blocks() * 512), (SIZE, SIZE));
    }
}
