//! When a consumer returns space: in eighths of the ring, and not for each message. Then the producer's look at the counter
//! costs one cache line for many messages, and an exchange of short messages touches only the lines of the messages.
#![cfg(not(loom))]

use ginnel_layout::ring::{HEAD, footprint, max_message};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::{Mapping, SharedMemory};

const CAPACITY: usize = 4096;
const EIGHTH: u64 = CAPACITY as u64 / 8;

fn memory() -> Mapping {
    Mapping::anonymous(footprint(CAPACITY)).unwrap()
}

fn streams(memory: &Mapping) -> (stream::Producer<Mapping>, stream::Consumer<Mapping>) {
    (stream::Producer::new(memory.clone(), CAPACITY), stream::Consumer::new(memory.clone(), CAPACITY))
}

/// Each exchange empties the ring, so the consumer finds nothing afterwards.
#[test]
fn a_drained_stream_returns_space_in_eighths() {
    let memory = memory();
    let (mut producer, mut consumer) = streams(&memory);
    let (mut returns, mut last) = (0, 0);
    for exchange in 1..=1000u64 {
        assert_eq!(producer.write(&[7; 64], || {}), Ok(64));
        assert_eq!(consumer.read(&mut [0; 100], || {}), Ok(64));
        assert_eq!(consumer.poll(), Err(RecvError::Empty));
        let head = memory.load_relaxed_u64(HEAD);
        assert!(64 * exchange - head < EIGHTH, "{} bytes are kept back", 64 * exchange - head);
        returns += u64::from(head != last);
        last = head;
    }
    assert_eq!(returns, 64 * 1000 / EIGHTH, "space was returned more often than the ring needs");
}

#[test]
fn a_drained_message_ring_returns_space_in_eighths() {
    let memory = memory();
    let mut producer = message::Producer::new(memory.clone(), CAPACITY);
    let mut consumer = message::Consumer::new(memory.clone(), CAPACITY);
    let (mut returns, mut last) = (0, 0);
    for _ in 0..1000 {
        producer.send(&[7; 56]).unwrap();
        assert_eq!(consumer.recv(&mut [0; 56]), Ok(56));
        assert_eq!(consumer.poll(), Err(RecvError::Empty));
        let head = memory.load_relaxed_u64(HEAD);
        returns += u64::from(head != last);
        last = head;
    }
    assert_eq!(returns, 64 * 1000 / EIGHTH);
}

/// Whatever the consumer holds back, a producer that was refused is rung before the ring is empty, and then finds seven
/// eighths of it free.
#[test]
fn a_refused_writer_finds_room_whatever_is_kept_back() {
    for kept in 0..EIGHTH as usize {
        let memory = memory();
        let (mut producer, mut consumer) = streams(&memory);
        // The consumer holds back `kept` bytes of an empty ring.
        producer.write(&vec![1; kept], || {}).unwrap();
        let _ = consumer.read(&mut vec![0; kept.max(1)], || {});
        let mut written = 0;
        let refused = loop {
            match producer.write(&[2; CAPACITY], || {}) {
                Ok(n) => written += n,
                Err(error) => break error,
            }
        };
        assert_eq!((written, refused), (CAPACITY - kept, SendError::Full));
        producer.arm();
        assert!(!producer.ready());
        let (mut rings, mut read) = (0, 0);
        // The length of the pieces divides neither the ring nor its eighths.
        while let Ok(n) = consumer.read(&mut [0; 77], || rings += 1) {
            read += n;
        }
        assert_eq!((read, rings), (written, 1), "with {kept} bytes kept back");
        assert!(producer.ready());
        assert!(producer.write(&[3; CAPACITY], || {}).unwrap() > CAPACITY - EIGHTH as usize);
    }
}

/// The longest message fits into an empty ring of which the consumer holds back as much as it ever does.
#[test]
fn the_longest_message_finds_room_whatever_is_kept_back() {
    for before in 0..2 * CAPACITY / 64 {
        let memory = memory();
        let mut producer = message::Producer::new(memory.clone(), CAPACITY);
        let mut consumer = message::Consumer::new(memory, CAPACITY);
        for _ in 0..before {
            producer.send(&[1; 56]).unwrap();
            assert_eq!(consumer.recv(&mut [0; 56]), Ok(56));
        }
        let longest = vec![2; max_message(CAPACITY)];
        assert!(producer.send(&longest).is_ok(), "after {before} messages of one line");
        assert_eq!(consumer.recv(&mut vec![0; CAPACITY]), Ok(longest.len()));
    }
}

/// A producer may wait until a whole message fits, of up to seven eighths of the ring, whatever the consumer holds back.
#[test]
fn what_fits_at_once_has_room_when_the_ring_is_drained() {
    for kept in 0..EIGHTH as usize {
        let memory = memory();
        let (mut producer, mut consumer) = streams(&memory);
        producer.write(&vec![1; kept], || {}).unwrap();
        let _ = consumer.read(&mut vec![0; kept.max(1)], || {});
        let most = producer.at_once();
        assert_eq!(most, CAPACITY - EIGHTH as usize);
        assert!(producer.has_room(most));
        assert_eq!(producer.write(&vec![2; most], || {}), Ok(most));
        let left = CAPACITY - most - kept;
        assert!(producer.has_room(left) && !producer.has_room(left + 1));
        assert_eq!(consumer.read(&mut vec![0; most], || {}), Ok(most));
        assert!(producer.has_room(most));
    }
    let memory = memory();
    let (mut producer, mut consumer) = streams(&memory);
    let _ = consumer.finish();
    assert!(producer.has_room(CAPACITY + 1), "a call would not wait, because it fails");
}
