//! Compares the message ring with a queue of messages.

use super::{Arena, Wake, size};
use crate::models::Op;
use ginnel_layout::ring::{RECORD_ALIGN, max_message, record_span};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError, message};
use ginnel_shmem::Mapping;
use std::collections::VecDeque;

/// Returns the payload of the message with this number.
fn payload(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (number.wrapping_mul(0x9e37_79b9) ^ i.wrapping_mul(31)) as u8 ^ 0x5c).collect()
}

struct Expected {
    /// Bytes since the ring began.
    position: u64,
    bytes: Vec<u8>,
}

struct Model {
    capacity: usize,
    /// Messages that are committed and not published yet.
    staged: VecDeque<Expected>,
    /// Messages that are published and not released.
    queue: VecDeque<Expected>,
    number: u64,
    tail: u64,
    /// Bytes that the consumer has released.
    head: u64,
    /// Whether anything waits for the next publish, even if it is only padding.
    held: bool,
    send_ended: Option<SendError>,
    recv_ended: Option<RecvError>,
    producer_finished: bool,
    consumer_finished: bool,
    data: Wake,
    space: Wake,
    /// Position of the consumer when the producer armed.
    head_when_armed: u64,
    /// Whether the look after arming found no room.
    refused_when_armed: bool,
}

