//! Copies that the poster of a request and the owner of the remote memory do together.
//!
//! A long RDMA READ or WRITE takes as long as one CPU needs to copy its bytes. Meanwhile the owner of the memory often does nothing but
//! poll: for example, an MPI rank does while a neighbour fetches a large message. So the poster of a long request offers to share the
//! copy. It claims and copies pieces one after the other from the front; an owner that polls claims and copies pieces from the back. If
//! the owner does not poll, the only cost is that of the offer.
//!
//! All claims are in one word, which both sides change by compare-exchange, so each piece has one claimer. Once no piece is left, the
//! poster waits for the piece that the owner may still be copying: for a moment in place, and then in the same way as a request that
//! waits for other things. A thread of the owner claims a piece only after it has announced what it is about to access, as for a request
//! of its own, so a region of the poster that is deregistered meanwhile is not accessed afterwards. If the owner dies, the request
//! fails, like any request to it.
//!
//! A program may poll the last byte of memory that a peer writes to, and then assume that all bytes have been written. So the poster of
//! a WRITE shares all pieces except the last, and copies that one when all others have been copied.
//!
//! The owner checks the regions of both sides as it would for a request, and then accesses only arenas of the two. The owner could write
//! wrong bytes into either memory anyway, so the poster trusts what the owner reports about its progress. An owner that claims a piece
//! and never copies it delays this one request until the owner dies.

use crate::work::Element;
use ginnel_layout::verbs::{Access, Claims, Errand, Key, Kind, OFFERS, copy};
use ginnel_shmem::SharedMemory;
use std::ops::Range;

/// The length in bytes from which on a copy is shared.
pub const LEAST: usize = if cfg!(loom) { 48 } else { 128 << 10 };

/// How often the poster checks whether the owner's last piece has been copied, before the request has to wait.
const LOOKS: u32 = if cfg!(loom) { 1 } else { 2000 };

/// How often the owner tries to claim a piece while the poster keeps claiming others.
const TRIES: u32 = if cfg!(loom) { 4 } else { 64 };

/// A copy that may be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shareable {
    /// WRITE or READ, by the poster.
    pub errand: Errand,
    /// Key and address of the owner's memory.
    pub key: Key,
    pub address: u64,
    /// The poster's memory.
    pub local: Element,
}

impl Shareable {
    /// Returns the copy for a request with these elements, if the peer can help with it.
    pub fn new(kind: Kind, errand: Errand, key: Key, address: u64, elements: &[Element]) -> Option<Self> {
        let [local] = *elements else { return None };
        // The peer cannot reach a shadow region of this side.
        let is_reachable = kind == Kind::RC && !Key(local.key).is_shadow();
        (is_reachable && local.length as usize >= LEAST).then_some(Self { errand, key, address, local })
    }

    fn len(&self) -> usize {
        self.local.length as usize
    }

    /// Returns the number of shared pieces.
    fn pieces(&self) -> usize {
        let all = self.len().div_ceil(copy::piece(self.len()));
        if self.errand == Errand::READ { all } else { all - 1 }
    }

    fn piece(&self, index: usize) -> Range<usize> {
        let len = copy::piece(self.len());
        index * len..self.len().min((index + 1) * len)
    }

    /// Returns the range behind the shared pieces.
    pub fn rest(&self) -> Range<usize> {
        self.len().min(self.pieces() * copy::piece(self.len()))..self.len()
    }

    /// Returns the range of the owner's memory.
    pub fn remote(&self) -> Element {
        Element { address: self.address, length: self.local.length, key: self.key.0 }
    }

    /// Returns the access rights that the owner must grant, and those that the poster's region must have.
    pub fn wanted(&self) -> Option<(u32, u32)> {
        match self.errand {
            Errand::READ => Some((Access::REMOTE_READ, Access::LOCAL_WRITE)),
            Errand::WRITE => Some((Access::REMOTE_WRITE, 0)),
            _ => None,
        }
    }
}

