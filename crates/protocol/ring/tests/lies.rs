//! One test for each malformed value that a hostile peer can write, named by the rule that the value breaks. The test expects
//! the exact error, and that nothing else happens, which is checked byte by byte: a side that refuses a lie writes nothing,
//! rings no doorbell and continues to refuse.
#![cfg(not(loom))]

use ginnel_layout::ring::{
    BASE, CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, RecordHeader, RecordKind, SPACE_ARMED,
    SideState, TAIL, footprint, max_message,
};
use ginnel_ring::wait::{Sleeper, WaitMode, wait};
use ginnel_ring::{Corrupt, RecvError, SendError, carrier, message, stream};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::io;
use std::time::{Duration, Instant};

const CAPACITY: usize = 4096;
const MAX: usize = max_message(CAPACITY);
const GUARD: usize = 4096;

/// A ring in the middle of a segment with other pages on each side, and the access of a hostile peer to it.
struct HostilePeer {
    whole: Mapping,
    ring: Mapping,
}

impl HostilePeer {
    fn new() -> Self {
        let whole = Mapping::anonymous(footprint(CAPACITY) + 2 * GUARD).unwrap();
        let ring = whole.part(GUARD, footprint(CAPACITY)).unwrap();
        Self { whole, ring }
    }

    fn messages() -> (Self, message::Producer<Mapping>, message::Consumer<Mapping>) {
        let n = Self::new();
        let (p, c) = (n.ring.clone(), n.ring.clone());
        (n, message::Producer::new(p, CAPACITY), message::Consumer::new(c, CAPACITY))
    }

    fn stream() -> (Self, stream::Producer<Mapping>, stream::Consumer<Mapping>) {
        let n = Self::new();
        let (p, c) = (n.ring.clone(), n.ring.clone());
        (n, stream::Producer::new(p, CAPACITY), stream::Consumer::new(c, CAPACITY))
    }

    /// Writes a header for `position` at its place in the ring.
    fn header(&self, position: u64, header: RecordHeader) {
        self.ring.store_release_u64(HEADER + position as usize % CAPACITY, header.0);
    }

    fn record(&self, kind: u8, position: u64, len: usize) {
        self.header(position, RecordHeader::new(RecordKind(kind), position, len));
    }

    fn state(&self, word: usize, state: u32) {
        self.ring.store_release_u32(word, state);
    }

    fn everything(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.whole.len()];
        self.whole.read(0, &mut bytes);
        bytes
    }

    /// Checks that the consumer returns `error`, writes nothing, and returns the same error again, whatever the peer repairs.
    fn refused_by(&self, consumer: &mut message::Consumer<Mapping>, error: impl Into<RecvError>) {
        let (error, before) = (error.into(), self.everything());
        assert_eq!(consumer.poll(), Err(error));
        assert_eq!(consumer.recv(&mut [0; MAX]), Err(error));
        assert_eq!(consumer.peek().err(), Some(error));
        assert!(!consumer.take_owed());
        assert!(self.everything() == before, "refusing {error} wrote something");
        for position in 0..CAPACITY as u64 / 64 {
            self.record(1, position * 64, 8);
        }
        self.state(PRODUCER_STATE, SideState::OPEN.0);
        assert_eq!(consumer.poll(), Err(error), "a corrupt peer became valid again");
    }

    fn refused_by_producer(&self, producer: &mut message::Producer<Mapping>, error: impl Into<SendError>) {
        let (error, before) = (error.into(), self.everything());
        assert_eq!(producer.send(&[0; MAX]), Err(error));
        assert_eq!(producer.claim(MAX).err(), Some(error));
        assert!(self.everything() == before, "refusing {error} wrote something");
        self.ring.store_release_u64(HEAD, 0);
        self.state(CONSUMER_STATE, SideState::OPEN.0);
        assert_eq!(producer.send(&[0; 8]), Err(error), "a corrupt peer became valid again");
    }

    fn refused_by_reader(&self, consumer: &mut stream::Consumer<Mapping>, error: impl Into<RecvError>) {
        let (error, before) = (error.into(), self.everything());
        assert_eq!(consumer.poll(), Err(error));
        assert_eq!(consumer.read(&mut [0; 100], || panic!("rings")), Err(error));
        assert_eq!(consumer.peek().err(), Some(error));
        assert!(!consumer.take_owed());
        assert!(self.everything() == before, "refusing {error} wrote something");
        self.ring.store_release_u64(TAIL, 1000);
        self.state(PRODUCER_STATE, SideState::OPEN.0);
        assert_eq!(consumer.poll(), Err(error), "a corrupt peer became valid again");
    }

    fn refused_by_writer(&self, producer: &mut stream::Producer<Mapping>, error: impl Into<SendError>) {
        let (error, before) = (error.into(), self.everything());
        assert_eq!(producer.claim(CAPACITY).err(), Some(error));
        assert_eq!(producer.write(&[0; 10], || panic!("rings")), Err(error));
        assert!(self.everything() == before, "refusing {error} wrote something");
        self.ring.store_release_u64(HEAD, 0);
        self.state(CONSUMER_STATE, SideState::OPEN.0);
        assert_eq!(producer.write(&[0; 10], || panic!("rings")), Err(error));
    }
}

