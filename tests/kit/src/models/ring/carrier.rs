//! A stream that leaves the kernel's connection for a ring, that ring for larger ones, and goes back to the kernel's
//! connection in between, compared with a queue; and a scribbler that writes to the words of the change-over.
//!
//! Without scribbles, each byte must arrive once, in order, by whichever carrier. With scribbles, anything may arrive, but
//! the receiver must not take more from the earlier carrier than the word allows at that moment, a position that has passed
//! must be [`Corrupt`], and nothing outside the rings may change.

use super::{Arena, size};
use crate::models::Op;
use ginnel_layout::ring::{BASE, END, MIN_CAPACITY, READY, RECALL, REPEATED, RESUME};
use ginnel_ring::carrier::{self, Earlier, Place};
use ginnel_ring::{Corrupt, RecvError, SendError, stream};
use ginnel_shmem::{Mapping, SharedMemory};
use std::collections::VecDeque;
use std::ops::Range;

/// Number of rings, which are used one after the other.
const RINGS: usize = 6;
/// The byte that wakes the peer over the kernel's connection.
const WAKE: u8 = 0xff;

/// Runs operations of both sides, and between them scribbles, which are the operations whose code has the top bit.
pub fn run(ops: impl IntoIterator<Item = Op>) {
    let arenas: [Arena; RINGS] = std::array::from_fn(|i| Arena::new(MIN_CAPACITY << (i % 3)));
    let mut world = World::new(&arenas);
    for op in ops {
        if op.code & 0x80 != 0 {
            world.scribble(op);
        } else if world.step(op).is_err() {
            assert!(world.scribbled, "an honest change-over is refused");
            break;
        }
    }
    if !world.scribbled {
        world.finish();
    }
}

struct Ring {
    memory: Mapping,
    producer: stream::Producer<Mapping>,
    consumer: stream::Consumer<Mapping>,
}

/// Progress of a side.
#[derive(Default)]
struct Side {
    /// Number of rings that it has reached.
    rings: usize,
    /// Whether the last of them carries the stream; if not, the kernel does.
    in_ring: bool,
    /// Bytes that have gone through the kernel, wake bytes included.
    kernel: u64,
}

impl Side {
    fn ring(&self) -> Option<usize> {
        self.in_ring.then(|| self.rings - 1)
    }

    fn earlier(&self) -> Earlier {
        if self.in_ring { Earlier::Ring } else { Earlier::Kernel }
    }
}

struct World {
    /// Content of the kernel's connection: bytes of the stream, and wake bytes.
    kernel: VecDeque<u8>,
    rings: Vec<Ring>,
    producer: Side,
    consumer: Side,
    /// The carrier in which the consumer counts, for the next ring.
    counts: Option<Earlier>,
    /// Set while the consumer is about to receive from the kernel again: bytes that must have gone through the kernel first,
    /// which are wake bytes, and the number of repeated bytes that follow.
    resume: Option<(u64, u64)>,
    /// Bytes that the consumer has taken as wake bytes.
    stash: VecDeque<u8>,
    /// Set while the producer is about to leave its ring: bytes that it had sent over the kernel's connection by then, and
    /// the bytes that it sends there once more.
    leaving: Option<(u64, VecDeque<u8>)>,
    /// Ranges of the kernel's connection in which bytes were sent once more, but not all of them.
    useless: Vec<Range<u64>>,
    /// Bytes that have been sent and not received.
    under_way: VecDeque<u8>,
    next: u8,
    scribbled: bool,
}

impl World {
    fn new(arenas: &[Arena; RINGS]) -> Self {
        let ring = |(i, arena): (usize, &Arena)| Ring {
            memory: arena.ring.clone(),
            producer: stream::Producer::new(arena.ring.clone(), MIN_CAPACITY << (i % 3)),
            consumer: stream::Consumer::new(arena.ring.clone(), MIN_CAPACITY << (i % 3)),
        };
        Self {
            kernel: VecDeque::new(),
            rings: arenas.iter().enumerate().map(ring).collect(),
            producer: Side::default(),
            consumer: Side::default(),
            counts: None,
            resume: None,
            stash: VecDeque::new(),
            under_way: VecDeque::new(),
            leaving: None,
            useless: Vec::new(),
            next: 0,
            scribbled: false,
        }
    }

