//! The journal: the books on disk, as records in the order in which they happened.
//!
//! One line each: the CRC-32 of the rest in hexadecimal, a space, JSON. A record is written with one call before the
//! answer that depends on it is sent. Records are not synced one by one: they must outlive the daemon, not the kernel,
//! because after a reboot nobody is attached any more. Rewriting syncs, beside the running daemon (`rewrite.rs`).
//!
//! # When the disk is full
//!
//! What is not in the journal is not known to the next daemon. So a request that is given something ([`Record::gives`]) is
//! refused unless its record is certain to find room; what ends something always happens, because a successor that
//! does not know of it merely believes that more is in use. The file has space allocated behind its end for
//! this: requests are refused as soon as that reserve cannot be filled up ([`Journal::takes`]), and half of it is left for
//! the records of ends. Records for which even that does not suffice are kept in memory and written, in their order, before
//! anything else.
//!
//! # Records of other versions
//!
//! `Start`, the first record, tells the [`FORMAT`]. A daemon does not start on a journal of a later format. A record of an
//! unknown kind is skipped with a warning if its object has the member `"optional": true` beside the kind; otherwise the
//! daemon does not start, because it would forget what it does not understand. Unknown members of known records are
//! ignored. So whoever adds a kind of record decides whether an older daemon may go on without it, and whoever
//! changes the meaning of what is there raises the format.

use super::books::Books;
use super::record::Record;
use ginnel_config::Problem;
use rewrite::{Rewriting, Rewritten};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

mod rewrite;

/// Version of the form of journals that this daemon writes, and the last that it reads.
pub const FORMAT: u32 = 1;
/// A journal is rewritten when it has grown by so many bytes, and to twice its size.
const GROWTH: u64 = 1 << 20;
/// Space that is allocated behind the end of the file.
const RESERVE: u64 = 1 << 20;
/// So much of it is left for records that end something.
const FOR_ENDS: u64 = RESERVE / 2;
/// Bytes of records that are kept for a file that does not take them.
const KEPT: usize = 64 << 20;
/// How soon it is tried again to write what could not be written.
const RETRY: Duration = Duration::from_secs(1);
/// Writing everything anew takes a second for a million blocks, during which nobody is served. If it fails, it is not tried
/// again before so many times the time that it took.
const REST: u32 = 20;

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes that the file has.
    len: u64,
    /// Up to where it has space; `None` where the file system does not allocate any.
    space: Option<u64>,
    /// The last answer of [`Journal::takes`].
    took: bool,
    rewrite_at: u64,
    rewriting: Option<Rewriting>,
    /// What the file did not take: the end of a record perhaps, and whole ones.
    unwritten: Vec<u8>,
    /// The file lacks records that are not kept either: all of them have to be written anew.
    lost: bool,
    /// Not before then is it tried again to write what could not be written.
    retry_at: Instant,
}

/// What a journal said.
#[derive(Debug, Default, PartialEq)]
pub struct Replayed {
    /// The books that its records make.
    pub books: Books,
    /// How many records were good.
    pub records: usize,
    /// Bytes of its last line, if that is torn or damaged.
    pub dropped: usize,
    /// Lines that are damaged and have others behind them. No crash of a daemon leaves such a line.
    pub damaged: usize,
    /// Records that did not fit the books.
    pub invalid_records: usize,
    /// Unknown records that may be skipped.
    pub skipped: usize,
    /// Kinds of unknown records that must not be skipped, and of what else is too new.
    pub too_new: Vec<String>,
}

/// What a line says.
enum Line {
    Record(Box<Record>),
    /// A record of an unknown kind.
    Unknown {
        kind: String,
        optional: bool,
    },
    Damaged,
}