/// Sends and receives a message that spans `span` bytes of the ring.
fn pass(producer: &mut message::Producer<Mapping>, consumer: &mut message::Consumer<Mapping>, span: usize) {
    let _ = producer.send(&vec![1; span - 8]).unwrap();
    assert_eq!(consumer.recv(&mut [0; MAX]), Ok(span - 8));
    let _ = consumer.take_owed();
}

mod record {
    use super::*;

    #[test]
    fn is_stamped_with_its_position() {
        let (n, _p, mut c) = HostilePeer::messages();
        let header = RecordHeader::new(RecordKind::DATA, 64, 8);
        n.header(0, header);
        n.refused_by(&mut c, Corrupt::Stamp { header: header.0, position: 0 });
    }

    #[test]
    fn of_an_earlier_round_is_stale() {
        let (n, mut p, mut c) = HostilePeer::messages();
        (0..4).for_each(|_| pass(&mut p, &mut c, 1024));
        let header = RecordHeader::new(RecordKind::DATA, 0, 8);
        n.header(4096, header);
        n.refused_by(&mut c, Corrupt::Stamp { header: header.0, position: 4096 });
    }

    #[test]
    fn without_the_top_bit_is_no_record() {
        let (n, _p, mut c) = HostilePeer::messages();
        n.header(0, RecordHeader(1));
        n.refused_by(&mut c, Corrupt::Stamp { header: 1, position: 0 });
    }

    #[test]
    fn has_a_known_kind() {
        for kind in (0..16).filter(|kind| ![1, 2].contains(kind)) {
            let (n, _p, mut c) = HostilePeer::messages();
            n.record(kind, 0, 8);
            n.refused_by(&mut c, Corrupt::Kind(kind));
        }
    }

    #[test]
    fn is_no_longer_than_the_longest_message() {
        for len in [MAX + 1, CAPACITY, (1 << 28) - 1] {
            let (n, _p, mut c) = HostilePeer::messages();
            n.record(1, 0, len);
            n.refused_by(&mut c, Corrupt::Length { len, position: 0 });
        }
    }

