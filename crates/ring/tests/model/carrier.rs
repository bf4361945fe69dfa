//! A stream that leaves another carrier for a ring, against a queue; and somebody who scribbles on the words of the change-over.
//!
//! Without scribbles each byte arrives once, in order, by whichever carrier. With them anything may arrive, but the receiver never takes
//! more from the earlier carrier than the word allows at that moment, a position that has passed is [`Corrupt`], and nothing
//! outside the ring changes.

use super::{Arena, Op, size};
use ginnel_layout::ring::{BASE, MIN_CAPACITY, READY};
use ginnel_ring::{Corrupt, RecvError, SendError, carrier, stream};
use ginnel_shmem::{Mapping, Memory};
use std::collections::VecDeque;

/// Operations of both sides, and scribbles (those whose code has the top bit) between them.
pub fn run(ops: impl IntoIterator<Item = Op>) {
    let arena = Arena::new(MIN_CAPACITY);
    let mut world = World::new(&arena.ring);
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

struct World {
    memory: Mapping,
    /// The earlier carrier: bytes of the stream, and wakes.
    earlier: VecDeque<u8>,
    producer: stream::Producer<Mapping>,
    consumer: stream::Consumer<Mapping>,
    sent: u64,
    begun: bool,
    received: u64,
    counts: bool,
    in_ring: bool,
    /// What has been sent and has not been received.
    under_way: VecDeque<u8>,
    next: u8,
    scribbled: bool,
}

impl World {
    fn new(memory: &Mapping) -> Self {
        Self {
            memory: memory.clone(),
            earlier: VecDeque::new(),
            producer: stream::Producer::new(memory.clone(), MIN_CAPACITY),
            consumer: stream::Consumer::new(memory.clone(), MIN_CAPACITY),
            sent: 0,
            begun: false,
            received: 0,
            counts: false,
            in_ring: false,
            under_way: VecDeque::new(),
            next: 0,
            scribbled: false,
        }
    }

    fn step(&mut self, op: Op) -> Result<(), Corrupt> {
        match op.code % 5 {
            0 => self.send(size(op.a, 3000)),
            1 => self.receive(size(op.a, 3000))?,
            2 if !self.counts => {
                carrier::count(&self.memory);
                self.counts = true;
            }
            3 if !self.begun && carrier::is_counted(&self.memory) => {
                assert!(self.counts || self.scribbled);
                carrier::begin(&self.memory, self.sent);
                self.begun = true;
            }
            // A wake.
            4 if self.begun => self.earlier.push_back(0xff),
            _ => {}
        }
        Ok(())
    }

    fn send(&mut self, len: usize) {
        let bytes: Vec<u8> = (0..len).map(|n| self.next.wrapping_add(n as u8)).collect();
        let sent = if self.begun {
            match self.producer.write(&bytes, || {}) {
                Ok(sent) => sent,
                Err(SendError::Full) => 0,
                Err(error) => panic!("{error}"),
            }
        } else {
            self.earlier.extend(&bytes);
            self.sent += len as u64;
            len
        };
        self.under_way.extend(&bytes[..sent]);
        self.next = self.next.wrapping_add(sent as u8);
    }

    fn receive(&mut self, len: usize) -> Result<(), Corrupt> {
        if !self.in_ring {
            let most = if self.counts { carrier::left(&self.memory, self.received)? } else { None };
            if most != Some(0) {
                let n = len
                    .min(self.earlier.len())
                    .min(most.unwrap_or(u64::MAX).try_into().unwrap_or(usize::MAX));
                let bytes: Vec<u8> = self.earlier.drain(..n).collect();
                self.received += n as u64;
                self.arrived(&bytes);
                return Ok(());
            }
            self.in_ring = true;
        }
        let mut bytes = vec![0; len];
        match self.consumer.read(&mut bytes, || {}) {
            Ok(n) => self.arrived(&bytes[..n]),
            Err(RecvError::Empty) => {}
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
        let near = self.received.wrapping_add(u64::from(op.a)).wrapping_sub(u64::from(op.b % 64));
        match op.code % 4 {
            0 => self.memory.store_relaxed_u64(BASE, near),
            1 => self.memory.store_relaxed_u64(BASE, u64::from(op.a) << (op.b % 64)),
            2 => self.memory.store_relaxed_u32(READY, op.b.into()),
            _ => self.memory.store_relaxed_u64(BASE, 0),
        }
        // What the words say now is what counts.
        if self.counts && !self.in_ring {
            let base = self.memory.load_relaxed_u64(BASE);
            match carrier::left(&self.memory, self.received) {
                Ok(None) => assert_eq!(base, 0),
                Ok(Some(left)) => assert_eq!(self.received + left + 1, base),
                Err(error) => {
                    assert!(base != 0 && base - 1 < self.received);
                    assert_eq!(error, Corrupt::Base { base: base - 1, received: self.received });
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
