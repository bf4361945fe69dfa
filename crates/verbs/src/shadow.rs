//! Shadow regions: memory that cannot lie in an arena, so that peers cannot reach it.
//!
//! What a peer would do to such memory, the owner's process does. The peer asks for it in the owner's queue pair, and rings; a thread of the
//! owner's library, or whoever polls there, does it and answers. Meanwhile the request waits in the peer's queue pair, as one does
//! that finds no receive. A queue pair has one such *errand* at a time. Its bytes go through the *bounce area*, memory of an arena of the
//! owner's that only this queue pair has; a request that is longer than the area is done in pieces, each of which is an errand.
//!
//! The order of things is that of one letter box: the peer puts its bytes and words before the errand's number, and the owner looks at the
//! number first; the owner accesses its memory and the bounce area before it answers, and the peer looks at the answer first. The peer
//! changes nothing in the box before there is an answer.
//!
//! Both sides take what they find in the box for a stranger's: the owner checks the region, its bounds and rights in its private books, and
//! the peer accesses nothing outside of the owner's arenas.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ginnel_layout::verbs::{Access, Errand, Key, Place, qp};
use ginnel_shmem::SharedMemory;

use crate::peer::Peer;
use crate::program::Program;
use crate::regions::Region;
use crate::work::{Element, Status};

/// The largest bounce area, and the smallest.
pub const MOST: usize = 64 << 10;
/// See above.
pub const LEAST: usize = 4 << 10;

/// A peer that has not answered for so long is rung again. It should have heard the first time. (In a model there is no time.)
const AGAIN: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(10) };

/// Memory of an arena of this endpoint's, for bytes on their way to memory of the program.
#[derive(Clone, Debug)]
pub struct Bounce<M> {
    /// Where it lies, as peers find it.
    pub place: Place,
    /// The memory that it lies in, and where.
    pub memory: M,
    /// See above.
    pub at: usize,
    /// Its bytes.
    pub len: usize,
}

/// What a peer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub errand: Errand,
    pub key: Key,
    pub address: u64,
    /// Of a bounce area, from its beginning.
    pub length: u32,
    /// From the address on, all bytes of the request that are not done yet.
    pub rest: u32,
    /// What is compared with, or added; then what is put.
    pub operands: [u64; 2],
}

/// The owner's side of a queue pair's errands.
pub(crate) struct Servant<M> {
    bounce: Bounce<M>,
    /// The last one that was done.
    done: Mutex<u32>,
}

impl<M: SharedMemory> Servant<M> {
    /// With a bounce area of so many bytes, or as many as there is room for. `None` if there is none.
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

    /// Peers may ask from now on.
    pub fn publish(&self, tables: &M, at: usize) {
        tables.store_relaxed_u64(at + qp::ANSWER, 0);
        tables.store_relaxed_u64(at + qp::BOUNCE, self.bounce.place.0);
        // ORDER verbs.bounce: the place before its size. Pairs with: `Asker::bounce`.
        tables.store_release_u32(at + qp::ROOM, self.bounce.len as u32);
    }

    /// Errands are done one after the other, by whichever thread looks; whoever has this is the only one.
    pub fn turn(&self) -> MutexGuard<'_, u32> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the peer of this incarnation asks for, and its number, if that is not the one that was done last.
    pub fn asked(&self, tables: &M, at: usize, incarnation: u32, done: u32) -> Option<(u32, Asked)> {
        // ORDER verbs.asked: the number before the errand, and before the bytes in the bounce area. Pairs with: `Asker::ask`.
        let word = tables.load_acquire_u64(at + qp::ASKED);
        let number = word as u32;
        if (word >> 32) as u32 != incarnation || number == done {
            return None;
        }
        let (what, size) =
            (tables.load_relaxed_u64(at + qp::ASKED_KEY), tables.load_relaxed_u64(at + qp::ASKED_LENGTH));
        let asked = Asked {
            errand: Errand((what >> 32) as u32),
            key: Key(what as u32),
            address: tables.load_relaxed_u64(at + qp::ASKED_ADDRESS),
            length: size as u32,
            rest: (size >> 32) as u32,
            operands: [qp::ASKED_FIRST, qp::ASKED_SECOND].map(|word| tables.load_relaxed_u64(at + word)),
        };
        Some((number, asked))
    }

    /// Says what has come of an errand.
    pub fn answer(&self, tables: &M, at: usize, number: u32, status: Status) {
        // ORDER verbs.answer: all accesses before the answer. Pairs with: `Asker::take_answer`.
        tables.store_release_u64(at + qp::ANSWER, u64::from(number) << 32 | u64::from(status.0));
    }
}

