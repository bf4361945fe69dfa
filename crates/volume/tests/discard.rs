//! Discards on block devices: loop devices over files, in which a discard makes a hole.

mod server;

use std::os::unix::fs::MetadataExt;

use ginnel_volume_client::Status;
use server::{Server, status};

const BYTES: u64 = 8 << 20;

/// A volume on a loop device that is made with these options over a file in a file system of this kind. All of it vanishes with the
/// process, which holds it. `None` if this is not root, who alone can make one.
fn on_a_device(file_system: &str, options: &str, flags: &str) -> Option<Server> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED only root can make a loop device");
        return None;
    }
    let make = format!(
        "mkdir DIR/below && mount -t {file_system} none DIR/below && dd if=/dev/zero of=DIR/below/file bs=1M count=8 status=none \
         && loop=$(losetup --find --show {options} DIR/below/file) && exec 9<>$loop && losetup -d $loop \
         && ln -s $loop DIR/image.disk && exec \"$@\""
    );
    let wrapper = ["unshare", "--mount", "sh", "-c", &make, "sh"];
    Some(Server::start_under(&wrapper, 0, &format!("--path IMAGE.disk {flags}")))
}

/// Bytes that the file below takes.
fn taken(server: &Server) -> u64 {
    let file = format!("/proc/{}/root{}/below/file", server.pid(), server.dir.path().display());
    std::fs::metadata(file).unwrap().blocks() * 512
}

/// Discards that the device was asked for, not zeroes to write.
fn discards(server: &Server) -> u64 {
    let device = std::fs::metadata(server.image().with_file_name("image.disk")).unwrap().rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
    stat.split_whitespace().nth(11).unwrap().parse().unwrap()
}

/// Whether io_uring has a discard (6.12).
fn kernel_has_it() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

#[test]
fn what_is_discarded_is_given_back() {
    for flags in ["--direct on", "--direct off", "--direct on --sandbox require --user nobody"] {
        let Some(server) = on_a_device("tmpfs", "", flags) else { return };
        let mut client = server.connect();
        client.write(0, &[7; 65536]).unwrap();
        client.flush().unwrap();
        assert_eq!(taken(&server), BYTES);
        let before = discards(&server);
        client.discard(0, 1 << 20).unwrap();
        assert!(discards(&server) > before || !kernel_has_it(), "zeroes are written in place of a discard");
        assert_eq!(taken(&server), BYTES - (1 << 20), "{flags}");
        let mut back = [1; 65536];
        client.read(0, &mut back).unwrap();
        assert_eq!(back, [0; 65536]);
    }
}

#[test]
fn a_range_that_does_not_fit_the_devices_sectors_is_cut() {
    let Some(server) = on_a_device("tmpfs", "--sector-size 4096", "--direct off") else { return };
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
    // Zeroes are wanted, so what does not fit is written.
    client.write_zeroes(512, 1024, true).unwrap();
    client.write_zeroes(12288 + 512, 1024, false).unwrap();
    client.read(0, &mut back).unwrap();
    let zeroes = |from: usize, to: usize| back[from..to].iter().all(|&byte| byte == 0);
    assert!(zeroes(512, 1536) && zeroes(12800, 13824));
    assert_eq!((back[511], back[1536], back[12799], back[13824]), (7, 7, 7, 7));
}

#[test]
fn a_device_that_has_none_says_so() {
    // ramfs makes no holes.
    let Some(server) = on_a_device("ramfs", "", "") else { return };
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
