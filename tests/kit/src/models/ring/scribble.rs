//! Runs both sides of a ring while a scribbler writes to its memory.
//!
//! Nothing is compared here, because anything may come out. But every call must return, with data of a possible length or
//! with one of its errors; an error that ends a side must stay; and no byte outside the ring may change.

use super::{Arena, size};
use crate::models::Op;
use ginnel_layout::ring::{
    CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, RECORD_ALIGN, RecordHeader, RecordKind,
    SPACE_ARMED, TAIL, max_message,
};
use ginnel_ring::wait::{Sleeper, WaitMode, Waitable, wait};
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::{Mapping, SharedMemory};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Runs operations of both sides, with scribbles between them.
pub fn alone(capacity: usize, messages: bool, ops: impl IntoIterator<Item = Op>) {
    let arena = Arena::new(capacity);
    let mut sides = Sides::new(&arena.ring, capacity, messages);
    for op in ops {
        if op.code & 0x80 != 0 {
            scribble(&arena.ring, capacity, op);
        } else {
            sides.step(op);
        }
    }
}

/// Does the same while another thread scribbles, again and again, until both sides have done their operations.
pub fn beside(capacity: usize, messages: bool, ops: impl IntoIterator<Item = Op>, scribbles: &[Op]) {
    let arena = Arena::new(capacity);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scribbler = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                scribbles.iter().for_each(|&op| scribble(&arena.ring, capacity, op));
                std::thread::yield_now();
            }
        });
        let ending = Done(&done);
        let mut sides = Sides::new(&arena.ring, capacity, messages);
        ops.into_iter().for_each(|op| sides.step(op));
        drop(ending);
        // The scope alone would not wait for the thread's own remains, which a leak checker then finds.
        scribbler.join().unwrap();
    });
}

/// Ends the scribbler, also if the sides panic.
struct Done<'a>(&'a AtomicBool);
impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes something that no correct peer writes, or an arbitrary value.
fn scribble(memory: &Mapping, capacity: usize, op: Op) {
    let (a, b) = (usize::from(op.a), u64::from(op.b));
    let line = HEADER + a * RECORD_ALIGN % capacity;
    match op.code % 10 {
        0 => memory.store_relaxed_u64(HEAD, b),
        1 => memory.store_relaxed_u64(HEAD, (b * 64).wrapping_sub(a as u64 % 3)),
        2 => memory.store_relaxed_u64(TAIL, b.wrapping_sub(a as u64 % 3)),
        3 => memory.store_relaxed_u32(PRODUCER_STATE, u32::from(op.b % 6)),
        4 => memory.store_relaxed_u32(CONSUMER_STATE, u32::from(op.b % 6)),
        5 => {
            memory.store_relaxed_u32(DATA_ARMED, u32::from(op.a));
            memory.store_relaxed_u32(SPACE_ARMED, u32::from(op.b));
        }
        // A header that is right for its place, with any kind and length.
        6 => {
            let len = size(op.b, capacity / 2);
            let kind = RecordKind(op.b as u8 % 5);
            memory.store_relaxed_u64(line, RecordHeader::new(kind, a as u64 * RECORD_ALIGN as u64, len).0);
        }
        7 => memory.store_relaxed_u64(line, 0),
        8 => memory.store_relaxed_u64(line, b << 48 | b),
        _ => {
            let at = a % memory.len();
            let len = (usize::from(op.b) % 2048).min(memory.len() - at);
            memory.write(at, &vec![op.b as u8; len]);
        }
    }
}

enum Sides {
    Messages(message::Producer<Mapping>, message::Consumer<Mapping>, usize),
    Stream(stream::Producer<Mapping>, stream::Consumer<Mapping>, usize),
}

/// Returns the error if it ends the sending side; then it must come again.
fn ended_send(error: SendError) -> Option<SendError> {
    (!matches!(error, SendError::Full | SendError::TooLong { .. })).then_some(error)
}
fn ended_recv(error: RecvError) -> Option<RecvError> {
    (error != RecvError::Empty).then_some(error)
}

impl Sides {
    fn new(memory: &Mapping, capacity: usize, messages: bool) -> Self {
        if messages {
            let producer = message::Producer::new(memory.clone(), capacity);
            Self::Messages(producer, message::Consumer::new(memory.clone(), capacity), capacity)
        } else {
            let producer = stream::Producer::new(memory.clone(), capacity);
            Self::Stream(producer, stream::Consumer::new(memory.clone(), capacity), capacity)
        }
    }

    fn step(&mut self, op: Op) {
        match self {
            Self::Messages(p, c, capacity) => messages(p, c, *capacity, op),
            Self::Stream(p, c, capacity) => bytes(p, c, *capacity, op),
        }
    }
}

