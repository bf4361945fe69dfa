//! Models of the rings and of the wait protocol: loom runs the real code in every order of threads, and with every old value
//! that the stated orderings allow a load to return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-ring --test loom        (or: scripts/loom)
//!
//! A side that sleeps when it should not is a deadlock, which loom reports. Messages have the maximum length, so that five of
//! them go around the smallest ring, but only one word of each is written and read.
//!
//! The last part shows that the models can fail: it runs them on a memory in which one side lacks one ordering. `scripts/loom
//! mutants` does the same with one line of the rings' source changed at a time.
#![cfg(loom)]

use ginnel_layout::ring::{
    CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, RecordHeader, RecordKind, SPACE_ARMED,
    SideState, TAIL, footprint, max_message, record_span,
};
use ginnel_ring::wait::{Sleeper, WaitMode, Waitable, wait};
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::io;
use std::time::Instant;

#[path = "loom_models/board.rs"]
mod board;
#[path = "loom_models/carrier.rs"]
mod carrier;

const CAPACITY: usize = 4096;
/// Length of the longest message; four of them fill the ring.
const LONG: usize = max_message(CAPACITY);
const _: () = assert!(record_span(LONG) * 4 == CAPACITY);

/// Explores `model` with at most this many preemptions, or the number in LOOM_MAX_PREEMPTIONS.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// Returns a ring's memory: all its control words, and the first two words of the lines at these offsets of the data.
fn ring(lines: &[usize]) -> LoomMemory {
    let control = [TAIL, SPACE_ARMED, HEAD, DATA_ARMED, PRODUCER_STATE, CONSUMER_STATE];
    let data = lines.iter().flat_map(|at| [HEADER + at, HEADER + at + 8]);
    LoomMemory::new(footprint(CAPACITY), control.into_iter().chain(data))
}

/// Offsets of records when all messages have the maximum length.
const LONG_LINES: [usize; 4] = [0, 1024, 2048, 3072];

/// A parking place, where one side sleeps. The other side has a clone, with which it wakes the first.
#[derive(Clone)]
struct Parker(Arc<(Mutex<bool>, Condvar)>);

impl Parker {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }
    fn ring_if(&self, needed: bool) {
        if needed {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }
    }
}

impl Sleeper for Parker {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
        *rung = false;
        Ok(())
    }
}

fn sleep_until(what: &mut impl Waitable, parker: &mut Parker) {
    assert!(wait(what, WaitMode::Interrupt, parker, None).unwrap());
}

/// Sends a message of `len` bytes that begins with `value`. Sleeps if there is no room.
fn send(
    producer: &mut message::Producer<LoomMemory>,
    len: usize,
    value: u64,
    own: &mut Parker,
    peer: &Parker,
) -> Result<(), SendError> {
    loop {
        match producer.claim(len) {
            Ok(claim) => {
                claim.slice().write(0, &value.to_ne_bytes());
                peer.ring_if(claim.publish(len));
                return Ok(());
            }
            Err(SendError::Full) => sleep_until(producer.want(len), own),
            Err(error) => return Err(error),
        }
    }
}

/// Receives a message, and sleeps if there is none. Returns its length and first word.
fn recv(
    consumer: &mut message::Consumer<LoomMemory>,
    own: &mut Parker,
    peer: &Parker,
) -> Result<(usize, u64), RecvError> {
    loop {
        match consumer.peek() {
            Ok(message) => {
                let mut word = [0; 8];
                message.slice().read(0, &mut word);
                let len = message.len();
                peer.ring_if(message.release());
                return Ok((len, u64::from_ne_bytes(word)));
            }
            Err(RecvError::Empty) => {
                peer.ring_if(consumer.take_owed());
                sleep_until(consumer, own);
            }
            Err(error) => return Err(error),
        }
    }
}

type MessagePair = (message::Producer<LoomMemory>, message::Consumer<LoomMemory>);

/// Returns both ends of a ring; each may see the memory in its own way.
fn messages(producer: LoomMemory, consumer: LoomMemory) -> MessagePair {
    (message::Producer::new(producer, CAPACITY), message::Consumer::new(consumer, CAPACITY))
}

fn both(memory: LoomMemory) -> (LoomMemory, LoomMemory) {
    (memory.clone(), memory)
}

