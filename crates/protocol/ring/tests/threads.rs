//! Two threads at full speed over the smallest ring, which sleep on real eventfds whenever it is full or empty. Every message
//! carries its number and a checksum. If a wake-up is lost, a wait ends with its deadline, and the test fails.
//!
//! `scripts/sanitize` runs these tests under ThreadSanitizer and AddressSanitizer. The usual test runner is precompiled,
//! without instrumentation, and the sanitizer would report its threads as racing. Therefore this file has its own `main`
//! (`harness = false`), which runs the tests whose names contain one of its arguments, or all.

use ginnel_layout::ring::{HEADER, RECORD_HEADER, footprint, max_message};
use ginnel_ring::wait::{Sleeper, WaitMode, Waitable, wait};
use ginnel_ring::{RecvError, SendError, message, stream};
use ginnel_shmem::Mapping;
use kit::random::Random;
use kit::wait::{WATCHDOG, Watchdog};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

const TESTS: [(&str, fn()); 4] =
    [("messages", messages), ("streams", streams), ("whole_writes", whole_writes), ("ping_pong", ping_pong)];
const PLANTED: [(&str, fn()); 2] = [("planted_race", planted_race), ("planted_overrun", planted_overrun)];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (name, test) in TESTS {
        if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
            let start = Instant::now();
            test();
            println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
        }
    }
    // These run only if they are named in full.
    for (name, plant) in PLANTED {
        if wanted.iter().any(|w| w == name) {
            plant();
            println!("{name} was not noticed");
        }
    }
}

const CAPACITY: usize = 4096;
const MODES: [WaitMode; 3] =
    [WaitMode::Interrupt, WaitMode::Adaptive { budget: Duration::from_micros(20) }, WaitMode::Poll];

/// A way to sleep for one side: an edge-triggered epoll on an eventfd that is never read, as in the library.
struct EventSleeper {
    event: Arc<OwnedFd>,
    epoll: OwnedFd,
    mode: WaitMode,
}

#[derive(Clone)]
struct Doorbell(Arc<OwnedFd>);

impl EventSleeper {
    fn new(mode: WaitMode) -> Self {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &event, epoll::EventData::new_u64(0), flags).unwrap();
        Self { event, epoll, mode }
    }

    fn doorbell(&self) -> Doorbell {
        Doorbell(self.event.clone())
    }

    fn until(&mut self, what: &mut impl Waitable) {
        let deadline = Some(Instant::now() + WATCHDOG);
        assert!(wait(what, self.mode, self, deadline).unwrap(), "a wake-up was lost");
    }
}

