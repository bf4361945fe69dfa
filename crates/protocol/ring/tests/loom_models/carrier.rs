//! Models of a stream that leaves the kernel for a ring: one direction, with a consumer that sleeps at the kernel's socket.
//!
//! In the model, words are sent instead of bytes, and positions count words.

use super::{ASLEEP, CAPACITY, explore, must_fail};
use ginnel_layout::ring::{
    BASE, CONSUMER_STATE, DATA_ARMED, END, HEAD, HEADER, PRODUCER_STATE, READY, RECALL, REPEATED, RESUME,
    SPACE_ARMED, TAIL, footprint,
};
use ginnel_ring::carrier::{Earlier, Place};
use ginnel_ring::wait::{Sleeper, WaitMode, Waitable, wait};
use ginnel_ring::{Corrupt, RecvError, carrier, stream};
use ginnel_shmem::{LoomMemory, Order};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::collections::VecDeque;
use std::io;
use std::time::Instant;

/// A wake word, which only wakes the consumer.
const WAKE: u64 = u64::MAX;

/// One direction of the kernel's connection.
#[derive(Clone)]
struct Kernel(Arc<(Mutex<VecDeque<u64>>, Condvar)>);

impl Kernel {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(VecDeque::new()), Condvar::new())))
    }

    fn send(&self, word: u64) {
        self.0.0.lock().unwrap().push_back(word);
        self.0.1.notify_one();
    }

    /// Returns the words that are there, at most `most`.
    fn recv(&self, most: u64) -> Vec<u64> {
        let mut words = self.0.0.lock().unwrap();
        let n = most.min(words.len() as u64) as usize;
        words.drain(..n).collect()
    }

    fn has_any(&self) -> bool {
        !self.0.0.lock().unwrap().is_empty()
    }
}

impl Sleeper for Kernel {
    /// Waits until the connection is readable.
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        let mut words = self.0.0.lock().unwrap();
        while words.is_empty() {
            words = self.0.1.wait(words).unwrap();
        }
        Ok(())
    }
}

/// Sends the words 1 to `count`, and changes over as soon as it may.
fn send(count: u64, kernel: &Kernel, producer: &mut stream::Producer<LoomMemory>) {
    let (mut sent, mut begun) = (0, false);
    for word in 1..=count {
        if !begun && carrier::is_counted(producer.memory(), Earlier::Kernel) {
            assert!(carrier::begin(producer.memory(), sent), "recalled, but no consumer has done so");
            begun = true;
        }
        if begun {
            let room = producer.claim(8).unwrap();
            room.slice().write(0, &word.to_ne_bytes());
            if room.publish(8) {
                kernel.send(WAKE);
            }
        } else {
            kernel.send(word);
            sent += 1;
        }
    }
}

/// The receiving side.
struct Receiver {
    kernel: Kernel,
    ring: stream::Consumer<LoomMemory>,
    received: u64,
    /// Number of received words after which the receiver begins to count.
    count_at: u64,
    counts: bool,
    in_ring: bool,
    /// Looks at the base only before it receives, which is a mistake.
    careless: bool,
}

impl Receiver {
    /// Receives the words that are there.
    fn recv(&mut self) -> Result<Vec<u64>, Corrupt> {
        if !self.counts && self.received >= self.count_at {
            carrier::count(self.ring.memory(), Earlier::Kernel);
            self.counts = true;
        }
        if self.in_ring {
            return Ok(self.from_ring());
        }
        let left = |receiver: &Self| match receiver.counts {
            true => carrier::left(receiver.ring.memory(), receiver.received),
            false => Ok(None),
        };
        let before = left(self)?;
        let mut words = match before {
            Some(0) => Vec::new(),
            before => self.kernel.recv(before.unwrap_or(u64::MAX)),
        };
        let after = if self.careless { before } else { left(self)? };
        if let Some(left) = after {
            words.truncate(left as usize);
        }
        self.received += words.len() as u64;
        if after == Some(0) {
            self.in_ring = true;
            return Ok(self.from_ring());
        }
        Ok(words)
    }

