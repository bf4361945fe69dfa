//! `on-error = "hold"`: requests that the disk fails wait until an operator lets them go on, and all other requests are
//! served.

mod front;
mod server;

use front::Guest;
use ginnel_layout::vhost_user::protocol::GET_VRING_BASE_INFLIGHT;
use ginnel_layout::vhost_user::{Request, feature};
use ginnel_layout::virtio::feature as virtio;
use ginnel_layout::virtio_blk::{RangeSegment, RequestHeader, RequestKind};
use ginnel_layout::virtio_scsi::{
    Address, CDB_LEN, CONTROL_QUEUE, CommandHeader, CommandResponse, ControlKind, FIRST_COMMAND_QUEUE,
    TaskFunction, TaskManagement,
};
use ginnel_shmem::SharedMemory;
use ginnel_virtqueue::{Kind, Segment};
use ginnel_volume_control::{Answer, Request as Ask};
use kit::wait::WATCHDOG;
use server::Server;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;
use zerocopy::IntoBytes;

const BLOCK: usize = 4096;
const HOLD: &str = "--path IMAGE --backend volatile --on-error hold";
const RESUME: &str = r#"{"op":"resume"}"#;
/// Status values of virtio-blk.
const OK: u8 = 0;
const IOERR: u8 = 1;

/// Writes `value` to a block, as request `n`.
fn write(guest: &mut Guest, n: usize, block: usize, value: u8) {
    let address = guest.data() + (n * BLOCK) as u64;
    guest.memory.write((address - front::GUEST) as usize, &[value; BLOCK]);
    let header = RequestHeader { kind: RequestKind::OUT, reserved: 0, sector: (block * BLOCK / 512) as u64 };
    let data = [Segment { address, len: BLOCK as u32, writable: false }];
    guest.add(0, n, header.as_bytes(), &data, 1, false);
    guest.kick(0);
}

fn flush(guest: &mut Guest, n: usize) {
    let header = RequestHeader { kind: RequestKind::FLUSH, reserved: 0, sector: 0 };
    guest.add(0, n, header.as_bytes(), &[], 1, false);
    guest.kick(0);
}

/// Returns the first byte of a block of the image.
fn found(server: &Server, block: usize) -> u8 {
    let mut byte = [0];
    std::fs::File::open(server.image()).unwrap().read_exact_at(&mut byte, (block * BLOCK) as u64).unwrap();
    byte[0]
}

fn fails(server: &Server, what: &str) {
    std::fs::write(server.faults(), what).unwrap();
}

/// A fault: writes to the second block fail with ENOSPC.
const FULL: &str = "write 4096 4096 28\n";