    fn step(&mut self, op: Op) -> Result<(), Corrupt> {
        match op.code % 11 {
            0 => self.send(size(op.a, 3000)),
            1 => self.receive(size(op.a, 3000))?,
            2 => self.count(),
            3 => self.begin(op.a.is_multiple_of(2)),
            4 if self.producer.in_ring && self.leaving.is_none() => {
                self.kernel.push_back(WAKE);
                self.producer.kernel += 1;
            }
            5 => self.end_wakes(op.a.is_multiple_of(2)),
            6 => self.drain(size(op.a, 300), op.b.is_multiple_of(4)),
            7 => self.leave(true),
            8 => self.recall()?,
            9 => self.send_again(size(op.a, 9000)),
            10 => self.give_back(op.a.is_multiple_of(2), size(op.b, 9000)),
            _ => {}
        }
        Ok(())
    }

    /// The consumer says that it counts.
    fn count(&mut self) {
        let earlier = self.consumer.earlier();
        if self.consumer.rings < RINGS && self.resume.is_none() && self.counts != Some(earlier) {
            carrier::count(&self.rings[self.consumer.rings].memory, earlier);
            self.counts = Some(earlier);
        }
    }

    /// The producer continues in the next ring.
    fn begin(&mut self, finishes: bool) {
        let at = self.producer.rings;
        if at >= RINGS
            || self.leaving.is_some()
            || !carrier::is_counted(&self.rings[at].memory, self.producer.earlier())
        {
            return;
        }
        let (earlier, later) = self.rings.split_at_mut(at);
        let last = earlier.last_mut().filter(|_| self.producer.in_ring);
        let sent = last.as_ref().map_or(self.producer.kernel, |ring| ring.producer.cursor().position);
        if !carrier::begin(&later[0].memory, sent) && !self.producer.in_ring {
            carrier::give_back(&later[0].memory, Place { ring: 0, kernel: sent, repeated: 0 });
            self.producer.rings = at + 1;
            return;
        }
        // The ring that was left may be finished.
        if let Some(ring) = last.filter(|_| finishes) {
            let _ = ring.producer.finish();
        }
        (self.producer.rings, self.producer.in_ring) = (at + 1, true);
    }

    /// The consumer makes the kernel carry on, if the producer has not begun.
    fn recall(&mut self) -> Result<(), Corrupt> {
        if self.counts == Some(Earlier::Kernel) && !self.consumer.in_ring {
            let memory = &self.rings[self.consumer.rings].memory;
            carrier::recall(memory);
            if carrier::left(memory, self.consumer.kernel)?.is_none() {
                (self.consumer.rings, self.counts) = (self.consumer.rings + 1, None);
            }
        }
        Ok(())
    }

    /// The producer is about to continue over the kernel's connection.
    fn end_wakes(&mut self, repeats: bool) {
        let Some(at) = self.producer.ring().filter(|_| self.leaving.is_none()) else { return };
        let ring = &mut self.rings[at];
        carrier::end_wakes(&ring.memory, self.producer.kernel);
        let again = if repeats { ring.producer.unreleased() } else { Vec::new() };
        self.leaving = Some((self.producer.kernel, again.into()));
    }

    /// The kernel takes at most `most` of the bytes that come once more.
    fn send_again(&mut self, most: usize) {
        if let Some((_, again)) = &mut self.leaving {
            let n = most.min(again.len());
            self.kernel.extend(again.drain(..n));
            self.producer.kernel += n as u64;
        }
    }

    /// The producer continues over the kernel's connection, after the kernel has taken at most `most` more of them.
    fn give_back(&mut self, finishes: bool, most: usize) {
        self.send_again(most);
        let Some((before, again)) = self.leaving.take() else { return };
        let Some(at) = self.producer.ring() else { return };
        let ring = &mut self.rings[at];
        let (position, kernel) = (ring.producer.cursor().position, self.producer.kernel);
        let (kernel, repeated) = match again.is_empty() {
            true => (before, kernel - before),
            false => {
                self.useless.push(before..kernel);
                (kernel, 0)
            }
        };
        carrier::give_back(&ring.memory, Place { ring: position, kernel, repeated });
        if finishes {
            let _ = ring.producer.finish();
        }
        self.producer.in_ring = false;
    }