    fn from_ring(&mut self) -> Vec<u64> {
        match self.ring.peek() {
            Ok(bytes) => {
                let mut word = [0; 8];
                bytes.slice().read(0, &mut word);
                let _ = bytes.release(8);
                vec![u64::from_ne_bytes(word)]
            }
            Err(RecvError::Empty) => Vec::new(),
            Err(error) => panic!("{error}"),
        }
    }
}

impl Waitable for Receiver {
    fn ready(&mut self) -> bool {
        if self.in_ring {
            return self.ring.ready();
        }
        let changed = self.counts && carrier::left(self.ring.memory(), self.received) == Ok(Some(0));
        changed && self.ring.ready() || self.kernel.has_any()
    }

    fn arm(&mut self) {
        // Earlier wake words have done their work. A receiver would not sleep while they are unread.
        if self.in_ring {
            self.kernel.recv(u64::MAX);
        }
        self.ring.arm();
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// All words must arrive once and in order, wherever the change comes.
fn change(count: u64, count_at: u64, careless: bool, producer: &LoomMemory, consumer: &LoomMemory) {
    let kernel = Kernel::new();
    let mut receiver = Receiver {
        kernel: kernel.clone(),
        ring: stream::Consumer::new(consumer.clone(), CAPACITY),
        received: 0,
        count_at,
        counts: false,
        in_ring: false,
        careless,
    };
    let (mut sleeper, mut ring) = (kernel.clone(), stream::Producer::new(producer.clone(), CAPACITY));
    let sender = thread::spawn(move || send(count, &kernel, &mut ring));
    let mut next = 1;
    while next <= count {
        let words = receiver.recv().unwrap();
        if words.is_empty() {
            assert!(wait(&mut receiver, WaitMode::Interrupt, &mut sleeper, None).unwrap());
        }
        for word in words {
            assert_eq!(word, next, "out of order");
            next += 1;
        }
    }
    sender.join().unwrap();
    assert!(receiver.recv().unwrap().is_empty(), "more than was sent");
}

fn memory() -> LoomMemory {
    let rings = [TAIL, SPACE_ARMED, HEAD, DATA_ARMED, PRODUCER_STATE, CONSUMER_STATE];
    let control = rings.into_iter().chain([BASE, END, RESUME, REPEATED, READY, RECALL]);
    let data = (0..4).map(|word| HEADER + 8 * word);
    LoomMemory::new(footprint(CAPACITY), control.chain(data))
}

#[test]
fn a_stream_changes_over_at_any_word() {
    for (count, count_at) in [(2, 0), (3, 0), (3, 1), (3, 2)] {
        explore(2, move || {
            let memory = memory();
            change(count, count_at, false, &memory, &memory);
        });
    }
}

#[test]
fn a_consumer_that_does_not_look_again_mistakes_a_wake_word_for_data() {
    must_fail(&["out of order"], || {
        let memory = memory();
        change(2, 0, true, &memory, &memory);
    });
}

#[test]
fn without_a_fence_the_sleeper_at_the_kernel_is_forgotten() {
    must_fail(ASLEEP, || {
        let memory = memory();
        change(2, 0, false, &memory.without(Order::Fence), &memory);
    });
    must_fail(ASLEEP, || {
        let memory = memory();
        change(2, 0, false, &memory, &memory.without(Order::Fence));
    });
}

/// The receiving side of a stream that leaves one ring for another. It sleeps at the kernel's connection, which carries wake
/// words.
struct Grower {
    kernel: Kernel,
    rings: [stream::Consumer<LoomMemory>; 2],
    at: usize,
    armed: bool,
}

impl Grower {
    /// Continues in the second ring, if it is time. Returns true if it does.
    fn step(&mut self) -> bool {
        let due = self.at == 0
            && carrier::left(self.rings[1].memory(), self.rings[0].cursor().position).unwrap() == Some(0);
        if due {
            self.at = 1;
            if self.armed {
                self.rings[1].arm();
            }
        }
        due
    }

    /// Returns a word, or `None` if there is none now.
    fn recv(&mut self) -> Option<u64> {
        loop {
            self.step();
            let mut word = [0; 8];
            let error = match self.rings[self.at].peek() {
                Ok(bytes) => {
                    bytes.slice().read(0, &mut word);
                    let _ = bytes.release(8);
                    return Some(u64::from_ne_bytes(word));
                }
                Err(error) => error,
            };
            match error {
                RecvError::Empty => return None,
                // A ring that was left is finished, and the other one has begun.
                RecvError::Finished if self.step() => {}
                error => panic!("{error}"),
            }
        }
    }
}

impl Waitable for Grower {
    fn ready(&mut self) -> bool {
        self.step();
        self.rings[self.at].ready()
    }

    fn arm(&mut self) {
        self.step();
        self.kernel.recv(u64::MAX);
        self.armed = true;
        self.rings[self.at].arm();
    }

    fn disarm(&mut self) {
        self.armed = false;
        self.rings[self.at].disarm();
    }
}

/// Words 1 to `count` must arrive once and in order, whichever ring carries them. The consumer counts from word `count_at`
/// on.
fn grow(count: u64, count_at: u64, wakes: bool) {
    let (small, large, kernel) = (memory(), memory(), Kernel::new());
    let consumer = |memory: &LoomMemory| stream::Consumer::new(memory.clone(), CAPACITY);
    let mut grower =
        Grower { kernel: kernel.clone(), rings: [consumer(&small), consumer(&large)], at: 0, armed: false };
    let mut sleeper = kernel.clone();
    let mut producers = [&small, &large].map(|memory| stream::Producer::new(memory.clone(), CAPACITY));
    let sender = thread::spawn(move || {
        let mut at = 0;
        for word in 1..=count {
            if at == 0 && carrier::is_counted(producers[1].memory(), Earlier::Ring) {
                assert!(carrier::begin(producers[1].memory(), producers[0].cursor().position));
                at = 1;
                if wakes {
                    kernel.send(WAKE);
                }
                let _ = producers[0].finish();
            }
            let room = producers[at].claim(8).unwrap();
            room.slice().write(0, &word.to_ne_bytes());
            if room.publish(8) {
                kernel.send(WAKE);
            }
        }
    });
    let mut next = 1;
    while next <= count {
        if next > count_at {
            carrier::count(grower.rings[1].memory(), Earlier::Ring);
        }
        match grower.recv() {
            Some(word) => {
                assert_eq!(word, next, "out of order");
                next += 1;
            }
            None => assert!(wait(&mut grower, WaitMode::Interrupt, &mut sleeper, None).unwrap()),
        }
    }
    sender.join().unwrap();
    assert_eq!(grower.recv(), None, "more than was sent");
}

#[test]
fn a_stream_leaves_a_ring_for_another_at_any_word() {
    for (count, count_at) in [(1, 0), (2, 0), (2, 1)] {
        explore(2, move || grow(count, count_at, true));
    }
}

#[test]
fn a_producer_that_begins_another_ring_without_a_wake_is_not_noticed() {
    must_fail(ASLEEP, || grow(2, 0, false));
}

/// The receiving side of a stream that goes back to the kernel. It sleeps at the kernel's connection, which carries wake
/// words until then.
struct Returner {
    kernel: Kernel,
    ring: stream::Consumer<LoomMemory>,
    /// Number of words that it has taken from the kernel, and how many of them come before the stream's.
    taken: u64,
    resume: Option<u64>,
    /// Words of the stream that it has mistaken for wake words.
    stash: VecDeque<u64>,
    sorted: u64,
    in_kernel: bool,
    /// Treats every word that comes as a wake word, which is a mistake.
    careless: bool,
}

impl Returner {
    /// Removes wake words, and keeps words that are not wake words.
    fn drain(&mut self) {
        let left = carrier::wakes_end(self.ring.memory()).map(|end| end.saturating_sub(self.taken));
        if left == Some(0) && carrier::given_back(self.ring.memory()).is_none() {
            // The kernel has something, and the producer is about to say what it is.
            thread::yield_now();
        }
        let words = self.kernel.recv(left.unwrap_or(u64::MAX));
        self.taken += words.len() as u64;
        let end = carrier::wakes_end(self.ring.memory()).filter(|_| !self.careless);
        let beyond = end.map_or(0, |end| self.taken.saturating_sub(end)) as usize;
        let words = &words[words.len() - beyond.min(words.len())..];
        self.sorted += words.len() as u64;
        self.stash.extend(words);
    }

    /// Continues with the kernel if the ring has nothing more. Returns true if it does.
    fn settle(&mut self) -> bool {
        let Some(resume) = self.resume else {
            let place = carrier::given_back(self.ring.memory());
            let due = place.filter(|place| place.ring == self.ring.cursor().position);
            self.resume = due.map(|place| place.kernel + place.repeated / 8);
            if let Some(resume) = self.resume {
                let beyond = self.taken.saturating_sub(resume) as usize;
                self.stash.drain(..self.stash.len().saturating_sub(beyond));
            }
            return self.resume.is_some() && self.settle();
        };
        let dropped = self.kernel.recv(resume.saturating_sub(self.taken));
        self.taken += dropped.len() as u64;
        assert!(self.taken <= resume + self.sorted, "a word was taken for a wake");
        self.in_kernel = self.taken >= resume && self.stash.is_empty();
        true
    }

    /// Returns a word, or `None` if there is none now.
    fn recv(&mut self) -> Option<u64> {
        if self.resume.is_none() {
            let mut word = [0; 8];
            if let Ok(bytes) = self.ring.peek() {
                bytes.slice().read(0, &mut word);
                let _ = bytes.release(8);
                return Some(u64::from_ne_bytes(word));
            }
        }
        if !self.in_kernel && !self.settle() {
            return None;
        }
        match self.in_kernel {
            true => self.kernel.recv(1).pop(),
            false => self.stash.pop_front(),
        }
    }
}

impl Waitable for Returner {
    fn ready(&mut self) -> bool {
        if !self.in_kernel && (self.resume.is_some() || !self.ring.ready()) && !self.settle() {
            return false;
        }
        if self.resume.is_none() { true } else { !self.stash.is_empty() || self.kernel.has_any() }
    }

    fn arm(&mut self) {
        if self.resume.is_none() {
            self.drain();
        }
        self.ring.arm();
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// Which words the kernel takes once more.
#[derive(Clone, Copy, PartialEq)]
enum Again {
    None,
    /// All words that were not received.
    All,
    /// One of them, if there are more.
    One,
}

/// Words 1 to `count` must arrive once and in order. From word `back_at` on, the kernel carries them again.
fn give_back(count: u64, back_at: u64, again: Again, careless: bool, memory: &LoomMemory) {
    let kernel = Kernel::new();
    let mut returner = Returner {
        kernel: kernel.clone(),
        ring: stream::Consumer::new(memory.clone(), CAPACITY),
        taken: 0,
        resume: None,
        stash: VecDeque::new(),
        sorted: 0,
        in_kernel: false,
        careless,
    };
    let (mut sleeper, mut ring) = (kernel.clone(), stream::Producer::new(memory.clone(), CAPACITY));
    let sender = thread::spawn(move || {
        let mut sent = 0;
        for word in 1..=count {
            if word == back_at {
                carrier::end_wakes(ring.memory(), sent);
                let unreleased = if again == Again::None { Vec::new() } else { ring.unreleased() };
                let words: Vec<_> =
                    unreleased.as_chunks::<8>().0.iter().copied().map(u64::from_ne_bytes).collect();
                let taken = if again == Again::One { words.len().min(1) } else { words.len() };
                words[..taken].iter().for_each(|word| kernel.send(*word));
                let (wakes_end, repeated) = match taken == words.len() {
                    true => (sent, 8 * taken as u64),
                    false => (sent + taken as u64, 0),
                };
                let place = Place { ring: ring.cursor().position, kernel: wakes_end, repeated };
                carrier::give_back(ring.memory(), place);
                let _ = ring.finish();
            }
            if word >= back_at {
                kernel.send(word);
                continue;
            }
            let room = ring.claim(8).unwrap();
            room.slice().write(0, &word.to_ne_bytes());
            if room.publish(8) {
                kernel.send(WAKE);
                sent += 1;
            }
        }
    });
    let mut next = 1;
    while next <= count {
        match returner.recv() {
            Some(word) => {
                assert_eq!(word, next, "out of order");
                next += 1;
            }
            None => assert!(wait(&mut returner, WaitMode::Interrupt, &mut sleeper, None).unwrap()),
        }
    }
    sender.join().unwrap();
    assert_eq!(returner.recv(), None, "more than was sent");
}

#[test]
fn a_stream_goes_back_to_the_kernel_at_any_word() {
    for (count, back_at) in [(1, 1), (2, 2), (3, 2)] {
        explore(2, move || give_back(count, back_at, Again::None, false, &memory()));
    }
}

#[test]
fn bytes_that_are_sent_once_more_are_received_once() {
    for (count, back_at, again) in [(2, 2, Again::All), (3, 3, Again::One)] {
        explore(2, move || give_back(count, back_at, again, false, &memory()));
    }
}

#[test]
fn a_consumer_that_drops_too_much_as_wake_words_loses_words() {
    must_fail(&["a word was taken for a wake"], || give_back(2, 2, Again::None, true, &memory()));
}

/// One word is sent while the consumer recalls the producer, which may begin just then. Both must agree on who carries the
/// word.
fn recall(producer: &LoomMemory, consumer: &LoomMemory) {
    let kernel = Kernel::new();
    let mut from_ring = stream::Consumer::new(consumer.clone(), CAPACITY);
    let (to_kernel, mut ring) = (kernel.clone(), stream::Producer::new(producer.clone(), CAPACITY));
    carrier::count(consumer, Earlier::Kernel);
    let sender = thread::spawn(move || {
        if carrier::is_counted(ring.memory(), Earlier::Kernel) {
            if carrier::begin(ring.memory(), 0) {
                let room = ring.claim(8).unwrap();
                room.slice().write(0, &7_u64.to_ne_bytes());
                let _ = room.publish(8);
                return;
            }
            carrier::give_back(ring.memory(), Place { ring: 0, kernel: 0, repeated: 0 });
        }
        to_kernel.send(7);
    });
    carrier::recall(consumer);
    let has_begun = carrier::left(consumer, 0).unwrap().is_some();
    sender.join().unwrap();
    // Either the producer has begun and must go back, or it has not begun and never will.
    let in_ring = from_ring.poll() == Ok(8);
    assert!(has_begun || !in_ring, "a word in a ring at which no side looks");
    assert_eq!(in_ring, kernel.recv(1).is_empty(), "a word that is nowhere, or twice");
}

#[test]
fn a_consumer_that_recalls_the_producer_knows_whether_it_has_begun() {
    explore(3, || {
        let memory = memory();
        recall(&memory, &memory);
    });
}

#[test]
fn without_a_fence_a_producer_begins_unseen() {
    must_fail(&["a word in a ring"], || {
        let memory = memory();
        recall(&memory.without(Order::Fence), &memory);
    });
    must_fail(&["a word in a ring"], || {
        let memory = memory();
        recall(&memory, &memory.without(Order::Fence));
    });
}
