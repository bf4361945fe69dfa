//! A stream that leaves the kernel's connection for a ring, and that for larger ones, against a queue; and somebody who scribbles on the
//! words of the change-over.
//!
//! Without scribbles each byte arrives once, in order, by whichever carrier. With them anything may arrive, but the receiver never takes
//! more from the earlier carrier than the word allows at that moment, a position that has passed is [`Corrupt`], and nothing
//! outside the rings changes.

use super::{Arena, Op, size};
use ginnel_layout::ring::{BASE, MIN_CAPACITY, READY};
use ginnel_ring::{Corrupt, RecvError, SendError, carrier, stream};
use ginnel_shmem::{Mapping, Memory};
use std::collections::VecDeque;

/// Rings, each larger than the one before.
const RINGS: usize = 3;

/// Operations of both sides, and scribbles (those whose code has the top bit) between them.
pub fn run(ops: impl IntoIterator<Item = Op>) {
    let arenas: [Arena; RINGS] = std::array::from_fn(|i| Arena::new(MIN_CAPACITY << i));
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

struct World {
    /// The first carrier: bytes of the stream, and wakes.
    kernel: VecDeque<u8>,
    rings: Vec<Ring>,
    /// Rings that the producer has begun, and bytes that it has sent over the kernel's connection.
    begun: usize,
    sent: u64,
    /// Rings that the consumer goes on from, the next included if it counts for that, and those that it has come to.
    counts: usize,
    come: usize,
    /// What it has received over the kernel's connection.
    received: u64,
    /// What has been sent and has not been received.
    under_way: VecDeque<u8>,
    next: u8,
    scribbled: bool,
}

impl World {
    fn new(arenas: &[Arena; RINGS]) -> Self {
        let ring = |(i, arena): (usize, &Arena)| Ring {
            memory: arena.ring.clone(),
            producer: stream::Producer::new(arena.ring.clone(), MIN_CAPACITY << i),
            consumer: stream::Consumer::new(arena.ring.clone(), MIN_CAPACITY << i),
        };
        Self {
            kernel: VecDeque::new(),
            rings: arenas.iter().enumerate().map(ring).collect(),
            begun: 0,
            sent: 0,
            counts: 0,
            come: 0,
            received: 0,
            under_way: VecDeque::new(),
            next: 0,
            scribbled: false,
        }
    }

    fn step(&mut self, op: Op) -> Result<(), Corrupt> {
        match op.code % 5 {
            0 => self.send(size(op.a, 3000)),
            1 => self.receive(size(op.a, 3000))?,
            2 if self.counts == self.come && self.counts < RINGS => {
                carrier::count(&self.rings[self.counts].memory);
                self.counts += 1;
            }
            3 if self.begun < RINGS && carrier::is_counted(&self.rings[self.begun].memory) => {
                assert!(self.counts > self.begun || self.scribbled);
                let (earlier, later) = self.rings.split_at_mut(self.begun);
                let sent = earlier.last().map_or(self.sent, |ring| ring.producer.cursor().position);
                carrier::begin(&later[0].memory, sent);
                // The ring that was left may be finished.
                if let Some(ring) = earlier.last_mut().filter(|_| op.a.is_multiple_of(2)) {
                    let _ = ring.producer.finish();
                }
                self.begun += 1;
            }
            // A wake.
            4 if self.begun > 0 => self.kernel.push_back(0xff),
            _ => {}
        }
        Ok(())
    }

    fn send(&mut self, len: usize) {
        let bytes: Vec<u8> = (0..len).map(|n| self.next.wrapping_add(n as u8)).collect();
        let sent = match self.begun.checked_sub(1) {
            Some(ring) => match self.rings[ring].producer.write(&bytes, || {}) {
                Ok(sent) => sent,
                Err(SendError::Full) => 0,
                Err(error) => panic!("{error}"),
            },
            None => {
                self.kernel.extend(&bytes);
                self.sent += len as u64;
                len
            }
        };
        self.under_way.extend(&bytes[..sent]);
        self.next = self.next.wrapping_add(sent as u8);
    }

    /// What the consumer has received from the carrier that it is at.
    fn received(&self) -> u64 {
        self.come.checked_sub(1).map_or(self.received, |ring| self.rings[ring].consumer.cursor().position)
    }

    fn receive(&mut self, len: usize) -> Result<(), Corrupt> {
        let mut left = None;
        while self.counts > self.come {
            left = carrier::left(&self.rings[self.come].memory, self.received())?;
            if left != Some(0) {
                break;
            }
            (self.come, left) = (self.come + 1, None);
        }
        let Some(ring) = self.come.checked_sub(1) else {
            let most = left.unwrap_or(u64::MAX).try_into().unwrap_or(usize::MAX);
            let n = len.min(self.kernel.len()).min(most);
            let bytes: Vec<u8> = self.kernel.drain(..n).collect();
            self.received += n as u64;
            self.arrived(&bytes);
            return Ok(());
        };
        let mut bytes = vec![0; len];
        match self.rings[ring].consumer.read(&mut bytes, || {}) {
            Ok(n) => self.arrived(&bytes[..n]),
            Err(RecvError::Empty) => {}
            Err(RecvError::Finished) => assert!(self.scribbled, "the end of a ring is the end of the stream"),
            Err(error) => panic!("{error}"),
        }
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
        let memory = &self.rings[self.come.min(RINGS - 1)].memory;
        let near = received.wrapping_add(u64::from(op.a)).wrapping_sub(u64::from(op.b % 64));
        match op.code % 4 {
            0 => memory.store_relaxed_u64(BASE, near),
            1 => memory.store_relaxed_u64(BASE, u64::from(op.a) << (op.b % 64)),
            2 => memory.store_relaxed_u32(READY, op.b.into()),
            _ => memory.store_relaxed_u64(BASE, 0),
        }
        // What the words say now is what counts.
        if self.counts > self.come {
            let base = memory.load_relaxed_u64(BASE);
            match carrier::left(memory, received) {
                Ok(None) => assert_eq!(base, 0),
                Ok(Some(left)) => assert_eq!(received + left + 1, base),
                Err(error) => {
                    assert!(base != 0 && base - 1 < received);
                    assert_eq!(error, Corrupt::Base { base: base - 1, received });
                }
            }
        }
    }

    /// All that is under way arrives.
    fn finish(&mut self) {
        while !self.under_way.is_empty() {
            let before = self.under_way.len();
            assert_eq!(self.receive(1000), Ok(()));
            assert!(self.under_way.len() < before, "stuck");
        }
    }
}
