//! Front ends that mean harm: whatever one says, or does to what it shares, the volume goes on and serves the next one at
//! once, and a volume beside it notices nothing.

mod server;

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ginnel_layout::vhost_user::{
    Header, InflightArea, LogArea, MemoryRegion, Request, VringAddress, VringState, feature, protocol,
};
use ginnel_layout::virtio::feature as virtio;
use ginnel_volume_client::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_client::{Client, Options};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use server::{PROMPT, Server, random};
use zerocopy::IntoBytes;

/// Bytes of memory, and its address for the guest and for the front end.
const MEMORY: u64 = 64 << 10;
const GUEST: u64 = 0x1_0000;
const USER: u64 = 0x7000_0000;
/// Descriptors of a queue.
const SIZE: u32 = 16;

/// A front end that says what it likes.
struct Front(UnixStream);

impl Front {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PROMPT)).unwrap();
        stream.set_write_timeout(Some(PROMPT)).unwrap();
        Self(stream)
    }

    /// What is not taken, because the volume has hung up, is lost.
    fn raw(&self, bytes: &[u8]) {
        let _ = (&self.0).write_all(bytes);
    }

    fn say(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request: request.0, flags: Header::VERSION, size: body.len() as u32 };
        let bytes = [header.as_bytes(), body].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let _ = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// Waits until the volume has done all that it was told, or has hung up, which it tells.
    fn is_served(&self) -> bool {
        self.say(Request::GET_FEATURES, &[], &[]);
        let mut answer = [0; 20];
        match (&self.0).read_exact(&mut answer) {
            Ok(()) => true,
            Err(error) => {
                assert!(error.kind() != std::io::ErrorKind::WouldBlock, "the volume hangs");
                false
            }
        }
    }

    /// A whole device with one queue that runs, in this memory.
    fn set_up(&self, memory: &OwnedFd, kick: BorrowedFd<'_>, call: BorrowedFd<'_>, packed: bool) {
        self.agree(packed);
        self.share(memory, MEMORY);
        let (descriptors, available, used) = (USER, USER + 0x400, USER + 0x800);
        self.queue(descriptors, available, used);
        self.say(Request::SET_VRING_CALL, 0u64.as_bytes(), &[call]);
        self.say(Request::SET_VRING_KICK, 0u64.as_bytes(), &[kick]);
        self.enable();
    }

    fn agree(&self, packed: bool) {
        let agreed = protocol::CONFIG | protocol::INFLIGHT_SHMFD | protocol::MQ;
        self.say(Request::SET_PROTOCOL_FEATURES, agreed.as_bytes(), &[]);
        let packed = if packed { virtio::RING_PACKED } else { 0 };
        let features = virtio::VERSION_1 | virtio::INDIRECT_DESC | feature::PROTOCOL_FEATURES | packed;
        self.say(Request::SET_FEATURES, features.as_bytes(), &[]);
    }

    fn share(&self, memory: impl AsFd, size: u64) {
        let region = MemoryRegion { guest: GUEST, size, user: USER, offset: 0 };
        let table = [&[1, 0, 0, 0, 0, 0, 0, 0], region.as_bytes()].concat();
        self.say(Request::SET_MEM_TABLE, &table, &[memory.as_fd()]);
    }

    fn queue(&self, descriptors: u64, available: u64, used: u64) {
        let state = VringState { index: 0, value: SIZE };
        self.say(Request::SET_VRING_NUM, state.as_bytes(), &[]);
        let address = VringAddress { index: 0, flags: 0, descriptors, used, available, log: 0 };
        self.say(Request::SET_VRING_ADDR, address.as_bytes(), &[]);
    }

    fn enable(&self) {
        self.say(Request::SET_VRING_ENABLE, VringState { index: 0, value: 1 }.as_bytes(), &[]);
    }

    fn stop(&self) {
        self.say(Request::GET_VRING_BASE, VringState { index: 0, value: 0 }.as_bytes(), &[]);
        let mut answer = [0; 20];
        let _ = (&self.0).read_exact(&mut answer);
    }
}

fn memory() -> OwnedFd {
    let file = memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, MEMORY).unwrap();
    file
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// Descriptors of all kinds that are no memory and no eventfd.
fn oddities() -> Vec<OwnedFd> {
    let (socket, far_end) = UnixStream::pair().unwrap();
    (&far_end).write_all(&[1; 1000]).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let sealed = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&sealed, MEMORY).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let files = ["/dev/null", "/dev/zero", "/dev/full", "/", "/proc/self/mem", "/proc/self/exe"];
    let opened = files.iter().map(|path| File::open(path).unwrap().into());
    let empty = memfd_create("empty", MemfdFlags::CLOEXEC).unwrap();
    // Each of the two ends of the pipe finds the other closed in the end.
    [reader, writer, socket.into(), sealed, empty].into_iter().chain(opened).collect()
}