    #[test]
    fn ends_within_the_ring() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for span in [1024, 1024, 1024, 960] {
            pass(&mut p, &mut c, span);
        }
        // One line is left before the end of the ring; 56 bytes fill it, 57 do not fit.
        n.record(1, 4032, 57);
        n.refused_by(&mut c, Corrupt::Length { len: 57, position: 4032 });
    }

    #[test]
    fn that_ends_with_the_ring_is_no_lie() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for span in [1024, 1024, 1024, 960] {
            pass(&mut p, &mut c, span);
        }
        n.record(1, 4032, 56);
        assert_eq!(c.recv(&mut [0; 56]), Ok(56));
    }

    #[test]
    fn forged_in_old_payload_is_not_taken_for_one() {
        let (_n, mut p, mut c) = HostilePeer::messages();
        // Every line of the first lap's payload begins with a header that would be right in the second lap.
        for _ in 0..4 {
            let claim = p.claim(MAX).unwrap();
            for line in 1..16 {
                let forged = RecordHeader::new(RecordKind::DATA, 4096 + line * 64, 8);
                claim.slice().write(line as usize * 64 - 8, &forged.0.to_ne_bytes());
            }
            let _ = claim.publish(MAX);
            c.peek().unwrap().release();
        }
        for _ in 0..16 {
            assert_eq!(c.poll(), Err(RecvError::Empty));
            pass(&mut p, &mut c, 64);
        }
    }

    #[test]
    fn that_changes_after_the_look_is_what_it_was() {
        let (n, mut p, mut c) = HostilePeer::messages();
        let _ = p.send(&[7; 100]).unwrap();
        assert_eq!(c.poll(), Ok(()));
        n.record(1, 0, MAX);
        let message = c.peek().unwrap();
        assert_eq!(message.slice().to_vec(), [7; 100]);
        n.header(0, RecordHeader(u64::MAX));
        message.release();
        let _ = p.send(&[8; 10]).unwrap();
        assert_eq!(c.recv(&mut [0; 10]), Ok(10), "the next record is where the checked length says");
    }

    #[test]
    fn that_never_comes_is_not_an_error_and_not_a_hang() {
        let (n, _p, mut c) = HostilePeer::messages();
        let before = n.everything();
        for _ in 0..1000 {
            assert_eq!(c.poll(), Err(RecvError::Empty));
        }
        assert!(n.everything() == before);
        let (late, _) = waits(&mut c);
        assert!(!late);
    }
}

mod padding {
    use super::*;

    #[test]
    fn is_never_at_the_start() {
        for len in [0, 8, CAPACITY - 8] {
            let (n, _p, mut c) = HostilePeer::messages();
            n.record(2, 0, len);
            n.refused_by(&mut c, Corrupt::Padding { len, position: 0 });
        }
    }

    #[test]
    fn ends_where_the_ring_ends() {
        // 1024 bytes are left, so only a padding payload of 1016 bytes is right.
        for len in [0, 1015, 1017, 1016 + 64, 1016 - 64, (1 << 28) - 1] {
            let (n, mut p, mut c) = HostilePeer::messages();
            (0..3).for_each(|_| pass(&mut p, &mut c, 1024));
            n.record(2, 3072, len);
            n.refused_by(&mut c, Corrupt::Padding { len, position: 3072 });
        }
    }

    #[test]
    fn is_not_followed_by_padding() {
        let (n, mut p, mut c) = HostilePeer::messages();
        (0..3).for_each(|_| pass(&mut p, &mut c, 1024));
        n.record(2, 3072, 1016);
        n.record(2, 4096, CAPACITY - 8);
        // The first of the two is valid, and its room is returned.
        assert_eq!(c.poll(), Err(Corrupt::Padding { len: CAPACITY - 8, position: 4096 }.into()));
        n.refused_by(&mut c, Corrupt::Padding { len: CAPACITY - 8, position: 4096 });
    }

    #[test]
    fn alone_is_no_message() {
        let (n, mut p, mut c) = HostilePeer::messages();
        (0..3).for_each(|_| pass(&mut p, &mut c, 1024));
        n.header(4096, RecordHeader(0));
        n.record(2, 3072, 1016);
        assert_eq!(c.poll(), Err(RecvError::Empty));
    }
}

mod head {
    use super::*;

    /// A producer whose ring is full, and which has seen `seen` bytes released.
    fn full(seen: usize) -> (HostilePeer, message::Producer<Mapping>) {
        let (n, mut p, mut c) = HostilePeer::messages();
        let mut sent = 0;
        while p.send(&[0; MAX]).is_ok() {
            sent += 1024;
        }
        (0..seen / 1024).for_each(|_| assert_eq!(c.recv(&mut []), Ok(MAX)));
        while p.send(&[0; MAX]).is_ok() {
            sent += 1024;
        }
        assert_eq!(p.in_flight(), sent - seen);
        (n, p)
    }

    #[test]
    fn never_goes_back() {
        let (n, mut p) = full(2048);
        n.ring.store_release_u64(HEAD, 1024);
        n.refused_by_producer(&mut p, Corrupt::Head { head: 1024, seen: 2048, tail: 5120 });
    }