/// The next step of the poster.
pub(crate) enum Next {
    /// Copy this range, which the poster has claimed.
    Copy(Range<usize>),
    /// The owner is still copying its last piece.
    Wait,
    /// All shared pieces have been copied.
    End,
    /// The owner's tables contain a value that no correct owner writes.
    Corrupt,
}

/// The poster's state of a shared copy.
#[derive(Default)]
pub(crate) struct Sharing {
    /// Number of the last offer; `None` if there was none.
    number: Option<u32>,
    /// The claims of an offer that has not ended.
    claims: Option<Claims>,
    /// Whether the poster has already waited in vain for the owner's last piece.
    has_waited: bool,
}

impl Sharing {
    /// Offers to share a copy with the owner of these tables, unless the offer exists already. `at` is the offset of the queue pair's
    /// words for shared copies, and `incarnation` that of the queue pair.
    pub fn offer<M: SharedMemory>(&mut self, tables: &M, at: usize, incarnation: u32, what: &Shareable) {
        if self.claims.is_some() {
            return;
        }
        // Another queue pair may have been connected here before, and its numbers must not recur soon.
        let last = self.number.unwrap_or_else(|| tables.load_relaxed_u64(at + copy::OFFER) as u32);
        let number = last.wrapping_add(1);
        let claims = Claims::new(number);
        let Shareable { errand, key, address, local } = *what;
        // All pieces of the last offer have been copied, so no one else changes the word.
        tables.store_relaxed_u64(at + copy::CLAIMS, claims.0);
        // ORDER verbs.offered: the new number in the claims is visible before each word of this offer. Pairs with: `find`.
        tables.store_release_u64(at + copy::ADDRESS, address);
        tables.store_release_u64(at + copy::KEY, u64::from(local.length) << 32 | u64::from(key.0));
        tables.store_release_u64(at + copy::LOCAL, local.address);
        tables.store_release_u64(at + copy::LOCAL_KEY, u64::from(errand.0) << 32 | u64::from(local.key));
        // ORDER verbs.offer: the words of the offer, and the bytes that a helper reads, are visible before the offer's number. Pairs
        // with: `find`.
        tables.store_release_u64(at + copy::OFFER, u64::from(incarnation) << 32 | u64::from(number));
        if !cfg!(loom) {
            // ORDER verbs.offers: the offer is visible before the count. Pairs with: `QueuePair::offers`.
            tables.fetch_add_u64(OFFERS, 1);
        }
        *self = Self { number: Some(number), claims: Some(claims), has_waited: false };
    }

    /// Claims the next piece, or returns what else the poster has to do.
    pub fn next<M: SharedMemory>(&mut self, tables: &M, at: usize, what: &Shareable) -> Next {
        let (Some(mut claims), pieces) = (self.claims, what.pieces()) else { return Next::End };
        let word = at + copy::CLAIMS;
        while let Some(claimed) = claims.claim_front(pieces) {
            // ORDER verbs.claim: see `Offer::help`.
            match tables.compare_exchange_u64(word, claims.0, claimed.0) {
                Ok(()) => {
                    self.claims = Some(claimed);
                    return Next::Copy(what.piece(claims.front()));
                }
                // Each failure means that the owner has made progress, which can happen a few thousand times at most.
                Err(found) if found != claims.0 && Claims(found).follow(claims, pieces) => {
                    claims = Claims(found)
                }
                Err(_) => return Next::Corrupt,
            }
        }
        self.claims = Some(claims);
        // The poster spins only once per offer, so that a request that is tried again does not delay the thread that polls.
        let looks = if std::mem::replace(&mut self.has_waited, true) { 1 } else { LOOKS };
        for _ in 0..looks {
            // ORDER verbs.copied: the count is loaded before this side uses the pieces that the owner has copied. Pairs with:
            // `Offer::help`.
            let found = Claims(tables.load_acquire_u64(word));
            if !found.follow(claims, pieces) {
                return Next::Corrupt;
            }
            if found.done() == found.back() {
                self.claims = None;
                return Next::End;
            }
            #[cfg(not(loom))]
            std::hint::spin_loop();
        }
        Next::Wait
    }

