//! Compares the byte-stream ring with a queue of bytes.

use super::{Arena, Wake, size};
use crate::models::Op;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError, stream};
use ginnel_shmem::Mapping;
use std::collections::VecDeque;

struct Model {
    capacity: usize,
    queue: VecDeque<u8>,
    written: u64,
    read: u64,
    send_ended: Option<SendError>,
    producer_finished: bool,
    consumer_finished: bool,
    data: Wake,
    space: Wake,
    read_when_armed: u64,
    /// Whether the look after arming found no room.
    refused_when_armed: bool,
}

fn bytes(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

/// Runs the operations on a ring for a stream.
pub fn run(capacity: usize, ops: impl IntoIterator<Item = Op>) {
    let arena = Arena::new(capacity);
    let mut producer = stream::Producer::new(arena.ring.clone(), capacity);
    let mut consumer = stream::Consumer::new(arena.ring.clone(), capacity);
    let mut model = Model {
        capacity,
        queue: VecDeque::new(),
        written: 0,
        read: 0,
        send_ended: None,
        producer_finished: false,
        consumer_finished: false,
        data: Wake::default(),
        space: Wake::default(),
        read_when_armed: 0,
        refused_when_armed: false,
    };
    for op in ops {
        model.step(op, &mut producer, &mut consumer);
    }
    model.drain(&mut producer, &mut consumer);
}

impl Model {
    fn step(
        &mut self,
        op: Op,
        producer: &mut stream::Producer<Mapping>,
        consumer: &mut stream::Consumer<Mapping>,
    ) {
        let (long, short) = (size(op.a, self.capacity * 3 / 2), size(op.b, self.capacity * 3 / 2));
        match op.code % 12 {
            0..=2 => self.write(producer, long),
            3 => self.claim(producer, long, short),
            4..=6 => self.read(consumer, long),
            7 => self.peek(consumer, short),
            8 => {
                self.data.arm();
                consumer.arm();
                assert_eq!(consumer.ready(), !self.queue.is_empty() || self.producer_finished);
            }
            9 => {
                self.data.disarm();
                consumer.disarm();
            }
            10 => {
                self.space.arm();
                self.read_when_armed = self.read;
                producer.arm();
                self.refused_when_armed = !producer.ready();
                if self.consumer_finished {
                    self.send_ended.get_or_insert(SendError::Closed);
                }
                let refused = self.send_ended.is_none() && self.queue.len() == self.capacity;
                assert!(self.refused_when_armed || !refused, "room in a full ring");
            }
            _ => match op.a % 64 {
                0 => {
                    assert_eq!(producer.finish(), self.data.look(), "doorbell of a finish");
                    self.producer_finished = true;
                    self.send_ended.get_or_insert(SendError::AfterFinish);
                }
                1 => {
                    self.consumer_finished = true;
                    let rung = consumer.finish();
                    assert_eq!(rung, self.space.look(), "doorbell of a consumer's finish");
                }
                _ => {
                    self.space.disarm();
                    producer.disarm();
                }
            },
        }
        let owed = consumer.take_owed();
        self.owed(owed);
    }

    /// Checks an error of the producer.
    fn refused(&mut self, error: SendError) {
        if self.consumer_finished {
            self.send_ended.get_or_insert(SendError::Closed);
        }
        match self.send_ended {
            Some(end) => assert_eq!(error, end),
            None => {
                assert_eq!(error, SendError::Full);
                // The consumer may hold back less than an eighth.
                assert!(self.queue.len() > self.capacity - self.capacity / 8, "Full although there is room");
            }
        }
    }

    fn write(&mut self, producer: &mut stream::Producer<Mapping>, len: usize) {
        let mut rings = 0;
        let due = self.data.due();
        match producer.write(&bytes(self.written, len), || rings += 1) {
            Ok(n) => {
                assert!(n <= len && (n > 0 || len == 0));
                let free = self.capacity - self.queue.len();
                assert!(n <= free, "{n} bytes went into room for {free}");
                assert!(n == len || n + self.capacity / 8 > free, "{n} of {len} bytes, room for {free}");
                self.grow(n);
                assert_eq!(rings, usize::from(due && n > 0), "doorbells of a write");
            }
            Err(error) => self.refused(error),
        }
    }

    fn claim(&mut self, producer: &mut stream::Producer<Mapping>, most: usize, publish: usize) {
        match producer.claim(most) {
            Ok(room) => {
                let len = room.slice().len();
                let to_end = self.capacity - self.written as usize % self.capacity;
                assert!(len <= most && len <= to_end && len <= self.capacity - self.queue.len());
                assert!(len > 0 || most == 0);
                let n = publish.min(len);
                assert_eq!(room.slice().write(0, &bytes(self.written, n)), n);
                let rung = room.publish(publish);
                assert_eq!(rung, self.data.look(), "doorbell of a publish");
                self.grow(n);
            }
            Err(error) => self.refused(error),
        }
    }

    fn grow(&mut self, n: usize) {
        assert!(self.send_ended.is_none() && !self.consumer_finished || n == 0, "sent after the end");
        self.queue.extend(bytes(self.written, n));
        self.written += n as u64;
        if n > 0 {
            self.data.look();
        }
    }

    fn nothing(&self) -> RecvError {
        assert!(self.queue.is_empty(), "nothing came although {} bytes are there", self.queue.len());
        if self.producer_finished { RecvError::Finished } else { RecvError::Empty }
    }

    fn read(&mut self, consumer: &mut stream::Consumer<Mapping>, room: usize) {
        let mut buffer = vec![0; room];
        let mut rings = 0;
        let got = consumer.read(&mut buffer, || rings += 1);
        match got {
            Ok(n) => {
                assert_eq!(n, room.min(self.queue.len()));
                assert!(
                    buffer[..n].iter().eq(self.queue.iter().take(n)),
                    "other bytes came out than went in"
                );
                self.queue.drain(..n);
                self.read += n as u64;
            }
            Err(error) => assert_eq!(error, self.nothing()),
        }
        for _ in 0..rings {
            self.owed(true);
        }
    }

    fn peek(&mut self, consumer: &mut stream::Consumer<Mapping>, release: usize) {
        match consumer.peek() {
            Ok(run) => {
                let len = run.len();
                let to_end = self.capacity - self.read as usize % self.capacity;
                assert!(len > 0 && len <= self.queue.len() && len <= to_end && !run.is_empty());
                assert!(run.slice().to_vec().iter().eq(self.queue.iter().take(len)));
                let rung = run.release(release);
                let n = release.min(len);
                self.queue.drain(..n);
                self.read += n as u64;
                self.owed(rung);
            }
            Err(error) => assert_eq!(error, self.nothing()),
        }
    }

    /// Checks whether the consumer said that the producer's doorbell must be rung.
    fn owed(&mut self, owed: bool) {
        if owed {
            assert!(self.space.look(), "a doorbell, but the producer does not sleep");
        }
        let since = self.read - self.read_when_armed.min(self.read);
        assert!(
            !self.space.due() || since < self.capacity as u64 / 8 || self.consumer_finished,
            "an armed producer is not rung although {since} bytes came back"
        );
    }

    fn drain(&mut self, producer: &mut stream::Producer<Mapping>, consumer: &mut stream::Consumer<Mapping>) {
        self.read(consumer, self.queue.len() + 1);
        assert!(self.queue.is_empty());
        let nothing = self.nothing();
        assert_eq!(consumer.poll(), Err(nothing));
        if self.refused_when_armed && !self.consumer_finished {
            assert!(!self.space.due(), "a producer that found no room is not rung although all came back");
        }
        if self.send_ended.is_none() && !self.consumer_finished {
            // A claim loads the consumer's counter only if it knows of less than an eighth.
            let room = producer.claim(self.capacity).unwrap().slice().len();
            let to_end = self.capacity - self.written as usize % self.capacity;
            assert!(room >= to_end.min(self.capacity / 8), "an empty ring has room for {room} bytes only");
        }
    }
}