    #[test]
    fn is_not_beyond_the_tail() {
        for head in [3072 + 64, !63, 1 << 63] {
            let (n, mut p) = full(0);
            n.ring.store_release_u64(HEAD, head);
            n.refused_by_producer(&mut p, Corrupt::Head { head, seen: 0, tail: 3072 });
        }
    }

    #[test]
    fn is_aligned_to_records() {
        for head in [1, 8, 63, 1025] {
            let (n, mut p) = full(0);
            n.ring.store_release_u64(HEAD, head);
            n.refused_by_producer(&mut p, Corrupt::Head { head, seen: 0, tail: 3072 });
        }
    }

    #[test]
    fn that_never_moves_is_full_and_not_a_hang() {
        let (n, mut p) = full(0);
        let before = n.everything();
        for _ in 0..1000 {
            assert_eq!(p.send(&[0; MAX]), Err(SendError::Full));
        }
        assert!(n.everything() == before);
        let (room, _) = waits(p.want(MAX));
        assert!(!room);
    }

    #[test]
    fn of_a_stream_never_goes_back() {
        let (n, mut p, mut c) = HostilePeer::stream();
        p.write(&[0; CAPACITY], || {}).unwrap();
        c.read(&mut [0; 1024], || {}).unwrap();
        p.write(&[0; CAPACITY], || {}).unwrap();
        n.ring.store_release_u64(HEAD, 1023);
        n.refused_by_writer(&mut p, Corrupt::Head { head: 1023, seen: 1024, tail: 5120 });
    }

    #[test]
    fn of_a_stream_is_not_beyond_the_tail() {
        for head in [CAPACITY as u64 + 1, u64::MAX] {
            let (n, mut p, _c) = HostilePeer::stream();
            p.write(&[0; CAPACITY], || {}).unwrap();
            n.ring.store_release_u64(HEAD, head);
            n.refused_by_writer(&mut p, Corrupt::Head { head, seen: 0, tail: 4096 });
        }
    }
}

mod tail {
    use super::*;

    #[test]
    fn never_goes_back() {
        let (n, mut p, mut c) = HostilePeer::stream();
        p.write(&[0; 100], || {}).unwrap();
        c.read(&mut [0; 100], || {}).unwrap();
        n.ring.store_release_u64(TAIL, 99);
        // An empty ring first returns the room; only then is there nothing left to write.
        let _ = c.poll();
        n.refused_by_reader(&mut c, Corrupt::Tail { tail: 99, seen: 100, head: 100 });
    }

    #[test]
    fn is_not_further_ahead_than_the_ring_is_long() {
        for tail in [CAPACITY as u64 + 1, 1 << 63, u64::MAX] {
            let (n, _p, mut c) = HostilePeer::stream();
            n.ring.store_release_u64(TAIL, tail);
            n.refused_by_reader(&mut c, Corrupt::Tail { tail, seen: 0, head: 0 });
        }
    }

    #[test]
    fn of_a_full_ring_is_no_lie() {
        let (n, _p, mut c) = HostilePeer::stream();
        n.ring.store_release_u64(TAIL, CAPACITY as u64);
        assert_eq!(c.poll(), Ok(CAPACITY));
    }

    #[test]
    fn that_changes_after_the_look_is_what_it_was() {
        let (n, mut p, mut c) = HostilePeer::stream();
        p.write(&[5; 100], || {}).unwrap();
        assert_eq!(c.poll(), Ok(100));
        n.ring.store_release_u64(TAIL, u64::MAX);
        let mut bytes = [0; 200];
        assert_eq!(c.read(&mut bytes, || {}), Ok(100), "what was checked is there");
        assert_eq!(bytes[..100], [5; 100]);
        assert_eq!(c.poll(), Err(Corrupt::Tail { tail: u64::MAX, seen: 100, head: 100 }.into()));
    }

    #[test]
    fn means_nothing_to_messages() {
        let (n, mut p, mut c) = HostilePeer::messages();
        n.ring.store_release_u64(TAIL, u64::MAX);
        pass(&mut p, &mut c, 64);
    }
}

mod state {
    use super::*;

