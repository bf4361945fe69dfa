//! The process that keeps the daemon's descriptors while there is no daemon.

use ginnel_daemon::packet;
use kit::wait::{wait_for, wait_until};
use rustix::net::SocketType;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

kit::test_that_skips_are_seen!();

/// Returns whether a process sleeps, and watches something with inotify.
fn watches(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut files = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
        && files.any(|file| file == Path::new("anon_inode:inotify"))
}

/// A keeper whose socket is gone cannot be found by anybody. Several are tried, because one that looks while the kernel still removes the
/// name is rare.
#[test]
fn a_keeper_ends_when_its_socket_is_removed() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let ginneld = kit::build::program("ginneld");
    for number in 0..50 {
        let socket = folder.path().join("keeper");
        let listener = packet::listen_at(&socket, SocketType::SEQPACKET).unwrap();
        let mut keeper = Command::new(&ginneld)
            .args(["keeper", "--socket"])
            .arg(&socket)
            .stdin(Stdio::from(listener))
            .spawn()
            .unwrap();
        wait_until("the keeper's watch", || watches(keeper.id()));
        std::fs::remove_file(&socket).unwrap();
        let status = wait_for(&format!("the end of keeper {number}"), || keeper.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }
}

/// A user has 128 inotify instances by default, and other programs may have taken all of them.
#[test]
fn a_keeper_without_inotify_keeps_and_ends_nevertheless() {
    kit::require_programs!(&["unshare"]);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = folder.path().join("keeper");
    let listener = packet::listen_at(&socket, SocketType::SEQPACKET).unwrap();
    let script =
        "echo 0 > /proc/sys/user/max_inotify_instances || exit 77; exec \"$0\" keeper --socket \"$1\"";
    let mut keeper = Command::new("unshare")
        .args(["--user", "--map-root-user", "sh", "-c", script])
        .arg(kit::build::program("ginneld"))
        .arg(&socket)
        .stdin(Stdio::from(listener))
        .spawn()
        .unwrap();
    let connection = packet::connect_to(&socket).unwrap();
    packet::send::<OwnedFd>(connection.as_fd(), b"F", &[]).unwrap();
    let ended = wait_for("an answer", || match keeper.try_wait().unwrap() {
        None if kit::daemon::readable(&connection, Duration::from_millis(100)) => Some(None),
        status => status.map(Some),
    });
    kit::require!(ended.and_then(|status| status.code()) != Some(77), "no limits in a user namespace");
    assert_eq!(ended, None);
    assert_eq!(packet::receive(connection.as_fd(), 64, 0).unwrap().bytes, b"K");
    assert!(!watches(keeper.id()));
    drop(connection);
    std::fs::remove_file(&socket).unwrap();
    let status = wait_for("its end", || keeper.try_wait().unwrap());
    assert!(status.success(), "{status}");
}
