//! Rewriting: while the daemon serves, a short journal is made with the same contents as a long one.
//!
//! The long file is the only input. A thread makes books from it, writes the records of these books into `journal.new`, and
//! copies what was appended since, until little is left. Meanwhile the daemon continues to append to the old file. In the end the
//! daemon copies the rest and puts the new file in its place; it stops serving only for this. If the daemon is killed at any
//! moment, either the old journal or the new one is left, and both have the same contents.

use ginnel_broker::books::Books;
use ginnel_broker::lines::{Replayed, snapshot};
use ginnel_broker::text::Hex16;
use ginnel_broker::trust::NO_MARK;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The thread stops when no more than this number of bytes remains to be copied.
const LITTLE: u64 = 64 << 10;
/// The most attempts to get there.
const ROUNDS: usize = 16;
/// The number of bytes after which the thread syncs: a file system that has much to sync at once blocks others meanwhile.
const SYNC: u64 = 8 << 20;

/// A rewriting that is under way.
#[derive(Debug)]
pub struct Rewriting(JoinHandle<io::Result<Rewritten>>);

/// A new journal that is not yet in its place.
#[derive(Debug)]
pub struct Rewritten {
    /// The new file.
    pub file: File,
    /// The length of the new file in bytes.
    pub len: u64,
    /// The old file.
    pub old: File,
    /// The offset in the old file up to which it has been copied.
    upto: u64,
}

impl Rewriting {
    /// Starts a thread that rewrites the first `len` bytes of a journal, which must be whole records.
    pub fn start(path: &Path, len: u64) -> io::Result<Self> {
        let path = path.to_owned();
        let rewrite = move || rewrite(&path, len);
        std::thread::Builder::new().name("journal".into()).spawn(rewrite).map(Self)
    }

    /// Returns the result, or itself if the thread is not done yet.
    pub fn finished(self) -> Result<io::Result<Rewritten>, Self> {
        if !self.0.is_finished() {
            return Err(self);
        }
        Ok(self.0.join().unwrap_or_else(|_| Err(io::Error::other("it panicked; please report this"))))
    }
}

/// Makes the new journal, except for the last part of it.
pub(super) fn rewrite(path: &Path, len: u64) -> io::Result<Rewritten> {
    let old = File::open(path)?;
    let read = read(&old, len)?;
    let (file, new_len) = write_new(path, &read.books, read.journal.unwrap_or(NO_MARK), read.last)?;
    drop(read);
    let mut new = Rewritten { file, len: new_len, old, upto: len };
    for _ in 0..ROUNDS {
        let end = new.old.metadata()?.len();
        if end - new.upto <= LITTLE {
            break;
        }
        new.copy(end)?;
        new.file.sync_data()?;
    }
    Ok(new)
}

/// Returns the contents of the first `len` bytes of a journal.
fn read(file: &File, len: u64) -> io::Result<Replayed> {
    let mut lines = BufReader::with_capacity(1 << 20, file.take(len));
    let (mut replayed, mut text) = (Replayed::default(), Vec::new());
    while lines.read_until(b'\n', &mut text)? > 0 {
        // The daemon has written all of it and has made the same books of it, so every line must be good.
        if text.pop() != Some(b'\n')
            || !replayed.line(&text)
            || replayed.invalid_records + replayed.misplaced > 0
        {
            return Err(io::Error::other("it differs from the daemon's books; restart the daemon"));
        }
        text.clear();
    }
    Ok(replayed)
}

impl Rewritten {
    /// Copies the contents of the old file up to `end`.
    pub fn copy(&mut self, end: u64) -> io::Result<()> {
        let mut bytes = vec![0; LITTLE as usize];
        while self.upto < end {
            let part = (end - self.upto).min(LITTLE) as usize;
            self.old.read_exact_at(&mut bytes[..part], self.upto)?;
            self.file.write_all(&bytes[..part])?;
            self.upto += part as u64;
            self.len += part as u64;
        }
        Ok(())
    }
}

/// Returns the path of a new journal until it gets its name.
pub fn new_path(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Writes and syncs a new journal beside the old one, with this name and all records up to number `last`. Returns it and its length.
pub fn write_new(path: &Path, books: &Books, name: Hex16, last: u64) -> io::Result<(File, u64)> {
    let new = new_path(path);
    let _ = std::fs::remove_file(&new); // A daemon that was killed in this function may have left it.
    let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&new)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let (mut len, mut synced) = (0, 0);
    for line in snapshot(books, name, last) {
        out.write_all(&line)?;
        len += line.len() as u64;
        if len - synced >= SYNC {
            out.flush()?;
            out.get_ref().sync_data()?;
            synced = len;
        }
    }
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_data()?;
    Ok((file, len))
}