    #[test]
    fn of_a_producer_is_known() {
        for state in [6, 77, u32::MAX] {
            let (n, _p, mut c) = HostilePeer::messages();
            n.state(PRODUCER_STATE, state);
            n.refused_by(&mut c, Corrupt::State(state));
            let (n, _p, mut c) = HostilePeer::stream();
            n.state(PRODUCER_STATE, state);
            n.refused_by_reader(&mut c, Corrupt::State(state));
        }
    }

    #[test]
    fn of_a_consumer_is_known() {
        for state in [6, 77, u32::MAX] {
            let (n, mut p, _c) = HostilePeer::messages();
            n.state(CONSUMER_STATE, state);
            n.refused_by_producer(&mut p, Corrupt::State(state));
            let (n, mut p, _c) = HostilePeer::stream();
            n.state(CONSUMER_STATE, state);
            n.refused_by_writer(&mut p, Corrupt::State(state));
        }
    }

    #[test]
    fn comes_after_what_was_published() {
        let (n, mut p, mut c) = HostilePeer::messages();
        let _ = p.send(&[1; 8]).unwrap();
        n.state(PRODUCER_STATE, 99);
        assert_eq!(c.recv(&mut [0; 8]), Ok(8));
        assert_eq!(c.poll(), Err(Corrupt::State(99).into()));
    }

    #[test]
    fn that_is_over_does_not_begin_again() {
        for (state, end) in [
            (SideState::FINISHED, RecvError::Finished),
            (SideState::DEAD, RecvError::PeerDead),
            (SideState::ABORTED, RecvError::Aborted),
            (SideState::LOST, RecvError::Broken),
        ] {
            let (n, _p, mut c) = HostilePeer::messages();
            n.state(PRODUCER_STATE, state.0);
            n.refused_by(&mut c, end);
            let (n, _p, mut c) = HostilePeer::stream();
            n.state(PRODUCER_STATE, state.0);
            n.refused_by_reader(&mut c, end);
        }
        for (state, end) in [
            (SideState::FINISHED, SendError::Closed),
            (SideState::DEAD, SendError::PeerDead),
            (SideState::ABORTED, SendError::Aborted),
            (SideState::LOST, SendError::Broken),
        ] {
            let (n, mut p, _c) = HostilePeer::messages();
            n.state(CONSUMER_STATE, state.0);
            n.refused_by_producer(&mut p, end);
            let (n, mut p, _c) = HostilePeer::stream();
            n.state(CONSUMER_STATE, state.0);
            n.refused_by_writer(&mut p, end);
        }
    }

    #[test]
    fn finished_is_not_followed_by_data() {
        let (n, mut p, mut c) = HostilePeer::messages();
        n.state(PRODUCER_STATE, SideState::FINISHED.0);
        assert_eq!(c.poll(), Err(RecvError::Finished));
        let _ = p.send(&[1; 8]).unwrap();
        assert_eq!(c.poll(), Err(RecvError::Finished));
        let (n, mut p, mut c) = HostilePeer::stream();
        n.state(PRODUCER_STATE, SideState::FINISHED.0);
        assert_eq!(c.poll(), Err(RecvError::Finished));
        p.write(&[1; 8], || {}).unwrap();
        assert_eq!(c.poll(), Err(RecvError::Finished));
    }

    #[test]
    fn that_flaps_unseen_changes_nothing() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for state in [0, 1, 2, 3, 99, 1] {
            n.state(PRODUCER_STATE, state);
            n.state(CONSUMER_STATE, state);
        }
        pass(&mut p, &mut c, 128);
        n.state(PRODUCER_STATE, 99);
        // The consumer does not look at the producer's state while messages come, except for an abort.
        let _ = p.send(&[1; 8]).unwrap();
        assert_eq!(c.recv(&mut [0; 8]), Ok(8));
        n.state(PRODUCER_STATE, SideState::OPEN.0);
        assert_eq!(c.poll(), Err(RecvError::Empty));
    }

    #[test]
    fn dead_survives_a_new_owner() {
        let n = HostilePeer::new();
        n.state(PRODUCER_STATE, SideState::DEAD.0);
        n.state(CONSUMER_STATE, SideState::DEAD.0);
        let mut p = message::Producer::new(n.ring.clone(), CAPACITY);
        let mut c = message::Consumer::new(n.ring.clone(), CAPACITY);
        assert_eq!(p.send(&[]), Err(SendError::PeerDead));
        assert_eq!(c.poll(), Err(RecvError::PeerDead));
    }
}

