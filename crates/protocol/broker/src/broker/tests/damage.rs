//! Whatever happens to a journal: the next daemon knows all that its predecessor gave out, or it does not believe the journal.

use super::*;
use crate::trust::{Mark, doubt};

const BOOT: Hex16 = Hex16([1; 16]);
const JOURNAL: Hex16 = Hex16([9; 16]);
/// The number of the last record in the snapshot.
const BEFORE: u64 = 1000;

/// A journal as a daemon leaves it, with lines of all kinds.
struct Left {
    /// The lines of the snapshot and those behind it, each with its end.
    lines: Vec<Vec<u8>>,
    /// The number of lines of the snapshot.
    snapshot: usize,
    books: Books,
    mark: Mark,
}

fn left() -> Left {
    let mut bench = Bench::new(Limits::default());
    let some_work = |bench: &mut Bench, turn: u64| {
        let (a, _) = bench.attach(0, "web");
        let (b, _) = bench.attach(VM, "web");
        let (c, _) = bench.attach(0, "own");
        let at = format!("x{turn}");
        bench.ask(a, Kind::LISTEN, listen(&at).as_bytes());
        bench.connect(b, &at, turn).unwrap();
        bench.ask(a, Kind::SYNC_OPEN, sync_open(&format!("m{turn}"), 1, 0, 1 << 41).as_bytes());
        bench.block(a, &block_create(&format!("b{turn}"), 8192, Rights::READ, 7)).unwrap();
        bench.block(c, &block_create("", 4096, Rights::READ, 8)).unwrap();
        bench.ends(c);
        bench.effects();
    };
    some_work(&mut bench, 1);
    let mut lines: Vec<Vec<u8>> = lines::snapshot(bench.broker.books(), JOURNAL, BEFORE).collect();
    let (snapshot, from) = (lines.len(), bench.journal.len());
    some_work(&mut bench, 2);
    // Another daemon goes on.
    let mut begun = bench.broker.books().clone();
    begun.begin(BOOT);
    assert!(bench.broker.note(begun.dump().next().unwrap()));
    assert!(*bench.broker.books() == begun);
    some_work(&mut bench, 3);
    let mut last = BEFORE;
    for line in bench.journal[from..].split_inclusive(|&b| b == b'\n') {
        let json = &line[line.iter().position(|&b| b == b'{').unwrap()..];
        last += 1;
        lines.push(lines::line(last, &serde_json::from_slice(json).unwrap()));
    }
    let mark = Mark { boot_id: BOOT, journal: JOURNAL, last };
    Left { lines, snapshot, books: bench.broker.books().clone(), mark }
}

impl Left {
    fn bytes(&self) -> Vec<u8> {
        self.lines.concat()
    }

    /// Returns whether a daemon believes this journal. If it does, it must know all.
    fn is_believed(&self, journal: &[u8]) -> bool {
        let replayed = lines::replay(journal);
        let is_believed = doubt(&replayed, Some(self.mark), BOOT).is_none();
        assert!(!is_believed || replayed.books == self.books, "it is believed, and says something else");
        is_believed
    }
}

#[test]
fn a_whole_journal_is_believed() {
    let mut left = left();
    assert!(left.is_believed(&left.bytes()));
    // The daemon was killed between the last record and the mark, or in the middle of a record.
    left.mark.last -= 1;
    assert!(left.is_believed(&left.bytes()));
    left.mark.last += 1;
    assert!(left.is_believed(&[&left.bytes(), &b"01234567 1"[..]].concat()));
    // A new name is not in force before there is a journal of this name.
    let replayed = lines::replay(&left.bytes());
    let other = Mark { journal: Hex16([8; 16]), ..left.mark };
    assert!(doubt(&replayed, Some(other), BOOT).is_some());
    assert!(doubt(&replayed, None, BOOT).is_some(), "without the mark, its end may be missing");
    // The daemon was killed when its new journal was in place, and the mark still said that there is none of this name.
    let first = Mark { last: 0, ..left.mark };
    assert_eq!(doubt(&replayed, Some(first), BOOT), None);
    // With another name it is the mark of a journal that never came.
    assert!(doubt(&replayed, Some(Mark { last: 0, ..other }), BOOT).is_some());
    assert!(doubt(&lines::replay(b""), Some(first), BOOT).is_none());
    // After a reboot nobody has memory.
    assert!(doubt(&replayed, Some(left.mark), Hex16([2; 16])).is_none());
    assert!(doubt(&lines::replay(b""), Some(left.mark), Hex16([2; 16])).is_none());
}

