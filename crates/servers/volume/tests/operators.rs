//! Which processes may use a volume's control socket: those of its operators, but not the QEMU of its VM.

mod server;

use rustix::fs::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use server::Server;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

kit::test_that_skips_are_seen!();

const QEMU: u32 = 64001;
const OPERATOR: u32 = 64002;

/// Connects from a thread whose user and group both have this number.
fn connect_as(number: u32, path: &Path) -> Result<(), ErrorKind> {
    let path = path.to_owned();
    let thread = std::thread::spawn(move || {
        let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
        set_thread_groups(&[group]).unwrap();
        set_thread_res_gid(group, group, group).unwrap();
        set_thread_res_uid(user, user, user).unwrap();
        UnixStream::connect(path).map(drop).map_err(|error| error.kind())
    });
    thread.join().unwrap()
}

#[test]
fn the_user_of_the_disk_cannot_change_its_limits() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can give sockets to others");
    // Unlike the server's own folder, this one is accessible to other users.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let control = folder.path().join("v.ctl");
    let flags = format!(
        "--path IMAGE --socket-mode 0666 --socket-user {QEMU} --socket-group {QEMU} --control {}",
        control.display()
    );

    let mut server = Server::start(1 << 20, &flags);
    let socket = std::fs::metadata(server.socket()).unwrap();
    assert_eq!((socket.mode() & 0o777, socket.uid(), socket.gid()), (0o666, QEMU, QEMU));
    assert_eq!(connect_as(QEMU, &control), Err(ErrorKind::PermissionDenied));
    assert_eq!(connect_as(OPERATOR, &control), Err(ErrorKind::PermissionDenied));
    UnixStream::connect(&control).unwrap();
    server.kill();

    let _server = Server::start(1 << 20, &format!("{flags} --control-group {OPERATOR}"));
    assert_eq!(connect_as(QEMU, &control), Err(ErrorKind::PermissionDenied));
    assert_eq!(connect_as(OPERATOR, &control), Ok(()));
}

#[test]
fn a_mode_that_nobody_can_mean_is_refused_unless_a_volume_starts_with_it() {
    for (flag, mode, part) in [
        ("--socket-mode", "0777", "every user of this host could read and write the disk"),
        ("--socket-mode", "0000", "only root's QEMU can connect"),
        ("--socket-mode", "0770", "write 0660"),
        ("--control-mode", "0666", "every user of this host could change the volume"),
        ("--control-mode", "0660", ""),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_ginnel-volume"))
            .args(["v", "--check", "--backend", "ram", "--size", "1M", flag, mode])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.success(), part.is_empty(), "{flag} {mode}: {text}");
        assert!(text.contains(part), "{flag} {mode}: {text}");
    }
    let server = Server::start(1 << 20, "--path IMAGE --socket-mode 0666");
    assert_eq!(server.count("it is obeyed nevertheless"), 1, "{}", server.log());
}

#[test]
fn a_check_finds_unknown_users_and_groups() {
    for flag in ["--socket-user", "--socket-group", "--control-user", "--control-group", "--user"] {
        let output = Command::new(env!("CARGO_BIN_EXE_ginnel-volume"))
            .args(["v", "--check", "--backend", "ram", "--size", "1M", flag, "no-such-account-here"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let place = format!("ginnel-volume: {}: there is no ", &flag[2..]);
        assert!(!output.status.success() && text.starts_with(&place), "{flag}: {text}");
    }
}