mod wake {
    use super::*;

    #[test]
    fn tokens_ring_once_each_whatever_they_are() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for token in [1, 7, 3, u32::MAX, 1] {
            n.ring.store_release_u32(DATA_ARMED, token);
            assert_eq!(p.send(&[0; 8]), Ok(true));
            assert_eq!(p.send(&[0; 8]), Ok(false), "token {token} rings twice");
            (0..2).for_each(|_| assert_eq!(c.recv(&mut [0; 8]), Ok(8)));
        }
        n.ring.store_release_u32(DATA_ARMED, 0);
        assert_eq!(p.send(&[0; 8]), Ok(false));
    }

    #[test]
    fn of_a_producer_rings_once_each() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for token in [5, 4, u32::MAX] {
            n.ring.store_release_u32(SPACE_ARMED, token);
            let _ = p.send(&[0; MAX]).unwrap();
            assert!(c.peek().unwrap().release());
            let _ = p.send(&[0; MAX]).unwrap();
            assert!(!c.peek().unwrap().release());
        }
    }

    #[test]
    fn tokens_that_are_overwritten_do_not_hold_a_side_longer_than_its_timeout() {
        let (n, _p, mut c) = HostilePeer::messages();
        n.ring.store_release_u32(DATA_ARMED, u32::MAX);
        let (ready, sleeps) = waits(&mut c);
        assert!(!ready && sleeps > 0);
        assert_eq!(n.ring.load_acquire_u32(DATA_ARMED), 0, "the wait ends disarmed");
    }

    #[test]
    fn without_end_is_bounded_by_the_timeout() {
        // A peer that rings all the time: every sleep returns at once, without a reason.
        struct ReturnsAtOnce(u32);
        impl Sleeper for ReturnsAtOnce {
            fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
                self.0 += 1;
                Ok(())
            }
        }
        let (_n, _p, mut c) = HostilePeer::messages();
        let mut sleeper = ReturnsAtOnce(0);
        let deadline = Instant::now() + Duration::from_millis(20);
        assert!(!wait(&mut c, WaitMode::Interrupt, &mut sleeper, Some(deadline)).unwrap());
        assert!(sleeper.0 > 1 && Instant::now() >= deadline);
    }

    #[test]
    fn budgets_beyond_the_clock_end_with_the_deadline() {
        let (_n, _p, mut c) = HostilePeer::messages();
        let mode = WaitMode::Adaptive { budget: Duration::MAX };
        let deadline = Instant::now() + Duration::from_millis(5);
        assert!(!wait(&mut c, mode, &mut SleepToDeadline(0), Some(deadline)).unwrap());
    }
}

/// Sleeps to the deadline, since no one rings.
struct SleepToDeadline(u32);

impl Sleeper for SleepToDeadline {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.0 += 1;
        std::thread::sleep(deadline.unwrap().saturating_duration_since(Instant::now()));
        Ok(())
    }
}

/// Waits for a short time in each mode. Returns whether something came, and how many sleeps that took.
fn waits(what: &mut impl ginnel_ring::wait::Waitable) -> (bool, u32) {
    let mut sleeper = SleepToDeadline(0);
    let mut came = false;
    for mode in [WaitMode::Poll, WaitMode::Interrupt, WaitMode::default()] {
        let deadline = Instant::now() + Duration::from_millis(5);
        came |= wait(what, mode, &mut sleeper, Some(deadline)).unwrap();
        assert!(came || Instant::now() >= deadline);
    }
    (came, sleeper.0)
}

/// A peer cannot change a side's own position, which is in private memory.
mod own_words {
    use super::*;

    #[test]
    fn are_not_read_back() {
        let (n, mut p, mut c) = HostilePeer::messages();
        for round in 0..100u64 {
            // The peer changes the consumer's released bytes, and moves the stream's counter about.
            n.ring.store_release_u64(HEAD, 0);
            n.ring.store_release_u64(TAIL, round);
            if let Err(error) = p.send(&[0; 56]) {
                // The head that the peer sets back to 0 makes the ring full in the end, or is detected.
                assert!(matches!(error, SendError::Full | SendError::Corrupt(Corrupt::Head { head: 0, .. })));
                break;
            }
            assert_eq!(c.recv(&mut [0; 56]), Ok(56));
        }
        assert_eq!(c.poll(), Err(RecvError::Empty));
    }
}

