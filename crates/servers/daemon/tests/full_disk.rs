//! A disk without room for the journal: requests that cannot be recorded are refused, and the next daemon does not allocate
//! memory that belongs to another endpoint.

use ginnel_layout::wire::{self, ErrorCode, Kind};
use kit::daemon::*;
use kit::process::Process;
use kit::wait::wait_for;
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

kit::test_that_skips_are_seen!();

const WEB: &str = "[vm.a]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n\
                   [limits]\nchannels_per_endpoint = 65536\nchannels_per_member = 65536\nbacklog = 65536\n";

/// A small file system, mounted as long as this value lives.
struct Disk(PathBuf);

impl Disk {
    /// Mounts a tmpfs of 4 MiB. Returns `None` if this user may not mount file systems.
    fn mount(at: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4M", "ginnel-test"]).arg(&at).status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(at))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    fn fill(&self) {
        let mut file = File::options().append(true).create(true).open(self.filler()).unwrap();
        while file.write(&[0; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn back(daemon: &Daemon, old: &Attached) -> Attached {
    daemon.client().attach_as(old.back).unwrap()
}

/// Returns the range of bytes in the segment that a channel occupies.
fn place(channel: &wire::Channel) -> std::ops::Range<u64> {
    channel.offset..channel.offset + channel.capacities().footprint() as u64
}

/// Makes and ends listeners until the daemon refuses one, and returns the refusal.
fn use_up(a: &mut Attached) -> Refused {
    for _ in 0..10_000 {
        let listener = match a.listen("y") {
            Ok(listener) => wire::Listening { listener, reserved: 0 },
            Err(refused) => return refused,
        };
        a.client.ask::<[u8; 0]>(Kind::UNLISTEN, listener.as_bytes(), Kind::OK).unwrap();
    }
    panic!("listeners without end on a full disk");
}

#[test]
fn requests_that_cannot_be_recorded_are_refused_and_nothing_is_allocated_twice() -> std::io::Result<()> {
    let mut daemon = Daemon::prepare("", WEB);
    let disk = Disk::mount(daemon.dir.path().join("state"));
    kit::require!(disk.is_some(), "only root can mount a file system");
    let disk = disk.unwrap();
    daemon.start();
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    b.listen("x").unwrap();
    let mut live = vec![a.connect("x").unwrap().wire];
    disk.fill();
    // Each of these requests is either known to the next daemon or refused.
    while live.len() < 20
        && let Ok(channel) = a.connect("x")
    {
        live.push(channel.wire);
    }
    let refused = use_up(&mut a);
    assert_eq!(refused.code, ErrorCode::UNRECORDED.0, "{}", refused.text);
    assert!(refused.text.contains("make room"), "{}", refused.text);
    let others = [
        a.connect("x").err().unwrap().code,
        daemon.client().attach("web", "c").err().unwrap().code,
        daemon
            .admin(json!({"op": "segment-create", "name": "s", "size": "4M", "members": ["host"]}))
            .unwrap_err()
            .code,
    ];
    assert_eq!(others, [ErrorCode::UNRECORDED.0; 3]);
    // Requests that end something are executed, and existing objects are served.
    let closed = live.remove(0);
    a.close(closed.channel).unwrap();
    assert_eq!(daemon.inspect()["endpoints"].as_array().unwrap().len(), 2);
    // A VM whose start cannot be recorded does not start.
    let mut qemu = std::os::unix::net::UnixStream::connect(daemon.run("a.sock")).unwrap();
    let mut version = [0; 8];
    qemu.read_exact(&mut version).unwrap();
    assert_eq!(i64::from_le_bytes(version), -1);

    // The next daemon starts although its disk is full, and knows all channels.
    daemon.restart();
    let (mut a, mut b) = (back(&daemon, &a), back(&daemon, &b));
    assert_eq!(a.connect_as("x", 100, 4096).err().unwrap().code, ErrorCode::UNRECORDED.0);
    let known = daemon.inspect()["channels"].as_array().unwrap().len();
    assert!(known >= live.len(), "{known} of {} are known", live.len());

    // When there is room, the daemon continues by itself, and allocates nothing that is in use.
    disk.make_room();
    let new = wait_for("a new channel", || a.connect_as("x", 101, 4096).ok());
    for channel in &live {
        assert!(place(&new.wire).is_disjoint_from(&place(channel)), "{:?} was given twice", place(channel));
    }
    // The changes are in the journal again.
    daemon.restart();
    (a, b) = (back(&daemon, &a), back(&daemon, &b));
    for channel in &live {
        a.close(channel.channel).unwrap();
        b.close(channel.channel).unwrap();
    }
    a.close(new.wire.channel).unwrap();
    Ok(())
}

trait Disjoint {
    fn is_disjoint_from(&self, other: &Self) -> bool;
}

impl Disjoint for std::ops::Range<u64> {
    fn is_disjoint_from(&self, other: &Self) -> bool {
        self.end <= other.start || other.end <= self.start
    }
}

#[test]
fn a_failed_write_to_the_journal_answers_nobody_and_allocates_nothing() -> std::io::Result<()> {
    let mut daemon = Daemon::prepare("", WEB);
    let script = format!(
        "trap '' XFSZ; exec {} host --config {}",
        kit::build::program("ginneld").display(),
        daemon.config().display()
    );
    let log = File::create(daemon.dir.path().join("log")).unwrap();
    let child = Process(
        Command::new("bash").args(["-c", &script]).stdout(Stdio::null()).stderr(log).spawn().unwrap(),
    );
    wait_for("the daemon", || ginnel_daemon::packet::connect_to(&daemon.socket()).ok());
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    b.listen("x").unwrap();
    // This error cannot be prevented by a reserve: the file may not grow any further, in the middle of a record.
    let journal = std::fs::metadata(daemon.dir.path().join("state/journal")).unwrap().len();
    let limit = format!("--fsize={}", journal + 1500);
    let limited = Command::new("prlimit").args(["--pid", &child.0.id().to_string(), &limit]).status();
    kit::require!(limited.is_ok_and(|status| status.success()), "prlimit is missing");
    let mut live = Vec::new();
    let unanswered = loop {
        let body = wire::Connect {
            name: name("x"),
            kind: 1,
            reserved: 0,
            capacity: 4096,
            input_capacity: 0,
            nonce: 1000 + live.len() as u64,
        };
        let request = a.client.send(Kind::CONNECT, body.as_bytes());
        let answered = wait_for("an answer, or its failure", || {
            let failed = daemon.log().contains("the journal cannot be written");
            let answered = readable(&a.client.fd, Duration::ZERO);
            (answered || failed).then_some(answered)
        });
        if !answered {
            break Some(body);
        }
        let packet = a.client.answer(request).unwrap();
        let (header, body) = wire::split(&packet.bytes).unwrap();
        if header.kind != Kind::CHANNEL {
            break None;
        }
        live.push(wire::body::<wire::Channel>(body).unwrap());
        assert!(live.len() < 1000, "all were granted");
    };
    let body = unanswered.expect("only channels were recorded, so it is the record of one that fails");
    // Asking again or coming back does not help.
    let back_then = a.back;
    let refused = daemon.client().attach_as(back_then).err().unwrap();
    assert_eq!(refused.code, ErrorCode::UNRECORDED.0, "{}", refused.text);
    let asked_again = a.client.send(Kind::CONNECT, body.as_bytes());
    let packet = a.client.answer(asked_again).unwrap();
    let (header, body) = wire::split(&packet.bytes).unwrap();
    assert_eq!(header.kind, Kind::ERROR);
    let mut error = wire::Error::new_zeroed();
    error.as_mut_bytes().copy_from_slice(&body[..8]);
    assert_eq!(error.code, ErrorCode::UNRECORDED);
    // Closing works.
    let closed = live.pop().unwrap();
    a.close(closed.channel).unwrap();
    drop(child);
    daemon.start();
    let mut a = back(&daemon, &a);
    let new = a.connect_as("x", 1, 4096).unwrap();
    for channel in &live {
        assert!(place(&new.wire).is_disjoint_from(&place(channel)), "{:?} was given twice", place(channel));
    }
    // At most one channel more exists, the one whose request was not answered.
    assert!(daemon.inspect()["channels"].as_array().unwrap().len() <= live.len() + 2);
    Ok(())
}
