//! Long reads and writes, in which a peer that polls takes part.

use super::lifetimes::{Meanwhile, with};
use super::*;
use ginnel_layout::verbs::{Claims, Errand, Executing, OFFERS, copy, counters};
use ginnel_verbs::shared_copy::LEAST;
use kit::wait::{AtEnd, Watchdog, wait_until};
use std::cell::Cell;
use std::thread;

const LONG: u32 = 1 << 20;
const READ: u32 = 0;

/// Two sides, each with a region that contains most of its memory.
struct Long {
    both: Both,
    keys: [Key; 2],
}

impl Long {
    fn new() -> Self {
        let both = Both::new();
        let register = |side: &Arc<Side>| side.register(0, 3 * CHUNK as u64, Access::LOCAL_WRITE | ALL);
        let keys = [register(&both.sides[0]), register(&both.sides[1])];
        Self { both, keys }
    }

    /// Returns an operation with which side 0 reads or writes. Its own data begins 12 bytes behind its first address, that of side 1 at
    /// `at`.
    fn operation(&self, kind: u32, at: u64) -> Operation {
        let (address, key) = (BASE + at, self.keys[1]);
        match kind {
            READ => Operation::Read { address, key },
            _ => Operation::Write { address, key, immediate: None, solicited: false },
        }
    }

    /// Posts it, and calls `meanwhile` while the first piece is copied.
    fn post(&self, kind: u32, at: u64, meanwhile: &dyn Fn()) {
        self.post_operation(self.operation(kind, at), meanwhile);
    }

    fn post_operation(&self, operation: Operation, meanwhile: &dyn Fn()) {
        let meanwhile = Cell::new(Some(meanwhile));
        let once = || {
            if let Some(event) = meanwhile.take() {
                event();
            }
        };
        let program = Meanwhile(self.both.sides[0].pages(), Box::new(once));
        let elements = [element(12, LONG, self.keys[0])];
        self.both.pairs[0].post(&program, &with(operation, &elements)).unwrap();
    }

    /// Fills the source and the destination with different bytes. Returns what the copy must produce: the side, the address and the
    /// bytes.
    fn prepare(&self, kind: u32, at: u64, seed: u8) -> (usize, u64, Vec<u8>) {
        let bytes: Vec<u8> = pattern(LONG as usize).iter().map(|byte| byte.wrapping_add(seed)).collect();
        let ([from, to], [from_at, to_at]) =
            if kind == READ { ([1, 0], [at, 12]) } else { ([0, 1], [12, at]) };
        self.both.fill(to, to_at, &vec![0xee; LONG as usize + 1]);
        self.both.fill(from, from_at, &bytes);
        (to, to_at, bytes)
    }

    /// Returns side 1's tables, and the offset of the words for shared copies.
    fn shared(&self) -> (&Mapping, usize) {
        (&self.both.sides[1].tables, self.both.pairs[1].number().copy_at().unwrap())
    }

    /// Claims a piece on side 1, without copying it.
    fn claim(&self) {
        let (tables, at) = self.shared();
        let claims = Claims(tables.load_relaxed_u64(at + copy::CLAIMS));
        let claimed = claims.claim_back(usize::MAX).unwrap();
        tables.compare_exchange_u64(at + copy::CLAIMS, claims.0, claimed.0).unwrap();
    }

    fn helped(&self) -> u64 {
        let at = self.both.pairs[1].number().counters_at().unwrap();
        self.both.sides[1].tables.load_relaxed_u64(at + counters::HELPED)
    }
}

#[test]
fn a_polling_peer_copies_a_part() {
    let long = Long::new();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(long.both.poll(1).is_empty());
            }
        });
        let _stop = AtEnd(|| done.store(true, Ordering::Relaxed));
        let (mut copies, mut watchdog): (u32, _) = (0, Watchdog::new("copies and bytes by the peer"));
        // On one CPU, the two threads rarely run at the same time.
        while copies < 40 || long.helped() == 0 {
            watchdog.look((copies.min(40), long.helped()));
            // At a range that crosses the end of a chunk, and at another one.
            let (kind, at) = (copies & 1, u64::from(copies * 77_777) % CHUNK as u64);
            let (side, place, bytes) = long.prepare(kind, at, copies as u8);
            long.both.post(0, 1, long.operation(kind, at), &[element(12, LONG, long.keys[0])]);
            assert_eq!(long.both.comes(0, 1), [(1, Status::SUCCESS)]);
            let found = long.both.bytes(side, place, LONG as usize + 1);
            assert!(found[..LONG as usize] == bytes && found[LONG as usize] == 0xee, "copy {copies}");
            copies += 1;
        }
    });
}