/// The messages of the given lengths must arrive, in order and complete, then the end.
fn deliver(lens: &'static [usize], (mut producer, mut consumer): MessagePair) {
    let (mut awake_producer, mut awake_consumer) = (Parker::new(), Parker::new());
    let (to_producer, to_consumer) = (awake_producer.clone(), awake_consumer.clone());
    let sender = thread::spawn(move || {
        for (i, &len) in lens.iter().enumerate() {
            send(&mut producer, len, 100 + i as u64, &mut awake_producer, &to_consumer).unwrap();
        }
        to_consumer.ring_if(producer.finish());
    });
    for (i, &len) in lens.iter().enumerate() {
        assert_eq!(recv(&mut consumer, &mut awake_consumer, &to_producer), Ok((len, 100 + i as u64)));
    }
    assert_eq!(recv(&mut consumer, &mut awake_consumer, &to_producer), Err(RecvError::Finished));
    sender.join().unwrap();
}

/// Each side has a new owner after each message; the earlier owner may have slept.
fn hand_over(count: u64, (producer, consumer): MessagePair) {
    let (mut awake_producer, mut awake_consumer) = (Parker::new(), Parker::new());
    let (to_producer, to_consumer) = (awake_producer.clone(), awake_consumer.clone());
    let sender = thread::spawn(move || {
        let mut producer = producer;
        for value in 100..100 + count {
            send(&mut producer, LONG, value, &mut awake_producer, &to_consumer).unwrap();
            producer =
                message::Producer::resume(producer.memory().clone(), CAPACITY, producer.cursor()).unwrap();
            to_consumer.ring_if(producer.take_owed());
        }
        to_consumer.ring_if(producer.finish());
    });
    let mut consumer = consumer;
    for value in 100..100 + count {
        assert_eq!(recv(&mut consumer, &mut awake_consumer, &to_producer), Ok((LONG, value)));
        consumer = message::Consumer::resume(consumer.memory().clone(), CAPACITY, consumer.cursor()).unwrap();
        to_producer.ring_if(consumer.take_owed());
    }
    assert_eq!(recv(&mut consumer, &mut awake_consumer, &to_producer), Err(RecvError::Finished));
    sender.join().unwrap();
}

#[test]
fn messages_arrive_although_each_side_has_a_new_owner_after_each() {
    explore(2, || {
        let (p, c) = both(ring(&LONG_LINES));
        hand_over(5, messages(p, c));
    });
}

/// Length of a run. The model does the same with a stream: as many runs of `RUN` bytes, each of which begins with its number.
const RUN: usize = 1024;

fn pour(
    runs: usize,
    (mut producer, mut consumer): (stream::Producer<LoomMemory>, stream::Consumer<LoomMemory>),
) {
    let (mut awake_producer, mut awake_consumer) = (Parker::new(), Parker::new());
    let (to_producer, to_consumer) = (awake_producer.clone(), awake_consumer.clone());
    let writer = thread::spawn(move || {
        let mut written = 0;
        while written < runs * RUN {
            match producer.claim(RUN) {
                Ok(room) => {
                    // The reader returns whole runs, so there is room for a whole run or for none.
                    assert_eq!(room.slice().len(), RUN);
                    room.slice().write(0, &(100 + written as u64).to_ne_bytes());
                    to_consumer.ring_if(room.publish(RUN));
                    written += RUN;
                }
                Err(SendError::Full) => sleep_until(&mut producer, &mut awake_producer),
                Err(error) => panic!("{error}"),
            }
        }
        to_consumer.ring_if(producer.finish());
    });
    let mut read = 0;
    loop {
        match consumer.peek() {
            Ok(bytes) => {
                assert_eq!(bytes.len() % RUN, 0);
                let mut word = [0; 8];
                bytes.slice().read(0, &mut word);
                assert_eq!(u64::from_ne_bytes(word), 100 + read as u64);
                to_producer.ring_if(bytes.release(RUN));
                read += RUN;
            }
            Err(RecvError::Empty) => {
                to_producer.ring_if(consumer.take_owed());
                sleep_until(&mut consumer, &mut awake_consumer);
            }
            Err(error) => {
                assert_eq!((error, read), (RecvError::Finished, runs * RUN));
                break;
            }
        }
    }
    writer.join().unwrap();
}

fn streams(p: LoomMemory, c: LoomMemory) -> (stream::Producer<LoomMemory>, stream::Consumer<LoomMemory>) {
    (stream::Producer::new(p, CAPACITY), stream::Consumer::new(c, CAPACITY))
}

#[test]
fn messages_arrive_over_the_wrap_with_both_sides_sleeping() {
    explore(3, || {
        let (p, c) = both(ring(&LONG_LINES));
        deliver(&[LONG; 5], messages(p, c));
    });
}

