//! Journals that are rewritten while they grow, that cannot be written, or that a killed daemon has left.

use super::*;
use ginnel_broker::record::FORMAT;
use ginnel_broker::text::{Hex16, Text};
use ginnel_broker::trust::doubt;
use ginnel_layout::Name;
use kit::wait::wait_until;
use rewrite::new_path;

fn record(number: u32) -> Record {
    let name = Text(Name::new(&format!("vm-{number}")).unwrap());
    Record::Member { number, name, runtime: None, retired: number.is_multiple_of(2) }
}

/// A journal and the books that belong to it, as the daemon has them.
struct Pair {
    dir: tempfile::TempDir,
    journal: Journal,
    books: Books,
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut books = Books::default();
        let (boot_id, next_object) = (Hex16([1; 16]), 7);
        let start = Record::Start {
            boot_id,
            generation: 1,
            next_epoch: 1,
            next_listener: 1,
            next_channel: 1,
            next_object,
            epochs: Vec::new(),
            format: FORMAT,
        };
        books.apply(&start).unwrap();
        let at = Mark { boot_id, journal: Hex16([9; 16]), last: 0 };
        let journal = Journal::create(dir.path(), &books, at, &mut MarkFile::open(dir.path()).ok()).unwrap();
        Self { dir, journal, books }
    }

    fn note(&mut self, record: &Record) {
        self.books.apply(record).unwrap();
        let _ = self.journal.append(record);
    }

    /// Declares the same few members again and again, which makes the journal long but not its contents.
    fn grow(&mut self, records: u32) {
        (0..records).for_each(|n| self.note(&record(n % 100)));
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("journal")
    }

    /// Checks that the next daemon would get the same books.
    fn check(&self) {
        let read = Journal::read(self.dir.path()).unwrap();
        assert_eq!((read.dropped, read.damaged, read.invalid_records, read.skipped), (0, 0, 0, 0));
        assert!(read.books == self.books, "the next daemon would know something else");
        assert_eq!(doubt(&read, self.mark(), self.books.boot_id), None);
    }

    /// The next daemon starts.
    fn again(&mut self) {
        let mut mark = MarkFile::open(self.dir.path()).ok();
        self.journal = Journal::create(self.dir.path(), &self.books, self.journal.at, &mut mark).unwrap();
    }

    fn mark(&self) -> Option<Mark> {
        MarkFile::open(self.dir.path()).unwrap().read().unwrap()
    }

    fn len(&self) -> u64 {
        std::fs::metadata(self.path()).unwrap().len()
    }
}

#[test]
fn a_long_journal_is_rewritten_while_it_grows() {
    let mut pair = Pair::new();
    let mut rewritten = 0;
    let mut settle = |pair: &mut Pair| {
        let before = pair.len();
        pair.journal.settle(&pair.books);
        rewritten += u32::from(pair.len() < before);
    };
    for turn in 0..400 {
        pair.grow(200);
        settle(&mut pair);
        if turn % 20 == 0 {
            pair.check();
        }
        // How much it grows before the thread gets to it depends on the machine.
        wait_until("the end of the rewriting", || {
            settle(&mut pair);
            pair.journal.rewriting.is_none() || pair.len() < 2 * GROWTH
        });
    }
    assert!(rewritten > 0, "{} bytes, and never rewritten", pair.len());
    wait_until("the end of the rewriting", || {
        pair.journal.settle(&pair.books);
        pair.journal.rewriting.is_none()
    });
    pair.check();
    assert!(pair.len() < 2 * GROWTH + (1 << 16), "{} bytes", pair.len());
    // The next daemon continues from the state of this one.
    pair.again();
    assert!(!new_path(&pair.path()).exists());
    pair.check();
}

#[test]
fn a_kill_at_any_point_of_a_rewriting_loses_nothing() {
    let mut pair = Pair::new();
    pair.grow(150);
    let (path, new) = (pair.path(), new_path(&pair.path()));
    let begun = pair.journal.len;
    pair.grow(50);
    let mut rewritten = rewrite::rewrite(&path, begun).unwrap();
    pair.grow(70);
    rewritten.copy(pair.journal.len).unwrap();
    let whole = std::fs::read(&new).unwrap();
    assert_eq!(whole.len() as u64, rewritten.len);
    for cut in (0..whole.len()).step_by(211) {
        std::fs::write(&new, &whole[..cut]).unwrap();
        pair.check();
    }
    // If the daemon is killed after that, the new journal is there.
    std::fs::write(&new, &whole).unwrap();
    rename(&path).unwrap();
    pair.check();
    // A half-written file of a killed daemon does not disturb the next daemon.
    std::fs::write(&new, b"torn").unwrap();
    pair.again();
    pair.check();
}

