//! The lines of the journal, and what a daemon makes of them.
//!
//! Each record is one line: the CRC-32 of the rest in hexadecimal, a space, and JSON.
//!
//! # Records of other versions
//!
//! `Start`, the first record, contains the [`FORMAT`]. A daemon does not start on a journal of a later format. It skips a record
//! of an unknown kind with a warning if the record's object has the member `"optional": true` beside the kind. Otherwise the
//! daemon does not start, because it would forget what it does not understand. It ignores unknown members of known records. So a
//! developer who adds a kind of record decides whether an older daemon may continue without it, and one who changes the meaning
//! of something that exists must raise the format.

use crate::books::Books;
use crate::record::Record;
use tracing::warn;

/// The version of the journals that this daemon writes, and the latest that it reads. Since format 2 the files of segments may be in the
/// daemon's own folder, where earlier daemons do not look for them.
pub const FORMAT: u32 = 2;

/// The contents of a journal.
#[derive(Debug, Default, PartialEq)]
pub struct Replayed {
    /// The books that the records make.
    pub books: Books,
    /// The number of good records.
    pub records: usize,
    /// The bytes of the last line, if it is torn or damaged.
    pub dropped: usize,
    /// The number of damaged lines that have others behind them. A crash of a daemon never leaves such a line.
    pub damaged: usize,
    /// The number of records that did not fit the books.
    pub invalid_records: usize,
    /// The number of unknown records that may be skipped.
    pub skipped: usize,
    /// The kinds of unknown records that must not be skipped, and whatever else is too new.
    pub too_new: Vec<String>,
}

/// The contents of a line.
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
    /// Reads one more line. Returns false if it is damaged.
    pub fn line(&mut self, line: &[u8]) -> bool {
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
                if let Err(error) = self.books.apply(&record) {
                    warn!(%error, ?record, "journal: a record does not fit the books and is ignored");
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

/// Makes books from the bytes of a journal. Never fails; the fields of the result say what is wrong with the journal.
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

/// Returns a record as a line.
pub fn line(record: &Record) -> Vec<u8> {
    // Records are plain data with text keys, so serialising them cannot fail.
    let json = serde_json::to_vec(record).unwrap_or_default();
    let mut line = format!("{:08x} ", crc32fast::hash(&json)).into_bytes();
    line.extend_from_slice(&json);
    line.push(b'\n');
    line
}
