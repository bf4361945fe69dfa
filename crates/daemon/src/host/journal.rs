//! The journal: the books on disk, as records in the order in which they happened.
//!
//! One line each: the CRC-32 of the rest in hexadecimal, a space, JSON. A record is written with one call before the
//! answer that depends on it is sent. Records are not synced one by one: they must outlive the daemon, not the kernel,
//! because after a reboot nobody is attached any more. Rewriting syncs, beside the running daemon (`rewrite.rs`).

use super::books::Books;
use super::record::Record;
use rewrite::{Rewriting, Rewritten};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

mod rewrite;

/// A journal is rewritten when it has grown by so many bytes, and to twice its size.
const GROWTH: u64 = 1 << 20;
/// Bytes of records that are kept for a file that does not take them.
const KEPT: usize = 64 << 20;
/// How often it is tried to write everything anew when more than that could not be written. It takes a second for a million
/// blocks, during which nobody is served.
const RETRY: Duration = Duration::from_secs(10);

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes that the file has.
    len: u64,
    rewrite_at: u64,
    rewriting: Option<Rewriting>,
    /// What the file did not take: the end of a record perhaps, and whole ones.
    unwritten: Vec<u8>,
    /// The file lacks records that are not kept either: since then, or since it was last tried to write them all.
    lost: Option<Instant>,
}

/// What a journal said.
#[derive(Debug, Default, PartialEq)]
pub struct Replayed {
    /// The books that its records make.
    pub books: Books,
    /// How many records were good.
    pub records: usize,
    /// Bytes behind the last good line: torn by a crash, or damaged.
    pub dropped: usize,
    /// Records that did not fit the books.
    pub misfits: usize,
}

impl Replayed {
    /// Reads one line more. False if it is damaged.
    fn line(&mut self, line: &[u8]) -> bool {
        let Some(record) = parse(line) else { return false };
        self.records += 1;
        if let Err(misfit) = self.books.apply(&record) {
            warn!(%misfit, ?record, "journal: a record does not fit and is left out");
            self.misfits += 1;
        }
        true
    }
}

/// Makes books of a journal's bytes. Never fails: what is good counts, up to the first line that is not.
pub fn replay(bytes: &[u8]) -> Replayed {
    let mut replayed = Replayed::default();
    let mut rest = bytes;
    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
        if !replayed.line(&rest[..end]) {
            break;
        }
        rest = &rest[end + 1..];
    }
    replayed.dropped = rest.len();
    replayed
}

fn parse(line: &[u8]) -> Option<Record> {
    let (crc, json) = line.split_at_checked(9)?;
    let crc = u32::from_str_radix(str::from_utf8(crc.strip_suffix(b" ")?).ok()?, 16).ok()?;
    if crc != crc32fast::hash(json) {
        return None;
    }
    serde_json::from_slice(json).ok()
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
    /// Reads the journal in `dir`, if there is one.
    pub fn read(dir: &Path) -> io::Result<Replayed> {
        let path = dir.join("journal");
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => file.read_to_end(&mut bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Replayed::default()),
            Err(error) => return Err(error),
        };
        let replayed = replay(&bytes);
        info!(path = %path.display(), records = replayed.records, "journal read");
        if replayed.dropped > 0 {
            warn!(path = %path.display(), bytes = replayed.dropped, "journal: its end is torn or damaged and is left out");
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
        let rewrite_at = 2 * len + GROWTH;
        Ok(Self { path, file, len, rewrite_at, rewriting: None, unwritten: Vec::new(), lost: None })
    }

    /// Adds a record. What the file does not take is logged, and written by a later [`Journal::settle`].
    pub fn append(&mut self, record: &Record) {
        if self.lost.is_some() {
            return;
        }
        let line = line(record);
        if self.unwritten.is_empty() {
            match self.write(&line) {
                Ok(()) => return,
                Err((n, error)) => {
                    error!(path = %self.path.display(), %error, "the journal cannot be written: a restart would forget what happens now; make room there");
                    self.unwritten.extend_from_slice(&line[n..]);
                }
            }
        } else {
            self.unwritten.extend_from_slice(&line);
        }
        if self.unwritten.len() > KEPT {
            self.unwritten = Vec::new();
            self.lost = Some(Instant::now());
        }
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

    /// Called when the books and the journal should say the same: writes what was not written, and rewrites a journal that
    /// has grown long. It takes longer than a few records do only if records were lost.
    pub fn settle(&mut self, books: &Books) {
        if !self.unwritten.is_empty() {
            let unwritten = std::mem::take(&mut self.unwritten);
            match self.write(&unwritten) {
                Ok(()) => info!(path = %self.path.display(), "the journal is whole again"),
                Err((n, _)) => self.unwritten = unwritten[n..].to_vec(),
            }
        }
        if self.lost.is_some_and(|since| since.elapsed() >= RETRY) {
            self.write_all_anew(books);
        }
        match self.rewriting.take() {
            // Not in the middle of a record.
            None if self.len >= self.rewrite_at && self.unwritten.is_empty() && self.lost.is_none() => {
                self.rewriting = Rewriting::start(&self.path, self.len)
                    .inspect_err(|error| self.not_rewritten(error))
                    .ok();
            }
            None => {}
            Some(rewriting) => match rewriting.finished() {
                Err(rewriting) => self.rewriting = Some(rewriting),
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
                self.rewrite_at = 2 * new.len + GROWTH;
                self.len = new.len;
                let old = (std::mem::replace(&mut self.file, new.file), new.old);
                // The file goes with its last descriptor, and a long one takes its time.
                let _ = std::thread::Builder::new().spawn(move || drop(old));
            }
            Err(error) => self.not_rewritten(&error),
        }
    }

    fn not_rewritten(&mut self, error: &io::Error) {
        warn!(path = %self.path.display(), %error, "the journal cannot be rewritten, and grows on; make room there");
        self.rewrite_at = self.len + self.len / 2 + GROWTH;
    }

    /// The file lacks records. The books have them all.
    fn write_all_anew(&mut self, books: &Books) {
        let written = rewrite::write_new(&self.path, books).and_then(|new| rename(&self.path).map(|()| new));
        match written {
            Ok((file, len)) => {
                info!(path = %self.path.display(), "the journal is whole again");
                (self.file, self.len, self.lost, self.rewriting) = (file, len, None, None);
                self.rewrite_at = 2 * len + GROWTH;
            }
            Err(_) => self.lost = Some(Instant::now()),
        }
    }
}

/// Gives the new journal its name.
fn rename(path: &Path) -> io::Result<()> {
    std::fs::rename(rewrite::new_path(path), path)
}

#[cfg(test)]
mod tests;