#[test]
fn a_journal_of_an_older_daemon_is_believed_if_it_is_whole() {
    let left = left();
    let old = |replace: &str| -> Vec<u8> {
        let lines = left.books.dump().map(|record| {
            let json = serde_json::to_string(&record).unwrap().replace("\"format\":3", replace);
            format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).into_bytes()
        });
        lines.flatten().collect()
    };
    let journal = old("\"format\":2");
    assert_eq!(doubt(&lines::replay(&journal), None, BOOT), None);
    assert_eq!(lines::replay(&journal).books, left.books);
    // Once this daemon has run, an older journal is an older copy.
    assert!(!left.is_believed(&journal));
    let half = journal.len() / 2;
    let damaged = [&journal[..half], b"?", &journal[half + 1..]].concat();
    assert!(doubt(&lines::replay(&damaged), None, BOOT).is_some());
    // One of this format has numbers.
    assert!(doubt(&lines::replay(&old("\"format\":3")), None, BOOT).is_some());
}

#[test]
fn a_journal_that_is_removed_cut_or_an_older_copy_is_not_believed() {
    let left = left();
    let journal = left.bytes();
    // All lengths include those at the ends of lines. What ends there is also what an older copy of the same journal has.
    let mut believed = (0..journal.len()).filter(|&len| left.is_believed(&journal[..len]));
    assert_eq!(believed.next(), None);
    // An older copy from before the journal was written anew.
    let older = lines::snapshot(&left.books, JOURNAL, left.mark.last - 1).flatten().collect::<Vec<u8>>();
    assert!(!left.is_believed(&older));
}

#[test]
fn a_flipped_bit_is_noticed_in_all_records() {
    let left = left();
    let mut journal = left.bytes();
    // So many bits away from each other, they are at all places of bytes, and in each line.
    let step = 61;
    let noticed = (0..journal.len() * 8).step_by(step).filter(|bit| {
        journal[bit / 8] ^= 1 << (bit % 8);
        let is_noticed = !left.is_believed(&journal);
        journal[bit / 8] ^= 1 << (bit % 8);
        is_noticed
    });
    // What a checksum is written with may change without a change of what it says: hexadecimal digits may be upper case.
    assert!(noticed.count() > journal.len() * 8 / step * 9 / 10);
}

#[test]
fn lines_that_are_lost_doubled_or_in_other_places_are_noticed() {
    let left = left();
    let n = left.lines.len();
    assert!(left.snapshot > 8 && n - left.snapshot > 8, "{} of {n} lines", left.snapshot);
    let mut count = 0;
    let mut is_noticed = |lines: Vec<&Vec<u8>>| {
        let bytes: Vec<u8> = lines.into_iter().flatten().copied().collect();
        assert!(!left.is_believed(&bytes));
        count += 1;
    };
    for i in 0..n {
        let all = || left.lines.iter().collect::<Vec<_>>();
        let mut lost = all();
        lost.remove(i);
        is_noticed(lost);
        for j in (0..n).filter(|&j| j != i) {
            let mut swapped = all();
            swapped.swap(i, j);
            is_noticed(swapped);
        }
        for j in 0..=n {
            let mut doubled = all();
            doubled.insert(j, &left.lines[i]);
            is_noticed(doubled);
        }
    }
    assert!(count > n * n);
}

proptest! {
    #[test]
    fn any_mixture_of_damage_is_noticed(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..6u8), 1..6),
    ) {
        let left = left();
        let mut journal = left.bytes();
        for (at, byte, kind) in damage {
            let at = at.index(journal.len() + 1);
            match kind {
                0 => journal.insert(at, byte),
                1 => journal.truncate(at),
                2 => drop(journal.drain(..at)),
                3 => {
                    let part = journal[at..(at + usize::from(byte)).min(journal.len())].to_vec();
                    journal.extend(part);
                }
                _ if at < journal.len() => journal[at] = byte,
                _ => {}
            }
        }
        left.is_believed(&journal);
    }
}
