//! Sides that abort: data that was not received is void, and the other side notices at once.
#![cfg(not(loom))]

use ginnel_layout::ring::{CONSUMER_STATE, PRODUCER_STATE, SideState, footprint};
use ginnel_ring::wait::{Waitable, Watchable};
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::{Mapping, SharedMemory};

const CAPACITY: usize = 4096;

fn ring() -> Mapping {
    Mapping::anonymous(footprint(CAPACITY)).unwrap()
}

fn messages() -> (Mapping, message::Producer<Mapping>, message::Consumer<Mapping>) {
    let ring = ring();
    let (p, c) = (ring.clone(), ring.clone());
    (ring, message::Producer::new(p, CAPACITY), message::Consumer::new(c, CAPACITY))
}

fn streams() -> (Mapping, stream::Producer<Mapping>, stream::Consumer<Mapping>) {
    let ring = ring();
    let (p, c) = (ring.clone(), ring.clone());
    (ring, stream::Producer::new(p, CAPACITY), stream::Consumer::new(c, CAPACITY))
}

#[test]
fn messages_that_were_not_received_are_void() {
    // Receives in three ways: by the fast path, by a look, and after an earlier look.
    for way in 0..3 {
        let (ring, mut producer, mut consumer) = messages();
        for _ in 0..3 {
            let _ = producer.send(&[7; 8]).unwrap();
        }
        assert_eq!(consumer.recv(&mut [0; 8]), Ok(8));
        if way == 2 {
            assert_eq!(consumer.poll(), Ok(()));
        }
        let claim = producer.claim(8).unwrap();
        claim.commit(8);
        assert!(!producer.abort());
        assert!(!producer.publish(), "what was committed is void, too");
        match way {
            0 => assert_eq!(consumer.take(&mut [0; 8], 1), None),
            1 => assert_eq!(consumer.peek().err(), Some(RecvError::Aborted)),
            _ => assert_eq!(consumer.recv(&mut [0; 8]), Err(RecvError::Aborted)),
        }
        assert_eq!(consumer.recv(&mut [0; 8]), Err(RecvError::Aborted));
        // A corrupt peer cannot become valid again.
        ring.store_relaxed_u32(PRODUCER_STATE, SideState::OPEN.0);
        assert_eq!(consumer.recv(&mut [0; 8]), Err(RecvError::Aborted));
        assert_eq!(producer.send(&[1]), Err(SendError::AfterFinish));
    }
}

#[test]
fn bytes_that_were_not_read_are_void() {
    let (ring, mut producer, mut consumer) = streams();
    producer.write(&[1; 100], || {}).unwrap();
    assert_eq!(consumer.read(&mut [0; 10], || {}), Ok(10));
    assert!(!producer.abort());
    assert_eq!(consumer.read(&mut [0; 10], || {}), Err(RecvError::Aborted));
    assert_eq!(consumer.peek().err(), Some(RecvError::Aborted));
    ring.store_relaxed_u32(PRODUCER_STATE, SideState::OPEN.0);
    assert_eq!(consumer.poll(), Err(RecvError::Aborted));
    assert_eq!(producer.write(&[1], || {}), Err(SendError::AfterFinish));
}

#[test]
fn a_sender_hears_of_a_receiver_that_aborts() {
    let (_, mut producer, mut consumer) = messages();
    let _ = producer.send(&[7; 8]).unwrap();
    assert!(!consumer.abort());
    assert_eq!(producer.send(&[7; 8]), Err(SendError::Aborted));
    assert_eq!(consumer.recv(&mut [0; 8]), Err(RecvError::Aborted));

    let (_, mut producer, mut consumer) = streams();
    producer.write(&[1; 100], || {}).unwrap();
    assert!(!consumer.abort());
    assert_eq!(producer.write(&[1], || {}), Err(SendError::Aborted));
    assert_eq!(consumer.read(&mut [0; 10], || {}), Err(RecvError::Aborted));
}

#[test]
fn a_side_may_abort_after_finish_but_not_finish_after_abort() {
    let (ring, mut producer, mut consumer) = messages();
    let _ = (producer.abort(), producer.finish(), consumer.abort(), consumer.finish());
    for state in [PRODUCER_STATE, CONSUMER_STATE] {
        assert_eq!(SideState(ring.load_relaxed_u32(state)), SideState::ABORTED);
    }
    let (_, mut producer, mut consumer) = messages();
    let _ = producer.send(&[7; 8]).unwrap();
    let _ = (producer.finish(), producer.abort());
    assert_eq!(consumer.recv(&mut [0; 8]), Err(RecvError::Aborted), "what has not been received yet");
    // If the daemon has marked the memory as lost, a side cannot change that.
    let (ring, mut producer, _) = streams();
    ring.store_relaxed_u32(PRODUCER_STATE, SideState::LOST.0);
    let _ = producer.abort();
    assert_eq!(SideState(ring.load_relaxed_u32(PRODUCER_STATE)), SideState::LOST);
}

#[test]
fn sleepers_are_woken() {
    let (_, mut producer, mut consumer) = messages();
    let _ = producer.send(&[7; 8]).unwrap();
    assert_eq!(consumer.recv(&mut [0; 8]), Ok(8));
    let mut watch = consumer.watch();
    watch.arm();
    assert!(producer.abort());
    assert!(watch.look.has_changed());

    let (_, mut producer, mut consumer) = messages();
    while producer.send(&[1; 500]).is_ok() {}
    producer.want(500).arm();
    assert!(!producer.ready());
    assert!(consumer.abort());
    assert!(producer.ready());

    let (_, mut producer, mut consumer) = streams();
    consumer.arm();
    assert!(producer.abort() && consumer.ready());
    let (_, mut producer, mut consumer) = streams();
    producer.arm();
    assert!(consumer.abort() && producer.ready());
}
