//! The process that keeps the daemon's descriptors while there is no daemon.

use ginnel_daemon::packet;
use kit::daemon::Daemon;
use kit::wait::{takes_less_than, wait_for, wait_until};
use rustix::net::SocketType;
use rustix::process::{Signal, kill_process};
use serde_json::json;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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

/// A keeper that is stopped does later what the daemon asks meanwhile, also if the daemon has ended by then.
#[test]
fn nobody_waits_for_a_stopped_keeper_and_nothing_is_lost() {
    takes_less_than(Duration::from_secs(3), || {
        let mut daemon = Daemon::start_new("[segment.web]\nsize = \"4M\"\nmembers = [\"host\"]\n");
        let keeper = daemon.keeper();
        kill_process(keeper, Signal::STOP).unwrap();
        let begin = Instant::now();
        for n in 0..3 {
            daemon.admin(json!({"op": "vm-add", "name": format!("new-{n}")})).unwrap();
        }
        daemon.admin(json!({"op": "vm-remove", "name": "new-0"})).unwrap();
        let late = json!({"op": "segment-create", "name": "late", "size": "4M", "members": ["host"]});
        daemon.admin(late).unwrap();
        let ends = (daemon.attach("web", "a"), daemon.attach("late", "b"));
        let waited = begin.elapsed();
        assert!(daemon.log().contains("the keeper does not answer"), "{}", daemon.log());
        daemon.kill();
        kill_process(keeper, Signal::CONT).unwrap();
        daemon.start();
        for end in [ends.0, ends.1] {
            daemon.client().attach_as(end.back).unwrap();
        }
        assert!(!daemon.log().contains("are lost"), "{}", daemon.log());
        assert_eq!(daemon.keeper(), keeper);
        waited
    });
}
