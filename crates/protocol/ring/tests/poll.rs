//! The result of a consumer of bytes that polls before it receives.
#![cfg(not(loom))]

use ginnel_layout::ring::footprint;
use ginnel_ring::{RecvError, stream};
use ginnel_shmem::Mapping;

const CAPACITY: usize = 4096;

#[test]
fn bytes_that_come_after_those_seen_are_counted_too() {
    let memory = Mapping::anonymous(footprint(CAPACITY)).unwrap();
    let mut producer = stream::Producer::new(memory.clone(), CAPACITY);
    let mut consumer = stream::Consumer::new(memory, CAPACITY);
    assert_eq!(consumer.poll_all(), Err(RecvError::Empty));
    producer.write(b"two", || {}).unwrap();
    assert_eq!((consumer.poll(), consumer.poll_all()), (Ok(3), Ok(3)));
    producer.write(b" more", || {}).unwrap();
    assert_eq!((consumer.poll(), consumer.poll_all()), (Ok(3), Ok(8)));
    let _ = producer.finish();
    assert_eq!(consumer.poll_all(), Ok(8));
    assert_eq!(consumer.read(&mut [0; 100], || {}), Ok(8));
    assert_eq!(consumer.poll_all(), Err(RecvError::Finished));
}

#[test]
fn bytes_that_were_seen_are_void_after_an_abort() {
    let memory = Mapping::anonymous(footprint(CAPACITY)).unwrap();
    let mut producer = stream::Producer::new(memory.clone(), CAPACITY);
    let mut consumer = stream::Consumer::new(memory, CAPACITY);
    producer.write(b"two", || {}).unwrap();
    assert_eq!(consumer.poll_all(), Ok(3));
    let _ = producer.abort();
    assert_eq!(consumer.poll_all(), Err(RecvError::Aborted));
}