fn garbage(socket: &Path) {
    let mut state = 0xbad;
    for round in 0..200 {
        let front = Front::connect(socket);
        let mut bytes: Vec<u8> =
            (0..random(&mut state) % 4096).map(|_| (random(&mut state) >> 32) as u8).collect();
        if round % 2 == 0 {
            // It looks like a message of some kind, at least.
            let (request, size) = (random(&mut state) as u32 % 45, random(&mut state) as u32 % 100);
            let header = Header { request, flags: Header::VERSION, size };
            bytes.splice(..0, header.as_bytes().iter().copied());
        }
        front.raw(&bytes);
    }
}

fn half_messages(socket: &Path) {
    let region = MemoryRegion { guest: GUEST, size: MEMORY, user: USER, offset: 0 };
    let table = [&[1, 0, 0, 0, 0, 0, 0, 0], region.as_bytes()].concat();
    let header = Header { request: Request::SET_MEM_TABLE.0, flags: 1, size: table.len() as u32 };
    let whole = [header.as_bytes(), &table].concat();
    for cut in 0..whole.len() {
        Front::connect(socket).raw(&whole[..cut]);
    }
    for size in [4097, 1 << 20, u32::MAX] {
        let front = Front::connect(socket);
        front.raw(Header { size, ..header }.as_bytes());
        assert!(!front.is_served());
    }
}

fn wrong_descriptors(socket: &Path) {
    let good = memory();
    for odd in oddities() {
        for request in [Request::SET_MEM_TABLE, Request::SET_INFLIGHT_FD, Request::SET_LOG_BASE] {
            let front = Front::connect(socket);
            front.agree(false);
            let area = InflightArea { size: 4096, offset: 0, queues: 1, queue_size: 16, padding: 0 };
            match request {
                Request::SET_MEM_TABLE => front.share(&odd, MEMORY),
                Request::SET_INFLIGHT_FD => front.say(request, area.as_bytes(), &[odd.as_fd()]),
                _ => front.say(request, LogArea { size: 4096, offset: 0 }.as_bytes(), &[odd.as_fd()]),
            }
            assert!(!front.is_served(), "{odd:?} is taken for memory");
        }
        // As what wakes and what is woken, of a queue that runs.
        let front = Front::connect(socket);
        front.set_up(&good, odd.as_fd(), odd.as_fd(), false);
        front.is_served();
        front.stop();
    }
    // None, or more than there should be.
    let many: Vec<_> = (0..40).map(|_| good.as_fd()).collect();
    for fds in [&many[..0], &many[..2], &many[..32], &many] {
        for request in [Request::SET_MEM_TABLE, Request::SET_VRING_KICK, Request::GET_FEATURES] {
            let front = Front::connect(socket);
            front.say(request, &[0; 8], fds);
            front.is_served();
        }
    }
}

fn memory_that_is_not_there(socket: &Path) {
    let front = Front::connect(socket);
    front.share(memory(), MEMORY + 4096);
    assert!(!front.is_served());
    for (size, offset) in [(u64::MAX, 0), (u64::MAX - 4095, 4096), (4096, u64::MAX - 4095), (0, 0)] {
        let front = Front::connect(socket);
        let region = MemoryRegion { guest: GUEST, size, user: USER, offset };
        front.say(Request::ADD_MEM_REG, &[&[0; 8], region.as_bytes()].concat(), &[memory().as_fd()]);
        assert!(!front.is_served(), "{size:#x} bytes at {offset:#x}");
        for queue_size in [0, 1, 16, u16::MAX] {
            let front = Front::connect(socket);
            let area = InflightArea { size, offset, queues: 1, queue_size, padding: 0 };
            front.say(Request::SET_INFLIGHT_FD, area.as_bytes(), &[memory().as_fd()]);
            assert!(!front.is_served(), "{size:#x} bytes at {offset:#x} in flight");
        }
    }
    // It goes away under a queue that runs.
    for packed in [false, true] {
        let (front, memory, kick) = (Front::connect(socket), memory(), event());
        front.set_up(&memory, kick.as_fd(), event().as_fd(), packed);
        assert!(front.is_served());
        ftruncate(&memory, 0).unwrap();
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        front.stop();
        // It may have found nothing to do; what is left of it ends with the connection.
    }
}

fn rings_outside_of_memory(socket: &Path) {
    for at in [0, USER - 1, USER + MEMORY - 8, USER + MEMORY, u64::MAX - 7, 1 << 63, GUEST, USER + 1] {
        for part in 0..3 {
            let (front, memory, kick) = (Front::connect(socket), memory(), event());
            front.agree(false);
            front.share(&memory, MEMORY);
            let mut places = [USER, USER + 0x400, USER + 0x800];
            places[part] = at;
            front.queue(places[0], places[1], places[2]);
            front.say(Request::SET_VRING_KICK, 0u64.as_bytes(), &[kick.as_fd()]);
            front.enable();
            assert!(!front.is_served(), "part {part} at {at:#x}");
        }
    }
}