    fn send(&mut self, len: usize) {
        if self.leaving.is_some() {
            return;
        }
        let bytes: Vec<u8> = (0..len).map(|n| self.next.wrapping_add(n as u8)).collect();
        let sent = match self.producer.ring() {
            Some(ring) => match self.rings[ring].producer.write(&bytes, || {}) {
                Ok(sent) => sent,
                Err(SendError::Full) => 0,
                Err(error) => panic!("{error}"),
            },
            None => {
                self.kernel.extend(&bytes);
                self.producer.kernel += len as u64;
                len
            }
        };
        self.under_way.extend(&bytes[..sent]);
        self.next = self.next.wrapping_add(sent as u8);
    }

    /// Returns the bytes that the consumer has received from its present carrier.
    fn received(&self) -> u64 {
        self.consumer.ring().map_or(self.consumer.kernel, |ring| self.rings[ring].consumer.cursor().position)
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let n = most.min(self.kernel.len());
        self.consumer.kernel += n as u64;
        self.kernel.drain(..n).collect()
    }

    /// Returns where wake bytes end, if the producer leaves the consumer's present ring, or the next one, for the kernel.
    fn wakes_end(&self) -> Option<u64> {
        let at = self.consumer.rings;
        let rings = self.rings[at.saturating_sub(1)..RINGS.min(at + 1)].iter();
        rings.filter_map(|ring| carrier::wakes_end(&ring.memory)).next()
    }

    /// Checks that the last bytes that were taken from the kernel are wake bytes, or useless repeated ones.
    fn check_dropped(&self, bytes: &[u8], end: u64) {
        let of_no_use = |at: u64| self.useless.iter().any(|range| range.contains(&at));
        for (at, byte) in (end.wrapping_sub(bytes.len() as u64)..end).zip(bytes) {
            assert!(self.scribbled || *byte == WAKE || of_no_use(at), "{at}");
        }
    }

    /// Handles bytes that the consumer has just taken as wake bytes.
    fn sort(&mut self, bytes: &[u8]) {
        let beyond = self.wakes_end().map_or(0, |end| self.consumer.kernel.saturating_sub(end));
        let data = bytes.len().min(usize::try_from(beyond).unwrap_or(usize::MAX));
        let (dropped, data) = bytes.split_at(bytes.len() - data);
        self.stash.extend(data);
        self.check_dropped(dropped, self.consumer.kernel.wrapping_sub(data.len() as u64));
    }

    /// The consumer drops wake bytes.
    fn drain(&mut self, most: usize, takes_any: bool) {
        if self.consumer.in_ring && self.resume.is_none() {
            // A receiver that sleeps in a call for one byte takes any byte, even if it is not a wake byte.
            let left = self.wakes_end().map(|end| end.saturating_sub(self.consumer.kernel));
            let left = left.and_then(|left| usize::try_from(left).ok()).unwrap_or(most);
            let bytes = self.take(if takes_any { 1 } else { most.min(left) });
            self.sort(&bytes);
        }
    }

    fn receive(&mut self, len: usize) -> Result<(), Corrupt> {
        if let Some((wakes, resume)) = self.resume {
            let left = |until: u64, world: &Self| {
                usize::try_from(until.saturating_sub(world.consumer.kernel)).unwrap_or(usize::MAX)
            };
            let wakes = self.take(left(wakes, self));
            self.check_dropped(&wakes, self.consumer.kernel);
            let left = left(resume, self);
            if self.take(left).len() < left {
                return Ok(());
            }
            let stash: Vec<u8> = self.stash.drain(..).collect();
            self.arrived(&stash);
            (self.resume, self.consumer.in_ring) = (None, false);
        }
        // The next ring continues from here, if it was counted for this carrier.
        while self.counts == Some(self.consumer.earlier()) {
            let gone_back = self
                .consumer
                .ring()
                .is_some_and(|ring| carrier::given_back(&self.rings[ring].memory).is_some());
            let received = self.received();
            if gone_back || carrier::left(&self.rings[self.consumer.rings].memory, received)? != Some(0) {
                break;
            }
            (self.consumer.rings, self.consumer.in_ring, self.counts) = (self.consumer.rings + 1, true, None);
        }
        let Some(ring) = self.consumer.ring() else { return self.receive_from_kernel(len) };
        let mut bytes = vec![0; len];
        match self.rings[ring].consumer.read(&mut bytes, || {}) {
            Ok(n) => {
                self.arrived(&bytes[..n]);
                return Ok(());
            }
            Err(RecvError::Empty | RecvError::Finished) => {}
            Err(error) => panic!("{error}"),
        }
        self.leave(false);
        Ok(())
    }