#[test]
fn records_are_written_when_a_full_disk_has_room_again() {
    let mut pair = Pair::new();
    pair.grow(10);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let file = std::mem::replace(&mut pair.journal.file, full);
    pair.grow(30);
    pair.journal.retry_at = Instant::now();
    pair.journal.settle(&pair.books);
    assert!(!pair.journal.unwritten.is_empty() && !pair.journal.lost);
    assert!(!pair.journal.takes() && pair.journal.until_retry().is_some());
    // Half a record may have found room.
    pair.journal.file = file;
    let unwritten = std::mem::take(&mut pair.journal.unwritten);
    pair.journal.write(&unwritten[..9]).unwrap();
    pair.journal.unwritten = unwritten[9..].to_vec();
    pair.grow(5);
    pair.journal.retry_at = Instant::now();
    pair.journal.settle(&pair.books);
    assert!(pair.journal.takes() && pair.journal.until_retry().is_none());
    pair.check();
    assert_eq!(pair.len(), pair.journal.len);
}

#[test]
fn lost_records_are_replaced_by_writing_everything_anew() {
    let mut pair = Pair::new();
    pair.journal.file = File::options().write(true).open("/dev/full").unwrap();
    pair.journal.unwritten = vec![b' '; KEPT];
    pair.grow(2);
    assert!(pair.journal.unwritten.is_empty() && pair.journal.lost);
    pair.grow(3);
    // It is not tried in each turn; but when it is tried, everything is written.
    pair.journal.retry_at = Instant::now() + Duration::from_secs(3600);
    pair.journal.settle(&pair.books);
    assert!(pair.journal.lost && !pair.journal.takes());
    pair.journal.retry_at = Instant::now();
    pair.journal.settle(&pair.books);
    assert!(pair.journal.is_whole() && pair.journal.takes());
    pair.grow(3);
    pair.check();
}

#[test]
fn a_damaged_journal_is_not_rewritten() {
    let mut pair = Pair::new();
    pair.grow(10);
    let mut bytes = std::fs::read(pair.path()).unwrap();
    *bytes.last_mut().unwrap() = b'?';
    std::fs::write(pair.path(), bytes).unwrap();
    assert!(rewrite::rewrite(&pair.path(), pair.journal.len).is_err());
}

/// Returns a line with a valid checksum.
fn good(json: &str) -> Vec<u8> {
    format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).into_bytes()
}