/// Short messages take the fast path: the first of a lap is sent by a claim, the others are not. For the second, no header is
/// zeroed ahead; for the third, one is. They are received at the first look or at a later one.
fn deliver_shortly(count: u64, (mut producer, mut consumer): MessagePair) {
    let mut awake_consumer = Parker::new();
    let to_consumer = awake_consumer.clone();
    let sender = thread::spawn(move || {
        for i in 0..count {
            to_consumer.ring_if(producer.send(&(100 + i).to_ne_bytes()).unwrap());
        }
    });
    for i in 0..count {
        let mut word = [0; 8];
        while consumer.take(&mut word, 1 + (i % 2) as u32).is_none() {
            sleep_until(&mut consumer, &mut awake_consumer);
        }
        assert_eq!(u64::from_ne_bytes(word), 100 + i);
    }
    sender.join().unwrap();
}

#[test]
fn short_messages_arrive_by_the_short_ways() {
    explore(3, || {
        let (p, c) = both(ring(&std::array::from_fn::<_, 13, _>(|line| 64 * line)));
        deliver_shortly(3, messages(p, c));
    });
}

#[test]
fn messages_arrive_over_padding() {
    // The fourth leaves half a message's room before the end of the ring, so padding precedes the fifth.
    explore(2, || {
        let (p, c) = both(ring(&[0, 1024, 2048, 3072, 3584]));
        deliver(&[LONG, LONG, LONG, 504, LONG, LONG], messages(p, c));
    });
}

#[test]
fn a_stream_arrives_over_the_wrap_with_both_sides_sleeping() {
    explore(2, || {
        let (p, c) = both(ring(&LONG_LINES));
        pour(5, streams(p, c));
    });
}

/// A writer waits for room in a full ring while the reader takes the bytes in parts that are shorter than what it returns at
/// a time, until it finds none. The reader may still hold back the last part when it goes to sleep.
fn trickle(
    part: usize,
    (mut producer, mut consumer): (stream::Producer<LoomMemory>, stream::Consumer<LoomMemory>),
) {
    // Two parts have been read and not returned, and the rest of the ring is full.
    let owed = 2 * part;
    for piece in [part, part, RUN, RUN, RUN, CAPACITY - 3 * RUN - owed] {
        let room = producer.claim(piece).unwrap();
        assert_eq!(room.slice().len(), piece);
        let _ = room.publish(piece);
    }
    for _ in 0..2 {
        assert!(!consumer.peek().unwrap().release(part), "no side waits yet");
    }
    let (mut awake_producer, mut awake_consumer) = (Parker::new(), Parker::new());
    let (to_producer, to_consumer) = (awake_producer.clone(), awake_consumer.clone());
    let writer = thread::spawn(move || {
        sleep_until(&mut producer, &mut awake_producer);
        to_consumer.ring_if(producer.claim(1).unwrap().publish(1));
        to_consumer.ring_if(producer.finish());
    });
    let mut left = CAPACITY - owed + 1;
    while left > 0 {
        match consumer.peek() {
            Ok(bytes) => {
                let n = bytes.len().min(CAPACITY / 4 - part);
                to_producer.ring_if(bytes.release(n));
                left -= n;
            }
            Err(RecvError::Empty) => sleep_until(&mut consumer, &mut awake_consumer),
            Err(error) => panic!("{error} with {left} bytes to come"),
        }
    }
    writer.join().unwrap();
}

#[test]
fn a_writer_finds_room_although_the_reader_keeps_some_back() {
    explore(3, || {
        let (p, c) = both(ring(&[]));
        trickle(200, streams(p, c));
    });
}

/// The consumer copies a message out and returns its room, into which the producer copies at once.
fn reuse((mut producer, mut consumer): MessagePair) {
    const LENS: [usize; 5] = [504, LONG, LONG, LONG, 440];
    for len in LENS {
        let _ = producer.claim(len).unwrap().publish(len);
    }
    let (mut awake_producer, no_sleeper) = (Parker::new(), Parker::new());
    let to_producer = awake_producer.clone();
    let sender = thread::spawn(move || {
        // Padding of one line, then the beginning of the ring, from which the first two messages must have been released.
        sleep_until(producer.want(LONG), &mut awake_producer);
        let claim = producer.claim(LONG).unwrap();
        claim.slice().write(512, &1u64.to_ne_bytes());
        no_sleeper.ring_if(claim.publish(LONG));
    });
    for _ in 0..2 {
        let message = consumer.peek().unwrap();
        message.slice().read(0, &mut [0; 8]);
        to_producer.ring_if(message.release());
    }
    sender.join().unwrap();
}

#[test]
fn room_comes_back_after_the_copy() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 512, 1536, 2560, 3584, 4032, 1024]));
        reuse(messages(p, c));
    });
}