/// The file under the ring is truncated: the memory is [`RecvError::Broken`], and the peer is not reported as corrupt.
mod truncated {
    use super::*;

    fn file() -> (std::fs::File, Mapping) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(8192).unwrap();
        let m = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        (file, m)
    }

    #[test]
    fn while_nothing_is_there() {
        let (file, m) = file();
        let mut c = message::Consumer::new(m.clone(), CAPACITY);
        let mut s = stream::Consumer::new(m, CAPACITY);
        file.set_len(0).unwrap();
        assert_eq!(c.poll(), Err(RecvError::Broken));
        assert_eq!(s.poll(), Err(RecvError::Broken));
    }

    #[test]
    fn between_the_look_and_the_copy() {
        let (file, m) = file();
        let mut p = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m, CAPACITY);
        let _ = p.send(&[7; 100]).unwrap();
        assert_eq!(c.poll(), Ok(()));
        file.set_len(0).unwrap();
        assert_eq!(c.recv(&mut [0; 100]), Err(RecvError::Broken), "zeros are not the message");
    }

    /// The header is on a page that is still there; the rest of the message is not.
    #[test]
    fn in_the_middle_of_a_message() {
        let (file, m) = file();
        let mut p = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m, CAPACITY);
        // The page ends 3584 bytes into the data. The last two messages return no space, since that takes another code path.
        for span in [1024, 1024, 640, 512, 320] {
            pass(&mut p, &mut c, span);
        }
        let _ = p.send(&[7; 120]).unwrap();
        file.set_len(4096).unwrap();
        assert_eq!(c.take(&mut [0; MAX], 1), None, "zeros are not the message");
        assert_eq!(c.recv(&mut [0; MAX]), Err(RecvError::Broken));
    }

    #[test]
    fn between_the_look_and_the_copy_of_a_stream() {
        let (file, m) = file();
        let mut p = stream::Producer::new(m.clone(), CAPACITY);
        let mut c = stream::Consumer::new(m, CAPACITY);
        p.write(&[7; 100], || {}).unwrap();
        assert_eq!(c.poll(), Ok(100));
        file.set_len(0).unwrap();
        assert_eq!(c.read(&mut [0; 100], || {}), Err(RecvError::Broken), "zeros are not the stream");
    }

    /// Neither the fast path of a send nor the slow one may succeed if the message goes nowhere.
    #[test]
    fn under_a_send() {
        let (file, m) = file();
        let mut p = message::Producer::new(m.clone(), CAPACITY);
        let mut fresh = message::Producer::new(m, CAPACITY);
        let _ = p.send(&[7; 8]).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(p.put(&[7; 8]), None);
        assert_eq!(p.send(&[7; 8]), Err(SendError::Broken));
        assert_eq!(fresh.send(&[7; 8]), Err(SendError::Broken));
        assert_eq!(fresh.claim(8).err(), Some(SendError::Broken));
    }

    /// The ring's words are on a page that is still there; the place of the message is not.
    #[test]
    fn under_the_place_of_a_message() {
        let (file, m) = file();
        let mut short = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m.clone(), CAPACITY);
        for span in [1024, 1024, 1024, 512] {
            pass(&mut short, &mut c, span);
        }
        file.set_len(4096).unwrap();
        assert_eq!(short.send(&[7; 8]), Err(SendError::Broken));

        let (file, m) = self::file();
        let mut long = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m, CAPACITY);
        for span in [1024, 1024, 1024, 448] {
            pass(&mut long, &mut c, span);
        }
        file.set_len(4096).unwrap();
        assert_eq!(long.send(&[7; 120]), Err(SendError::Broken));
        assert_eq!(long.claim(8).err(), Some(SendError::Broken), "and stays broken");
    }

    #[test]
    fn under_a_write() {
        let (file, m) = file();
        let mut p = stream::Producer::new(m.clone(), CAPACITY);
        let mut fresh = stream::Producer::new(m, CAPACITY);
        p.write(&[7; 8], || {}).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(p.write(&[7; 8], || {}), Err(SendError::Broken));
        assert_eq!(fresh.claim(8).err(), Some(SendError::Broken));

        // The counters are still there; the place of the bytes is not.
        let (file, m) = self::file();
        let mut p = stream::Producer::new(m, CAPACITY);
        p.write(&[7; 3500], || {}).unwrap();
        file.set_len(4096).unwrap();
        assert_eq!(p.write(&[7; 200], || {}), Err(SendError::Broken));
        assert_eq!(p.claim(8).err(), Some(SendError::Broken), "and stays broken");
    }

    #[test]
    fn under_a_full_ring() {
        let (file, m) = file();
        let mut p = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m, CAPACITY);
        // The producer has seen a head from which zero would be a step back.
        for _ in 0..6 {
            pass(&mut p, &mut c, 1024);
        }
        while p.send(&[0; MAX]).is_ok() {}
        file.set_len(0).unwrap();
        assert_eq!(p.send(&[0; MAX]), Err(SendError::Broken), "the consumer is not to blame");
    }

    #[test]
    fn under_a_full_stream() {
        let (file, m) = file();
        let mut p = stream::Producer::new(m.clone(), CAPACITY);
        let mut c = stream::Consumer::new(m, CAPACITY);
        p.write(&[0; CAPACITY], || {}).unwrap();
        c.read(&mut [0; CAPACITY], || {}).unwrap();
        p.write(&[0; CAPACITY], || {}).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(p.write(&[0; 1], || {}), Err(SendError::Broken), "the consumer is not to blame");
    }

    /// The file was truncated, and has its size again: all bytes are zero, except what the daemon has written.
    #[test]
    fn and_made_longer_again() {
        let lose = |m: &Mapping| {
            m.write(0, &[0; 8192]);
            m.store_relaxed_u32(PRODUCER_STATE, SideState::LOST.0);
            m.store_relaxed_u32(CONSUMER_STATE, SideState::LOST.0);
        };
        let (_file, m) = file();
        let mut p = message::Producer::new(m.clone(), CAPACITY);
        let mut c = message::Consumer::new(m.clone(), CAPACITY);
        pass(&mut p, &mut c, 1024);
        lose(&m);
        assert_eq!(c.recv(&mut [0; MAX]), Err(RecvError::Broken));
        assert_eq!(p.put(&[7; 8]), None);
        assert_eq!(p.send(&[7; 8]), Err(SendError::Broken));
        // A side that ends does not hide the loss.
        let _ = p.finish();
        let _ = c.finish();
        // A side that begins only now sees the loss too.
        assert_eq!(message::Producer::new(m.clone(), CAPACITY).send(&[7; 8]), Err(SendError::Broken));
        assert_eq!(message::Consumer::new(m, CAPACITY).poll(), Err(RecvError::Broken));

        let (_file, m) = self::file();
        let mut p = stream::Producer::new(m.clone(), CAPACITY);
        let mut c = stream::Consumer::new(m.clone(), CAPACITY);
        p.write(&[7; 100], || {}).unwrap();
        c.read(&mut [0; 100], || {}).unwrap();
        lose(&m);
        assert_eq!(c.read(&mut [0; 100], || {}), Err(RecvError::Broken), "the producer is not to blame");
        assert_eq!(p.write(&[7; 8], || {}), Err(SendError::Broken));
    }
}

#[test]
fn a_ring_that_takes_over_at_a_byte_that_has_come() {
    let n = HostilePeer::new();
    for (base, received, expected) in [
        (0, 7, Ok(None)),
        (8, 7, Ok(Some(0))),
        (9, 7, Ok(Some(1))),
        (7, 7, Err(Corrupt::Base { base: 6, received: 7 })),
        (1, u64::MAX, Err(Corrupt::Base { base: 0, received: u64::MAX })),
        (u64::MAX, 0, Ok(Some(u64::MAX - 1))),
    ] {
        n.ring.store_release_u64(BASE, base);
        let before = n.everything();
        assert_eq!(carrier::left(&n.ring, received), expected);
        assert!(n.everything() == before);
    }
}
