//! A side of a ring is killed at each of its stores, and another process continues: every message must arrive once and in
//! order, and a sleeping peer must be rung.
//!
//! A killed process has done all its stores up to some point and none after it; saving its cursor and ringing a doorbell
//! count as stores. Therefore a side runs on a memory that accepts no more stores after the k-th, for every k until its work
//! is done. The other side, the ring and the saved cursor survive.
#![cfg(not(loom))]

use ginnel_layout::ring::{MIN_CAPACITY, footprint, max_message};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{Cursor, RecvError, SendError, message, stream};
use ginnel_shmem::Mapping;
use kit::mortal::Mortal;

const CAPACITY: usize = MIN_CAPACITY;
const MAX: usize = max_message(CAPACITY);
/// Message lengths that go around the ring several times, with padding at its end.
const LENGTHS: [usize; 24] = [
    MAX, 0, 700, MAX, MAX, 1, MAX, 500, 56, 57, MAX, MAX, 0, 900, MAX, MAX, 8, 64, MAX, 333, MAX, 800, MAX,
    MAX,
];

/// What a side saves outside of its process: its cursor, and what belongs to it.
#[derive(Clone, Copy, Default)]
struct Saved {
    cursor: Cursor,
    /// Number of the message that is about to be published, or of the first that is not processed.
    number: usize,
}

fn ring() -> Mapping {
    Mapping::anonymous(footprint(CAPACITY)).unwrap()
}

fn content(number: usize) -> Vec<u8> {
    vec![number as u8 + 1; LENGTHS[number]]
}

/// A consumer that survives. It sleeps whenever there is nothing, and expects to be woken.
struct Reader {
    consumer: message::Consumer<Mapping>,
    got: usize,
    rung: bool,
}

impl Reader {
    /// Processes what is there; then sleeps. A message that comes while it sleeps must ring.
    fn works(&mut self, lost: &str) {
        let mut into = [0; MAX];
        loop {
            match self.consumer.recv(&mut into) {
                Ok(len) => {
                    assert!(self.rung, "{lost}: message {} came to a sleeper that was not rung", self.got);
                    assert_eq!(&into[..len], &content(self.got)[..], "{lost}");
                    let _ = self.consumer.take_owed();
                    self.got += 1;
                }
                Err(error) => {
                    assert_eq!(error, RecvError::Empty, "{lost}");
                    break;
                }
            }
        }
        self.rung = false;
        self.consumer.arm();
    }
}

/// A process that sends the remaining messages, until it is done or dead.
fn send_all(
    ring: &Mapping,
    left: u64,
    saved: &mut Saved,
    fresh: bool,
    reader: &mut Reader,
    lost: &str,
) -> bool {
    let memory = Mortal::new(ring, left);
    let mut producer = if fresh {
        message::Producer::new(memory.clone(), CAPACITY)
    } else {
        let was = saved.cursor;
        let mut producer = message::Producer::resume(memory.clone(), CAPACITY, was).expect(lost);
        let now = producer.cursor();
        assert!([was.position, was.position + was.pending].contains(&now.position), "{lost}");
        if producer.take_owed() {
            reader.rung = true;
        }
        // The message that was about to be published was published.
        let done = was.pending > 0 && now.position != was.position;
        *saved = Saved { cursor: now, number: saved.number + usize::from(done) };
        reader.works(lost);
        producer
    };
    while saved.number < LENGTHS.len() {
        let bytes = content(saved.number);
        match producer.claim(bytes.len()) {
            Ok(claim) => {
                claim.slice().write(0, &bytes);
                claim.commit(bytes.len());
            }
            Err(error) => {
                assert_eq!(error, SendError::Full, "{lost}");
                let before = reader.got;
                reader.works(lost);
                assert!(reader.got > before, "{lost}: the ring is full, and nothing comes out of it");
                continue;
            }
        }
        let number = saved.number;
        if memory.stores() {
            saved.cursor = producer.cursor();
        }
        if producer.publish() && memory.stores() {
            reader.rung = true;
        }
        if memory.is_dead() {
            return false;
        }
        // The message is known to be published, so the next save is about the next message.
        *saved = Saved { cursor: producer.cursor(), number: number + 1 };
        if number.is_multiple_of(3) {
            reader.works(lost);
        }
    }
    true
}

#[test]
fn a_producer_that_dies_anywhere_is_succeeded_without_loss_or_repetition() {
    let mut kills = 0;
    for first in 1.. {
        let ring = ring();
        let mut reader =
            Reader { consumer: message::Consumer::new(ring.clone(), CAPACITY), got: 0, rung: false };
        reader.consumer.arm();
        let mut saved = Saved::default();
        let lost = format!("killed at store {first}");
        if !send_all(&ring, first, &mut saved, true, &mut reader, &lost) {
            kills += 1;
            // The first words belong to the producer: until they are written, the next process begins anew.
            let begins = first <= 3;
            // The next process dies too, a little later.
            let next = 1 + first % 7;
            if !send_all(&ring, next, &mut saved, begins, &mut reader, &lost) {
                let begins = begins && next <= 3;
                assert!(send_all(&ring, u64::MAX, &mut saved, begins, &mut reader, &lost));
            }
        }
        reader.works(&lost);
        assert_eq!(reader.got, LENGTHS.len(), "{lost}");
        if kills < first {
            break;
        }
    }
    assert!(kills > 100, "{kills} kills are not many");
}