#[test]
fn failed_requests_wait_and_are_tried_again_in_order() {
    let server = Server::start(1 << 20, HOLD);
    let mut guest = Guest::connect(&server.socket(), 1);
    fails(&server, FULL);
    // Two writes to the same block: the later one must win.
    write(&mut guest, 0, 1, 10);
    write(&mut guest, 1, 1, 11);
    write(&mut guest, 2, 2, 12);
    guest.wait();
    assert_eq!(guest.answer(0, 2), OK, "the others go on");
    server.wait_for_held(2);
    assert!(guest.poll(0).is_none());
    let dump: serde_json::Value = serde_json::from_str(&server.control(r#"{"op":"dump"}"#)).unwrap();
    for n in 0..2 {
        let request = &dump["dump"]["queues"][0]["in_flight"][n];
        assert_eq!(request["waits_for"], "operator", "{dump}");
        assert!(request["error"].as_str().unwrap().contains("No space left"), "{dump}");
    }
    server.wait_for_line("No space left on device (os error 28); it and others that fail wait", 1);
    // The disk still fails, so this is too early.
    assert_eq!(server.control(RESUME).trim(), r#"{"resumed":2}"#);
    server.wait_for_line("held requests again", 1);
    server.wait_for_held(2);
    fails(&server, "");
    server.control(RESUME);
    guest.wait();
    guest.wait();
    assert_eq!((guest.answer(0, 0), guest.answer(0, 1)), (OK, OK));
    server.wait_for_held(0);
    assert_eq!(server.control(RESUME).trim(), r#"{"resumed":0}"#);
    flush(&mut guest, 3);
    guest.wait();
    assert_eq!((found(&server, 1), found(&server, 2)), (11, 12));
}

/// Data that a flush could not make durable may be lost. A repeated flush would succeed and hide that.
#[test]
fn a_flush_that_fails_does_not_wait() {
    let server = Server::start(1 << 20, HOLD);
    let mut guest = Guest::connect(&server.socket(), 1);
    fails(&server, &format!("{FULL}flush 0 0 5\n"));
    write(&mut guest, 0, 1, 10);
    server.wait_for_held(1);
    flush(&mut guest, 1);
    guest.wait();
    assert_eq!(guest.answer(0, 1), IOERR);
    server.wait_for_held(1);
    // Later flushes must fail as well, even after the write has succeeded.
    fails(&server, "");
    server.control(RESUME);
    guest.wait();
    flush(&mut guest, 2);
    guest.wait();
    assert_eq!(guest.answer(0, 2), IOERR);
}

#[test]
fn an_operator_can_let_held_requests_fail() {
    let server = Server::start(1 << 20, HOLD);
    let mut guest = Guest::connect(&server.socket(), 1);
    fails(&server, FULL);
    write(&mut guest, 0, 1, 10);
    server.wait_for_held(1);
    server.control(r#"{"op":"resume","fail":true}"#);
    guest.wait();
    assert_eq!(guest.answer(0, 0), IOERR);
    server.wait_for_held(0);
    // Without `on-error = "hold"`, every error is reported at once.
    let server = Server::start(1 << 20, "--path IMAGE --backend volatile");
    let mut guest = Guest::connect(&server.socket(), 1);
    fails(&server, FULL);
    write(&mut guest, 0, 1, 10);
    guest.wait();
    assert_eq!(guest.answer(0, 0), IOERR);
}

/// A front end that stops a queue for good gets the errors. One that takes requests in flight along gets the requests
/// back unanswered, and the next volume executes them.
#[test]
fn a_queue_can_be_stopped_while_requests_wait() {
    for kind in [Kind::Split, Kind::Packed] {
        let (server, other) = (Server::start(1 << 20, HOLD), Server::start(1 << 20, HOLD));
        fails(&server, FULL);
        let mut guest = Guest::connect_with(&server.socket(), 1, kind);
        write(&mut guest, 0, 1, 10);
        server.wait_for_held(1);
        guest.stop(0);
        assert!(guest.poll(0).is_some());
        assert_eq!(guest.answer(0, 0), IOERR, "{kind:?}");
        server.wait_for_held(0);
        drop(guest);

        let mut guest = Guest::connect_without_queues(&server.socket(), 1, kind, GET_VRING_BASE_INFLIGHT);
        guest.open_inflight_region();
        guest.run(0, None);
        (0..4).for_each(|n| write(&mut guest, n, 1 + n % 2, 20 + n as u8));
        server.wait_for_held(2);
        guest.wait();
        guest.wait();
        let base = guest.stop(0);
        assert!(guest.poll(0).is_none(), "{kind:?}");
        server.wait_for_held(0);
        guest.move_to(&other.socket(), GET_VRING_BASE_INFLIGHT);
        guest.run(0, Some(base));
        guest.wait();
        guest.wait();
        assert_eq!((guest.answer(0, 0), guest.answer(0, 2)), (OK, OK), "{kind:?}");
        flush(&mut guest, 5);
        guest.wait();
        assert_eq!(found(&other, 1), 22, "{kind:?}");
    }
}

/// Neither a change by the front end, as at the start of a migration, nor a restart of the volume ends the wait.
#[test]
fn held_requests_survive_changes_and_restarts() {
    let mut server = Server::start(1 << 20, HOLD);
    fails(&server, FULL);
    let mut guest = Guest::connect_without_queues(&server.socket(), 1, Kind::Split, 0);
    guest.open_inflight_region();
    guest.run(0, None);
    write(&mut guest, 0, 1, 10);
    server.wait_for_held(1);
    let features = virtio::VERSION_1 | virtio::INDIRECT_DESC | feature::PROTOCOL_FEATURES | feature::LOG_ALL;
    guest.front.say(Request::SET_FEATURES, features.as_bytes(), &[]);
    assert!(guest.front.is_served());
    server.wait_for_held(1);
    assert!(guest.poll(0).is_none());
    // The volume opens the file of faults when it starts, so the new faults take effect with the next process.
    assert!(server.terminate().success());
    assert!(guest.poll(0).is_none());
    server.restart();
    guest.move_to(&server.socket(), 0);
    guest.run(0, None);
    server.wait_for_held(1);
    fails(&server, "");
    server.control(RESUME);
    guest.wait();
    assert_eq!(guest.answer(0, 0), OK);
}

/// A driver that aborts its commands needs an answer, so held commands fail with their errors.
#[test]
fn an_abort_does_not_wait_for_an_operator() {
    const CONTROL: usize = CONTROL_QUEUE as usize;
    const COMMANDS: usize = FIRST_COMMAND_QUEUE as usize;
    let server = Server::start(1 << 20, &format!("--device scsi {HOLD}"));
    fails(&server, FULL);
    let mut guest = Guest::connect(&server.socket(), COMMANDS + 1);
    let lun = Address::bytes(0, 0);
    let mut cdb = [0; CDB_LEN];
    cdb[..10].copy_from_slice(&[0x2a, 0, 0, 0, 0, 8, 0, 0, 8, 0]);
    let command = CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb };
    let data = [Segment { address: guest.data(), len: BLOCK as u32, writable: false }];
    let room = size_of::<CommandResponse>() as u32;
    guest.add(COMMANDS, 0, command.as_bytes(), &data, room, false);
    guest.kick(COMMANDS);
    server.wait_for_held(1);
    let function = TaskFunction::ABORT_TASK;
    let task = TaskManagement { kind: ControlKind::TASK_MANAGEMENT, function, lun, tag: 7 };
    guest.add(CONTROL, 0, task.as_bytes(), &[], 1, false);
    guest.kick(CONTROL);
    let mut done = [guest.wait().0, guest.wait().0];
    done.sort_unstable();
    assert_eq!(done, [CONTROL, COMMANDS]);
    server.wait_for_held(0);
}

/// A file system that is full, and later has space again.
#[test]
fn a_disk_that_was_full_goes_on_without_an_error() {
    const COUNT: usize = 96;
    const LEN: u32 = 64 << 10;
    // A small file system in a mount namespace of the volume's own.
    let mount = "mount -t tmpfs -o size=4m none DIR && exec \"$@\"";
    let user = if rustix::process::geteuid().is_root() { vec![] } else { vec!["--map-root-user"] };
    let wrapper = [vec!["unshare", "--mount"], user, vec!["sh", "-c", mount, "sh"]].concat();
    let flags = "--path IMAGE --size 32M --create --sandbox off --on-error hold";
    let server = Server::start_under(&wrapper, 0, flags);
    let inside = |path: &Path| format!("/proc/{}/root{}", server.pid(), path.display());
    let mut guest = Guest::connect(Path::new(&inside(&server.socket())), 1);
    let data = [Segment { address: guest.data(), len: LEN, writable: false }];
    for n in 0..COUNT {
        let sector = n as u64 * u64::from(LEN / 512);
        let header = RequestHeader { kind: RequestKind::OUT, reserved: 0, sector };
        guest.add(0, n, header.as_bytes(), &data, 1, false);
    }
    guest.kick(0);
    // The 6 MiB do not fit into the 4 MiB of the file system.
    let control = inside(&server.dir.path().join("v.ctl"));
    let mut control = ginnel_volume_control::Client::connect("v", Path::new(&control)).unwrap();
    let mut held = || match control.ask(&Ask::Stat).unwrap() {
        Answer::Stat(stat) => stat.queues[0].held as usize,
        other => panic!("{other:?}"),
    };
    let until = Instant::now() + WATCHDOG;
    let mut back = 0;
    while back + held() < COUNT {
        back += std::iter::from_fn(|| guest.poll(0)).count();
        assert!(Instant::now() < until, "{back} are back, and {} wait", held());
    }
    let waiting = held();
    assert!(waiting > COUNT / 4 && waiting < COUNT / 2, "{waiting}");
    // Makes room for the held writes.
    let header = RequestHeader { kind: RequestKind::DISCARD, reserved: 0, sector: 0 };
    let range = RangeSegment { sector: 0, sectors: 3 << 11, flags: 0 };
    guest.add(0, COUNT, &[header.as_bytes(), range.as_bytes()].concat(), &[], 1, false);
    guest.kick(0);
    guest.wait();
    assert_eq!(control.ask(&Ask::Resume { fail: false }).unwrap(), Answer::Resumed(waiting as u64));
    (0..waiting).for_each(|_| _ = guest.wait());
    for n in 0..=COUNT {
        assert_eq!(guest.answer(0, n), OK, "request {n}");
    }
    server.wait_for_line("No space left on device", 1);
    assert_eq!(
        server.count("No space left on device"),
        1,
        "one line, not one for each request: {}",
        server.log()
    );
}