fn broken_rings(socket: &Path) {
    let mut state = 0xdead;
    for round in 0..60 {
        let (front, memory, kick) = (Front::connect(socket), memory(), event());
        let mut bytes: Vec<u8> = (0..MEMORY / 8)
            .flat_map(|_| random(&mut state).wrapping_mul(0x9e37_79b9).to_ne_bytes())
            .collect();
        if round % 3 == 0 {
            // Descriptors that lead in a circle, and more of them than there are.
            for (number, descriptor) in bytes[..16 * SIZE as usize].chunks_exact_mut(16).enumerate() {
                descriptor[..8].copy_from_slice(&(GUEST + 0x1000).to_ne_bytes());
                descriptor[8..12].copy_from_slice(&16u32.to_ne_bytes());
                descriptor[12..14].copy_from_slice(&1u16.to_ne_bytes());
                descriptor[14..].copy_from_slice(&((number as u16 + 1) % SIZE as u16).to_ne_bytes());
            }
            bytes[0x400..0x406].copy_from_slice(&[0, 0, 1, 0, 0, 0]);
        }
        rustix::io::pwrite(&memory, &bytes, 0).unwrap();
        front.set_up(&memory, kick.as_fd(), event().as_fd(), round % 2 == 1);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        front.is_served();
        if round % 4 == 0 {
            front.stop();
        }
    }
}

fn wrong_order(socket: &Path) {
    let mut state = 0xabc;
    let (memory, event) = (memory(), event());
    for _ in 0..150 {
        let front = Front::connect(socket);
        for _ in 0..20 {
            let request = Request((random(&mut state) >> 20) as u32 % 40);
            let mut body = [0; 40];
            body[0] = (random(&mut state) >> 30) as u8 % 3;
            body[4] = (random(&mut state) >> 30) as u8 % 2;
            let lengths = [0, 8, 8, 8, 16, 20, 24, 40];
            let len = lengths[(random(&mut state) >> 30) as usize % lengths.len()];
            let fd = [memory.as_fd(), event.as_fd()];
            let fd = &fd[(random(&mut state) >> 30) as usize % 2..][..1];
            front.say(request, &body[..len], if len >= 8 { fd } else { &[] });
        }
        if !front.is_served() {
            continue;
        }
        front.stop();
    }
}

fn flood(socket: &Path) {
    let all: Vec<_> = (0..300).filter_map(|_| UnixStream::connect(socket).ok()).collect();
    for mut stream in &all {
        let _ = stream.write(&[0; 5]);
    }
    drop(all);
    // One that asks, and hears nothing of the answers.
    let front = Front::connect(socket);
    front.0.set_nonblocking(true).unwrap();
    let ask = Header { request: Request::GET_FEATURES.0, flags: 1, size: 0 };
    while (&front.0).write(ask.as_bytes()).is_ok_and(|n| n == ask.as_bytes().len()) {}
}

type Attack = (&'static str, fn(&Path));
const ATTACKS: &[Attack] = &[
    ("garbage", garbage),
    ("half messages", half_messages),
    ("wrong descriptors", wrong_descriptors),
    ("memory that is not there", memory_that_is_not_there),
    ("rings outside of memory", rings_outside_of_memory),
    ("broken rings", broken_rings),
    ("messages in the wrong order", wrong_order),
    ("a flood of connections", flood),
];

/// As a VM would come, within a second.
fn a_good_front_end_is_served(server: &Server, after: &str) {
    let begin = Instant::now();
    let mut client = loop {
        match Client::connect(Options { patience: PROMPT, ..server.options() }) {
            Ok(client) => break client,
            // Refused, as long as others wait.
            Err(error) => assert!(begin.elapsed() < PROMPT, "after {after}: {error}"),
        }
    };
    let bytes = after.as_bytes().repeat(512);
    client.write(0, &bytes[..512]).unwrap();
    let mut back = [0; 512];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, bytes[..512]);
    client.close().unwrap();
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(1), "after {after} it took {took:?}");
}

fn attacked(flags: &str) {
    let mut server = Server::start(8 << 20, flags);
    let beside = Server::start(8 << 20, "--path IMAGE");
    let mut neighbour = beside.connect();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let workload = Workload {
                pattern: Pattern { random: true, reads: 50 },
                limit: Limit::Time(Duration::from_millis(200)),
                depth: 4,
                sleep: true,
                verify: true,
                ..Workload::default()
            };
            let mut verified = 0;
            loop {
                let outcome = run(&mut neighbour, &workload).unwrap();
                assert_eq!((outcome.failed, outcome.reconnects), (0, 0), "{:?}", outcome.first_failure);
                verified += outcome.verified;
                if ended.load(Ordering::Relaxed) {
                    return verified;
                }
            }
        });
        let attacks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for (name, attack) in ATTACKS {
                let begin = Instant::now();
                attack(&server.socket());
                println!("{name}: {:?}", begin.elapsed());
                a_good_front_end_is_served(&server, name);
            }
        }));
        ended.store(true, Ordering::Relaxed);
        assert!(load.join().unwrap() > 0);
        if let Err(panic) = attacks {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(server.is_running());
    assert_eq!(server.count("panicked"), 0, "{}", server.log());
    assert!(server.terminate().success());
}

#[test]
fn a_volume_in_memory_survives() {
    attacked("--backend ram --size 8M --queues 2 --wait interrupt");
}

#[test]
fn a_volume_with_an_image_survives() {
    attacked("--path IMAGE --queues 2 --threads 2");
}