    /// The consumer leaves the ring for the kernel, if the producer has done so; perhaps with unread bytes, if they come
    /// again.
    fn leave(&mut self, may_be_unread: bool) {
        let Some(ring) = self.consumer.ring().filter(|_| self.resume.is_none()) else { return };
        let Some(place) = carrier::given_back(&self.rings[ring].memory) else { return };
        let unread = place.ring.checked_sub(self.received());
        assert!(self.scribbled || unread.is_some(), "the producer has gone back before what was received");
        let most = if may_be_unread { place.repeated } else { 0 };
        if let Some(unread) = unread.filter(|unread| *unread <= most) {
            let resume = place.kernel.saturating_add(place.repeated - unread);
            self.resume = Some((place.kernel, resume));
            let beyond = usize::try_from(self.consumer.kernel.saturating_sub(resume)).unwrap_or(usize::MAX);
            self.stash.drain(..self.stash.len().saturating_sub(beyond));
        }
    }

    fn receive_from_kernel(&mut self, len: usize) -> Result<(), Corrupt> {
        let left = match self.counts {
            Some(Earlier::Kernel) => {
                carrier::left(&self.rings[self.consumer.rings].memory, self.consumer.kernel)?
            }
            _ => None,
        };
        let most = left.map_or(len, |left| len.min(left.try_into().unwrap_or(usize::MAX)));
        let bytes = self.take(most);
        self.arrived(&bytes);
        Ok(())
    }

    fn arrived(&mut self, bytes: &[u8]) {
        if !self.scribbled {
            let expected: Vec<u8> = self.under_way.drain(..bytes.len().min(self.under_way.len())).collect();
            assert_eq!(bytes, expected);
        }
    }

    fn scribble(&mut self, op: Op) {
        self.scribbled = true;
        let received = self.received();
        let memory = &self.rings[self.consumer.rings.min(RINGS - 1)].memory;
        let near = received.wrapping_add(u64::from(op.a)).wrapping_sub(u64::from(op.b % 64));
        match op.code % 8 {
            0 => memory.store_relaxed_u64(BASE, near),
            1 => memory.store_relaxed_u64(BASE, u64::from(op.a) << (op.b % 64)),
            2 => memory.store_relaxed_u32(READY, op.b.into()),
            3 => memory.store_relaxed_u64(END, near),
            4 => memory.store_relaxed_u64(RESUME, u64::from(op.a) << (op.b % 64)),
            5 => memory.store_relaxed_u64(REPEATED, u64::from(op.a) << (op.b % 64)),
            6 => memory.store_relaxed_u32(RECALL, op.b.into()),
            _ => memory.store_relaxed_u64(BASE, 0),
        }
        // The present value of the words decides.
        let base = memory.load_relaxed_u64(BASE);
        match carrier::left(memory, received) {
            Ok(None) => assert_eq!(base, 0),
            Ok(Some(left)) => assert_eq!(received + left + 1, base),
            Err(error) => {
                assert!(base != 0 && base - 1 < received);
                assert_eq!(error, Corrupt::Base { base: base - 1, received });
            }
        }
        let end = memory.load_relaxed_u64(END);
        assert_eq!(carrier::given_back(memory).map_or(0, |place| place.ring.wrapping_add(1)), end);
    }

    /// Checks that all bytes that have been sent arrive.
    fn finish(&mut self) {
        self.give_back(false, 0);
        for _ in 0..2 * RINGS + 2 {
            if self.under_way.is_empty() {
                return;
            }
            // Bytes beyond a carrier's bounds come with the next call.
            for _ in 0..200 {
                assert_eq!(self.receive(3000), Ok(()));
            }
        }
        panic!("stuck");
    }
}
