//! Models of the session between the two daemons of a VM: loom runs both ends in every order of their steps.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-daemon --test loom_control_link
//!
//! Each end works only when it has been rung, so a missing doorbell is a deadlock, which loom reports. The models cover the
//! handshake and the first messages of a session; the rings have models of their own in `ginnel-ring`.
#![cfg(loom)]

use ginnel_daemon::control_link::{Event, GuestLink, HostLink, Parts};
use ginnel_layout::Name;
use ginnel_layout::control::{
    CAPACITY, ControlHeader, GUEST_ACK, GUEST_BOOT_ID, GUEST_EPOCH, GUEST_INTERRUPTS, HOST_ACK, HOST_EPOCH,
    SIZE, TO_GUEST, TO_HOST,
};
use ginnel_layout::relay::RelayKind;
use ginnel_layout::ring::{self, CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, SPACE_ARMED};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const BOOT: [u8; 16] = *b"boot identity 01";
const HELLO: [u8; 8] = *b"greeting";

/// Explores `model` with at most this many preemptions, or with LOOM_MAX_PREEMPTIONS if that is set.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// A part of the control memory.
#[derive(Clone)]
struct Part {
    whole: LoomMemory,
    start: usize,
    len: usize,
}

/// Makes the control memory: the session lines, the words of both rings, and the first two records of each ring.
fn control() -> Part {
    let session =
        [GUEST_ACK, GUEST_BOOT_ID, GUEST_BOOT_ID + 8, GUEST_EPOCH, GUEST_INTERRUPTS, HOST_ACK, HOST_EPOCH];
    let name = (192..size_of::<ControlHeader>()).step_by(8);
    let of_ring = |start| {
        let words = [SPACE_ARMED, HEAD, DATA_ARMED, PRODUCER_STATE, CONSUMER_STATE];
        let records = [0, 8, 16, 64, 72, 80, 128].map(|at| HEADER + at);
        words.into_iter().chain(records).map(move |at| start + at)
    };
    let words =
        (0..64).step_by(8).chain(session).chain(name).chain(of_ring(TO_GUEST)).chain(of_ring(TO_HOST));
    Part { whole: LoomMemory::new(SIZE, words), start: 0, len: SIZE }
}

impl Part {
    fn without(&self, order: Order) -> Self {
        Self { whole: self.whole.without(order), ..self.clone() }
    }
}

impl Parts for Part {
    fn ring(&self, at: usize, len: usize) -> Self {
        assert!(at + len <= self.len && len == ring::footprint(CAPACITY));
        Self { whole: self.whole.clone(), start: self.start + at, len }
    }
}

macro_rules! words {
    ($($type:ty: $load_relaxed:ident $load_acquire:ident $store_relaxed:ident $store_release:ident)*) => {$(
        fn $load_relaxed(&self, at: usize) -> $type { self.whole.$load_relaxed(self.start + at) }
        fn $load_acquire(&self, at: usize) -> $type { self.whole.$load_acquire(self.start + at) }
        fn $store_relaxed(&self, at: usize, value: $type) { self.whole.$store_relaxed(self.start + at, value) }
        fn $store_release(&self, at: usize, value: $type) { self.whole.$store_release(self.start + at, value) }
    )*};
}

impl SharedMemory for Part {
    fn len(&self) -> usize {
        self.len
    }
    words! {
        u16: load_relaxed_u16 load_acquire_u16 store_relaxed_u16 store_release_u16
        u32: load_relaxed_u32 load_acquire_u32 store_relaxed_u32 store_release_u32
        u64: load_relaxed_u64 load_acquire_u64 store_relaxed_u64 store_release_u64
    }
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        self.whole.compare_exchange_u64(self.start + at, old, new)
    }
    fn swap_u64(&self, at: usize, value: u64) -> u64 {
        self.whole.swap_u64(self.start + at, value)
    }
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64 {
        self.whole.fetch_or_u64(self.start + at, bits)
    }
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64 {
        self.whole.fetch_and_u64(self.start + at, bits)
    }
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32 {
        self.whole.fetch_add_u32(self.start + at, value)
    }
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64 {
        self.whole.fetch_add_u64(self.start + at, value)
    }
    fn full_fence(&self) {
        self.whole.full_fence();
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        self.whole.read(self.start + at, into);
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.whole.write(self.start + at, from);
    }
    fn read_acquire(&self, at: usize, into: &mut [u8]) {
        self.whole.read_acquire(self.start + at, into);
    }
    fn write_release(&self, at: usize, from: &[u8]) {
        self.whole.write_release(self.start + at, from);
    }
}

