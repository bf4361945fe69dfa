//! Sides that are abandoned and resumed from their cursors, at any moment.
#![cfg(not(loom))]

use ginnel_layout::ring::{CONSUMER_STATE, HEAD, PRODUCER_STATE, SideState, footprint, max_message};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{Corrupt, Cursor, RecvError, SendError, message, stream};
use ginnel_shmem::{Mapping, SharedMemory};
use proptest::prelude::*;
use std::collections::VecDeque;

const CAPACITY: usize = 4096;
const MAX: usize = max_message(CAPACITY);

fn memory() -> Mapping {
    Mapping::anonymous(footprint(CAPACITY)).unwrap()
}

fn everything(memory: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes);
    bytes
}

proptest! {
    /// Whichever side changes its owner before whichever message, all messages arrive, once and in order.
    #[test]
    fn messages_pass_from_owner_to_owner(ops in prop::collection::vec((0..6u8, 0..=MAX), 1..200)) {
        let memory = memory();
        let mut producer = message::Producer::new(memory.clone(), CAPACITY);
        let mut consumer = message::Consumer::new(memory.clone(), CAPACITY);
        let mut sent = VecDeque::new();
        let mut number = 0u8;
        for (op, len) in ops {
            match op {
                0 | 1 => {
                    number = number.wrapping_add(1);
                    match producer.send(&vec![number; len]) {
                        Ok(_) => sent.push_back((number, len)),
                        Err(error) => prop_assert_eq!(error, SendError::Full),
                    }
                }
                2 | 3 => {
                    let mut into = [0; MAX];
                    let got = consumer.recv(&mut into).map(|len| (len, into[..len].to_vec()));
                    let _ = consumer.take_owed();
                    let expected = sent.pop_front().map(|(number, len)| (len, vec![number; len]));
                    prop_assert_eq!(got, expected.ok_or(RecvError::Empty));
                }
                4 => {
                    // A message that is committed and not published is lost with its owner.
                    if let Ok(claim) = producer.claim(len) {
                        claim.commit(len);
                    }
                    let cursor = producer.cursor();
                    producer = message::Producer::resume(memory.clone(), CAPACITY, cursor).unwrap();
                    let now = producer.cursor();
                    prop_assert_eq!((now.position, now.pending), (cursor.position, 0));
                    prop_assert!(!producer.take_owed());
                }
                _ => {
                    let cursor = consumer.cursor();
                    consumer = message::Consumer::resume(memory.clone(), CAPACITY, cursor).unwrap();
                    prop_assert_eq!(consumer.cursor().position, cursor.position);
                    prop_assert!(!consumer.take_owed());
                }
            }
        }
    }

    #[test]
    fn bytes_pass_from_owner_to_owner(ops in prop::collection::vec((0..6u8, 1..=CAPACITY), 1..200)) {
        let memory = memory();
        let mut producer = stream::Producer::new(memory.clone(), CAPACITY);
        let mut consumer = stream::Consumer::new(memory.clone(), CAPACITY);
        let (mut written, mut read) = (0usize, 0usize);
        for (op, len) in ops {
            match op {
                0 | 1 => {
                    let bytes: Vec<u8> = (written..written + len).map(|n| n as u8).collect();
                    match producer.write(&bytes, || {}) {
                        Ok(n) => written += n,
                        Err(error) => prop_assert_eq!(error, SendError::Full),
                    }
                }
                2 | 3 => {
                    let mut into = vec![0; len];
                    match consumer.read(&mut into, || {}) {
                        Ok(n) => {
                            prop_assert!(into[..n].iter().enumerate().all(|(i, byte)| *byte == (read + i) as u8));
                            read += n;
                        }
                        Err(error) => prop_assert_eq!((error, read), (RecvError::Empty, written)),
                    }
                }
                4 => producer = stream::Producer::resume(memory.clone(), CAPACITY, producer.cursor()).unwrap(),
                _ => consumer = stream::Consumer::resume(memory.clone(), CAPACITY, consumer.cursor()).unwrap(),
            }
        }
    }

    /// A cursor may have any value: it is refused, or leads to an error or a message, and never to a panic.
    #[test]
    fn a_forged_cursor_breaks_no_more_than_the_ring(
        position in prop_oneof![any::<u64>(), 0..16384u64, (0..256u64).prop_map(|n| n * 64)],
        back in prop_oneof![any::<u64>(), 0..8192u64, (0..70u64).prop_map(|n| n * 64)],
        pending in prop_oneof![any::<u64>(), 0..8192u64, (0..70u64).prop_map(|n| n * 64)],
        token in any::<u32>(),
        rung in any::<u32>(),
    ) {
        let cursor = Cursor { position, pending, released: position.wrapping_sub(back), token, rung };
        let memory = memory();
        let _ = message::Producer::new(memory.clone(), CAPACITY).send(&[7; 500]);
        if let Ok(mut producer) = message::Producer::resume(memory.clone(), CAPACITY, cursor) {
            for len in [0, 1, 56, 57, MAX, MAX, MAX, MAX, MAX] {
                let _ = producer.send(&vec![1; len]);
            }
            producer.arm();
        }
        if let Ok(mut consumer) = message::Consumer::resume(memory.clone(), CAPACITY, cursor) {
            while consumer.recv(&mut [0; 100]).is_ok() {}
        }
        if let Ok(mut producer) = stream::Producer::resume(memory.clone(), CAPACITY, cursor) {
            let _ = producer.write(&[1; 2 * CAPACITY], || {});
        }
        if let Ok(mut consumer) = stream::Consumer::resume(memory, CAPACITY, cursor) {
            while consumer.read(&mut [0; 100], || {}).is_ok() {}
        }
    }
}