impl Asked {
    /// What the peer and the region must allow for it, if it can be done with so much room.
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

    /// Does it, if the region allows that to a queue pair in this domain. The region stays meanwhile.
    pub fn execute<M: SharedMemory>(
        &self,
        program: &impl Program<M>,
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

/// The peer's side of a queue pair's errands.
pub(crate) struct Asker<M> {
    /// The owner's bounce area, and how large it is.
    bounce: Option<(M, usize, usize)>,
    /// The errand that has no answer yet.
    pending: Option<Pending>,
    /// Bytes of the request that were done.
    done: u32,
}

#[derive(Clone, Copy)]
struct Pending {
    number: u32,
    length: u32,
    since: Instant,
}

/// How far a request has come.
pub(crate) enum Step {
    /// There is no answer yet.
    Waits,
    /// It is done.
    Done,
    /// It has failed, or cannot be asked for.
    Failed(Status),
}

/// Where a queue pair's words are: its owner, their place in the tables, and the incarnation that they are of.
pub(crate) struct Way<'a, M> {
    pub peer: &'a Peer<M>,
    pub at: usize,
    pub incarnation: u32,
}

// By hand, because a derived one would ask the same of `M`.
impl<M> Clone for Way<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Way<'_, M> {}

impl<M: SharedMemory> Asker<M> {
    pub fn new() -> Self {
        Self { bounce: None, pending: None, done: 0 }
    }

    /// The request has ended without an answer, which nobody looks for any more.
    pub fn forget(&mut self) {
        (self.pending, self.done) = (None, 0);
    }

    /// Goes on with a request as far as that is possible now: to be called until it is done, with the same one. `fill` puts bytes of the
    /// request into the bounce area, `drain` takes them out: the area, where in it, from which byte of the request on, and how many.
    /// The caller has said in the queue pair that it accesses what belongs to it.
    pub fn proceed(
        &mut self,
        to: Way<'_, M>,
        asked: &Asked,
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
            &Asked { address: asked.address.wrapping_add(self.done.into()), length, rest, ..*asked },
        );
        self.pending = Some(Pending { number, length, since: Instant::now() });
        Step::Waits
    }

    /// The bounce area.
    fn bounce(&mut self, to: Way<'_, M>) -> Option<(M, usize, usize)> {
        if self.bounce.is_none() {
            let tables = to.peer.tables();
            // ORDER verbs.bounce: the size before the place. Pairs with: `Servant::publish`.
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

/// The number of the next errand. `None` while there is one of somebody who was here before.
fn next_number<M: SharedMemory>(to: Way<'_, M>) -> Option<u32> {
    let tables = to.peer.tables();
    let asked = tables.load_acquire_u64(to.at + qp::ASKED);
    // ORDER verbs.answer: as in `take_answer`.
    let answered = (tables.load_acquire_u64(to.at + qp::ANSWER) >> 32) as u32;
    let is_free = (asked >> 32) as u32 != to.incarnation || asked as u32 == answered;
    is_free.then(|| answered.wrapping_add(1))
}

fn ask<M: SharedMemory>(to: Way<'_, M>, number: u32, asked: &Asked) {
    let (tables, at) = (to.peer.tables(), to.at);
    let Asked { errand, key, address, length, rest, operands: [first, second] } = *asked;
    tables.store_relaxed_u64(at + qp::ASKED_ADDRESS, address);
    tables.store_relaxed_u64(at + qp::ASKED_KEY, u64::from(errand.0) << 32 | u64::from(key.0));
    tables.store_relaxed_u64(at + qp::ASKED_LENGTH, u64::from(rest) << 32 | u64::from(length));
    tables.store_relaxed_u64(at + qp::ASKED_FIRST, first);
    tables.store_relaxed_u64(at + qp::ASKED_SECOND, second);
    // ORDER verbs.asked: the errand and its bytes before its number. Pairs with: `Servant::asked`.
    tables.store_release_u64(at + qp::ASKED, u64::from(to.incarnation) << 32 | u64::from(number));
    // A doorbell that has no room for another ring is about to be looked at: this store must be there by then.
    tables.full_fence();
    to.peer.ring();
}

/// What has come of an errand, once something has.
fn take_answer<M: SharedMemory>(to: Way<'_, M>, number: u32) -> Option<Status> {
    // ORDER verbs.answer: the answer before what is in the bounce area. Pairs with: `Servant::answer`.
    let answer = to.peer.tables().load_acquire_u64(to.at + qp::ANSWER);
    ((answer >> 32) as u32 == number).then_some(Status(answer as u32))
}