/// A doorbell. A ring is kept until somebody has slept on the doorbell.
#[derive(Clone)]
struct Bell(Arc<(Mutex<bool>, Condvar)>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }
    fn ring_if(&self, needed: bool) {
        if needed {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }
    }
    fn sleep(&self) {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// The methods that both ends have.
trait End {
    fn step(&mut self) -> Event;
    fn take_ring(&mut self) -> bool;
    fn greet(&mut self);
}

impl End for HostLink<Part> {
    fn step(&mut self) -> Event {
        self.step()
    }
    fn take_ring(&mut self) -> bool {
        self.take_ring()
    }
    fn greet(&mut self) {
        // The session may have ended meanwhile; the next one is greeted anew.
        let _ = self.send(RelayKind::DATA, 1, &HELLO);
    }
}

impl End for GuestLink<Part> {
    fn step(&mut self) -> Event {
        self.step()
    }
    fn take_ring(&mut self) -> bool {
        self.take_ring()
    }
    fn greet(&mut self) {
        let _ = self.send(RelayKind::DATA, 2, &HELLO);
    }
}

/// Works until the peer's greeting has arrived: greets the peer in each session, and sleeps when there is nothing to do.
fn converse(mut end: impl End, own: &Bell, peers: &Bell) {
    loop {
        let event = end.step();
        match event {
            Event::Up(info) => {
                assert_eq!((info.boot_id, info.interrupts), (BOOT, true));
                end.greet();
            }
            Event::Message { ref body, .. } => assert_eq!(*body, HELLO),
            Event::Down | Event::Idle => {}
        }
        peers.ring_if(end.take_ring());
        match event {
            Event::Message { .. } => return,
            Event::Idle => own.sleep(),
            _ => {}
        }
    }
}

fn host(memory: &Part) -> HostLink<Part> {
    HostLink::new(memory.clone(), 1, 2, Name::new("vm").unwrap())
}

fn guest(memory: &Part) -> GuestLink<Part> {
    GuestLink::new(memory.clone(), BOOT, true)
}

/// Runs the host's end in a thread, and the guest's end in this one.
fn both(host: impl FnOnce() -> HostLink<Part> + 'static, guest: impl FnOnce() -> GuestLink<Part>) {
    let (to_host, to_guest) = (Bell::new(), Bell::new());
    let (own, peers) = (to_host.clone(), to_guest.clone());
    let thread = thread::spawn(move || converse(host(), &own, &peers));
    converse(guest(), &to_guest, &to_host);
    thread.join().unwrap();
}

/// Returns both ends of a session without messages.
fn session(memory: &Part) -> (HostLink<Part>, GuestLink<Part>) {
    let (mut host, mut guest) = (host(memory), guest(memory));
    assert_eq!(host.step(), Event::Idle);
    assert!(matches!(guest.step(), Event::Up(_)));
    assert!(matches!(host.step(), Event::Up(_)));
    assert!(host.take_ring() && guest.take_ring());
    (host, guest)
}

#[test]
fn two_daemons_start_at_once() {
    explore(3, || {
        let memory = control();
        let theirs = memory.clone();
        both(move || host(&theirs), || guest(&memory));
    });
}

#[test]
fn the_host_daemon_is_replaced() {
    explore(3, || {
        let memory = control();
        let (_, guest) = session(&memory);
        let theirs = memory.clone();
        both(move || host(&theirs), || guest);
    });
}

#[test]
fn the_guest_daemon_is_replaced() {
    explore(3, || {
        let memory = control();
        let (host, _) = session(&memory);
        both(move || host, || guest(&memory));
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_host_without_release_is_noticed() {
    explore(3, || {
        let memory = control();
        let theirs = memory.without(Order::Release);
        both(move || host(&theirs), || guest(&memory));
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_guest_without_acquire_is_noticed() {
    explore(3, || {
        let memory = control();
        let theirs = memory.clone();
        both(move || host(&theirs), || guest(&memory.without(Order::Acquire)));
    });
}
