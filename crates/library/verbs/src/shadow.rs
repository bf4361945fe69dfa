//! Shadow regions: registered memory that cannot lie in an arena, so that peers cannot reach it.
//!
//! The owner's process accesses such memory on behalf of the peer. The peer writes a request into the owner's queue pair, and rings the
//! doorbell. A thread of the owner's library, or a program thread that polls there, executes the request and answers. Meanwhile the
//! peer's work request waits, like one that finds no receive. A queue pair has one such request, an *errand*, at a time. The data passes
//! through the *bounce area*, which is memory in an arena of the owner that only this queue pair uses. A work request that is longer
//! than the bounce area is split into several errands.
//!
//! The memory ordering is that of a mailbox with one slot. The peer writes its data and words before the number of the errand, and the
//! owner reads the number first. The owner accesses its memory and the bounce area before it answers, and the peer reads the answer
//! first. The peer changes nothing in the mailbox before there is an answer.
//!
//! Both sides treat the contents of the mailbox as untrusted. The owner checks the region, its bounds and its access rights in private
//! memory, and the peer accesses nothing outside the owner's arenas.

use crate::peer::Peer;
use crate::program::ProgramMemory;
use crate::regions::Region;
use crate::work::{Element, Status};
use ginnel_layout::verbs::{Access, Errand, Key, Place, qp};
use ginnel_shmem::SharedMemory;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The length of the largest bounce area, in bytes.
pub const MOST: usize = 64 << 10;
/// The length of the smallest bounce area, in bytes.
pub const LEAST: usize = 4 << 10;

/// A peer that has not answered for this long is rung again, although it should have noticed the first time. A loom model has no time.
const AGAIN: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(10) };

/// Memory in an arena of this endpoint, through which data passes on its way to the program's memory.
#[derive(Clone, Debug)]
pub struct Bounce<M> {
    /// The place at which peers find it.
    pub place: Place,
    /// The mapping that contains it.
    pub memory: M,
    /// The offset in `memory`.
    pub at: usize,
    /// The length in bytes.
    pub len: usize,
}

/// An errand, as the peer requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErrandRequest {
    pub errand: Errand,
    pub key: Key,
    pub address: u64,
    /// Number of bytes of this errand, which begin at the start of the bounce area.
    pub length: u32,
    /// Number of bytes of the work request that are not done yet, from the address on.
    pub rest: u32,
    /// The operands of an atomic operation: the value to compare with or to add, then the value to swap in.
    pub operands: [u64; 2],
}

/// The owner's state of a queue pair's errands.
pub(crate) struct ErrandServer<M> {
    bounce: Bounce<M>,
    /// Number of the errand that was done last.
    done: Mutex<u32>,
}

impl<M: SharedMemory> ErrandServer<M> {
    /// Returns a server with a bounce area of `most` bytes, or fewer if there is little room. Returns `None` if there is no room for the
    /// smallest one.
    pub fn new(most: usize, take: impl Fn(usize) -> Option<Bounce<M>>) -> Option<Self> {
        let sizes =
            std::iter::successors(Some(most), |size| Some(size / 2)).take_while(|size| *size >= LEAST);
        let bounce = sizes.filter_map(take).next()?;
        Some(Self { bounce, done: Mutex::new(0) })
    }

    pub fn bounce(&self) -> &Bounce<M> {
        &self.bounce
    }

    pub fn into_bounce(self) -> Bounce<M> {
        self.bounce
    }

    /// Publishes the bounce area, so that peers may request errands.
    pub fn publish(&self, tables: &M, at: usize) {
        tables.store_relaxed_u64(at + qp::ANSWER, 0);
        tables.store_relaxed_u64(at + qp::BOUNCE, self.bounce.place.0);
        // ORDER verbs.bounce: the place is visible before its size. Pairs with: `ErrandClient::bounce`.
        tables.store_release_u32(at + qp::ROOM, self.bounce.len as u32);
    }

    /// Locks the errands of this queue pair, so that threads execute one at a time. The guard has the number of the last one done.
    pub fn turn(&self) -> MutexGuard<'_, u32> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the errand that the peer of this incarnation requests, and the errand, unless it is the one that was done
    /// last.
    pub fn asked(&self, tables: &M, at: usize, incarnation: u32, done: u32) -> Option<(u32, ErrandRequest)> {
        // ORDER verbs.asked: the number is loaded before the errand, and before the bytes in the bounce area. Pairs with:
        // `ErrandClient::ask`.
        let word = tables.load_acquire_u64(at + qp::ASKED);
        let number = word as u32;
        if (word >> 32) as u32 != incarnation || number == done {
            return None;
        }
        let (what, size) =
            (tables.load_relaxed_u64(at + qp::ASKED_KEY), tables.load_relaxed_u64(at + qp::ASKED_LENGTH));
        let asked = ErrandRequest {
            errand: Errand((what >> 32) as u32),
            key: Key(what as u32),
            address: tables.load_relaxed_u64(at + qp::ASKED_ADDRESS),
            length: size as u32,
            rest: (size >> 32) as u32,
            operands: [qp::ASKED_FIRST, qp::ASKED_SECOND].map(|word| tables.load_relaxed_u64(at + word)),
        };
        Some((number, asked))
    }

