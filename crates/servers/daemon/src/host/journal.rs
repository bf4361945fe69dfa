//! The journal: the books on disk, as records in the order in which the changes happened.
//!
//! Each record is one line ([`ginnel_broker::lines`]). A record is written with one system call
//! before the answer that depends on it is sent. Records are not synced one by one: they must outlive the daemon, not the kernel,
//! because after a reboot nobody is attached any more. Rewriting does sync, in a thread beside the running daemon (`rewrite.rs`).
//!
//! After each record, its number is written to another file ([`MarkFile`]), so that a journal which has lost its end is not believed
//! ([`ginnel_broker::trust`]).
//!
//! # When the disk is full
//!
//! The next daemon knows only what is in the journal. So a request that gives a client something ([`Record::gives`]) is
//! refused unless its record is certain to find room. A change that ends something is always made, because a successor that
//! does not know of it merely believes that more is in use. For this purpose the file has space allocated behind its end:
//! requests are refused as soon as that reserve cannot be filled up ([`Journal::takes`]), and half of it is kept for
//! the records of ends. Records for which even that does not suffice are kept in memory and are written, in their order, before
//! anything else.

use ginnel_broker::books::Books;
use ginnel_broker::lines::{Replayed, line, replay};
use ginnel_broker::record::Record;
use ginnel_broker::trust::Mark;
use ginnel_config::Problem;
pub use mark::MarkFile;
use rewrite::{Rewriting, Rewritten};
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

mod mark;
mod rewrite;

/// A journal is rewritten when it has reached twice its size at the last rewriting plus this number of bytes.
const GROWTH: u64 = 1 << 20;
/// The space that is allocated behind the end of the file, in bytes.
const RESERVE: u64 = 1 << 20;
/// The part of the reserve that is kept for records that end something, in bytes.
const FOR_ENDS: u64 = RESERVE / 2;
/// The most bytes of records that are kept in memory while the file does not accept them.
const KEPT: usize = 64 << 20;
/// The time after which the daemon tries again to write what could not be written.
const RETRY: Duration = Duration::from_secs(1);
/// Writing everything anew takes a second for a million blocks, and nobody is served meanwhile. If it fails, the next attempt is
/// delayed by this many times the time that it took.
const REST: u32 = 20;

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// What the mark says as soon as everything up to here is written.
    at: Mark,
    mark: Option<MarkFile>,
    /// The length of the file in bytes.
    len: u64,
    /// The offset up to which the file has allocated space; `None` if the file system does not allocate any.
    space: Option<u64>,
    /// The last answer of [`Journal::takes`].
    took: bool,
    rewrite_at: u64,
    rewriting: Option<Rewriting>,
    /// The bytes that the file has not accepted: perhaps the end of a record, then whole records.
    unwritten: Vec<u8>,
    /// The file lacks records that are not kept in memory either, so everything must be written anew.
    lost: bool,
    /// The earliest time at which to try again to write what could not be written.
    retry_at: Instant,
}

impl Journal {
    /// Returns the path of a new journal in `dir` until it gets its name. Nobody needs such a file of an earlier daemon.
    pub fn unnamed(dir: &Path) -> PathBuf {
        rewrite::new_path(&dir.join("journal"))
    }

