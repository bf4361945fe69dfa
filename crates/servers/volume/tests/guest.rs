//! Guests that ask for as much as they can. Their queues can still be stopped at once, so that the next front end is
//! served, and the resources that a volume needs for a request are bounded.

mod front;
mod server;

use front::{DATA, Guest};
use ginnel_layout::vhost_user::{Request, feature};
use ginnel_layout::virtio::feature as virtio;
use ginnel_layout::virtio_blk::{RangeSegment, RequestHeader, RequestKind};
use ginnel_layout::virtio_scsi::{
    Address, CDB_LEN, CONTROL_QUEUE, CommandHeader, CommandResponse, ControlKind, FIRST_COMMAND_QUEUE,
    TaskFunction, TaskManagement,
};
use ginnel_shmem::SharedMemory;
use ginnel_virtqueue::Segment;
use ginnel_volume_bench::{Client, Options};
use kit::wait::{WATCHDOG, takes_less_than};
use server::Server;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Returns `count` segments that all describe the same `len` bytes of the guest's data, `skip` bytes after their start.
fn folded(guest: &Guest, count: usize, len: u32, skip: u64, writable: bool) -> Vec<Segment> {
    vec![Segment { address: guest.data() + skip, len, writable }; count]
}

fn read(sector: u64) -> RequestHeader {
    RequestHeader { kind: RequestKind::IN, reserved: 0, sector }
}

/// Disconnects the guest. Returns the time until the next front end has the answer to its first request.
fn gone(server: &Server, guest: Guest) -> Duration {
    drop(guest);
    let begin = Instant::now();
    let mut client = Client::connect(Options { patience: 3 * WATCHDOG, ..server.options() }).unwrap();
    client.read(0, &mut [0; 512]).unwrap();
    begin.elapsed()
}

#[test]
fn a_stop_does_not_wait_for_gigabytes() {
    const QUEUES: usize = 8;
    const EACH: usize = 32;
    takes_less_than(Duration::from_secs(5), || {
        let server = Server::start(0, "--backend ram --size 1G --queues 8 --threads 1");
        let mut guest = Guest::connect(&server.socket(), QUEUES);
        // Each request reads 448 MiB, so all together read 112 GiB.
        let data = folded(&guest, 112, 4 << 20, 0, true);
        for queue in 0..QUEUES {
            for n in 0..EACH {
                guest.add(queue, n, read(0).as_bytes(), &data, 1, false);
            }
            guest.kick(queue);
        }
        server.wait_for_taken(1);
        let took = gone(&server, guest);
        println!("the next guest is served after {took:?}");
        took
    });
}

#[test]
fn a_stop_does_not_wait_for_the_limits() {
    // At 1 KiB per second, 1 MiB is in flight for 17 minutes, and an abort waits for it.
    let server = Server::start(0, "--device scsi --backend ram --size 64M --threads 1 --bandwidth 1024");
    let mut guest = Guest::connect(&server.socket(), usize::from(FIRST_COMMAND_QUEUE) + 1);
    let mut cdb = [0; CDB_LEN];
    cdb[..10].copy_from_slice(&[0x28, 0, 0, 0, 0, 0, 0, 8, 0, 0]);
    let lun = Address::bytes(0, 0);
    let command = CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb };
    let data = folded(&guest, 1, 1 << 20, 0, true);
    let commands = FIRST_COMMAND_QUEUE.into();
    guest.add(commands, 0, command.as_bytes(), &data, size_of::<CommandResponse>() as u32, true);
    guest.kick(commands);
    server.wait_for_taken(1);
    let task = TaskManagement {
        kind: ControlKind::TASK_MANAGEMENT,
        function: TaskFunction::LOGICAL_UNIT_RESET,
        lun,
        tag: 0,
    };
    guest.add(CONTROL_QUEUE.into(), 0, task.as_bytes(), &[], 1, false);
    guest.kick(CONTROL_QUEUE.into());
    server.wait_for_taken(2);
    // The abort's queue is stopped first, as QEMU does when it disconnects.
    let begin = Instant::now();
    guest.front.stop();
    let mut done = [guest.wait(), guest.wait()];
    done.sort_unstable();
    assert_eq!(done, [(CONTROL_QUEUE.into(), 0), (commands, 0)]);
    println!("both end after {:?}", begin.elapsed());
    assert!(begin.elapsed() < WATCHDOG, "{:?}", begin.elapsed());
    assert!(guest.front.is_served());
}