    /// Publishes the result of an errand.
    pub fn answer(&self, tables: &M, at: usize, number: u32, status: Status) {
        // ORDER verbs.answer: all accesses are visible before the answer. Pairs with: `ErrandClient::take_answer`.
        tables.store_release_u64(at + qp::ANSWER, u64::from(number) << 32 | u64::from(status.0));
    }
}

impl ErrandRequest {
    /// Returns the access right that the peer and the region must allow. Returns `None` if the errand is invalid, or does not fit into a
    /// bounce area of this size.
    pub fn wanted(&self, room: usize) -> Option<u32> {
        let Self { errand, address, length, rest, .. } = *self;
        let fits = length > 0 && length <= rest && length as usize <= room;
        match errand {
            Errand::WRITE if fits => Some(Access::REMOTE_WRITE),
            Errand::READ if fits => Some(Access::REMOTE_READ),
            Errand::COMPARE_AND_SWAP | Errand::FETCH_AND_ADD
                if (length, rest) == (8, 8) && address.is_multiple_of(8) =>
            {
                Some(Access::REMOTE_ATOMIC)
            }
            _ => None,
        }
    }

    /// Executes the errand, if the region allows it to a queue pair in this protection domain. The caller ensures that the region is not
    /// removed meanwhile.
    pub fn execute<M: SharedMemory>(
        &self,
        program: &impl ProgramMemory<M>,
        bounce: &Bounce<M>,
        region: &Region,
        wanted: u32,
        domain: u32,
    ) -> Status {
        let Self { errand, address, length, .. } = *self;
        let all = Element { address, length: self.rest, key: self.key.0 };
        if !region.allows(&all, wanted, domain) {
            return Status::REM_ACCESS_ERR;
        }
        let length = length as usize;
        if !program.is_there(address, length, errand != Errand::READ) {
            return Status::REM_OP_ERR;
        }
        let Bounce { memory, at, .. } = bounce;
        let [first, second] = self.operands;
        match errand {
            Errand::WRITE => program.deliver(memory, *at, address, length),
            Errand::READ => program.copy_in(address, memory, *at, length, false),
            Errand::COMPARE_AND_SWAP => {
                memory.write(*at, &program.compare_exchange(address, first, second).to_ne_bytes());
            }
            _ => memory.write(*at, &program.fetch_add(address, first).to_ne_bytes()),
        }
        Status::SUCCESS
    }
}

/// The peer's state of a queue pair's errands.
pub(crate) struct ErrandClient<M> {
    /// The owner's bounce area: its mapping, offset and length.
    bounce: Option<(M, usize, usize)>,
    /// The errand that has not been answered yet.
    pending: Option<Pending>,
    /// Number of bytes of the work request that are done.
    done: u32,
}

#[derive(Clone, Copy)]
struct Pending {
    number: u32,
    length: u32,
    since: Instant,
}

/// The progress of a work request.
pub(crate) enum Step {
    /// There is no answer yet.
    Waits,
    /// The work request is complete.
    Done,
    /// The work request has failed, or the owner does not accept errands.
    Failed(Status),
}

/// The words of a queue pair: its owner, its offset in the owner's tables, and the incarnation for which the words are valid.
pub(crate) struct PeerWords<'a, M> {
    pub peer: &'a Peer<M>,
    pub at: usize,
    pub incarnation: u32,
}

// These impls are written by hand, because derived ones would require `M` to be `Clone` and `Copy`.
impl<M> Clone for PeerWords<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for PeerWords<'_, M> {}

impl<M: SharedMemory> ErrandClient<M> {
    pub fn new() -> Self {
        Self { bounce: None, pending: None, done: 0 }
    }

    /// Gives up the current work request, which has ended without an answer.
    pub fn forget(&mut self) {
        (self.pending, self.done) = (None, 0);
    }

