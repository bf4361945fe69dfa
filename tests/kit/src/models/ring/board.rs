//! Rings whose consumers sleep on a readiness board, while a scribbler writes to the board and to their wake words.
//!
//! Anything may come out of a ring, and a wake-up may be missed. But every call must return; a lane must not name a slot that
//! it does not have, nor the same slot twice in one look; nothing outside the segment may change; and once the scribbler is
//! gone, a producer must reach the sleeper again.

use super::GUARD;
use crate::models::Op;
use ginnel_layout::board::{self, ARMED, BITS, Place, SUMMARY};
use ginnel_layout::ring::{DATA_ARMED, DATA_NOTIFY, MIN_CAPACITY, SideState, footprint};
use ginnel_layout::{CACHE_LINE, PAGE};
use ginnel_ring::board::{Lane, Poster};
use ginnel_ring::wait::{Watch, Watchable, notified_at};
use ginnel_ring::{RecvError, message};
use ginnel_shmem::{Mapping, SharedMemory};
use std::collections::BTreeSet;

const RINGS: usize = 3;
const STRIDE: usize = footprint(MIN_CAPACITY).next_multiple_of(PAGE);
/// Offset of the board. (No board lies at the start of a segment.)
const BOARD: usize = PAGE;
const FIRST_RING: usize = 2 * PAGE;
const LEN: usize = FIRST_RING + RINGS * STRIDE;

/// Runs operations of all sides, and between them scribbles, which are the operations whose code has the top bit.
pub fn run(ops: impl IntoIterator<Item = Op>) {
    let whole = Mapping::anonymous(LEN + 2 * GUARD).unwrap();
    for at in [0, GUARD + LEN] {
        whole.write(at, &[0xa5; GUARD]);
    }
    let segment = whole.part(GUARD, LEN).unwrap();
    let mut world = World::new(&segment);
    for op in ops {
        if op.code & 0x80 != 0 { scribble(&segment, op) } else { world.step(op) }
    }
    world.reaches_again();
    for at in [0, GUARD + LEN] {
        let mut bytes = [0; GUARD];
        whole.read(at, &mut bytes);
        assert!(bytes == [0xa5; GUARD], "bytes outside the segment have changed");
    }
}

/// A ring, and the means by which its producer wakes its consumer.
struct Ring {
    memory: Mapping,
    slot: usize,
    producer: message::Producer<Mapping>,
    consumer: message::Consumer<Mapping>,
    rest: Option<Watch<Mapping>>,
    /// The lane that the consumer has named last, and its memory.
    named: Option<(u64, Mapping)>,
    poster: Poster,
}

struct World {
    segment: Mapping,
    lane: Lane<Mapping>,
    lane_at: u64,
    rings: Vec<Ring>,
}

impl World {
    fn new(segment: &Mapping) -> Self {
        // Not the first lane, so that there is another one on each side of it.
        let lane_at = BOARD + board::LANE;
        let lane = Lane::new(segment.part(lane_at, board::LANE).unwrap());
        let ring = |n: usize| {
            let memory = segment.part(FIRST_RING + n * STRIDE, footprint(MIN_CAPACITY)).unwrap();
            let producer = message::Producer::new(memory.clone(), MIN_CAPACITY);
            let mut consumer = message::Consumer::new(memory.clone(), MIN_CAPACITY);
            let slot = [0, 64, board::SLOTS - 1][n];
            consumer.notify_at(Place::new(lane_at as u64, slot));
            Ring { memory, slot, producer, consumer, rest: None, named: None, poster: Poster::default() }
        };
        let rings = (0..RINGS).map(ring).collect();
        Self { segment: segment.clone(), lane, lane_at: lane_at as u64, rings }
    }

    fn step(&mut self, op: Op) {
        let n = usize::from(op.a) % RINGS;
        match op.code % 6 {
            0 | 1 => {
                let _ = self.rings[n].send(&self.segment);
            }
            2 => self.rings[n].rests(),
            3 => self.rings[n].works(),
            4 => {
                let taken = self.take();
                for ring in self.rings.iter_mut().filter(|ring| taken.contains(&ring.slot)) {
                    ring.works();
                }
            }
            _ if op.b.is_multiple_of(2) => self.lane.arm(),
            _ => self.lane.disarm(),
        }
    }

    fn take(&self) -> BTreeSet<usize> {
        let mut taken = BTreeSet::new();
        self.lane.take(|slot| {
            assert!(slot < board::SLOTS, "slot {slot} is none of the lane's");
            assert!(taken.insert(slot), "slot {slot} twice");
        });
        taken
    }