/// Runs the operations on a ring for messages.
pub fn run(capacity: usize, ops: impl IntoIterator<Item = Op>) {
    let arena = Arena::new(capacity);
    let mut producer = message::Producer::new(arena.ring.clone(), capacity);
    let mut consumer = message::Consumer::new(arena.ring.clone(), capacity);
    let mut model = Model {
        capacity,
        staged: VecDeque::new(),
        queue: VecDeque::new(),
        number: 0,
        tail: 0,
        head: 0,
        held: false,
        send_ended: None,
        recv_ended: None,
        producer_finished: false,
        consumer_finished: false,
        data: Wake::default(),
        space: Wake::default(),
        head_when_armed: 0,
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
        producer: &mut message::Producer<Mapping>,
        consumer: &mut message::Consumer<Mapping>,
    ) {
        // A little more than the maximum, so that messages that are too long come too.
        let len = size(op.a, max_message(self.capacity) + 3);
        match op.code % 16 {
            0 | 1 => self.send(producer, len),
            2 => drop(self.claim(producer, len, Some(size(op.b, len)), false)),
            3 => drop(self.claim(producer, len, Some(size(op.b, len)), true)),
            // A length beyond the claim, which is reduced to it.
            4 => drop(self.claim(producer, len, Some(len + usize::from(op.b)), op.b.is_multiple_of(2))),
            5 => drop(self.claim(producer, len, None, false)),
            6 => {
                let expected = self.publish();
                assert_eq!(producer.publish(), expected, "doorbell of a publish");
            }
            7 => self.peek(consumer, false),
            8 | 9 => self.peek(consumer, true),
            10 | 11 => self.recv(consumer, size(op.b, max_message(self.capacity))),
            12 => {
                self.data.arm();
                consumer.arm();
                let ready = consumer.ready();
                self.observe();
                assert_eq!(ready, !self.queue.is_empty() || self.recv_ended.is_some());
            }
            13 => {
                self.data.disarm();
                consumer.disarm();
            }
            14 => {
                self.space.arm();
                self.head_when_armed = self.head;
                producer.arm();
                let looked = self.claim(producer, len, None, false);
                self.refused_when_armed = looked == Err(SendError::Full);
            }
            _ => match op.a % 64 {
                0 => {
                    let expected = self.publish() | self.data.look();
                    assert_eq!(producer.finish(), expected, "doorbell of a finish");
                    self.producer_finished = true;
                    self.send_ended.get_or_insert(SendError::AfterFinish);
                }
                1 => {
                    self.consumer_finished = true;
                    let rung = consumer.finish();
                    assert_eq!(rung, self.space.due(), "doorbell of a consumer's finish");
                    if rung {
                        self.space.look();
                    }
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

    /// Checks a producer's answer to a claim. Returns true if it was granted.
    fn granted(&mut self, len: usize, claim: Result<(), SendError>) -> bool {
        let span = record_span(len);
        let to_end = self.capacity - self.tail as usize % self.capacity;
        let padding = if to_end < span { to_end } else { 0 };
        let need = padding + span + RECORD_ALIGN;
        let free = self.capacity - (self.tail - self.head) as usize;
        if self.send_ended.is_none() {
            if len > max_message(self.capacity) {
                let max = max_message(self.capacity);
                assert_eq!(claim, Err(SendError::TooLong { len, max }));
                return false;
            }
            if self.consumer_finished {
                self.send_ended = Some(SendError::Closed);
            }
        }
        if let Some(end) = self.send_ended {
            assert_eq!(claim, Err(end));
            return false;
        }
        match claim {
            Ok(()) => {
                assert!(need <= free, "room for {len} bytes is granted where there is none");
                self.held |= padding > 0;
                self.tail += padding as u64;
                true
            }
            Err(error) => {
                assert_eq!(error, SendError::Full);
                // The consumer may hold back less than an eighth.
                assert!(need + self.capacity / 8 > free, "{len} bytes are refused although there is room");
                false
            }
        }
    }

    fn commit(&mut self, len: usize) -> u64 {
        self.number += 1;
        self.staged.push_back(Expected { position: self.tail, bytes: payload(self.number, len) });
        self.tail += record_span(len) as u64;
        self.held = true;
        self.number
    }

    /// Does to the queue what a publish does. Returns whether the doorbell must be rung.
    fn publish(&mut self) -> bool {
        if !std::mem::take(&mut self.held) {
            return false;
        }
        self.queue.append(&mut self.staged);
        self.data.look()
    }

    fn send(&mut self, producer: &mut message::Producer<Mapping>, len: usize) {
        let bytes = payload(self.number + 1, len);
        let sent = producer.send(&bytes);
        if self.granted(len, sent.map(|_| ())) {
            self.commit(len);
            assert_eq!(sent, Ok(self.publish()), "doorbell of a send");
        }
    }

    fn claim(
        &mut self,
        producer: &mut message::Producer<Mapping>,
        len: usize,
        commit: Option<usize>,
        publish: bool,
    ) -> Result<(), SendError> {
        let claim = producer.claim(len);
        let answer = claim.as_ref().map(|_| ()).map_err(|e| *e);
        if !self.granted(len, answer) {
            return answer;
        }
        let (Ok(claim), Some(commit)) = (claim, commit) else { return answer };
        let kept = commit.min(len);
        let number = self.commit(kept);
        // Writes the message in two parts. The second part also fills the rest of the claim with arbitrary bytes.
        let half = kept / 2;
        assert_eq!(claim.slice().len(), len);
        assert_eq!(claim.slice().write(0, &payload(number, kept)[..half]), half);
        let rest = [&payload(number, kept)[half..], &vec![0xee; len - kept]].concat();
        assert_eq!(claim.slice().write(half, &rest), len - half);
        if publish {
            assert_eq!(claim.publish(commit), self.publish(), "doorbell of a claim's publish");
        } else {
            claim.commit(commit);
        }
        answer
    }

    /// Records the effect of a look by the consumer: it notices an end. Padding that it has passed is released with the next
    /// message.
    fn observe(&mut self) {
        if self.queue.is_empty() && self.producer_finished {
            self.recv_ended = Some(RecvError::Finished);
        }
    }

    fn nothing(&self) -> RecvError {
        self.recv_ended.unwrap_or(RecvError::Empty)
    }

    fn peek(&mut self, consumer: &mut message::Consumer<Mapping>, release: bool) {
        let message = consumer.peek();
        self.observe();
        match (message, self.queue.front()) {
            (Ok(message), Some(front)) => {
                assert_eq!(message.slice().to_vec(), front.bytes);
                assert_eq!((message.len(), message.is_empty()), (front.bytes.len(), front.bytes.is_empty()));
                if release {
                    let rung = message.release();
                    self.released();
                    self.owed(rung);
                }
            }
            (Err(error), None) => assert_eq!(error, self.nothing()),
            (got, expected) => {
                panic!("got {:?}, expected a message: {}", got.map(|m| m.len()), expected.is_some())
            }
        }
    }

    fn recv(&mut self, consumer: &mut message::Consumer<Mapping>, room: usize) {
        let mut buffer = vec![0xcc; room];
        let got = consumer.recv(&mut buffer);
        self.observe();
        match self.queue.front() {
            Some(front) => {
                let kept = front.bytes.len().min(room);
                assert_eq!(got, Ok(front.bytes.len()));
                assert_eq!(buffer[..kept], front.bytes[..kept]);
                assert!(buffer[kept..].iter().all(|&b| b == 0xcc), "recv writes behind the message");
                self.released();
            }
            None => assert_eq!(got, Err(self.nothing())),
        }
    }

    fn released(&mut self) {
        let front = self.queue.pop_front().unwrap();
        self.head = front.position + record_span(front.bytes.len()) as u64;
    }

    /// Checks whether the consumer said that the producer's doorbell must be rung.
    fn owed(&mut self, owed: bool) {
        if owed {
            assert!(self.space.look(), "a doorbell, but the producer does not sleep");
        }
        let since = self.head - self.head_when_armed.min(self.head);
        assert!(
            !self.space.due() || since < self.capacity as u64 / 8 || self.consumer_finished,
            "an armed producer is not rung although {since} bytes came back"
        );
    }

    /// Checks that in the end everything comes out, and that then there is room for the longest message.
    fn drain(
        &mut self,
        producer: &mut message::Producer<Mapping>,
        consumer: &mut message::Consumer<Mapping>,
    ) {
        assert_eq!(producer.publish(), self.publish());
        while !self.queue.is_empty() {
            self.peek(consumer, true);
        }
        self.peek(consumer, true);
        // Padding after the last message is released with the next one.
        assert!(self.tail - self.head < record_span(max_message(self.capacity)) as u64);
        if self.refused_when_armed && !self.consumer_finished {
            assert!(!self.space.due(), "a producer that found no room is not rung although all came back");
        }
        if self.send_ended.is_none() && !self.consumer_finished {
            assert!(producer.claim(producer.max_message()).is_ok(), "an empty ring has no room");
        }
    }
}