impl Replayed {
    /// Reads one line more. False if it is damaged.
    fn line(&mut self, line: &[u8]) -> bool {
        match parse(line) {
            Line::Damaged => return false,
            Line::Unknown { kind, optional: true } => {
                warn!(kind, "journal: a record of a newer ginneld is skipped; it says that this is allowed");
                self.skipped += 1;
            }
            Line::Unknown { kind, optional: false } => self.too_new(format!("a record {kind:?}")),
            Line::Record(record) => {
                self.records += 1;
                if let Record::Start { format, .. } = *record
                    && format > FORMAT
                {
                    self.too_new(format!("format {format} (this one knows formats up to {FORMAT})"));
                }
                if let Err(misfit) = self.books.apply(&record) {
                    warn!(%misfit, ?record, "journal: a record does not fit and is left out");
                    self.invalid_records += 1;
                }
            }
        }
        true
    }

    fn too_new(&mut self, what: String) {
        if !self.too_new.contains(&what) && self.too_new.len() < 8 {
            self.too_new.push(what);
        }
    }
}

/// Makes books of a journal's bytes. Never fails; the fields of the result say what is wrong with the journal.
pub fn replay(bytes: &[u8]) -> Replayed {
    let mut replayed = Replayed::default();
    let mut rest = bytes;
    let mut last = 0;
    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
        if replayed.line(&rest[..end]) {
            last = 0;
        } else {
            replayed.damaged += 1;
            last = end + 1;
        }
        rest = &rest[end + 1..];
    }
    replayed.dropped = rest.len();
    if last > 0 && rest.is_empty() {
        (replayed.dropped, replayed.damaged) = (last, replayed.damaged - 1);
    }
    replayed
}

fn parse(line: &[u8]) -> Line {
    let json = || {
        let (crc, json) = line.split_at_checked(9)?;
        let crc = u32::from_str_radix(str::from_utf8(crc.strip_suffix(b" ")?).ok()?, 16).ok()?;
        (crc == crc32fast::hash(json)).then_some(json)
    };
    let Some(json) = json() else { return Line::Damaged };
    if let Ok(record) = serde_json::from_slice(json) {
        return Line::Record(record);
    }
    let Ok(object) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(json) else {
        return Line::Damaged;
    };
    let optional = object.get("optional") == Some(&true.into());
    match object.keys().find(|key| *key != "optional") {
        Some(kind) => Line::Unknown { kind: kind.chars().take(64).collect(), optional },
        None => Line::Damaged,
    }
}

/// A record as a line.
pub fn line(record: &Record) -> Vec<u8> {
    // Records are plain data with text keys; writing them cannot fail.
    let json = serde_json::to_vec(record).unwrap_or_default();
    let mut line = format!("{:08x} ", crc32fast::hash(&json)).into_bytes();
    line.extend_from_slice(&json);
    line.push(b'\n');
    line
}