#[test]
fn optional_records_of_a_newer_daemon_are_skipped_and_others_refused() {
    let with = |line: &[u8]| {
        let mut pair = Pair::new();
        pair.grow(3);
        pair.journal.file.write_all(line).unwrap();
        pair.grow(3);
        let read = Journal::read(pair.dir.path());
        (pair, read)
    };
    let (pair, read) = with(&good(r#"{"coloured":{"block":7},"optional":true}"#));
    let read = read.unwrap();
    assert!(read.books == pair.books, "the records behind it are read");
    assert_eq!((read.skipped, read.dropped, read.damaged), (1, 0, 0));

    for line in [r#"{"coloured":{"block":7}}"#, r#"{"coloured":{"block":7},"optional":false}"#] {
        let problem = with(&good(line)).1.unwrap_err().to_string();
        assert!(problem.contains("newer ginneld") && problem.contains("coloured"), "{problem}");
    }
    // A known kind with other contents, and a later format.
    let problem = with(&good(r#"{"dead":{"endpoint":"x"}}"#)).1.unwrap_err().to_string();
    assert!(problem.contains("dead"), "{problem}");
    let mut start = Books::default().dump().next().unwrap();
    if let Record::Start { format, .. } = &mut start {
        *format += 1;
    }
    let problem = with(&line(2, &start)).1.unwrap_err().to_string();
    assert!(problem.contains(&format!("format {}", FORMAT + 1)), "{problem}");
}

#[test]
fn records_behind_a_damaged_line_are_read() {
    let mut pair = Pair::new();
    pair.grow(3);
    pair.journal.file.write_all(b"01234567 {\"dead\":{\"endpoint\":1}}\n").unwrap();
    pair.grow(3);
    let read = Journal::read(pair.dir.path()).unwrap();
    assert!(read.books == pair.books);
    assert_eq!((read.damaged, read.dropped), (1, 0));
}

#[test]
fn a_journal_of_a_daemon_without_formats_is_read() {
    let old = good(
        r#"{"start":{"boot_id":"00000000000000000000000000000001","generation":4,"next_epoch":5,"next_listener":6,"next_channel":7}}"#,
    );
    let read = replay(&old);
    assert_eq!((read.records, read.books.generation, read.too_new.len()), (1, 4, 0));
}

#[test]
fn records_of_ends_find_room_when_requests_are_refused() {
    let mut pair = Pair::new();
    // All of the reserve is used up, except the part for ends, and it cannot be filled up: the file is full.
    pair.journal.space = Some(pair.journal.len + FOR_ENDS - 1);
    let full = File::open(pair.path()).unwrap();
    let file = std::mem::replace(&mut pair.journal.file, full);
    assert!(!pair.journal.takes());
    pair.journal.file = file;
    assert!(pair.journal.append(&record(1)), "there is space for it");
    assert!(pair.journal.takes());
    assert!(pair.journal.space.unwrap() >= pair.journal.len + FOR_ENDS);
}

#[test]
fn a_journal_that_could_not_be_made_is_made_later() {
    let mut pair = Pair::new();
    pair.grow(20);
    let old = std::fs::read(pair.path()).unwrap();
    pair.journal =
        Journal::behind(pair.dir.path(), pair.journal.at, MarkFile::open(pair.dir.path()).ok()).unwrap();
    assert!(!pair.journal.takes());
    pair.grow(4);
    assert_eq!(std::fs::read(pair.path()).unwrap(), old, "the old one stays as it is");
    pair.journal.settle(&pair.books);
    assert!(pair.journal.takes());
    pair.check();
}

#[test]
fn a_journal_that_is_removed_while_the_daemon_runs_is_written_anew() {
    let mut pair = Pair::new();
    pair.grow(20);
    std::fs::remove_file(pair.path()).unwrap();
    pair.grow(1);
    // A daemon that starts now does not believe what it finds.
    let found = Journal::read(pair.dir.path()).unwrap();
    assert!(doubt(&found, pair.mark(), pair.books.boot_id).is_some());
    assert!(!pair.journal.takes());
    pair.journal.settle(&pair.books);
    assert!(pair.journal.takes());
    pair.grow(3);
    pair.check();
    // Another file in its place is not the journal.
    std::fs::write(new_path(&pair.path()), b"x").unwrap();
    rename(&pair.path()).unwrap();
    assert!(!pair.journal.takes());
    pair.journal.settle(&pair.books);
    pair.check();
}

#[test]
fn the_mark_is_never_in_front_of_the_journal() {
    let mut pair = Pair::new();
    pair.grow(5);
    let marked = pair.mark().unwrap();
    assert_eq!(marked.last, pair.journal.at.last);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let file = std::mem::replace(&mut pair.journal.file, full);
    pair.grow(3);
    assert_eq!(pair.mark(), Some(marked));
    let found = Journal::read(pair.dir.path()).unwrap();
    assert_eq!(doubt(&found, pair.mark(), pair.books.boot_id), None);
    pair.journal.file = file;
    pair.journal.retry_at = Instant::now();
    pair.journal.settle(&pair.books);
    assert_eq!(pair.mark().unwrap().last, marked.last + 3);
    pair.check();
}

#[test]
fn the_next_daemon_continues_the_file() {
    let mut pair = Pair::new();
    let snapshot = pair.len();
    for torn in [&b""[..], b"01234567 9 {", b"01234567 9 {}\n"] {
        pair.grow(30);
        pair.journal.file.write_all(torn).unwrap();
        std::fs::write(new_path(&pair.path()), b"torn").unwrap();
        let found = Journal::read(pair.dir.path()).unwrap();
        assert_eq!((found.dropped, found.snapshot_len), (torn.len(), snapshot));
        pair.books.begin(pair.books.boot_id);
        let at = Mark { last: found.last, ..pair.journal.at };
        let mut mark = MarkFile::open(pair.dir.path()).ok();
        let resumed = Journal::resume(pair.dir.path(), &found, &pair.books, at, &mut mark);
        pair.journal = resumed.unwrap();
        assert!(!new_path(&pair.path()).exists());
        pair.check();
        pair.grow(3);
        pair.check();
        assert_eq!(pair.len(), pair.journal.len);
        assert_eq!(pair.journal.rewrite_at, 2 * snapshot + GROWTH);
    }
    // It is rewritten as if the same daemon went on.
    pair.journal.rewrite_at = 0;
    wait_until("the rewriting", || {
        pair.journal.settle(&pair.books);
        pair.journal.rewrite_at > 0
    });
    pair.check();
}