    /// Returns whether there is an offer that has not ended, so that the owner may be copying a piece.
    pub fn is_open(&self) -> bool {
        self.claims.is_some()
    }
}

/// Returns the number of the copy that the peer of a queue pair offers, if the offer is for this incarnation. The owner calls this.
pub(crate) fn number<M: SharedMemory>(tables: &M, at: usize, incarnation: u32) -> Option<u32> {
    // ORDER verbs.offer: the offer's number is loaded before the words of the offer. Pairs with: `Sharing::offer`.
    let word = tables.load_acquire_u64(at + copy::OFFER);
    ((word >> 32) as u32 == incarnation).then_some(word as u32)
}

/// A copy that the peer of a queue pair offers to share, as the owner sees it.
pub(crate) struct Offer<'a, M> {
    /// The owner's tables, and the offset of the words for shared copies.
    tables: &'a M,
    at: usize,
    /// Distinguishes this offer from others.
    pub number: u32,
    pub what: Shareable,
}

/// Returns the copy that is offered, if the offer is for this incarnation.
pub(crate) fn find<M: SharedMemory>(tables: &M, at: usize, incarnation: u32) -> Option<Offer<'_, M>> {
    let number = number(tables, at, incarnation)?;
    // ORDER verbs.offered: each word is loaded before the number in the claims. Pairs with: `Sharing::offer`.
    // One of these words may already belong to the next offer. Then so does the number in the claims, and no piece of this offer can be
    // claimed.
    let word = |word| tables.load_acquire_u64(at + word);
    let (what, local, address) = (word(copy::KEY), word(copy::LOCAL_KEY), word(copy::LOCAL));
    let what = Shareable {
        errand: Errand((local >> 32) as u32),
        key: Key(what as u32),
        address: word(copy::ADDRESS),
        local: Element { address, length: (what >> 32) as u32, key: local as u32 },
    };
    (what.len() >= LEAST).then_some(Offer { tables, at, number, what })
}