    /// Continues a work request as far as possible without waiting. The caller calls this with the same request until it is done. `fill`
    /// copies data of the request into the bounce area, and `drain` copies data out of it. Their arguments are the mapping of the bounce
    /// area, its offset, the first byte of the request, and the number of bytes. The caller must have announced in the queue pair that
    /// it accesses what belongs to it.
    pub fn proceed(
        &mut self,
        to: PeerWords<'_, M>,
        asked: &ErrandRequest,
        fill: impl FnOnce(&M, usize, usize, usize),
        drain: impl FnOnce(&M, usize, usize, usize),
    ) -> Step {
        let Some((memory, at, room)) = self.bounce(to) else { return Step::Failed(Status::REM_ACCESS_ERR) };
        if let Some(pending) = &mut self.pending {
            let Some(status) = take_answer(to, pending.number) else {
                if pending.since.elapsed() >= AGAIN {
                    pending.since = Instant::now();
                    to.peer.ring();
                }
                return Step::Waits;
            };
            let length = pending.length;
            self.pending = None;
            if status != Status::SUCCESS {
                self.done = 0;
                return Step::Failed(status);
            }
            drain(&memory, at, self.done as usize, length as usize);
            self.done += length;
            if self.done == asked.rest {
                self.done = 0;
                return Step::Done;
            }
        }
        let rest = asked.rest - self.done;
        let length = rest.min(room as u32);
        let Some(number) = next_number(to) else {
            to.peer.ring();
            return Step::Waits;
        };
        fill(&memory, at, self.done as usize, length as usize);
        ask(
            to,
            number,
            &ErrandRequest { address: asked.address.wrapping_add(self.done.into()), length, rest, ..*asked },
        );
        self.pending = Some(Pending { number, length, since: Instant::now() });
        Step::Waits
    }

    /// Returns the owner's bounce area, and looks it up the first time.
    fn bounce(&mut self, to: PeerWords<'_, M>) -> Option<(M, usize, usize)> {
        if self.bounce.is_none() {
            let tables = to.peer.tables();
            // ORDER verbs.bounce: the size is loaded before the place. Pairs with: `ErrandServer::publish`.
            let room = tables.load_acquire_u32(to.at + qp::ROOM) as usize;
            if !(LEAST..=MOST).contains(&room) {
                return None;
            }
            let place = Place(tables.load_relaxed_u64(to.at + qp::BOUNCE));
            let (memory, at) = to.peer.place(place, room)?;
            self.bounce = Some((memory, at, room));
        }
        self.bounce.clone()
    }
}

/// Returns the number of the next errand. Returns `None` while an errand of an earlier sender is unanswered.
fn next_number<M: SharedMemory>(to: PeerWords<'_, M>) -> Option<u32> {
    let tables = to.peer.tables();
    let asked = tables.load_acquire_u64(to.at + qp::ASKED);
    // ORDER verbs.answer: as in `take_answer`.
    let answered = (tables.load_acquire_u64(to.at + qp::ANSWER) >> 32) as u32;
    let is_free = (asked >> 32) as u32 != to.incarnation || asked as u32 == answered;
    is_free.then(|| answered.wrapping_add(1))
}

fn ask<M: SharedMemory>(to: PeerWords<'_, M>, number: u32, asked: &ErrandRequest) {
    let (tables, at) = (to.peer.tables(), to.at);
    let ErrandRequest { errand, key, address, length, rest, operands: [first, second] } = *asked;
    tables.store_relaxed_u64(at + qp::ASKED_ADDRESS, address);
    tables.store_relaxed_u64(at + qp::ASKED_KEY, u64::from(errand.0) << 32 | u64::from(key.0));
    tables.store_relaxed_u64(at + qp::ASKED_LENGTH, u64::from(rest) << 32 | u64::from(length));
    tables.store_relaxed_u64(at + qp::ASKED_FIRST, first);
    tables.store_relaxed_u64(at + qp::ASKED_SECOND, second);
    // ORDER verbs.asked: the errand and its bytes are visible before its number. Pairs with: `ErrandServer::asked`.
    tables.store_release_u64(at + qp::ASKED, u64::from(to.incarnation) << 32 | u64::from(number));
    // A doorbell that is too full for another ring is about to be read, so this store must be visible by then.
    tables.full_fence();
    to.peer.ring();
}

/// Returns the result of an errand once it has been answered.
fn take_answer<M: SharedMemory>(to: PeerWords<'_, M>, number: u32) -> Option<Status> {
    // ORDER verbs.answer: the answer is loaded before the bytes in the bounce area. Pairs with: `ErrandServer::answer`.
    let answer = to.peer.tables().load_acquire_u64(to.at + qp::ANSWER);
    ((answer >> 32) as u32 == number).then_some(Status(answer as u32))
}