impl Journal {
    /// Reads the journal in `dir`, if there is one. An error if part of it cannot be understood.
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
            warn!(path = %path.display(), bytes = replayed.dropped, "journal: its end is torn or damaged and is left out");
        }
        if replayed.damaged > 0 {
            error!(path = %path.display(), lines = replayed.damaged, "journal: damaged lines are left out, and what they said is forgotten; no crash does this: check the disk, then stop all VMs and programs and remove the journal");
        }
        Ok(replayed)
    }

    /// Writes a new journal in `dir` that says what `books` say, in place of the old one.
    pub fn create(dir: &Path, books: &Books) -> io::Result<Self> {
        let path = dir.join("journal");
        let (file, len) = rewrite::write_new(&path, books)?;
        rename(&path)?;
        // Makes the new name last. It is no harm if the file system does not offer it.
        let _ = File::open(dir).and_then(|dir| dir.sync_all());
        let mut journal = Self::of(path, file);
        journal.take_file(len);
        Ok(journal)
    }

    /// A journal that cannot be written now: it takes nothing until there is room for all of `books` beside the old one,
    /// which stays meanwhile.
    pub fn behind(dir: &Path) -> io::Result<Self> {
        // Nothing is written to this file.
        let mut journal = Self::of(dir.join("journal"), File::open(dir)?);
        (journal.lost, journal.took) = (true, false);
        Ok(journal)
    }

    fn of(path: PathBuf, file: File) -> Self {
        Self {
            path,
            file,
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

    /// The file is a new one with so many bytes.
    fn take_file(&mut self, len: u64) {
        (self.len, self.space, self.rewrite_at) = (len, Some(0), 2 * len + GROWTH);
        self.reserve();
    }

    /// Whether it has all that has happened.
    pub fn is_whole(&self) -> bool {
        self.unwritten.is_empty() && !self.lost
    }

    /// Whether it takes a record that gives somebody something, and leaves room for what ends things.
    pub fn takes(&mut self) -> bool {
        let takes = self.is_whole() && (self.has_space() || self.reserve());
        if takes != self.took {
            self.took = takes;
            match takes {
                true => info!(path = %self.path.display(), "the journal takes records again"),
                false => {
                    error!(path = %self.path.display(), "the journal has no room: nothing is given to anybody until there is; make room there");
                }
            }
        }
        takes
    }

    fn has_space(&self) -> bool {
        self.space.is_none_or(|space| space >= self.len + FOR_ENDS)
    }

    /// Fills up the reserve. Whether there is enough of it then.
    fn reserve(&mut self) -> bool {
        let allocate = || fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.len, RESERVE);
        match rustix::io::retry_on_intr(allocate) {
            Ok(()) => self.space = Some(self.len + RESERVE),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => self.space = None,
            Err(errno) => debug!(path = %self.path.display(), %errno, "no reserve for the journal"),
        }
        self.has_space()
    }

    /// Adds a record. False if the file does not take it: that is logged, and [`Journal::settle`] tries again.
    #[must_use]
    pub fn append(&mut self, record: &Record) -> bool {
        if self.lost {
            return false;
        }
        let line = line(record);
        if self.unwritten.is_empty() {
            match self.write(&line) {
                Ok(()) => return true,
                Err((n, error)) => {
                    error!(path = %self.path.display(), %error, "the journal cannot be written: nothing is given to anybody until it can; make room there, or see what the disk lacks");
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

    /// Writes bytes, or says how many of them were written before the error.
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

    /// How long until [`Journal::settle`] should be called even if nothing happens.
    pub fn until_retry(&self) -> Option<Duration> {
        (!self.is_whole()).then(|| self.retry_at.saturating_duration_since(Instant::now()))
    }

    /// Called when the books and the journal should say the same: writes what was not written, and rewrites a journal that
    /// has grown long. It takes longer than a few records do only if records were lost.
    pub fn settle(&mut self, books: &Books) {
        if !self.is_whole() && Instant::now() >= self.retry_at {
            let begun = Instant::now();
            if self.lost {
                self.write_all_anew(books);
            } else {
                let unwritten = std::mem::take(&mut self.unwritten);
                if let Err((n, _)) = self.write(&unwritten) {
                    self.unwritten = unwritten[n..].to_vec();
                }
            }
            if self.is_whole() {
                info!(path = %self.path.display(), "the journal is whole again");
            }
            self.retry_at = Instant::now() + RETRY.max(begun.elapsed() * REST);
        }
        match self.rewriting.take() {
            // Not in the middle of a record.
            None if self.len >= self.rewrite_at && self.is_whole() => {
                self.rewriting = Rewriting::start(&self.path, self.len)
                    .inspect_err(|error| self.not_rewritten(error))
                    .ok();
            }
            None => {}
            Some(rewriting) => match rewriting.finished() {
                Err(rewriting) => self.rewriting = Some(rewriting),
                // It would lack what the file lacks.
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
                // The file goes with its last descriptor, and a long one takes its time.
                let _ = std::thread::Builder::new().spawn(move || drop(old));
            }
            Err(error) => self.not_rewritten(&error),
        }
    }

    fn not_rewritten(&mut self, error: &io::Error) {
        warn!(path = %self.path.display(), %error, "the journal cannot be rewritten, and grows on; make room there");
        let _ = std::fs::remove_file(rewrite::new_path(&self.path)); // The room that it has taken.
        self.rewrite_at = self.len + self.len / 2 + GROWTH;
    }

    /// The file lacks records. The books have them all.
    fn write_all_anew(&mut self, books: &Books) {
        let written = rewrite::write_new(&self.path, books).and_then(|new| rename(&self.path).map(|()| new));
        match written {
            Ok((file, len)) => {
                (self.file, self.lost, self.rewriting) = (file, false, None);
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