impl Doorbell {
    fn ring_if(&self, needed: bool) {
        if needed {
            rustix::io::write(&self.0, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

impl Sleeper for EventSleeper {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.unwrap().saturating_duration_since(Instant::now());
        let left = rustix::event::Timespec::try_from(left).unwrap();
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        match epoll::wait(&self.epoll, &mut events, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Returns a message: its number, a checksum of the rest, and the rest. Most are short, some of the greatest length.
fn compose(number: u64) -> Vec<u8> {
    let longest = max_message(CAPACITY) - 16;
    let len = match Random::of(number) % 8 {
        0 => longest - Random::of(number + 1) as usize % 8,
        1 | 2 => Random::of(number + 2) as usize % longest,
        _ => Random::of(number + 3) as usize % 120,
    };
    let rest: Vec<u8> = (0..len as u64).map(|i| (Random::of(number) >> (i % 57)) as u8 ^ i as u8).collect();
    [&number.to_le_bytes()[..], &checksum(&rest).to_le_bytes(), &rest].concat()
}

fn verify(number: u64, message: &[u8]) {
    let (head, rest) = message.split_at(16);
    assert_eq!(head[..8], number.to_le_bytes(), "message {number} is another one");
    assert_eq!(head[8..], checksum(rest).to_le_bytes(), "message {number} is damaged");
}

fn messages() {
    const COUNT: u64 = 20_000;
    for mode in MODES {
        let ring = Mapping::anonymous(footprint(CAPACITY)).unwrap();
        let mut producer = message::Producer::new(ring.clone(), CAPACITY);
        let mut consumer = message::Consumer::new(ring, CAPACITY);
        let (mut sending, mut receiving) = (EventSleeper::new(mode), EventSleeper::new(mode));
        let (to_sender, to_receiver) = (sending.doorbell(), receiving.doorbell());
        let sender = thread::spawn(move || {
            for number in 0..COUNT {
                let message = compose(number);
                let claim = loop {
                    match producer.claim(message.len()) {
                        Ok(_) => break producer.claim(message.len()).unwrap(),
                        Err(SendError::Full) => {
                            to_receiver.ring_if(producer.publish());
                            sending.until(producer.want(message.len()));
                        }
                        Err(error) => panic!("{error}"),
                    }
                };
                claim.slice().write(0, &message);
                match number % 5 {
                    // The message is published with one of the next, or before a sleep.
                    0..=2 => claim.commit(message.len()),
                    _ => to_receiver.ring_if(claim.publish(message.len())),
                }
            }
            to_receiver.ring_if(producer.finish());
        });
        let (mut number, mut buffer) = (0, vec![0; max_message(CAPACITY)]);
        loop {
            let got = match number % 2 {
                0 => consumer.recv(&mut buffer).map(|len| verify(number, &buffer[..len])),
                _ => consumer.peek().map(|message| {
                    verify(number, &message.slice().to_vec());
                    to_sender.ring_if(message.release());
                }),
            };
            to_sender.ring_if(consumer.take_owed());
            match got {
                Ok(()) => number += 1,
                Err(RecvError::Empty) => receiving.until(&mut consumer),
                Err(end) => {
                    assert_eq!((end, number), (RecvError::Finished, COUNT), "{mode:?}");
                    break;
                }
            }
        }
        sender.join().unwrap();
    }
}

fn streams() {
    const BYTES: u64 = 4 << 20;
    let byte = |at: u64| (Random::of(at / 64) >> (at % 57)) as u8;
    for mode in MODES {
        let ring = Mapping::anonymous(footprint(CAPACITY)).unwrap();
        let mut producer = stream::Producer::new(ring.clone(), CAPACITY);
        let mut consumer = stream::Consumer::new(ring, CAPACITY);
        let (mut sending, mut receiving) = (EventSleeper::new(mode), EventSleeper::new(mode));
        let (to_sender, to_receiver) = (sending.doorbell(), receiving.doorbell());
        let sender = thread::spawn(move || {
            let mut at = 0;
            while at < BYTES {
                let len = (Random::of(at) % 9000).min(BYTES - at).max(1);
                let bytes: Vec<u8> = (at..at + len).map(byte).collect();
                let sent = match at % 3 {
                    0 => producer.claim(bytes.len()).map(|room| {
                        let n = room.slice().write(0, &bytes);
                        to_receiver.ring_if(room.publish(n));
                        n
                    }),
                    _ => producer.write(&bytes, || to_receiver.ring_if(true)),
                };
                match sent {
                    Ok(n) => at += n as u64,
                    Err(SendError::Full) => sending.until(&mut producer),
                    Err(error) => panic!("{error}"),
                }
            }
            to_receiver.ring_if(producer.finish());
        });
        let (mut at, mut buffer) = (0, vec![0; 9000]);
        loop {
            let room = 1 + Random::of(at) as usize % buffer.len();
            let got = match at % 2 {
                0 => consumer.read(&mut buffer[..room], || to_sender.ring_if(true)),
                _ => consumer.peek().map(|bytes| {
                    let n = bytes.slice().read(0, &mut buffer[..room]);
                    to_sender.ring_if(bytes.release(n));
                    n
                }),
            };
            match got {
                Ok(n) => {
                    let end = at + n as u64;
                    assert!(buffer[..n].iter().copied().eq((at..end).map(byte)), "damage before {end}");
                    at = end;
                }
                Err(RecvError::Empty) => {
                    to_sender.ring_if(consumer.take_owed());
                    receiving.until(&mut consumer);
                }
                Err(end) => {
                    assert_eq!((end, at), (RecvError::Finished, BYTES), "{mode:?}");
                    break;
                }
            }
        }
        sender.join().unwrap();
    }
}

/// Programs expect to receive in one call what was sent in one, if it is short and there is room for it.
fn whole_writes() {
    const ROUNDS: usize = 100_000;
    let memory = Mapping::anonymous(footprint(CAPACITY)).unwrap();
    let mut output = stream::Producer::new(memory.clone(), CAPACITY);
    let mut input = stream::Consumer::new(memory, CAPACITY);
    let received = Arc::new(AtomicUsize::new(0));
    let theirs = received.clone();
    let len = |round: usize| [1, 5, 61, 1448, 3000, CAPACITY - CAPACITY / 8][round % 6];
    let sender = thread::spawn(move || {
        for round in 0..ROUNDS {
            while theirs.load(Ordering::Acquire) < round {
                thread::yield_now();
            }
            assert_eq!(output.write(&[round as u8; CAPACITY][..len(round)], || {}), Ok(len(round)));
        }
    });
    let (mut watchdog, mut bytes) = (Watchdog::new("rounds of which nothing comes"), [0; 2 * CAPACITY]);
    for round in 0..ROUNDS {
        let n = loop {
            match input.read(&mut bytes, || {}) {
                Ok(n) => break n,
                Err(error) => assert_eq!(error, RecvError::Empty),
            }
            watchdog.look(round);
            thread::yield_now();
        };
        assert_eq!((n, bytes[n - 1]), (len(round), round as u8), "round {round}");
        received.store(round + 1, Ordering::Release);
    }
    sender.join().unwrap();
}

/// One message there, one back: every step is a sleep and a wake-up, so everything depends on the fence pair.
fn ping_pong() {
    const ROUNDS: u64 = 20_000;
    for mode in MODES {
        let (ping, pong) = (
            Mapping::anonymous(footprint(CAPACITY)).unwrap(),
            Mapping::anonymous(footprint(CAPACITY)).unwrap(),
        );
        let mut here = EventSleeper::new(mode);
        let mut there = EventSleeper::new(mode);
        let (to_here, to_there) = (here.doorbell(), there.doorbell());
        let side = |output: &Mapping, input: &Mapping| {
            (
                message::Producer::new(output.clone(), CAPACITY),
                message::Consumer::new(input.clone(), CAPACITY),
            )
        };
        let (mut near_out, mut near_in) = side(&ping, &pong);
        let (mut far_out, mut far_in) = side(&pong, &ping);
        let echo = thread::spawn(move || {
            let mut word = [0; 8];
            for _ in 0..ROUNDS {
                there.until(&mut far_in);
                assert_eq!(far_in.recv(&mut word), Ok(8));
                let _ = far_in.take_owed();
                to_here.ring_if(far_out.send(&word).unwrap());
            }
        });
        for round in 0..ROUNDS {
            let mut word = round.to_le_bytes();
            to_there.ring_if(near_out.send(&word).unwrap());
            here.until(&mut near_in);
            assert_eq!(near_in.recv(&mut word), Ok(8));
            let _ = near_in.take_owed();
            assert_eq!(word, round.to_le_bytes());
        }
        echo.join().unwrap();
    }
}

/// Shows that the sanitizer sees accesses to mapped memory: a copy out that no header orders after the copy in. Without a
/// sanitizer nothing happens; `scripts/sanitize` requires that this is reported.
fn planted_race() {
    use ginnel_shmem::SharedMemory;
    let ring = Mapping::anonymous(footprint(CAPACITY)).unwrap();
    let mut producer = message::Producer::new(ring.clone(), CAPACITY);
    let reader = thread::spawn(move || {
        let mut bytes = [0; 101];
        ring.read(HEADER + RECORD_HEADER, &mut bytes);
        std::hint::black_box(bytes);
    });
    let _ = producer.send(&[1; 101]).unwrap();
    reader.join().unwrap();
}

/// Shows the same for memory errors: reads the byte after a buffer.
#[allow(unsafe_code)] // The error itself.
fn planted_overrun() {
    let bytes = Box::new([1u8; 64]);
    let p = std::hint::black_box(bytes.as_ptr());
    // SAFETY: none; this is the error that the sanitizer must report.
    let byte = unsafe { p.add(64).read_volatile() };
    std::hint::black_box(byte);
}
