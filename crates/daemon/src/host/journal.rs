//! The journal: the books on disk, as records in the order in which they happened.
//!
//! One line each: the CRC-32 of the rest in hexadecimal, a space, JSON. A record is written with one call before the
//! answer that depends on it is sent. Records are not synced one by one: they must outlive the daemon, not the kernel,
//! because after a reboot nobody is attached any more. Rewriting syncs.

use super::books::Books;
use super::record::Record;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tracing::{error, info, warn};

/// A journal is rewritten when it has grown by so many bytes, and to twice its size.
const GROWTH: u64 = 1 << 20;

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    len: u64,
    rewrite_at: u64,
    /// The last record was not written, or not wholly. All is made good by rewriting.
    failed: bool,
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

/// Makes books of a journal's bytes. Never fails: what is good counts, up to the first line that is not.
pub fn replay(bytes: &[u8]) -> Replayed {
    let mut replayed = Replayed::default();
    let mut rest = bytes;
    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
        let Some(record) = parse(&rest[..end]) else { break };
        replayed.records += 1;
        if let Err(misfit) = replayed.books.apply(&record) {
            warn!(%misfit, ?record, "journal: a record does not fit and is left out");
            replayed.misfits += 1;
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
        let (file, len) = write_new(&path, books)?;
        Ok(Self { path, file, len, rewrite_at: 2 * len + GROWTH, failed: false })
    }

    /// Adds a record. A failure is logged, and made good by a later [`Journal::settle`].
    pub fn append(&mut self, record: &Record) {
        if self.failed {
            return;
        }
        let line = line(record);
        self.len += line.len() as u64;
        match self.file.write(&line) {
            Ok(n) if n == line.len() => {}
            Ok(_) => self.fail(&io::Error::from(io::ErrorKind::WriteZero)),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &io::Error) {
        error!(path = %self.path.display(), %error, "the journal cannot be written: a restart would forget what happens now; make room there");
        self.failed = true;
    }

    /// Called when the books and the journal should say the same: rewrites a journal that failed or has grown long.
    pub fn settle(&mut self, books: &Books) {
        if !self.failed && self.len < self.rewrite_at {
            return;
        }
        match write_new(&self.path, books) {
            Ok((file, len)) => {
                if self.failed {
                    info!(path = %self.path.display(), "the journal is whole again");
                }
                (self.file, self.len, self.failed) = (file, len, false);
                self.rewrite_at = 2 * len + GROWTH;
            }
            Err(error) => {
                if !self.failed {
                    self.fail(&error);
                }
            }
        }
    }
}

fn write_new(path: &Path, books: &Books) -> io::Result<(File, u64)> {
    let bytes: Vec<u8> = books.dump().iter().flat_map(line).collect();
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new); // Left by a daemon that was killed in here.
    let mut file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&bytes)?;
    file.sync_data()?;
    std::fs::rename(&new, path)?;
    if let Some(dir) = path.parent() {
        // Makes the new name last. It is no harm if the file system does not offer it.
        let _ = File::open(dir).and_then(|dir| dir.sync_all());
    }
    Ok((file, bytes.len() as u64))
}