/// Waits without any time: the deadline is now.
fn look(what: &mut impl Waitable, choice: u16) {
    struct Sleepless;
    impl Sleeper for Sleepless {
        fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
            panic!("sleeps after the deadline");
        }
    }
    let mode = match choice % 3 {
        0 => WaitMode::Poll,
        1 => WaitMode::Interrupt,
        _ => WaitMode::Adaptive { budget: Duration::from_micros(1) },
    };
    wait(what, mode, &mut Sleepless, Some(Instant::now())).unwrap();
}

fn messages(
    producer: &mut message::Producer<Mapping>,
    consumer: &mut message::Consumer<Mapping>,
    capacity: usize,
    op: Op,
) {
    let len = size(op.a, max_message(capacity) + 1);
    let sent = match op.code % 10 {
        0 | 1 => producer.send(&vec![op.b as u8; len]).err(),
        2 => match producer.claim(len) {
            Ok(claim) => {
                claim.slice().write(0, &vec![op.b as u8; len + 1]);
                claim.commit(usize::from(op.b));
                None
            }
            Err(error) => Some(error),
        },
        3 => {
            let _ = producer.publish();
            None
        }
        4 => {
            look(producer.want(len), op.b);
            None
        }
        5 if op.a.is_multiple_of(32) => {
            let _ = producer.finish();
            None
        }
        _ => None,
    };
    if let Some(end) = sent.and_then(ended_send) {
        assert_eq!(producer.claim(0).err(), Some(end), "an end must stay");
        *producer = message::Producer::new(producer.memory().clone(), capacity);
    }
    assert!(producer.in_flight() <= capacity);

    let mut buffer = vec![0; len];
    let received = match op.code % 10 {
        6 => consumer.recv(&mut buffer).map(|n| assert!(n <= max_message(capacity))).err(),
        7 => consumer.peek().map(|m| assert!(m.slice().to_vec().len() <= max_message(capacity))).err(),
        8 => match consumer.peek() {
            Ok(message) => {
                message.release();
                None
            }
            Err(error) => Some(error),
        },
        9 if op.a.is_multiple_of(32) => {
            let _ = consumer.finish();
            None
        }
        9 => {
            look(consumer, op.b);
            None
        }
        _ => None,
    };
    if let Some(end) = received.and_then(ended_recv) {
        assert_eq!(consumer.poll(), Err(end), "an end must stay");
        *consumer = message::Consumer::new(consumer.memory().clone(), capacity);
    }
    let _ = consumer.take_owed();
}

fn bytes(
    producer: &mut stream::Producer<Mapping>,
    consumer: &mut stream::Consumer<Mapping>,
    capacity: usize,
    op: Op,
) {
    let len = size(op.a, capacity * 2);
    // A call may ring once for each piece that it publishes.
    let mut rings = 0;
    let sent = match op.code % 8 {
        0 => producer.write(&vec![op.b as u8; len], || rings += 1).map(|n| assert!(n <= len)).err(),
        1 => match producer.claim(len) {
            Ok(room) => {
                assert!(room.slice().len() <= len);
                room.slice().write(0, &vec![op.b as u8; len + 1]);
                let _ = room.publish(usize::from(op.b));
                None
            }
            Err(error) => Some(error),
        },
        2 => {
            look(producer, op.b);
            None
        }
        3 if op.a.is_multiple_of(32) => {
            let _ = producer.finish();
            None
        }
        _ => None,
    };
    if let Some(end) = sent.and_then(ended_send) {
        assert_eq!(producer.claim(1).err(), Some(end), "an end must stay");
        *producer = stream::Producer::new(producer.memory().clone(), capacity);
    }
    assert!(producer.in_flight() <= capacity);

    let mut buffer = vec![0; len];
    let received = match op.code % 8 {
        4 => consumer.read(&mut buffer, || rings += 1).map(|n| assert!(n <= len)).err(),
        5 => match consumer.peek() {
            Ok(run) => {
                assert!(run.slice().to_vec().len() <= capacity);
                run.release(usize::from(op.b));
                None
            }
            Err(error) => Some(error),
        },
        6 => {
            look(consumer, op.b);
            None
        }
        7 if op.a.is_multiple_of(32) => {
            let _ = consumer.finish();
            None
        }
        _ => None,
    };
    if let Some(end) = received.and_then(ended_recv) {
        assert_eq!(consumer.poll(), Err(end), "an end must stay");
        *consumer = stream::Consumer::new(consumer.memory().clone(), capacity);
    }
    let _ = consumer.take_owed();
    // Between two pieces of a call, the scribbler may have let the other side continue, byte by byte in the worst case.
    assert!(rings <= 2 * len + 1);
}
