//! The file of a journal's mark ([`ginnel_broker::trust`]), in the folder of the sockets. It is as durable as what it guards: it outlives
//! a daemon that is killed, and need not outlive the kernel.

use ginnel_broker::text::Hex16;
use ginnel_broker::trust::Mark;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The name of the file.
const NAME: &str = "journal.mark";
/// Its first bytes. Behind them are the boot identity, the name of the journal, and the last number.
const BEGIN: [u8; 8] = *b"ginnel\0\x01";
const LEN: usize = 48;

/// The file of a mark.
#[derive(Debug)]
pub struct MarkFile(File);

impl MarkFile {
    /// Returns the path of the mark of a daemon with this folder for its sockets.
    pub fn path(dir: &Path) -> PathBuf {
        dir.join(NAME)
    }

    /// Opens the file, or makes it without a mark.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let path = Self::path(dir);
        let mut options = File::options();
        let options = options.read(true).write(true).truncate(false).mode(0o600);
        // To make a file, even one that is there, is to wait for whoever holds the lock of the folder.
        let there = options.open(&path);
        there.or_else(|_| options.create(true).open(&path)).map(Self)
    }

    /// Reads the mark. A file with anything else is as good as none.
    pub fn read(&self) -> io::Result<Option<Mark>> {
        let mut bytes = [0; LEN];
        match self.0.read_exact_at(&mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let (begin, rest) = bytes.split_at(BEGIN.len());
        let (boot_id, rest) = rest.split_at(16);
        let (journal, last) = rest.split_at(16);
        let [Ok(boot_id), Ok(journal)] = [boot_id.try_into(), journal.try_into()].map(|id| id.map(Hex16))
        else {
            return Ok(None);
        };
        let last = last.try_into().map_or(0, u64::from_le_bytes);
        Ok((begin == BEGIN).then_some(Mark { boot_id, journal, last }))
    }

    /// Writes the mark, with one system call, within which no signal ends a process.
    pub fn write(&self, mark: &Mark) -> io::Result<()> {
        let mut bytes = [0; LEN];
        let parts = [&BEGIN[..], &mark.boot_id.0, &mark.journal.0, &mark.last.to_le_bytes()];
        let mut at = 0;
        for part in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.0.write_all_at(&bytes, 0)
    }
}
