//! Disk failures: the guest gets the right status, the log gets one clear line, and the volume continues.

mod server;

use ginnel_volume_bench::{Client, Options, Status};
use server::{Server, status};
use std::fs::File;

const BYTES: u64 = 32 << 20;

#[test]
fn a_full_disk_fails_writes_and_nothing_else() {
    // A small file system in a mount namespace of the volume's own.
    let mount = "mount -t tmpfs -o size=4m none DIR && exec \"$@\"";
    let user = if rustix::process::geteuid().is_root() { vec![] } else { vec!["--map-root-user"] };
    let wrapper = [vec!["unshare", "--mount"], user, vec!["sh", "-c", mount, "sh"]].concat();
    // The volume creates the image inside the mount, as a sparse file.
    let server = Server::start_under(&wrapper, 0, "--path IMAGE --size 32M --create --sandbox off");
    // The volume's socket is inside the mount as well.
    let socket = format!("/proc/{}/root{}", server.pid(), server.socket().display());
    let mut client = Client::connect(Options::new(socket)).unwrap();
    let mut failed = 0;
    for at in (0..BYTES).step_by(64 << 10) {
        match status(client.write(at, &[7; 64 << 10])) {
            Status::Ok => assert_eq!(failed, 0, "a write at {at} behind the first that failed"),
            Status::IoError => failed += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(failed > 100 && failed < 512, "{failed} failed");
    let mut back = [0; 4096];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    client.flush().unwrap();
    // Space that a discard has freed can be used again.
    client.discard(0, 1 << 20).unwrap();
    client.write(BYTES - 4096, &[8; 4096]).unwrap();
    server.wait_for_line("No space left on device", 1);
    assert_eq!(server.count("No space left on device"), 1, "{}", server.log());
}

#[test]
fn an_image_that_is_cut_fails_behind_its_end() {
    for flags in ["--path IMAGE", "--path IMAGE --direct off"] {
        let server = Server::start(BYTES, flags);
        let mut client = server.connect();
        client.write(BYTES - 8192, &[1; 8192]).unwrap();
        client.flush().unwrap();
        let image = File::options().write(true).open(server.image()).unwrap();
        image.set_len(BYTES / 2 + 4096).unwrap();
        assert_eq!(status(client.read(BYTES - 8192, &mut [0; 8192])), Status::IoError);
        // Only the first half of this range exists, so the read system call returns less than was asked for.
        assert_eq!(status(client.read(BYTES / 2, &mut [0; 8192])), Status::IoError);
        client.read(BYTES / 2, &mut [0; 4096]).unwrap();
        // A write behind the end makes the file longer again.
        client.write(BYTES - 4096, &[2; 4096]).unwrap();
        client.read(BYTES - 8192, &mut [0; 8192]).unwrap();
        server.wait_for_line("it was truncated", 1);
        assert_eq!(server.count("it was truncated"), 1, "{}", server.log());
    }
}

#[test]
fn ranges_that_fail_are_reported_and_the_rest_goes_on() {
    let server = Server::start(BYTES, "--path IMAGE --backend volatile");
    let mut client = server.connect();
    let (eio, enospc) = (5, 28);
    std::fs::write(
        server.faults(),
        format!("read 4096 4096 {eio}\nwrite 8192 4096 {enospc}\nflush 0 0 {eio}\n"),
    )
    .unwrap();
    assert_eq!(status(client.read(4096, &mut [0; 512])), Status::IoError);
    assert_eq!(status(client.read(0, &mut [0; 8192])), Status::IoError);
    assert_eq!(status(client.write(4096, &[1; 8192])), Status::IoError);
    assert_eq!(status(client.flush()), Status::IoError);
    client.write(4096, &[1; 4096]).unwrap();
    client.read(8192, &mut [0; 4096]).unwrap();
    std::fs::write(server.faults(), "").unwrap();
    // A failed flush is reported until an operator resets the errors: see lost_writes.rs.
    server.control(r#"{"op":"reset-errors"}"#);
    client.flush().unwrap();
    let mut back = [0; 4096];
    client.read(4096, &mut back).unwrap();
    assert_eq!(back, [1; 4096]);
    let log = server.log();
    assert!(log.contains("read of 512 bytes at 4096 failed: Input/output error"), "{log}");
    assert_eq!(server.count("failed:"), 1, "one line, not one for each request: {log}");
}

#[test]
fn an_image_has_one_volume() {
    let server = Server::start(BYTES, "--path IMAGE");
    server.refuses_another().unwrap();
    server.connect().write(0, &[1; 512]).unwrap();
}
