//! The headers that a producer of short messages zeroes ahead of its tail: the producer must not touch bytes that the
//! consumer has not released, and the consumer must never mistake an old payload for a header.
#![cfg(not(loom))]

use ginnel_layout::ring::footprint;
use ginnel_ring::{RecvError, SendError, message};
use ginnel_shmem::Mapping;

const CAPACITY: usize = 4096;

fn pair() -> (message::Producer<Mapping>, message::Consumer<Mapping>) {
    let memory = Mapping::anonymous(footprint(CAPACITY)).unwrap();
    (message::Producer::new(memory.clone(), CAPACITY), message::Consumer::new(memory, CAPACITY))
}

/// Returns bytes that would be an invalid header at any position.
fn message(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (number * 31 + i) as u8 | 1).collect()
}

fn receive(consumer: &mut message::Consumer<Mapping>, expected: &[u8]) {
    let mut bytes = [0; 600];
    let len = consumer.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..len], expected);
}

/// Fills the ring until it is full, and empties it by a number of messages at a time, for several laps.
#[test]
fn messages_that_are_not_released_stay() {
    for len in [0, 8, 56, 57, 120, 121, 248, 249, 600] {
        for at_a_time in [1, 2, 3, 5, 8, 13, usize::MAX] {
            let (mut producer, mut consumer) = pair();
            let (mut sent, mut received) = (0, 0);
            while received < 500 {
                loop {
                    match producer.send(&message(sent, len)) {
                        Ok(_) => sent += 1,
                        Err(error) => {
                            assert_eq!(error, SendError::Full);
                            break;
                        }
                    }
                }
                for _ in 0..at_a_time.min((sent - received) as usize) {
                    receive(&mut consumer, &message(received, len));
                    received += 1;
                }
            }
            while received < sent {
                receive(&mut consumer, &message(received, len));
                received += 1;
            }
            assert_eq!(consumer.recv(&mut []), Err(RecvError::Empty));
        }
    }
}

/// Between short messages there is a claim, which fills lines beyond what is committed and leaves the bytes there.
#[test]
fn bytes_left_by_a_claim_are_not_taken_for_a_header() {
    for between in 0..12 {
        for committed in [0, 8, 100, 500] {
            let (mut producer, mut consumer) = pair();
            for number in 0..300 {
                for _ in 0..between {
                    producer.send(&message(number, 8)).unwrap();
                    receive(&mut consumer, &message(number, 8));
                    assert_eq!(consumer.recv(&mut []), Err(RecvError::Empty));
                }
                let claim = producer.claim(500).unwrap();
                claim.slice().write(0, &message(number, 500));
                let _ = claim.publish(committed);
                receive(&mut consumer, &message(number, 500)[..committed]);
                assert_eq!(consumer.recv(&mut []), Err(RecvError::Empty));
            }
        }
    }
}