impl<M: SharedMemory> Offer<'_, M> {
    /// Claims a piece for the owner and calls `copy` to copy it. Returns its length in bytes, or `None` if no piece is left. The caller
    /// must have announced what is about to be accessed.
    pub fn help(&self, copy: impl FnOnce(Range<usize>)) -> Option<usize> {
        let Self { tables, at, number, what } = self;
        let (word, pieces) = (at + copy::CLAIMS, what.pieces());
        let mut found = Claims(tables.load_relaxed_u64(word));
        for _ in 0..TRIES {
            let claimed = found.claim_back(pieces).filter(|_| found.is_of(*number))?;
            // ORDER verbs.claim: the claim comes before anything that the poster does after it has seen the claim. Pairs with:
            // `Sharing::next`.
            match tables.compare_exchange_u64(word, found.0, claimed.0) {
                Ok(()) => {
                    let piece = what.piece(pieces - claimed.back());
                    let len = piece.len();
                    copy(piece);
                    // ORDER verbs.copied: the copied piece is visible before the count. Pairs with: `Sharing::next`.
                    tables.fetch_add_u64(word, Claims::COPIED);
                    return Some(len);
                }
                Err(now) => found = Claims(now),
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_layout::verbs::{QpNumber, TABLES};
    use ginnel_shmem::Mapping;

    fn what(errand: Errand, length: u32) -> Shareable {
        let local = Element { address: 0, length, key: 5 };
        Shareable::new(Kind::RC, errand, Key(3), 0, &[local]).unwrap()
    }

    #[test]
    fn the_pieces_and_the_rest_cover_the_whole_copy() {
        for length in [LEAST as u32, LEAST as u32 + 1, 1 << 20, (1 << 20) - 1, 200 << 20, 1 << 31, u32::MAX] {
            for errand in [Errand::READ, Errand::WRITE] {
                let what = what(errand, length);
                let mut end = 0;
                for piece in 0..what.pieces() {
                    assert_eq!(what.piece(piece).start, end);
                    end = what.piece(piece).end;
                }
                assert_eq!(what.rest().start, end);
                assert_eq!(what.rest().end, length as usize);
                assert_eq!(what.rest().is_empty(), errand == Errand::READ);
                assert!(what.pieces() <= copy::MOST);
            }
        }
    }

    #[test]
    fn short_copies_and_those_of_several_elements_are_not_shared() {
        let element = |length, key| Element { address: 0, length, key };
        let new = |kind, elements: &[Element]| Shareable::new(kind, Errand::READ, Key(3), 0, elements);
        assert!(new(Kind::RC, &[element(LEAST as u32 - 1, 5)]).is_none());
        assert!(new(Kind::UC, &[element(LEAST as u32, 5)]).is_none());
        assert!(new(Kind::RC, &[element(LEAST as u32, Key::shadow(1, 1).0)]).is_none());
        assert!(new(Kind::RC, &[element(LEAST as u32, 5); 2]).is_none());
        assert!(new(Kind::RC, &[element(LEAST as u32, 5)]).is_some());
    }

    #[test]
    fn each_offer_has_a_new_number_and_ends() {
        let tables = Mapping::anonymous(TABLES).unwrap();
        let at = QpNumber::new(1, 1).and_then(QpNumber::copy_at).unwrap();
        assert!(find(&tables, at, 1).is_none());
        let what = what(Errand::READ, LEAST as u32);
        let mut sharing = Sharing::default();
        sharing.offer(&tables, at, 7, &what);
        assert!(find(&tables, at, 8).is_none(), "another incarnation");
        let offer = find(&tables, at, 7).unwrap();
        assert_eq!(offer.what, what);
        // The owner copies the last piece, and the poster copies all others.
        let mut copied = Vec::new();
        let len = copy::piece(LEAST);
        assert_eq!(offer.help(|piece| copied.push(piece)), Some(len));
        assert_eq!(copied, [what.piece(what.pieces() - 1)]);
        for piece in 0..what.pieces() - 1 {
            assert!(
                matches!(sharing.next(&tables, at, &what), Next::Copy(range) if range == what.piece(piece))
            );
        }
        assert!(matches!(sharing.next(&tables, at, &what), Next::End));
        assert!(matches!(sharing.next(&tables, at, &what), Next::End));
        assert_eq!(offer.help(|_| panic!("there is no piece left")), None);
        // An offer from a queue pair that is connected here later has another number.
        Sharing::default().offer(&tables, at, 7, &what);
        assert!(find(&tables, at, 7).is_some_and(|next| next.number != offer.number));
        assert_eq!(offer.help(|_| panic!("this offer has ended")), None);
        assert_eq!(tables.load_relaxed_u64(OFFERS), 2);
    }

    #[test]
    fn the_poster_waits_for_the_owners_last_piece_and_rejects_false_claims() {
        let tables = Mapping::anonymous(TABLES).unwrap();
        let at = QpNumber::new(1, 1).and_then(QpNumber::copy_at).unwrap();
        let word = at + copy::CLAIMS;
        let what = what(Errand::WRITE, LEAST as u32);
        let mut sharing = Sharing::default();
        sharing.offer(&tables, at, 7, &what);
        let claims = Claims(tables.load_relaxed_u64(word)).claim_back(what.pieces()).unwrap();
        tables.store_relaxed_u64(word, claims.0);
        for _ in 1..what.pieces() {
            assert!(matches!(sharing.next(&tables, at, &what), Next::Copy(_)));
        }
        assert!(matches!(sharing.next(&tables, at, &what), Next::Wait));
        // The request is tried again, but the offer stays the same.
        sharing.offer(&tables, at, 7, &what);
        assert!(matches!(sharing.next(&tables, at, &what), Next::Wait));
        let honest = tables.load_relaxed_u64(word);
        for lie in [0, u64::MAX, honest + (1 << 13), honest - (1 << 26), honest + 2, honest - (1 << 13)] {
            tables.store_relaxed_u64(word, lie);
            assert!(matches!(sharing.next(&tables, at, &what), Next::Corrupt), "{lie:#x}");
        }
        tables.store_relaxed_u64(word, honest + Claims::COPIED);
        assert!(matches!(sharing.next(&tables, at, &what), Next::End));
    }
}

/// Models of the poster and the owner: two copies of a few pieces, one after the other. Each source word is overwritten once its copy
/// has ended, and each copied word is checked then, so a piece that is copied twice or too late shows up as a race.
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use ginnel_shmem::{LoomMemory, Order};
    use loom::thread;

    const AT: usize = 0;
    const FROM: usize = 64;
    const TO: usize = 128;
    /// Lengths of the two copies. The second one has more pieces.
    const LENS: [usize; 2] = [48, 64];

    fn copy_piece(memory: &LoomMemory, piece: Range<usize>) {
        memory.copy_into(FROM + piece.start, memory, TO + piece.start, piece.len());
    }

    fn shared((owners, posters): (Option<Order>, Option<Order>)) {
        let words = [copy::OFFER, copy::ADDRESS, copy::KEY, copy::LOCAL, copy::LOCAL_KEY, copy::CLAIMS];
        let words = words.map(|word| AT + word).into_iter();
        let data = (0..LENS[1]).step_by(8).flat_map(|at| [FROM + at, TO + at]);
        let memory = LoomMemory::new(256, words.chain(data));
        let side = |lacks: Option<Order>| lacks.map_or(memory.clone(), |order| memory.without(order));
        let (owner, poster) = (side(owners), side(posters));
        let owner = thread::spawn(move || {
            for _ in 0..2 {
                if let Some(offer) = find(&owner, AT, 1) {
                    offer.help(|piece| copy_piece(&owner, piece));
                }
            }
        });
        let mut sharing = Sharing::default();
        for (value, len) in (1_u64..).zip(LENS) {
            let local = Element { address: 0, length: len as u32, key: 5 };
            let what = Shareable::new(Kind::RC, Errand::READ, Key(3), 0, &[local]).unwrap();
            for at in (0..len).step_by(8) {
                poster.write(FROM + at, &value.to_ne_bytes());
            }
            sharing.offer(&poster, AT, 1, &what);
            loop {
                match sharing.next(&poster, AT, &what) {
                    Next::Copy(piece) => copy_piece(&poster, piece),
                    Next::Wait => thread::yield_now(),
                    Next::Corrupt => panic!("assertion: corrupt"),
                    Next::End => break,
                }
            }
            for at in (0..len).step_by(8) {
                let mut bytes = [0; 8];
                poster.read(TO + at, &mut bytes);
                assert_eq!(u64::from_ne_bytes(bytes), value, "assertion");
            }
        }
        owner.join().unwrap();
    }

    fn explore(lacks: (Option<Order>, Option<Order>)) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(3));
        builder.check(move || shared(lacks));
    }

    #[test]
    fn each_piece_is_copied_once_and_before_the_end() {
        explore((None, None));
    }

    #[test]
    fn without_an_order_a_piece_is_copied_too_early_or_too_late() {
        let each = [
            (Some(Order::Release), None),
            (Some(Order::Acquire), None),
            (None, Some(Order::Release)),
            (None, Some(Order::Acquire)),
        ];
        for lacks in each {
            let failure = std::panic::catch_unwind(|| explore(lacks));
            assert!(failure.is_err(), "the model passes although an ordering is missing: {lacks:?}");
        }
    }
}
