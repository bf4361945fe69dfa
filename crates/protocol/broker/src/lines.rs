//! The lines of the journal, and what a daemon makes of them.
//!
//! Each record is one line: the CRC-32 of the rest in hexadecimal, a space, a number, a space, and JSON. A journal begins with a
//! [`snapshot`], whose lines are numbered from 1. Its last line is no record: it names the journal, and says the number of the last record
//! that is in the snapshot. The records behind it continue with the next number. So a line that is changed, lost, doubled or in another
//! place is noticed, except at the end of the journal; [`crate::trust`] says how that is noticed.
//!
//! # Records of other versions
//!
//! `Start`, the first record, contains the [`FORMAT`]. A daemon does not start on a journal of a later format. It skips a record
//! of an unknown kind with a warning if the record's object has the member `"optional": true` beside the kind. Otherwise the
//! daemon does not start, because it would forget what it does not understand. It ignores unknown members of known records. So a
//! developer who adds a kind of record decides whether an older daemon may continue without it, and one who changes the meaning
//! of something that exists must raise the format.

use crate::books::Books;
use crate::record::{FORMAT, Record};
use crate::text::Hex16;
use serde::{Deserialize, Serialize};
use tracing::warn;

/// The contents of a journal.
#[derive(Debug, Default, PartialEq)]
pub struct Replayed {
    /// The books that the records make.
    pub books: Books,
    /// The number of good records.
    pub records: usize,
    /// The format; 0 if no record says it.
    pub format: u32,
    /// The journal's name, once the end of its snapshot was read. Journals before format 3 have none.
    pub journal: Option<Hex16>,
    /// The number of the last record, from the end of the snapshot on.
    pub last: u64,
    /// The number of lines without the number that they should have.
    pub misplaced: usize,
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
    /// The length of the lines so far, in bytes.
    pub len: u64,
    /// The length of the snapshot, in bytes.
    pub snapshot_len: u64,
    /// The number of lines that were not damaged, and the number of the last of them, if lines have numbers.
    lines: usize,
    number: Option<u64>,
}

/// The line at the end of a snapshot.
#[derive(Serialize, Deserialize)]
enum End {
    #[serde(rename = "snapshot_ends")]
    Snapshot { journal: Hex16, last: u64 },
}

/// The contents of a line.
enum Line {
    Record(Box<Record>),
    End(End),
    /// A record of an unknown kind.
    Unknown {
        kind: String,
        optional: bool,
    },
    Damaged,
}

impl Replayed {
    /// Returns whether there is nothing in the journal.
    pub fn is_empty(&self) -> bool {
        self.lines == 0 && self.damaged == 0
    }

    /// Reads one more line. Returns false if it is damaged.
    pub fn line(&mut self, line: &[u8]) -> bool {
        self.len += line.len() as u64 + 1;
        let Some((number, json)) = checked(line) else { return false };
        let contents = parse(json);
        if matches!(contents, Line::Damaged) {
            return false;
        }
        // If the first line has no number, none has.
        let expected = match (self.lines, self.number) {
            (0, _) => number.map(|_| 1),
            (_, before) => before.map(|before| before.wrapping_add(1)),
        };
        self.misplaced += usize::from(number != expected);
        self.lines += 1;
        self.number = number;
        if self.journal.is_some() {
            self.last = number.unwrap_or(self.last);
        }
        match contents {
            Line::Damaged => {}
            Line::End(End::Snapshot { journal, last }) => {
                self.misplaced += usize::from(self.journal.is_some());
                (self.journal, self.last, self.number) = (Some(journal), last, Some(last));
                self.snapshot_len = self.len;
            }
            Line::Unknown { kind, optional: true } => {
                warn!(kind, "journal: a record of a newer ginneld is skipped; it says that this is allowed");
                self.skipped += 1;
            }
            Line::Unknown { kind, optional: false } => self.too_new(format!("a record {kind:?}")),
            Line::Record(record) => {
                self.records += 1;
                if let Record::Start { format, .. } = *record {
                    self.format = format;
                }
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
        replayed.len -= last as u64;
    }
    replayed
}

/// Returns the number of a line, if it has one, and its JSON. `None` if the line is damaged.
fn checked(line: &[u8]) -> Option<(Option<u64>, &[u8])> {
    let (crc, rest) = line.split_at_checked(9)?;
    let crc = u32::from_str_radix(str::from_utf8(crc.strip_suffix(b" ")?).ok()?, 16).ok()?;
    if crc != crc32fast::hash(rest) {
        return None;
    }
    if !rest.first()?.is_ascii_digit() {
        return Some((None, rest));
    }
    let end = rest.iter().position(|&b| b == b' ')?;
    let number = str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
    Some((Some(number), &rest[end + 1..]))
}

fn parse(json: &[u8]) -> Line {
    if let Ok(record) = serde_json::from_slice(json) {
        return Line::Record(record);
    }
    if let Ok(end) = serde_json::from_slice(json) {
        return Line::End(end);
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

/// Returns a record as the line with this number.
pub fn line(number: u64, record: &Record) -> Vec<u8> {
    numbered(number, record)
}

/// Returns the lines of a new journal with this name and these books. The next record has the number behind `last`.
pub fn snapshot(books: &Books, journal: Hex16, last: u64) -> impl Iterator<Item = Vec<u8>> {
    let (mut number, mut records, mut has_ended) = (0, books.dump(), false);
    std::iter::from_fn(move || {
        number += 1;
        match records.next() {
            Some(record) => Some(line(number, &record)),
            None if has_ended => None,
            None => {
                has_ended = true;
                Some(numbered(number, &End::Snapshot { journal, last }))
            }
        }
    })
}

fn numbered(number: u64, contents: &impl Serialize) -> Vec<u8> {
    // This is plain data with text keys, so serialising it cannot fail.
    let json = serde_json::to_vec(contents).unwrap_or_default();
    let number = format!("{number} ");
    let mut crc = crc32fast::Hasher::new();
    crc.update(number.as_bytes());
    crc.update(&json);
    let mut line = format!("{:08x} {number}", crc.finalize()).into_bytes();
    line.extend_from_slice(&json);
    line.push(b'\n');
    line
}
