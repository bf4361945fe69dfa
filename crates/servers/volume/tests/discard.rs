//! Discards on block devices: the tests use loop devices over files, in which a discard punches a hole.

mod front;
mod server;

use front::Guest;
use ginnel_layout::virtio_blk::{RangeSegment, RequestHeader, RequestKind};
use ginnel_volume_bench::Status;
use server::{Server, status};
use std::os::unix::fs::MetadataExt;
use zerocopy::IntoBytes;

kit::test_that_skips_are_seen!();

const BYTES: u64 = 8 << 20;

/// How the volume executes a discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// io_uring, if the kernel has the operation (Linux 6.12); else a thread.
    Kernel,
    /// A thread that calls BLKDISCARD, as on older kernels.
    Thread,
}

const BOTH: [By; 2] = [By::Kernel, By::Thread];

/// Starts a volume on a loop device that `losetup` makes with `options` over a file in a file system of this type. The
/// volume's process keeps the device and the file system alive, so both vanish with it. Only root can do this.
fn on_a_device(by: By, file_system: &str, options: &str, flags: &str) -> Server {
    let (by_thread, hide) = match by {
        By::Kernel => (!kernel_has_it(), ""),
        By::Thread => (true, "export GINNEL_TEST_NO_URING_DISCARD=1 && "),
    };
    let make = format!(
        "{hide}mkdir DIR/below && mount -t {file_system} none DIR/below && dd if=/dev/zero of=DIR/below/file bs=1M count=8 status=none \
         && loop=$(losetup --find --show {options} DIR/below/file) && exec 9<>$loop && losetup -d $loop \
         && ln -s $loop DIR/image.disk && exec \"$@\""
    );
    let wrapper = ["unshare", "--mount", "sh", "-c", &make, "sh"];
    let server = Server::start_under(&wrapper, 0, &format!("--path IMAGE.disk {flags}"));
    let can_discard = file_system == "tmpfs";
    assert_eq!(server.count("a thread does it"), usize::from(by_thread && can_discard), "{}", server.log());
    server
}

/// Returns the number of bytes that the file below the loop device occupies.
fn taken(server: &Server) -> u64 {
    let file = format!("/proc/{}/root{}/below/file", server.pid(), server.dir.path().display());
    std::fs::metadata(file).unwrap().blocks() * 512
}

/// Returns the number of discards that the device has received. Requests to write zeroes do not count.
fn discards(server: &Server) -> u64 {
    let device = std::fs::metadata(server.image().with_file_name("image.disk")).unwrap().rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
    stat.split_whitespace().nth(11).unwrap().parse().unwrap()
}

/// Whether io_uring has a discard operation (Linux 6.12).
fn kernel_has_it() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

#[test]
fn a_discard_frees_space() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let flags = ["--direct on", "--direct off --wait poll", "--direct on --sandbox require --user nobody"];
    for (by, flags) in BOTH.into_iter().flat_map(|by| flags.map(|flags| (by, flags))) {
        let server = on_a_device(by, "tmpfs", "", flags);
        let mut client = server.connect();
        client.write(0, &[7; 65536]).unwrap();
        client.flush().unwrap();
        assert_eq!(taken(&server), BYTES);
        let before = discards(&server);
        client.discard(0, 1 << 20).unwrap();
        assert!(discards(&server) > before, "{by:?}, {flags}: zeroes are written in place of a discard");
        assert_eq!(taken(&server), BYTES - (1 << 20), "{by:?}, {flags}");
        let mut back = [1; 65536];
        client.read(0, &mut back).unwrap();
        assert_eq!(back, [0; 65536]);
    }
}

#[test]
fn a_range_that_does_not_fit_the_devices_sectors_is_cut() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    BOTH.into_iter().for_each(is_cut);
}

fn is_cut(by: By) {
    let server = on_a_device(by, "tmpfs", "--sector-size 4096", "--direct off");
    let mut client = server.connect();
    client.write(0, &[7; 16384]).unwrap();
    client.flush().unwrap();
    client.discard(512, 8192).unwrap();
    client.discard(12288 + 512, 1024).unwrap();
    assert_eq!(taken(&server), BYTES - 4096);
    let mut back = [1; 16384];
    client.read(0, &mut back).unwrap();
    let gone = back.iter().position(|&byte| byte == 0).unwrap()
        ..back.iter().rposition(|&byte| byte == 0).unwrap() + 1;
    assert_eq!(gone, 4096..8192);
    // The guest asks for zeroes, so the volume must write the parts that are not aligned to the device's sectors.
    client.write_zeroes(512, 1024, true).unwrap();
    client.write_zeroes(12288 + 512, 1024, false).unwrap();
    client.read(0, &mut back).unwrap();
    let zeroes = |from: usize, to: usize| back[from..to].iter().all(|&byte| byte == 0);
    assert!(zeroes(512, 1536) && zeroes(12800, 13824));
    assert_eq!((back[511], back[1536], back[12799], back[13824]), (7, 7, 7, 7));
}

#[test]
fn a_device_without_discards_reports_them_unsupported() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    BOTH.into_iter().for_each(says_so);
}

fn says_so(by: By) {
    // ramfs cannot punch holes.
    let server = on_a_device(by, "ramfs", "", "");
    let mut client = server.connect();
    client.write(0, &[7; 4096]).unwrap();
    assert_eq!(status(client.discard(0, 4096)), Status::Unsupported);
    let mut back = [0; 4096];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096], "no zeroes are written");
    client.write_zeroes(0, 4096, true).unwrap();
    client.read(0, &mut back).unwrap();
    assert_eq!(back, [0; 4096]);
}

/// Discards one megabyte after the other, as requests 0 to `count` of queue 0.
fn discard_all(guest: &mut Guest, count: usize) {
    for n in 0..count {
        let header = RequestHeader { kind: RequestKind::DISCARD, reserved: 0, sector: 0 };
        let range = RangeSegment { sector: (n as u64) << 11, sectors: 1 << 11, flags: 0 };
        guest.add(0, n, &[header.as_bytes(), range.as_bytes()].concat(), &[], 1, false);
    }
    guest.kick(0);
}

/// When a queue has been stopped, all of its discards must be complete.
#[test]
fn a_queue_is_stopped_when_its_discards_are_done() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    const COUNT: usize = 8;
    const ROUNDS: usize = 20;
    for by in BOTH {
        let mut server = on_a_device(by, "tmpfs", "", "");
        let mut guest = Guest::connect(&server.socket(), 1);
        for round in 0..ROUNDS {
            discard_all(&mut guest, COUNT);
            // The volume takes at least one request, and in most rounds others are still in flight.
            server.wait_for_taken((round * COUNT) as u64 + 1);
            let taken = guest.stop(0) as usize - round * COUNT;
            let done = std::iter::from_fn(|| guest.poll(0)).count();
            assert_eq!(done, taken, "{by:?}");
            guest.start(0);
            (done..COUNT).for_each(|_| _ = guest.wait());
        }
        assert_eq!(taken(&server), 0, "{by:?}");
        let stat: serde_json::Value = serde_json::from_str(&server.control(r#"{"op":"stat"}"#)).unwrap();
        let kinds = stat["stat"]["operations"].as_array().unwrap();
        let counted = kinds.iter().find(|kind| kind["operation"] == "discard").unwrap();
        assert_eq!(counted["requests"], ROUNDS * COUNT, "{by:?}: {counted}");
        // Terminating the whole volume must wait for the discards as well.
        discard_all(&mut guest, COUNT);
        assert!(server.terminate().success(), "{by:?}");
    }
}
