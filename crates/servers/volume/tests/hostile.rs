//! Hostile front ends: whatever a front end sends, or does to the memory that it shares, the volume keeps running and
//! serves the next front end at once. A volume next to it in the same process is not affected.

mod front;
mod server;

use front::{Front, GUEST, MEMORY, SIZE, USER, event, memory};
use ginnel_layout::vhost_user::{Header, InflightArea, LogArea, MemoryRegion, Request};
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Options};
use kit::random::Random;
use kit::wait::{WATCHDOG, takes_less_than};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use server::Server;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Returns descriptors of many kinds, none of which is shareable memory or an eventfd.
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
    // When this returns, the other ends of the socket and of the pipe are closed.
    [reader, writer, socket.into(), sealed, empty].into_iter().chain(opened).collect()
}

fn garbage(socket: &Path) {
    let mut random = Random::new(0xbad);
    for round in 0..200 {
        let front = Front::connect(socket);
        let mut bytes: Vec<u8> = (0..random.below(4096)).map(|_| (random.next() >> 32) as u8).collect();
        if round % 2 == 0 {
            // The header at least is well-formed.
            let (request, size) = (random.next() as u32 % 45, random.next() as u32 % 100);
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
        // Passes the descriptor as the kick and call eventfd of a running queue.
        let front = Front::connect(socket);
        front.set_up(&good, odd.as_fd(), odd.as_fd(), false);
        front.is_served();
        front.stop();
    }
    // Passes no descriptor, or too many.
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
    // The front end truncates the memory of a running queue.
    for packed in [false, true] {
        let (front, memory, kick) = (Front::connect(socket), memory(), event());
        front.set_up(&memory, kick.as_fd(), event().as_fd(), packed);
        assert!(front.is_served());
        ftruncate(&memory, 0).unwrap();
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        front.stop();
        // The volume may have found nothing to do. Closing the connection cleans up the rest.
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
    let mut random = Random::new(0xdead);
    for round in 0..60 {
        let (front, memory, kick) = (Front::connect(socket), memory(), event());
        let mut bytes: Vec<u8> =
            (0..MEMORY / 8).flat_map(|_| random.next().wrapping_mul(0x9e37_79b9).to_ne_bytes()).collect();
        if round % 3 == 0 {
            // Descriptors that form a loop, and an available ring that claims more of them than the queue has.
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
    let mut random = Random::new(0xabc);
    let (memory, event) = (memory(), event());
    for _ in 0..150 {
        let front = Front::connect(socket);
        for _ in 0..20 {
            let request = Request((random.next() >> 20) as u32 % 40);
            let mut body = [0; 40];
            body[0] = (random.next() >> 30) as u8 % 3;
            body[4] = (random.next() >> 30) as u8 % 2;
            let lengths = [0, 8, 8, 8, 16, 20, 24, 40];
            let len = lengths[(random.next() >> 30) as usize % lengths.len()];
            let fd = [memory.as_fd(), event.as_fd()];
            let fd = &fd[(random.next() >> 30) as usize % 2..][..1];
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
    // A front end that sends requests and never reads the answers.
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

/// Connects as a well-behaved VM does, and returns how long it takes until it has been served.
fn a_good_front_end_is_served(server: &Server, after: &str) -> Duration {
    let begin = Instant::now();
    let mut client = loop {
        match Client::connect(Options { patience: WATCHDOG, ..server.options() }) {
            Ok(client) => break client,
            // The volume refuses connections while others are waiting.
            Err(error) => assert!(begin.elapsed() < WATCHDOG, "after {after}: {error}"),
        }
    };
    let bytes = after.as_bytes().repeat(512);
    client.write(0, &bytes[..512]).unwrap();
    let mut back = [0; 512];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, bytes[..512]);
    client.close().unwrap();
    begin.elapsed()
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
                takes_less_than(Duration::from_secs(1), || {
                    attack(&server.socket());
                    a_good_front_end_is_served(&server, name)
                });
                println!("{name}: {:?}", begin.elapsed());
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

#[test]
fn a_volume_that_pins_memory_survives() {
    attacked("--path IMAGE --queues 2 --threads 2 --pin-memory true --iopoll");
}

/// SIGTERM ends the volume even while a front end sends messages without a pause.
#[test]
fn an_endless_sender_does_not_keep_the_volume_from_ending() {
    takes_less_than(Duration::from_secs(2), end_beside_an_endless_sender);
}

fn end_beside_an_endless_sender() -> Duration {
    let mut server = Server::start(8 << 20, "--backend ram --size 8M");
    let socket = server.socket();
    let (talks, heard) = std::sync::mpsc::channel();
    let talker = std::thread::spawn(move || {
        let front = Front::connect(&socket);
        let owner = Header { request: Request::SET_OWNER.0, flags: Header::VERSION, size: 0 };
        let many = owner.as_bytes().repeat(4000);
        // This thread ignores the answers and ends when the volume has closed the connection.
        while (&front.0).write_all(&many).is_ok() {
            let _ = talks.send(());
        }
    });
    for _ in 0..20 {
        heard.recv_timeout(WATCHDOG).unwrap();
    }
    let begin = Instant::now();
    assert!(server.terminate().success());
    let took = begin.elapsed();
    talker.join().unwrap();
    took
}

/// Returns the numbers of open files and of mappings, and the private memory in KiB, of the volume's process while it
/// has no front end.
fn belongings(server: &Server) -> (usize, usize, u64) {
    let until = Instant::now() + WATCHDOG;
    while !server.control(r#"{"op":"stat"}"#).contains(r#""front_end":null"#) {
        assert!(Instant::now() < until, "the last front end does not go");
    }
    let at = |what: &str| format!("/proc/{}/{what}", server.pid());
    let open = std::fs::read_dir(at("fd")).unwrap().count();
    let mapped = std::fs::read_to_string(at("maps")).unwrap().lines().count();
    let status = std::fs::read_to_string(at("status")).unwrap();
    let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    (open, mapped, own.trim().trim_end_matches(" kB").parse().unwrap())
}

/// Connects, goes as far as `stage` in setting up a device, and disconnects.
fn come_and_go(socket: &Path, stage: u64, fds: &[OwnedFd; 3]) {
    let [memory, kick, call] = fds;
    let front = Front::connect(socket);
    match stage % 8 {
        0 => {}
        1 => front.raw(&[1, 2, 3]),
        2 => front.agree(false),
        3 => {
            front.agree(true);
            front.share(memory, MEMORY);
        }
        // The first half of a message, with descriptors.
        4 => {
            let header = Header { request: Request::SET_MEM_TABLE.0, flags: Header::VERSION, size: 40 };
            front.send(header.as_bytes(), &[memory.as_fd(), kick.as_fd(), call.as_fd()]);
        }
        5 => {
            front.agree(false);
            let area = InflightArea { size: 8192, offset: 0, queues: 1, queue_size: 16, padding: 0 };
            front.say(Request::GET_INFLIGHT_FD, area.as_bytes(), &[]);
            front.say(Request::SET_INFLIGHT_FD, area.as_bytes(), &[memory.as_fd()]);
            front.say(Request::SET_LOG_BASE, LogArea { size: 4096, offset: 0 }.as_bytes(), &[memory.as_fd()]);
            front.say(Request::SET_BACKEND_REQ_FD, &[], &[call.as_fd()]);
        }
        6 => {
            front.set_up(memory, kick.as_fd(), call.as_fd(), false);
            front.say(Request::SET_VRING_ERR, 0u64.as_bytes(), &[call.as_fd()]);
            front.say(Request::SET_VRING_CALL, 1u64.as_bytes(), &[call.as_fd()]);
        }
        _ => {
            front.set_up(memory, kick.as_fd(), call.as_fd(), true);
            // An invalid message, which ends the session.
            front.say(Request(99), &[], &[memory.as_fd(), call.as_fd()]);
        }
    }
    // Waits until the volume has handled all messages, except where a message is incomplete.
    if !matches!(stage % 8, 1 | 4) {
        front.is_served();
    }
}

#[test]
fn thousands_of_front_ends_leave_nothing_behind() {
    let server = Server::start(8 << 20, "--path IMAGE --queues 2 --threads 2");
    let fds = [memory(), event(), event()];
    let mut before = (0, 0, 0);
    for number in 0..5000 {
        come_and_go(&server.socket(), number, &fds);
        // By then the volume has made all allocations that it makes once and keeps.
        if number == 500 {
            a_good_front_end_is_served(&server, "the first 500");
            before = belongings(&server);
        }
    }
    a_good_front_end_is_served(&server, "thousands");
    let after = belongings(&server);
    println!("open, mapped, own KiB: {before:?} after 500 front ends, {after:?} after 5000");
    assert!(server.count("has connected") > 5000 / 8 * 6, "hardly any was served");
    // A leak of one object of each kind by each front end would add up to more than 500. Descriptors of this test's own
    // queries stay open for a moment, so small differences do not count.
    let grown = (
        after.0.saturating_sub(before.0),
        after.1.saturating_sub(before.1),
        after.2.saturating_sub(before.2),
    );
    assert!(grown.0 <= 2 && grown.1 <= 8 && grown.2 < 2048, "{before:?}, then {after:?}");
}