/// Three messages are committed with one publish: a consumer that sees the first must have all three.
fn batch((mut producer, mut consumer): MessagePair) {
    let mut parker = Parker::new();
    let to_consumer = parker.clone();
    let sender = thread::spawn(move || {
        for value in 0..3u64 {
            let claim = producer.claim(8).unwrap();
            claim.slice().write(0, &value.to_ne_bytes());
            claim.commit(8);
        }
        to_consumer.ring_if(producer.publish());
    });
    sleep_until(&mut consumer, &mut parker);
    for value in 0..3u64 {
        let mut word = [0; 8];
        assert_eq!(consumer.recv(&mut word), Ok(8), "message {value} of the batch");
        assert_eq!(u64::from_ne_bytes(word), value);
    }
    assert_eq!(consumer.poll(), Err(RecvError::Empty));
    sender.join().unwrap();
}

#[test]
fn a_batch_is_seen_whole() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 64, 128, 192]));
        batch(messages(p, c));
    });
}

/// A payload of the first lap is a perfect header for a record of the second lap. The consumer must find the zero that is
/// written over it, never the payload.
fn old_payload((mut producer, mut consumer): MessagePair) {
    let second = CAPACITY as u64 + 64;
    let forged = RecordHeader::new(RecordKind::DATA, second, 8);
    for i in 0..4 {
        let claim = producer.claim(LONG).unwrap();
        if i == 0 {
            // Offset 64 of the ring, after the header of 8 bytes.
            claim.slice().write(56, &forged.0.to_ne_bytes());
        }
        let _ = claim.publish(LONG);
        consumer.peek().unwrap().release();
    }
    let mut parker = Parker::new();
    let to_consumer = parker.clone();
    let sender = thread::spawn(move || to_consumer.ring_if(producer.send(&7u64.to_ne_bytes()).unwrap()));
    sleep_until(&mut consumer, &mut parker);
    assert_eq!(consumer.recv(&mut [0; 8]), Ok(8));
    assert_eq!(consumer.poll(), Err(RecvError::Empty), "the forged header was taken for one");
    sender.join().unwrap();
}

#[test]
fn old_payload_is_never_a_header() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 64, 1024, 2048, 3072]));
        old_payload(messages(p, c));
    });
}

/// The last message and the end must come in this order, whether the producer or the daemon marks the end.
fn last_message(state: SideState, producer: LoomMemory, consumer: LoomMemory) {
    let (mut producer, mut consumer) = messages(producer, consumer);
    let mut parker = Parker::new();
    let (to_consumer, no_sleeper) = (parker.clone(), Parker::new());
    let sender = thread::spawn(move || {
        let woken = producer.send(&7u64.to_ne_bytes()).unwrap();
        if state == SideState::DEAD {
            // The daemon learns of the death after it has happened; it writes the state and then rings without asking.
            producer.memory().store_release_u32(PRODUCER_STATE, state.0);
            to_consumer.ring_if(true);
        } else {
            to_consumer.ring_if(producer.finish() || woken);
        }
    });
    let end = if state == SideState::DEAD { RecvError::PeerDead } else { RecvError::Finished };
    assert_eq!(recv(&mut consumer, &mut parker, &no_sleeper), Ok((8, 7)));
    assert_eq!(recv(&mut consumer, &mut parker, &no_sleeper), Err(end));
    sender.join().unwrap();
}

/// A producer sends and aborts. The consumer gets the message or not, learns of the end, and never sleeps through it.
#[test]
fn a_message_that_is_aborted_is_received_before_or_never() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 64]));
        let (mut producer, mut consumer) = messages(p, c);
        let mut parker = Parker::new();
        let (to_consumer, no_sleeper) = (parker.clone(), Parker::new());
        let sender = thread::spawn(move || {
            to_consumer.ring_if(producer.send(&7u64.to_ne_bytes()).unwrap());
            to_consumer.ring_if(producer.abort());
        });
        let first = recv(&mut consumer, &mut parker, &no_sleeper);
        if first == Ok((8, 7)) {
            assert_eq!(recv(&mut consumer, &mut parker, &no_sleeper), Err(RecvError::Aborted));
        } else {
            assert_eq!(first, Err(RecvError::Aborted));
        }
        sender.join().unwrap();
    });
}

#[test]
fn the_last_message_comes_before_the_end() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 64]));
        last_message(SideState::FINISHED, p, c);
    });
}

#[test]
fn the_last_message_of_the_dead_comes_before_their_death() {
    explore(3, || {
        let (p, c) = both(ring(&[0, 64]));
        last_message(SideState::DEAD, p, c);
    });
}