/// A process that processes what comes, until it has everything or is dead. It saves the result of each message together with
/// its cursor.
fn receive_all(
    ring: &Mapping,
    left: u64,
    saved: &mut Saved,
    fresh: bool,
    producer: &mut message::Producer<Mapping>,
    sent: &mut usize,
    lost: &str,
) -> bool {
    let memory = Mortal::new(ring, left);
    let mut consumer = if fresh {
        message::Consumer::new(memory.clone(), CAPACITY)
    } else {
        let mut consumer = message::Consumer::resume(memory.clone(), CAPACITY, saved.cursor).expect(lost);
        let _ = consumer.take_owed();
        consumer
    };
    while saved.number < LENGTHS.len() {
        while *sent < LENGTHS.len() && producer.send(&content(*sent)).is_ok() {
            *sent += 1;
        }
        let message = match consumer.peek() {
            Ok(message) => message,
            Err(error) => panic!("{lost}: {error} before message {}", saved.number),
        };
        assert_eq!(message.slice().to_vec(), content(saved.number), "{lost}");
        if memory.stores() {
            *saved = Saved { cursor: message.cursor(), number: saved.number + 1 };
        }
        let _ = message.release();
        if memory.is_dead() {
            return false;
        }
    }
    true
}

#[test]
fn a_consumer_that_dies_anywhere_is_succeeded_without_loss_or_repetition() {
    let mut kills = 0;
    for first in 1.. {
        let ring = ring();
        let mut producer = message::Producer::new(ring.clone(), CAPACITY);
        let (mut saved, mut sent) = (Saved::default(), 0);
        let lost = format!("killed at store {first}");
        let mut left = first;
        let mut begins = true;
        while !receive_all(&ring, left, &mut saved, begins, &mut producer, &mut sent, &lost) {
            begins &= left <= 3;
            kills += u64::from(left == first);
            left = if left == first { first + 100 } else { u64::MAX };
        }
        assert_eq!((saved.number, sent), (LENGTHS.len(), LENGTHS.len()), "{lost}");
        if kills < first {
            break;
        }
    }
    assert!(kills > 20, "{kills} kills are not many");
}

/// Does the same with a stream, whose pieces are saved before they are published, and before they are released.
#[test]
fn both_ends_of_a_stream_that_die_anywhere_are_succeeded() {
    const LEN: u64 = 3 * CAPACITY as u64;
    for first in 4..200 {
        let ring = ring();
        let lost = format!("killed at store {first}");
        let (mut to, mut from) = (Cursor::default(), Cursor::default());
        let (mut sender, mut receiver) = (Mortal::new(&ring, first), Mortal::new(&ring, first + first % 5));
        let mut producer = stream::Producer::new(sender.clone(), CAPACITY);
        let mut consumer = stream::Consumer::new(receiver.clone(), CAPACITY);
        let mut read = 0;
        for turn in 0.. {
            if read == LEN {
                break;
            }
            assert!(turn < 1000, "{lost}: nothing moves");
            match producer.claim(400) {
                Ok(room) if producer_left(to, LEN) > 0 => {
                    let len = room.slice().len().min(producer_left(to, LEN) as usize);
                    let at = to.position;
                    let bytes: Vec<u8> = (0..len as u64).map(|n| (at + n) as u8).collect();
                    room.slice().write(0, &bytes);
                    if sender.stores() {
                        to = room.cursor(len);
                    }
                    let _ = room.publish(len);
                    if sender.is_dead() {
                        sender = Mortal::new(&ring, u64::MAX);
                        producer = stream::Producer::resume(sender.clone(), CAPACITY, to).expect(&lost);
                    }
                    to = producer.cursor();
                }
                Ok(_) | Err(SendError::Full) => {}
                Err(error) => panic!("{lost}: {error}"),
            }
            match consumer.peek() {
                Ok(bytes) => {
                    let (whole, len) = (bytes.slice().to_vec(), bytes.len().min(333));
                    let expected: Vec<u8> = (0..len as u64).map(|n| (read + n) as u8).collect();
                    assert_eq!(whole[..len], expected[..], "{lost}");
                    if receiver.stores() {
                        from = bytes.cursor(len);
                        read += len as u64;
                    }
                    let _ = bytes.release(len);
                    if receiver.is_dead() {
                        receiver = Mortal::new(&ring, u64::MAX);
                        consumer = stream::Consumer::resume(receiver.clone(), CAPACITY, from).expect(&lost);
                    }
                }
                Err(error) => assert_eq!(error, RecvError::Empty, "{lost}"),
            }
        }
    }
}

/// Returns how many bytes of the stream are not published.
fn producer_left(to: Cursor, len: u64) -> u64 {
    len - to.position
}