    /// Checks, after the scribbler is gone, that each message for a consumer that rests appears in its slot, and that the
    /// sleeper is rung. The first message need not ring, since the scribbler may have used its token before.
    fn reaches_again(&mut self) {
        let memory = self.segment.part(BOARD, board::LEN).unwrap();
        memory.write(0, &[0; board::LEN]);
        for n in 0..RINGS {
            let ring = &mut self.rings[n];
            let (memory, slot) = (ring.memory.clone(), ring.slot);
            memory.write(0, &vec![0; memory.len()]);
            let producer = message::Producer::new(memory.clone(), MIN_CAPACITY);
            let mut consumer = message::Consumer::new(memory.clone(), MIN_CAPACITY);
            consumer.notify_at(Place::new(self.lane_at, slot));
            // The lane's memory and the poster are kept.
            let (named, poster) = (ring.named.take(), std::mem::take(&mut ring.poster));
            *ring = Ring { memory, slot, producer, consumer, rest: None, named, poster };
            let mut rung = 0;
            for _ in 0..2 {
                self.rings[n].rests();
                self.lane.arm();
                rung += u32::from(self.rings[n].send(&self.segment));
                assert_eq!(self.take(), BTreeSet::from([slot]));
                self.lane.disarm();
                self.rings[n].works();
            }
            assert!(rung > 0, "the sleeper is not rung");
        }
    }
}

impl Ring {
    /// Sends a message. Returns true if a doorbell is rung for it.
    fn send(&mut self, segment: &Mapping) -> bool {
        match self.producer.send(&[7; 8]) {
            Ok(true) => self.wake(segment),
            _ => false,
        }
    }

    /// Does what a program does when it finds the other side armed: it reads the place from that side's word, and checks it.
    fn wake(&mut self, segment: &Mapping) -> bool {
        let place = notified_at(&self.memory, DATA_ARMED);
        if self.named.as_ref().is_none_or(|(at, _)| *at != place.lane()) {
            let lane =
                place.board().and_then(|_| segment.part(usize::try_from(place.lane()).ok()?, board::LANE));
            let Some(lane) = lane.filter(|_| place != Place::NONE) else { return true };
            (self.named, self.poster) = (Some((place.lane(), lane)), Poster::default());
        }
        self.named.as_ref().is_none_or(|(_, lane)| self.poster.post(lane, place.slot()))
    }

    /// Lets the consumer rest if there is nothing for it.
    fn rests(&mut self) {
        if self.rest.is_some() || self.consumer.poll() != Err(RecvError::Empty) {
            return;
        }
        let mut watch = self.consumer.watch();
        watch.arm();
        if watch.look.has_changed() {
            watch.disarm();
            return self.consumer.unwatch(watch);
        }
        self.rest = Some(watch);
    }

    /// Lets the consumer process what is there.
    fn works(&mut self) {
        if let Some(mut watch) = self.rest.take() {
            watch.disarm();
            self.consumer.unwatch(watch);
        }
        // At most as many messages as there can be, whatever the scribbler writes.
        for _ in 0..MIN_CAPACITY / CACHE_LINE {
            if self.consumer.recv(&mut [0; 8]).is_err() {
                return;
            }
        }
    }
}

/// Writes something to the board, or beside a ring's wake word, that no correct program writes.
fn scribble(segment: &Mapping, op: Op) {
    let (a, b) = (usize::from(op.a), u64::from(op.b));
    let value = (b << 48 | b).rotate_left(u32::from(op.a));
    let lane = BOARD + a % board::LANES * board::LANE;
    let ring = FIRST_RING + a % RINGS * STRIDE;
    match op.code % 8 {
        0 => segment.store_relaxed_u64(lane + SUMMARY, value),
        1 => segment.store_relaxed_u64(lane + BITS + a / 8 % board::WORDS * 8, value),
        2 => segment.store_relaxed_u32(lane + ARMED, u32::from(op.b)),
        // A place that a board could have, in the segment or far from it.
        3 => {
            let place = Place::new(b % 16 * PAGE as u64 + (b / 16 % 8) * board::LANE as u64, a);
            segment.store_relaxed_u64(ring + DATA_NOTIFY, place.0);
        }
        4 => segment.store_relaxed_u64(ring + DATA_NOTIFY, value),
        5 => segment.store_relaxed_u32(ring + DATA_ARMED, u32::from(op.b)),
        6 => segment.store_relaxed_u32(
            ring + ginnel_layout::ring::PRODUCER_STATE,
            u32::from(op.b % 7) & !SideState::OPEN.0,
        ),
        _ => {
            let len = usize::from(op.b) % 512;
            segment.write(BOARD + a % (board::LEN - len), &vec![op.b as u8; len]);
        }
    }
}