#[test]
fn a_peer_that_polls_in_between_copies_the_rest() {
    for kind in 0..2 {
        let long = Long::new();
        let (side, place, bytes) = long.prepare(kind, 100, 3);
        // All pieces except the first one, and the last one of a write; half a megabyte per poll.
        long.post(kind, 100, &|| (0..3).for_each(|_| assert!(long.both.poll(1).is_empty())));
        assert_eq!(long.both.said(0), [(1, Status::SUCCESS)]);
        assert!(long.both.bytes(side, place, LONG as usize) == bytes);
        let piece = copy::piece(LONG as usize) as u64;
        assert_eq!(long.helped(), u64::from(LONG) - piece * u64::from(1 + kind));
        assert!(!long.both.pairs[1].help(&mut (16 << 20)), "nothing is left");
    }
}

#[test]
fn a_request_waits_for_a_piece_that_the_peer_has_claimed() {
    for kind in 0..2 {
        let long = Long::new();
        let (side, place, bytes) = long.prepare(kind, 0, 5);
        long.post(kind, 0, &|| long.claim());
        assert_eq!((long.both.said(0), long.both.said(0)), (vec![], vec![]));
        // If the program does not poll, the notifier continues the request.
        assert!(long.both.sides[0].asked.load(Ordering::Relaxed) > 0);
        // A second request stays behind it.
        long.both.post(0, 2, SEND, &[]);
        long.both.pairs[1].post_receive(9, &[]).unwrap();
        assert_eq!((long.both.said(0), long.both.said(1)), (vec![], vec![]));
        let piece = copy::piece(LONG as usize);
        let last = LONG as usize / piece - 1 - kind as usize;
        long.both.fill(side, place + (last * piece) as u64, &bytes[last * piece..][..piece]);
        let (tables, at) = long.shared();
        tables.fetch_add_u64(at + copy::CLAIMS, Claims::COPIED);
        assert_eq!(long.both.comes(0, 2), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
        assert_eq!(long.both.said(1), [(9, Status::SUCCESS)]);
        assert!(long.both.bytes(side, place, LONG as usize) == bytes);
    }
}

#[test]
fn a_write_with_immediate_data_claims_its_receive_when_all_is_copied() {
    let long = Long::new();
    let (_, _, bytes) = long.prepare(1, 0, 5);
    let operation =
        Operation::Write { address: BASE, key: long.keys[1], immediate: Some(7), solicited: false };
    long.both.pairs[1].post_receive(9, &[]).unwrap();
    long.post_operation(operation, &|| long.claim());
    let used = || {
        let at = long.both.pairs[1].number().at().unwrap();
        long.both.sides[1].tables.load_relaxed_u64(at + qp::HEAD)
    };
    assert_eq!((long.both.said(0), long.both.said(0), used()), (vec![], vec![], 0));
    let piece = copy::piece(LONG as usize);
    let last = LONG as usize / piece - 2;
    long.both.fill(1, (last * piece) as u64, &bytes[last * piece..][..piece]);
    let (tables, at) = long.shared();
    tables.fetch_add_u64(at + copy::CLAIMS, Claims::COPIED);
    assert_eq!(long.both.comes(0, 1), [(1, Status::SUCCESS)]);
    assert_eq!((long.both.said(1), used()), (vec![(9, Status::SUCCESS)], 1));
    assert!(long.both.bytes(1, 0, LONG as usize) == bytes);
}

#[test]
fn a_half_written_offer_is_not_taken() {
    let long = Long::new();
    // The poster has copied all of it.
    let short = [element(12, LEAST as u32, long.keys[0])];
    long.both.post(0, 1, long.operation(1, 0), &short);
    assert_eq!(long.both.said(0), [(1, Status::SUCCESS)]);
    // The next one is longer, and its number has not been written yet.
    let (tables, at) = long.shared();
    let number = tables.load_relaxed_u64(at + copy::OFFER) as u32;
    tables.store_relaxed_u64(at + copy::CLAIMS, Claims::new(number + 1).0);
    set(&long, copy::KEY, |word| word as u32 as u64 | u64::from(LONG) << 32);
    assert!(!long.both.pairs[1].help(&mut (16 << 20)));
    assert_eq!((long.helped(), tables.load_relaxed_u64(at + copy::CLAIMS)), (0, Claims::new(number + 1).0));
}

#[test]
fn a_request_is_not_flushed_while_the_peer_copies_for_it() {
    let long = Long::new();
    long.post(READ, 0, &|| long.claim());
    let at = long.both.pairs[0].number().at().unwrap();
    let (tables, pair) = (&long.both.sides[0].tables, &long.both.pairs[0]);
    let state = tables.load_relaxed_u64(at + qp::STATE);
    // The peer is in the middle of a piece.
    let executing = Executing::region((state >> 32) as u32, long.keys[0]);
    tables.store_relaxed_u64(at + qp::EXECUTING, executing.0);
    thread::scope(|scope| {
        let ends = scope.spawn(|| pair.modify(QpState::ERR, Change::default()).unwrap());
        wait_for_state(pair, QpState::ERR);
        assert!(!ends.is_finished());
        tables.store_release_u64(at + qp::EXECUTING, 0);
    });
    assert_eq!(long.both.said(0), [(1, Status::WR_FLUSH_ERR)]);
}

fn wait_for_state(pair: &Pair, state: QpState) {
    wait_until("another state", || pair.state() == state);
}

#[test]
fn the_death_of_a_peer_in_the_middle_of_a_piece_ends_the_request() {
    let long = Long::new();
    long.post(READ, 0, &|| long.claim());
    assert_eq!(long.both.said(0), []);
    long.both.sides[1].own.set_dead();
    assert_eq!(long.both.comes(0, 1), [(1, Status::RETRY_EXC_ERR)]);
}

#[test]
fn false_claims_end_the_request() {
    for lie in [0, u64::MAX, 1] {
        let long = Long::new();
        let (tables, at) = long.shared();
        long.post(READ, 0, &|| tables.store_relaxed_u64(at + copy::CLAIMS, lie));
        assert_eq!(long.both.said(0), [(1, Status::REM_OP_ERR)], "{lie:#x}");
        assert_eq!(long.both.pairs[0].state(), QpState::ERR);
    }
}

type Wrong<'a> = &'a dyn Fn(&Long);

#[test]
fn regions_that_have_ended_or_do_not_allow_the_copy_are_not_accessed() {
    // What is wrong with an offer: which region has ended, or what a false offer contains.
    let wrongs: [(&str, Wrong); 6] = [
        ("the owner's region has ended", &|long| long.both.sides[1].remove(long.keys[1])),
        ("the poster's region has ended", &|long| long.both.sides[0].remove(long.keys[0])),
        ("another key of the owner", &|long| set(long, copy::KEY, |word| word ^ 1)),
        ("another key of the poster", &|long| set(long, copy::LOCAL_KEY, |word| word ^ 1)),
        ("an address beyond the owner's region", &|long| {
            set(long, copy::ADDRESS, |word| word + 3 * CHUNK as u64)
        }),
        ("something else is to be done", &|long| {
            set(long, copy::LOCAL_KEY, |word| word & 0xffff_ffff | 3 << 32)
        }),
    ];
    for (wrong, does) in wrongs {
        let long = Long::new();
        let (side, place, _) = long.prepare(READ, 0, 9);
        let is_checked = Cell::new(false);
        long.post(READ, 0, &|| {
            does(&long);
            let before = long.both.bytes(side, place, LONG as usize);
            assert!(!long.both.pairs[1].help(&mut (16 << 20)), "{wrong}");
            assert!(long.both.bytes(side, place, LONG as usize) == before, "{wrong}");
            is_checked.set(true);
        });
        assert!(is_checked.get() && long.helped() == 0, "{wrong}");
        // The poster has announced its accesses before, and copies everything itself.
        assert_eq!(long.both.said(0), [(1, Status::SUCCESS)], "{wrong}");
    }
}

fn set(long: &Long, word: usize, change: impl Fn(u64) -> u64) {
    let (tables, at) = long.shared();
    tables.store_relaxed_u64(at + word, change(tables.load_relaxed_u64(at + word)));
}

#[test]
fn the_owner_checks_the_access_rights_too() {
    let both = Both::new();
    let keys = [
        both.sides[0].register(0, LONG.into(), Access::LOCAL_WRITE),
        both.sides[1].register(0, LONG.into(), Access::LOCAL_WRITE | Access::REMOTE_WRITE),
    ];
    let long = Long { both, keys };
    // The offer comes from a peer that has not checked whether it may read there.
    let (tables, at) = long.shared();
    let number = 1;
    tables.store_relaxed_u64(at + copy::ADDRESS, BASE);
    tables.store_relaxed_u64(at + copy::KEY, u64::from(LONG) << 32 | u64::from(long.keys[1].0));
    tables.store_relaxed_u64(at + copy::LOCAL, BASE);
    tables
        .store_relaxed_u64(at + copy::LOCAL_KEY, u64::from(Errand::READ.0) << 32 | u64::from(long.keys[0].0));
    tables.store_relaxed_u64(at + copy::CLAIMS, Claims::new(number).0);
    let state = tables.load_relaxed_u64(long.both.pairs[1].number().at().unwrap() + qp::STATE);
    tables.store_relaxed_u64(at + copy::OFFER, state >> 32 << 32 | u64::from(number));
    tables.fetch_add_u64(OFFERS, 1);
    long.both.fill(1, 0, &pattern(LONG as usize));
    assert!(long.both.poll(1).is_empty());
    assert_eq!(long.helped(), 0);
    assert!(long.both.bytes(0, 0, LONG as usize).iter().all(|byte| *byte == 0));
}

#[test]
fn short_copies_are_not_offered() {
    let long = Long::new();
    let short = [element(12, LEAST as u32 - 1, long.keys[0])];
    long.both.post(0, 1, long.operation(READ, 0), &short);
    assert_eq!(long.both.sides[1].tables.load_relaxed_u64(OFFERS), 0);
    long.both.post(0, 2, long.operation(READ, 0), &[element(12, LEAST as u32, long.keys[0])]);
    assert_eq!(long.both.sides[1].tables.load_relaxed_u64(OFFERS), 1);
    assert_eq!(long.both.said(0), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
}