#[test]
fn impossible_cursors_are_refused_and_nothing_is_written() {
    let memory = memory();
    let _ = message::Producer::new(memory.clone(), CAPACITY).send(&[1; 8]);
    let before = everything(&memory);
    let at = |position, released| Cursor { position, released, ..Cursor::default() };
    let both = [
        at(0, 64),
        at(8192, 4032),
        at(64, u64::MAX - 63),
        at(1 << 63, 1 << 63),
        at(u64::MAX - 63, u64::MAX - 63),
    ];
    for cursor in both {
        let error = Corrupt::Cursor { position: cursor.position, released: cursor.released };
        assert_eq!(message::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
        assert_eq!(message::Consumer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
        assert_eq!(stream::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
        assert_eq!(stream::Consumer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
    }
    // This includes two positions that are misaligned by the same amount.
    let like_position = Cursor { pending: 100, ..at(100, 64) };
    let like_released = Cursor { pending: 100, ..at(128, 100) };
    for cursor in [at(100, 64), at(128, 100), at(100, 100), like_position, like_released] {
        let error = Corrupt::Cursor { position: cursor.position, released: cursor.released };
        assert_eq!(message::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
        assert_eq!(message::Consumer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
    }
    let pending = |pending| Cursor { position: 4096, pending, released: 64, ..Cursor::default() };
    for cursor in [pending(128), pending(u64::MAX), pending(5000)] {
        let error = Corrupt::Cursor { position: cursor.position, released: cursor.released };
        assert_eq!(message::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
        assert_eq!(stream::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
    }
    let cursor = Cursor { pending: 3, ..Cursor::default() };
    let error = Corrupt::Cursor { position: 0, released: 0 };
    assert_eq!(message::Producer::resume(memory.clone(), CAPACITY, cursor).err(), Some(error));
    assert!(everything(&memory) == before);
}

/// The earlier producer has published, and died before it could ring. One doorbell too many does no harm.
#[test]
fn a_doorbell_that_may_be_owed_is_reported() {
    let ring = memory();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    message::Consumer::new(ring.clone(), CAPACITY).arm();
    producer.claim(8).unwrap().commit(8);
    let cursor = producer.cursor();
    assert!(producer.publish());
    let mut resumed = message::Producer::resume(ring.clone(), CAPACITY, cursor).unwrap();
    assert_eq!((resumed.take_owed(), resumed.take_owed()), (true, false));
    assert!(
        !message::Producer::resume(ring, CAPACITY, producer.cursor()).unwrap().take_owed(),
        "it has rung"
    );

    let ring = memory();
    let mut producer = stream::Producer::new(ring.clone(), CAPACITY);
    stream::Consumer::new(ring.clone(), CAPACITY).arm();
    let room = producer.claim(8).unwrap();
    let cursor = room.cursor(8);
    assert!(room.publish(8));
    let mut resumed = stream::Producer::resume(ring.clone(), CAPACITY, cursor).unwrap();
    assert_eq!((resumed.take_owed(), resumed.take_owed()), (true, false));
    assert!(!stream::Producer::resume(ring, CAPACITY, producer.cursor()).unwrap().take_owed(), "it has rung");
}

/// The earlier consumer has slept, and been rung, after its cursor was saved.
#[test]
fn sleeps_that_were_not_saved_cost_no_wake() {
    let ring = memory();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    let mut consumer = message::Consumer::new(ring.clone(), CAPACITY);
    let cursor = consumer.cursor();
    consumer.arm();
    assert_eq!(producer.send(&[1]), Ok(true));
    let mut consumer = message::Consumer::resume(ring, CAPACITY, cursor).unwrap();
    assert_eq!(consumer.recv(&mut [0]), Ok(1));
    consumer.arm();
    assert_eq!(producer.send(&[2]), Ok(true));
}

/// The word in the ring, which the peer can write, is neither the position of the cursor nor the one that it was about to
/// reach.
#[test]
fn a_ring_that_does_not_agree_with_the_cursor_is_corrupt() {
    // Two publishes of which only the first was announced, and one that was not announced.
    let ring = memory();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    producer.claim(8).unwrap().commit(8);
    let cursor = producer.cursor();
    assert_eq!((cursor.position, cursor.pending), (0, 64));
    let _ = producer.publish();
    let resumed = message::Producer::resume(ring.clone(), CAPACITY, cursor).unwrap();
    assert_eq!((resumed.cursor().position, resumed.cursor().pending), (64, 0));
    let _ = producer.send(&[1; 8]).unwrap();
    for cursor in [cursor, Cursor { pending: 0, ..cursor }] {
        let resumed = message::Producer::resume(ring.clone(), CAPACITY, cursor);
        assert!(matches!(resumed, Err(Corrupt::Stamp { .. })));
    }

    let ring = memory();
    let mut producer = stream::Producer::new(ring.clone(), CAPACITY);
    producer.write(&[1; 100], || {}).unwrap();
    let at = |position, pending| Cursor { position, pending, ..Cursor::default() };
    for (position, pending, now) in [(100, 0, 100), (40, 60, 100), (100, 7, 100)] {
        let resumed = stream::Producer::resume(ring.clone(), CAPACITY, at(position, pending)).unwrap();
        assert_eq!((resumed.cursor().position, resumed.cursor().pending), (now, 0));
    }
    for (position, pending) in [(0, 0), (40, 61), (101, 0)] {
        let resumed = stream::Producer::resume(ring.clone(), CAPACITY, at(position, pending));
        assert_eq!(resumed.err(), Some(Corrupt::Tail { tail: 100, seen: position, head: 0 }));
    }

    // Bytes that a consumer has released may have been overwritten.
    let ring = memory();
    ring.store_relaxed_u64(HEAD, 128);
    let error = Corrupt::Head { head: 128, seen: 0, tail: 64 };
    assert_eq!(message::Consumer::resume(ring.clone(), CAPACITY, at(64, 0)).err(), Some(error));
    assert_eq!(stream::Consumer::resume(ring.clone(), CAPACITY, at(64, 0)).err(), Some(error));
    assert!(message::Consumer::resume(ring.clone(), CAPACITY, at(128, 0)).is_ok());
    let cursor = Cursor { position: 192, released: 192, ..Cursor::default() };
    let error = Corrupt::Head { head: 128, seen: 192, tail: 192 };
    assert_eq!(stream::Consumer::resume(ring, CAPACITY, cursor).err(), Some(error));
}

/// The peer may look at the words in the ring meanwhile, so resuming must not reset any of them.
#[test]
fn to_resume_writes_nothing() {
    let memory = memory();
    let mut producer = message::Producer::new(memory.clone(), CAPACITY);
    let mut consumer = message::Consumer::new(memory.clone(), CAPACITY);
    let _ = producer.send(&[1; 100]).unwrap();
    let _ = producer.send(&[2; 100]).unwrap();
    assert_eq!(consumer.recv(&mut [0; 100]), Ok(100));
    producer.arm();
    consumer.arm();
    let before = everything(&memory);
    let _ = message::Producer::resume(memory.clone(), CAPACITY, producer.cursor()).unwrap();
    let mut consumer = message::Consumer::resume(memory.clone(), CAPACITY, consumer.cursor()).unwrap();
    assert!(everything(&memory) == before);
    let mut into = [0; 100];
    assert_eq!((consumer.recv(&mut into), into), (Ok(100), [2; 100]));
}

/// The earlier consumer stopped between taking and returning: the producer sleeps, and nothing more will come.
#[test]
fn space_that_is_due_goes_back_at_once() {
    let cursor = Cursor { position: 1024, released: 0, ..Cursor::default() };
    let ring = memory();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    while producer.send(&[1; MAX]).is_ok() {}
    producer.want(MAX).arm();
    assert!(!producer.ready());
    let mut consumer = message::Consumer::resume(ring.clone(), CAPACITY, cursor).unwrap();
    assert_eq!((consumer.take_owed(), ring.load_relaxed_u64(HEAD)), (true, 1024));
    assert!(producer.ready());

    let ring = memory();
    let mut producer = stream::Producer::new(ring.clone(), CAPACITY);
    while producer.write(&[1; CAPACITY], || {}).is_ok() {}
    producer.arm();
    let mut consumer = stream::Consumer::resume(ring.clone(), CAPACITY, cursor).unwrap();
    assert_eq!((consumer.take_owed(), ring.load_relaxed_u64(HEAD)), (true, 1024));
    assert!(producer.ready());
}

/// A peer that has rung for a token does not ring for it again.
#[test]
fn tokens_go_on() {
    let ring = memory();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    let mut consumer = message::Consumer::new(ring.clone(), CAPACITY);
    consumer.arm();
    assert_eq!(producer.send(&[1]), Ok(true));
    let mut consumer = message::Consumer::resume(ring.clone(), CAPACITY, consumer.cursor()).unwrap();
    assert_eq!(consumer.recv(&mut [0]), Ok(1));
    consumer.arm();
    assert_eq!(producer.send(&[2]), Ok(true), "the second sleep is a new one");
    let mut producer = message::Producer::resume(ring.clone(), CAPACITY, producer.cursor()).unwrap();
    assert_eq!(producer.send(&[3]), Ok(false), "one doorbell for each sleep, whichever producer rings it");
}

#[test]
fn a_side_that_has_ended_stays_so() {
    for (state, error) in [
        (SideState::FINISHED.0, SendError::AfterFinish),
        (SideState::ABORTED.0, SendError::AfterFinish),
        (SideState::DEAD.0, SendError::AfterFinish),
        (SideState::LOST.0, SendError::Broken),
        (77, Corrupt::State(77).into()),
    ] {
        let ring = memory();
        ring.store_relaxed_u32(PRODUCER_STATE, state);
        let mut producer = message::Producer::resume(ring.clone(), CAPACITY, Cursor::default()).unwrap();
        assert_eq!(producer.send(&[1]), Err(error));
        let mut producer = stream::Producer::resume(ring.clone(), CAPACITY, Cursor::default()).unwrap();
        assert_eq!(producer.write(&[1], || {}), Err(error));
        assert_eq!(ring.load_relaxed_u32(CONSUMER_STATE), 0);
    }
}