#[test]
fn the_last_bytes_of_a_stream_come_before_its_end() {
    explore(3, || {
        let (p, c) = both(ring(&LONG_LINES));
        pour(1, streams(p, c));
    });
}

/// A producer sleeps for room in a full ring while the consumer closes its side.
fn close((mut producer, mut consumer): MessagePair) {
    let (mut parker, no_sleeper) = (Parker::new(), Parker::new());
    let to_producer = parker.clone();
    let sender = thread::spawn(move || {
        for value in 0..4 {
            match send(&mut producer, LONG, value, &mut parker, &no_sleeper) {
                Ok(()) => assert!(value < 3, "the fourth never fits"),
                Err(error) => return assert_eq!(error, SendError::Closed),
            }
        }
    });
    to_producer.ring_if(consumer.finish());
    sender.join().unwrap();
}

#[test]
fn closing_wakes_a_producer_that_waits_for_room() {
    explore(3, || {
        let (p, c) = both(ring(&LONG_LINES));
        close(messages(p, c));
    });
}

// The following tests must fail. Each takes one ordering away from one side; loom must find the execution in which that loses
// a wake-up (a deadlock) or shows an old value (an assertion of the model).

/// A sleeper that is never woken.
const ASLEEP: &[&str] = &["deadlock"];
/// A copy that is not ordered with another party's copy of the same bytes, or a consequence of it.
const RACE: &[&str] = &["Causality violation", "assertion"];

/// Runs `model`, which must fail with a panic whose message contains one of `how`.
fn must_fail(how: &[&str], model: impl Fn() + Sync + Send + 'static) {
    let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(3, model)));
    let panic = failure.expect_err("the model passes although an ordering is missing");
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
    assert!(how.iter().any(|how| text.contains(how)), "expected {how:?}, failed with {text:?}");
}

#[test]
fn without_the_fence_of_the_waker_a_wake_up_is_lost() {
    must_fail(ASLEEP, || {
        let memory = ring(&LONG_LINES);
        deliver(&[LONG; 1], messages(memory.without(Order::Fence), memory));
    });
}

#[test]
fn without_the_fence_of_the_sleeper_a_wake_up_is_lost() {
    must_fail(ASLEEP, || {
        let memory = ring(&LONG_LINES);
        deliver(&[LONG; 1], messages(memory.clone(), memory.without(Order::Fence)));
    });
}

#[test]
fn without_the_release_of_publish_an_old_payload_is_read() {
    must_fail(RACE, || {
        let memory = ring(&LONG_LINES);
        deliver(&[LONG; 1], messages(memory.without(Order::Release), memory));
    });
}

#[test]
fn without_the_acquire_of_poll_an_old_payload_is_read() {
    must_fail(RACE, || {
        let memory = ring(&LONG_LINES);
        deliver(&[LONG; 1], messages(memory.clone(), memory.without(Order::Acquire)));
    });
}

#[test]
fn without_release_or_acquire_a_batch_is_torn() {
    must_fail(RACE, || {
        let memory = ring(&[0, 64, 128, 192]);
        batch(messages(memory.without(Order::Release), memory));
    });
    must_fail(RACE, || {
        let memory = ring(&[0, 64, 128, 192]);
        batch(messages(memory.clone(), memory.without(Order::Acquire)));
    });
}

#[test]
fn without_the_release_of_publish_old_payload_is_a_header() {
    must_fail(RACE, || {
        let memory = ring(&[0, 64, 1024, 2048, 3072]);
        old_payload(messages(memory.without(Order::Release), memory));
    });
}

#[test]
fn without_the_release_of_space_a_message_is_overwritten() {
    must_fail(RACE, || {
        let memory = ring(&[0, 512, 1536, 2560, 3584, 4032, 1024]);
        reuse(messages(memory.clone(), memory.without(Order::Release)));
    });
    must_fail(RACE, || {
        let memory = ring(&[0, 512, 1536, 2560, 3584, 4032, 1024]);
        reuse(messages(memory.without(Order::Acquire), memory));
    });
    must_fail(RACE, || {
        let memory = ring(&LONG_LINES);
        pour(5, streams(memory.clone(), memory.without(Order::Release)));
    });
}

#[test]
fn without_release_or_acquire_a_stream_is_read_too_early() {
    must_fail(RACE, || {
        let memory = ring(&LONG_LINES);
        pour(1, streams(memory.without(Order::Release), memory));
    });
    must_fail(RACE, || {
        let memory = ring(&LONG_LINES);
        pour(1, streams(memory.clone(), memory.without(Order::Acquire)));
    });
}