/// Waits until the limits hold back a request of a queue, and returns for how long they do so, in seconds.
fn held(server: &Server) -> u64 {
    let until = Instant::now() + WATCHDOG;
    loop {
        let answer: serde_json::Value = serde_json::from_str(&server.control(r#"{"op":"dump"}"#)).unwrap();
        let queues = answer["dump"]["queues"].as_array().unwrap();
        let longest = queues.iter().map(|queue| queue["throttled_ns"].as_u64().unwrap()).max();
        if let Some(held @ 1..) = longest {
            return held / 1_000_000_000;
        }
        assert!(Instant::now() < until, "nothing is held: {answer}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stopping a queue does not wait for the limits, but the requests that it lets through are charged to later ones.
#[test]
fn stops_are_no_way_around_the_limits() {
    // Each of these requests uses 64 seconds' worth of bandwidth.
    let server = Server::start(0, "--backend ram --size 64M --bandwidth 16384");
    let mut guest = Guest::connect(&server.socket(), 1);
    let data = folded(&guest, 1, 1 << 20, 0, true);
    for n in 0..20 {
        guest.add(0, n, read(0).as_bytes(), &data, 1, false);
        guest.kick(0);
        server.wait_for_taken(n as u64 + 1);
        guest.stop(0);
        assert_eq!(guest.wait().0, 0);
        guest.start(0);
    }
    guest.add(0, 0, read(0).as_bytes(), &data, 1, false);
    guest.kick(0);
    let held = held(&server);
    println!("after 20 stops the next request waits {held} s");
    assert!(held > 10 * 64, "20 requests of 64 seconds each went, and the next one waits {held}");
}

/// Zeroes that the volume has to write to the disk count against the limits like any other data.
#[test]
fn zeroes_are_limited_where_they_are_written() {
    // For memory the volume knows from the start whether it has to write the zeroes; for a file system that cannot make
    // zeroes, only after the first attempt.
    let shm = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    shm.as_file().set_len(8 << 20).unwrap();
    let file = format!("--path {} --direct off", shm.path().display());
    for (disk, free) in [("--backend ram --size 8M", 0), (&file, 1)] {
        let server = Server::start(0, &format!("{disk} --bandwidth 16384"));
        let mut guest = Guest::connect(&server.socket(), 1);
        let header = RequestHeader { kind: RequestKind::WRITE_ZEROES, reserved: 0, sector: 0 };
        let range = RangeSegment { sector: 0, sectors: 4 << 11, flags: 0 };
        let request = [header.as_bytes(), range.as_bytes()].concat();
        for n in 0..free {
            guest.add(0, n, &request, &[], 1, false);
            guest.kick(0);
            guest.wait();
        }
        guest.add(0, free, &request, &[], 1, false);
        guest.kick(0);
        let held = held(&server);
        assert!(guest.poll(0).is_none(), "{disk}: it went, and the next one waits {held} s");
        assert!(
            free == 0 || held > 100,
            "{disk}: 256 seconds' worth were written, and the next one waits {held}"
        );
    }
}

/// A chain with more segments than the device has announced breaks its queue, however long the chain is.
#[test]
fn requests_have_no_more_segments_than_told() {
    let server = Server::start(0, "--backend ram --size 64M --segments 30 --queues 2");
    let mut guest = Guest::connect(&server.socket(), 2);
    let data = folded(&guest, 30, 512, 0, true);
    guest.add(0, 0, read(0).as_bytes(), &data, 1, false);
    guest.kick(0);
    assert_eq!(guest.wait(), (0, 0));
    let data = folded(&guest, 60, 512, 0, true);
    guest.add(1, 0, read(0).as_bytes(), &data, 1, false);
    guest.kick(1);
    server.wait_for_line("a request of more than", 1);
    assert!(guest.front.is_served());
}

/// Buffers that direct I/O cannot use because of their alignment are copied. A guest can ask for more copies than the
/// host has memory for.
#[test]
fn copies_for_alignment_are_bounded() {
    const REQUESTS: usize = 32;
    let server = Server::start(1 << 30, "--path IMAGE --direct on");
    let mut guest = Guest::connect(&server.socket(), 1);
    let peak = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
        peak.trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let before = peak();
    // Each request has 64 MiB, at an odd address.
    let data = folded(&guest, 16, 4 << 20, 1, true);
    for n in 0..REQUESTS {
        guest.add(0, n, read(0).as_bytes(), &data, 1, false);
    }
    guest.kick(0);
    (0..REQUESTS).for_each(|_| assert_eq!(guest.wait().0, 0));
    let grown = peak() - before;
    println!("{REQUESTS} requests of 64 MiB: {grown} KiB more at most");
    assert!(grown < (DATA as u64 >> 10) + (64 << 10), "{grown} KiB");
}

/// A request that is copied in many parts is copied completely, also if its buffers are split at odd addresses.
#[test]
fn copied_requests_are_complete() {
    const LEN: usize = 3 << 20;
    let server = Server::start(8 << 20, "--path IMAGE --direct on");
    let mut guest = Guest::connect(&server.socket(), 1);
    let at = (guest.data() - front::GUEST) as usize + 1;
    let bytes: Vec<u8> = (0..LEN).map(|i| (i / 7 + i / 70_001) as u8).collect();
    guest.memory.write(at, &bytes);
    let segments = |guest: &Guest, writable| {
        let mut list = Vec::new();
        let mut from = 0;
        while from < LEN {
            let len = (40_003 + 977 * list.len()).min(LEN - from);
            list.push(Segment { address: guest.data() + 1 + from as u64, len: len as u32, writable });
            from += len;
        }
        list
    };
    let write = RequestHeader { kind: RequestKind::OUT, reserved: 0, sector: 8 };
    let data = segments(&guest, false);
    guest.add(0, 0, write.as_bytes(), &data, 1, false);
    guest.kick(0);
    guest.wait();
    let mut image = vec![0; LEN];
    std::fs::File::open(server.image()).unwrap().read_exact_at(&mut image, 4096).unwrap();
    assert!(image == bytes, "what was written");
    guest.memory.zero(at, LEN);
    let data = segments(&guest, true);
    guest.add(0, 1, read(8).as_bytes(), &data, 1, false);
    guest.kick(0);
    guest.wait();
    let mut back = vec![0; LEN];
    guest.memory.read(at, &mut back);
    assert!(back == bytes, "what was read");
}

/// QEMU stops all queues when the guest reboots, as it does at the end of a migration. If pages are being logged at
/// that time, only the device reset that follows a reboot tells the two apart.
#[test]
fn a_reboot_during_a_migration_keeps_the_image() {
    let server = Server::start(8 << 20, "--path IMAGE");
    let mut guest = Guest::connect(&server.socket(), 1);
    let features = virtio::VERSION_1 | virtio::INDIRECT_DESC | feature::PROTOCOL_FEATURES | feature::LOG_ALL;
    guest.front.say(Request::SET_FEATURES, features.as_bytes(), &[]);
    guest.stop(0);
    server.wait_for_line("its images are unlocked", 1);
    guest.front.say(Request::RESET_DEVICE, &[], &[]);
    assert!(guest.front.is_served());
    server.refuses_another().unwrap();
}