    /// Reads the journal in `dir`, if there is one. Returns an error if a part of it cannot be understood.
    pub fn read(dir: &Path) -> Result<Replayed, Problem> {
        let path = dir.join("journal");
        let failed = |error: io::Error| {
            let what = format!("the journal cannot be read: {error}");
            Problem::new(path.display(), what, "let the daemon's user read it")
        };
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => file.read_to_end(&mut bytes).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Replayed::default()),
            Err(error) => return Err(failed(error)),
        };
        let replayed = replay(&bytes);
        if !replayed.too_new.is_empty() {
            let what = format!(
                "a newer ginneld has written the journal: it has {}, which version {} does not know",
                replayed.too_new.join(", "),
                env!("CARGO_PKG_VERSION")
            );
            let fix = "install the newer version again, or stop all VMs and programs and remove the journal";
            return Err(Problem::new(path.display(), what, fix));
        }
        info!(path = %path.display(), records = replayed.records, "journal read");
        if replayed.dropped > 0 {
            warn!(path = %path.display(), bytes = replayed.dropped, "journal: its end is torn or damaged and is ignored");
        }
        Ok(replayed)
    }

    /// Continues the journal in `dir` behind its last whole line. `found` is what was read there, and says all; `books` are the ones
    /// that it makes, begun by this daemon. So a long journal need not be written before others are served.
    pub fn resume(
        dir: &Path,
        found: &Replayed,
        books: &Books,
        at: Mark,
        mark: &mut Option<MarkFile>,
    ) -> io::Result<Self> {
        let path = dir.join("journal");
        let file = File::options().append(true).open(&path)?;
        if file.metadata()?.len() != found.len + found.dropped as u64 {
            return Err(io::Error::other("it has changed since it was read"));
        }
        if found.dropped > 0 {
            file.set_len(found.len)?;
        }
        let _ = std::fs::remove_file(rewrite::new_path(&path)); // A daemon that was killed while it rewrote may have left it.
        let mut journal = Self::of(path, file, at, mark.take());
        journal.take_file(found.len);
        journal.rewrite_at = 2 * found.snapshot_len + GROWTH;
        // It is logged if this is not written, and tried again.
        let _ = books.dump().take(1).all(|start| journal.append(&start));
        Ok(journal)
    }

    /// Writes a new journal with the contents of `books` into `dir`, in place of the old one. `at` has its name and the number of the
    /// last record of the old one, and `mark` is the file that follows it.
    pub fn create(dir: &Path, books: &Books, at: Mark, mark: &mut Option<MarkFile>) -> io::Result<Self> {
        let path = dir.join("journal");
        let at = Mark { last: at.last + 1, ..at };
        let (file, len) = rewrite::write_new(&path, books, at.journal, at.last)?;
        rename(&path)?;
        // This makes the new name durable. A file system that cannot do that does no harm.
        let _ = File::open(dir).and_then(|dir| dir.sync_all());
        let mut journal = Self::of(path, file, at, mark.take());
        journal.take_file(len);
        journal.mark();
        Ok(journal)
    }

    /// Makes a journal that cannot be written now. It accepts nothing until there is room for all of `books` beside the old file,
    /// which stays meanwhile.
    pub fn behind(dir: &Path, at: Mark, mark: Option<MarkFile>) -> io::Result<Self> {
        // Nothing is written to this file.
        let mut journal = Self::of(dir.join("journal"), File::open(dir)?, at, mark);
        (journal.lost, journal.took) = (true, false);
        Ok(journal)
    }

    fn of(path: PathBuf, file: File, at: Mark, mark: Option<MarkFile>) -> Self {
        Self {
            path,
            file,
            at,
            mark,
            len: 0,
            space: Some(0),
            took: true,
            rewrite_at: u64::MAX,
            rewriting: None,
            unwritten: Vec::new(),
            lost: false,
            retry_at: Instant::now(),
        }
    }

    /// Notes that the file is a new one with this number of bytes.
    fn take_file(&mut self, len: u64) {
        (self.len, self.space, self.rewrite_at) = (len, Some(0), 2 * len + GROWTH);
        self.reserve();
    }

    /// Writes the mark, because everything is in the journal.
    fn mark(&mut self) {
        if let Some(mark) = &self.mark
            && let Err(error) = mark.write(&self.at)
        {
            // A mark that is behind makes nobody distrust the journal.
            warn!(%error, "the journal's mark cannot be written: it is not noticed if the journal loses its end");
            self.mark = None;
        }
    }

    /// Returns whether the file still has a name: without one, no other daemon finds it.
    fn is_there(&self) -> bool {
        fstat(&self.file).is_ok_and(|stat| stat.st_nlink > 0)
    }

    /// Returns whether the file has all records so far.
    pub fn is_whole(&self) -> bool {
        self.unwritten.is_empty() && !self.lost
    }

    /// Returns whether the journal accepts a record that gives something ([`Record::gives`]), and still keeps room for records
    /// that end something.
    pub fn takes(&mut self) -> bool {
        if !self.lost && !self.is_there() {
            error!(path = %self.path.display(), "the journal was removed while the daemon runs: it is written anew");
            (self.lost, self.retry_at) = (true, Instant::now());
            self.unwritten.clear();
        }
        let takes = self.is_whole() && (self.has_space() || self.reserve());
        if takes != self.took {
            self.took = takes;
            match takes {
                true => info!(path = %self.path.display(), "the journal takes records again"),
                // Why it is not whole was said.
                false if !self.is_whole() => {}
                false => {
                    error!(path = %self.path.display(), "the journal has no room: requests for anything new are refused until there is; make room there");
                }
            }
        }
        takes
    }

    fn has_space(&self) -> bool {
        self.space.is_none_or(|space| space >= self.len + FOR_ENDS)
    }

    /// Fills up the reserve. Returns whether it is large enough then.
    fn reserve(&mut self) -> bool {
        let allocate = || fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.len, RESERVE);
        match rustix::io::retry_on_intr(allocate) {
            Ok(()) => self.space = Some(self.len + RESERVE),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => self.space = None,
            Err(errno) => debug!(path = %self.path.display(), %errno, "no reserve for the journal"),
        }
        self.has_space()
    }

    /// Adds a record. Returns false if the file does not accept it: this is logged, and [`Journal::settle`] tries again.
    #[must_use]
    pub fn append(&mut self, record: &Record) -> bool {
        if self.lost {
            return false;
        }
        self.at.last += 1;
        let line = line(self.at.last, record);
        if self.unwritten.is_empty() {
            match self.write(&line) {
                Ok(()) => {
                    self.mark();
                    return true;
                }
                Err((n, error)) => {
                    error!(path = %self.path.display(), %error, "the journal cannot be written: requests for anything new are refused until it can; make room there, or check the disk");
                    self.unwritten.extend_from_slice(&line[n..]);
                    self.retry_at = Instant::now() + RETRY;
                }
            }
        } else {
            self.unwritten.extend_from_slice(&line);
        }
        if self.unwritten.len() > KEPT {
            self.unwritten = Vec::new();
            self.lost = true;
        }
        false
    }

    /// Writes bytes. The error says how many of them were written before it.
    fn write(&mut self, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err((bytes.len() - rest.len(), io::ErrorKind::WriteZero.into())),
                Ok(n) => {
                    self.len += n as u64;
                    rest = &rest[n..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((bytes.len() - rest.len(), error)),
            }
        }
        Ok(())
    }

    /// Returns the time after which [`Journal::settle`] should be called even if nothing happens.
    pub fn until_retry(&self) -> Option<Duration> {
        (!self.is_whole()).then(|| self.retry_at.saturating_duration_since(Instant::now()))
    }

    /// Writes what was not written before, and rewrites a journal that has grown long. Must be called when the books and the
    /// journal should agree. It takes longer than writing a few records only if records were lost.
    pub fn settle(&mut self, books: &Books) {
        if !self.is_whole() && Instant::now() >= self.retry_at {
            let begun = Instant::now();
            if self.lost {
                self.write_all_anew(books);
            } else {
                let unwritten = std::mem::take(&mut self.unwritten);
                match self.write(&unwritten) {
                    Ok(()) => self.mark(),
                    Err((n, _)) => self.unwritten = unwritten[n..].to_vec(),
                }
            }
            if self.is_whole() {
                info!(path = %self.path.display(), "the journal is complete again");
            }
            self.retry_at = Instant::now() + RETRY.max(begun.elapsed() * REST);
        }
        match self.rewriting.take() {
            // Rewriting must not start in the middle of a record.
            None if self.len >= self.rewrite_at && self.is_whole() => {
                self.rewriting = Rewriting::start(&self.path, self.len)
                    .inspect_err(|error| self.not_rewritten(error))
                    .ok();
            }
            None => {}
            Some(rewriting) => match rewriting.finished() {
                Err(rewriting) => self.rewriting = Some(rewriting),
                // The new journal would lack the same records as the old file.
                Ok(_) if !self.is_whole() => {}
                Ok(result) => self.take_rewritten(result),
            },
        }
    }

    /// Puts a new journal in the place of the old one.
    fn take_rewritten(&mut self, result: io::Result<Rewritten>) {
        let done = result.and_then(|mut new| {
            new.copy(self.len)?;
            rename(&self.path)?;
            Ok(new)
        });
        match done {
            Ok(new) => {
                debug!(path = %self.path.display(), old = self.len, new = new.len, "journal rewritten");
                let old = (std::mem::replace(&mut self.file, new.file), new.old);
                self.take_file(new.len);
                // The file is deleted with its last descriptor, and deleting a long one takes time.
                let _ = std::thread::Builder::new().spawn(move || drop(old));
            }
            Err(error) => self.not_rewritten(&error),
        }
    }

    fn not_rewritten(&mut self, error: &io::Error) {
        warn!(path = %self.path.display(), %error, "the journal cannot be rewritten, and keeps growing; make room there");
        let _ = std::fs::remove_file(rewrite::new_path(&self.path)); // This frees the room that it has taken.
        self.rewrite_at = self.len + self.len / 2 + GROWTH;
    }

    /// Writes a new file from the books, which have all records, because the old file lacks some.
    fn write_all_anew(&mut self, books: &Books) {
        let at = Mark { last: self.at.last + 1, ..self.at };
        let written = rewrite::write_new(&self.path, books, at.journal, at.last);
        match written.and_then(|new| rename(&self.path).map(|()| new)) {
            Ok((file, len)) => {
                (self.file, self.at, self.lost, self.rewriting) = (file, at, false, None);
                self.mark();
                self.unwritten.clear();
                self.take_file(len);
            }
            Err(error) => {
                debug!(path = %self.path.display(), %error, "the journal cannot be written");
                let _ = std::fs::remove_file(rewrite::new_path(&self.path));
            }
        }
    }
}

/// Gives the new journal its name.
fn rename(path: &Path) -> io::Result<()> {
    std::fs::rename(rewrite::new_path(path), path)
}

#[cfg(test)]
mod tests;
