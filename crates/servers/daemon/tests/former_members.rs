//! Members that lose their share in a segment while their QEMU has its memory, and segments that are declared anew.

use ginnel::{AttachOptions, BlockOptions, Endpoint};
use ginnel_layout::segment::RESERVED;
use ginnel_layout::wire::ErrorCode;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::wait_for;
use rustix::pipe::{SpliceFlags, splice};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Stdio};

/// A place in a segment that nothing else uses, in the memory of programs, and in the file.
const AT: usize = 1 << 20;
const IN_FILE: usize = AT + RESERVED as usize;

/// The QEMU of a VM that has the segment `web`.
struct Vm(Child);

kit::program! {
    /// Joins as the VM of this socket, if there is one, maps this file, and says what is in it for each line that comes.
    fn vm() {
        let _qemu = std::env::var_os("TEST_SOCKET").map(|socket| Qemu::join(socket.as_ref(), 4));
        let file = File::options().read(true).write(true).open(std::env::var("TEST_FILE").unwrap()).unwrap();
        let memory = Mapping::of_file(&file, 0, IN_FILE + 8, Protection::ReadWrite).unwrap();
        println!("ready");
        for _ in std::io::stdin().lines() {
            println!("{}", memory.load_acquire_u64(IN_FILE));
        }
    }
}

impl Vm {
    fn start(daemon: &Daemon, name: Option<&str>, segment: &str) -> Self {
        let mut command = daemon.program(vm);
        if let Some(name) = name {
            command.env("TEST_SOCKET", daemon.run(&format!("{name}.sock")));
        }
        let mut vm =
            Self(command.env("TEST_FILE", daemon.shm(segment)).stdout(Stdio::piped()).spawn().unwrap());
        assert_eq!(vm.line(), "ready");
        vm
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Returns what it sees in the segment.
    fn sees(&mut self) -> u64 {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.line().parse().unwrap()
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A configuration with the VMs `a`, `b` and `c`, and with the segment `web`.
fn config(web: &str) -> String {
    format!("[vm.a]\n[vm.b]\n[vm.c]\n[segment.web]\nsize = \"8M\"\n{web}\n")
}

const ALL: &str = "members = [\"host\", \"a\", \"b\"]";
const WITHOUT_B: &str = "members = [\"host\", \"a\"]";

fn start(web: &str) -> Daemon {
    Daemon::start_with("vectors = 4\n", &config(web))
}

/// Kills the daemon and starts another one with this configuration.
fn restart(daemon: &mut Daemon, config: &str) {
    daemon.kill();
    daemon.write_config("vectors = 4\n", config);
    daemon.start();
}

fn segment(daemon: &Daemon, name: &str) -> Value {
    let status = daemon.inspect();
    status["segments"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap().clone()
}

fn inode(daemon: &Daemon) -> u64 {
    fs::metadata(daemon.shm("web")).unwrap().ino()
}

/// Checks that the segment is out of service, and returns the reason.
fn refused(daemon: &Daemon) -> String {
    let refused = daemon.client().attach("web", "x").err().expect("the segment is served");
    assert_eq!(refused.code, ErrorCode::BROKEN.0, "{}", refused.text);
    let web = segment(daemon, "web");
    assert!(refused.text.contains(web["broken_why"].as_str().unwrap()), "{}", refused.text);
    refused.text
}

fn in_service(daemon: &Daemon) -> Attached {
    wait_for("the segment", || daemon.client().attach("web", "x").ok())
}

#[test]
fn a_segment_is_out_of_service_while_the_qemu_of_a_former_member_runs() {
    let mut daemon = start(ALL);
    let (mut a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
    let host = daemon.attach("web", "x");
    host.memory.store_release_u64(AT, 7);
    assert_eq!((a.sees(), b.sees()), (7, 7));
    let (before, back) = (inode(&daemon), host.hang_up());
    // Also for the daemons that follow, whose books have never had the VM as a member.
    for _ in 0..3 {
        restart(&mut daemon, &config(WITHOUT_B));
        assert!(refused(&daemon).contains("VM b"));
        assert!(daemon.log().contains(&b.pid().to_string()));
        assert!(daemon.client().attach_as(back).is_err(), "its endpoint has ended");
    }
    let endpoints = daemon.inspect()["endpoints"].clone();
    assert_eq!(endpoints, json!([]));
    b.kill();
    // The members that stay have their memory.
    let host = in_service(&daemon);
    assert_eq!((inode(&daemon), host.memory.load_acquire_u64(AT)), (before, 7));
    host.memory.store_release_u64(AT, 8);
    assert_eq!(a.sees(), 8);
    daemon.restart();
    daemon.attach("web", "y");
    assert_eq!(inode(&daemon), before);
}

#[test]
fn a_member_that_was_removed_by_mistake_can_come_back() {
    let mut daemon = start(ALL);
    let (mut a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
    for other in [WITHOUT_B, "members = [\"host\", \"a\"]\nreaders = [\"b\"]", "members = [\"a\", \"b\"]"] {
        restart(&mut daemon, &config(other));
        assert!(segment(&daemon, "web")["broken_why"].is_string(), "{other}");
        restart(&mut daemon, &config(ALL));
        daemon.attach("web", "x").memory.store_release_u64(AT, 7);
        assert_eq!((a.sees(), b.sees()), (7, 7));
    }
}

#[test]
fn the_end_of_a_qemu_while_no_daemon_runs_is_seen_too() {
    let mut daemon = start(ALL);
    let (_a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
    restart(&mut daemon, &config(WITHOUT_B));
    refused(&daemon);
    daemon.kill();
    b.kill();
    daemon.start();
    daemon.attach("web", "x");
}

#[test]
fn a_vm_that_is_not_declared_any_more_is_a_former_member_too() {
    let others: [&str; 2] = [
        // It is gone.
        "[vm.a]\n",
        // Another VM has its number.
        "[vm.a]\n[vm.d]\nnumber = 7\n",
    ];
    for vms in others {
        let mut daemon = Daemon::start_with(
            "vectors = 4\n",
            &format!("[vm.a]\n[vm.b]\nnumber = 7\n[segment.web]\nsize = \"8M\"\n{ALL}\n"),
        );
        let (_a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
        let members = if vms.contains("vm.d") { "members = [\"host\", \"a\", \"d\"]" } else { WITHOUT_B };
        restart(&mut daemon, &format!("{vms}[segment.web]\nsize = \"8M\"\n{members}\n"));
        assert!(refused(&daemon).contains("VM b"));
        daemon.restart();
        assert!(refused(&daemon).contains("VM b"));
        b.kill();
        in_service(&daemon);
    }
}

#[test]
fn a_qemu_that_was_never_connected_is_found() {
    let mut daemon = start("members = [\"a\", \"b\"]");
    let (_a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, None, "web"));
    restart(&mut daemon, &config("members = [\"a\"]"));
    let why = segment(&daemon, "web")["broken_why"].as_str().expect("out of service").to_owned();
    assert!(why.contains(&format!("process {}", b.pid())), "{why}");
    b.kill();
    wait_for("the segment", || (segment(&daemon, "web")["broken"] == false).then_some(()));
}

#[test]
fn a_segment_whose_present_members_do_not_use_it_gets_a_new_file_at_once() {
    let mut daemon = start(ALL);
    let mut b = Vm::start(&daemon, Some("b"), "web");
    let host = daemon.attach("web", "x");
    host.memory.store_release_u64(AT, 7);
    let (before, uuid) = (inode(&daemon), host.wire.uuid);
    drop(host);
    wait_for("its end", || (daemon.inspect()["endpoints"] == json!([])).then_some(()));
    restart(&mut daemon, &config(WITHOUT_B));
    for _ in 0..2 {
        let host = daemon.attach("web", "x");
        assert_eq!(host.memory.load_acquire_u64(AT), 0);
        assert_ne!(inode(&daemon), before);
        assert_ne!(host.wire.uuid, uuid, "the others know that one");
        host.memory.store_release_u64(AT, 9);
        assert_eq!(b.sees(), 7, "the memory of the others");
        host.memory.store_release_u64(AT, 0);
        daemon.restart();
    }
}

#[test]
fn a_writer_that_becomes_a_reader_must_start_anew() {
    let mut daemon = start(ALL);
    let (_a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
    let reader = config(&format!("{WITHOUT_B}\nreaders = [\"b\"]"));
    restart(&mut daemon, &reader);
    assert!(refused(&daemon).contains("VM b"));
    b.kill();
    in_service(&daemon);
    // As a reader it disturbs nobody, and may become a writer again.
    let _b = Vm::start(&daemon, Some("b"), "web");
    restart(&mut daemon, &reader);
    daemon.attach("web", "x");
    restart(&mut daemon, &config(ALL));
    daemon.attach("web", "x");
}

#[test]
fn without_the_host_nobody_keeps_what_its_programs_may_have() {
    let mut daemon = start(ALL);
    let mut a = Vm::start(&daemon, Some("a"), "web");
    let before = inode(&daemon);
    restart(&mut daemon, &config("members = [\"a\", \"b\"]"));
    let why = segment(&daemon, "web")["broken_why"].as_str().expect("out of service").to_owned();
    assert!(why.contains("programs of the host"), "{why}");
    a.kill();
    wait_for("the segment", || (segment(&daemon, "web")["broken"] == false).then_some(()));
    assert_ne!(inode(&daemon), before);
}

#[test]
fn pages_that_a_former_program_has_pinned_do_not_return_to_service() {
    let mut daemon = start(ALL);
    let mut a = Vm::start(&daemon, Some("a"), "web");
    let before = inode(&daemon);
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("web", &options).unwrap();
    host.create_block("kept", 4096, &BlockOptions { persistent: true, ..BlockOptions::default() }).unwrap();
    drop(host);
    // The pipe has a page of the file, and no descriptor of it.
    let (mut pipe, into) = std::io::pipe().unwrap();
    let file = File::options().read(true).write(true).open(daemon.shm("web")).unwrap();
    file.write_all_at(&7u64.to_ne_bytes(), IN_FILE as u64).unwrap();
    let mut at = IN_FILE as u64;
    splice(&file, Some(&mut at), &into, None, 4096, SpliceFlags::empty()).unwrap();
    drop((file, into));
    restart(&mut daemon, &config("members = [\"a\", \"b\"]"));
    let why = || segment(&daemon, "web")["broken_why"].as_str().map(str::to_owned);
    let first = why().unwrap();
    a.kill();
    wait_for("the segment", || why().is_none().then_some(()));
    let file = File::options().read(true).write(true).open(daemon.shm("web")).unwrap();
    file.write_all_at(&9u64.to_ne_bytes(), IN_FILE as u64).unwrap();
    let mut pinned = [0; 8];
    pipe.read_exact(&mut pinned).unwrap();
    assert_ne!(
        u64::from_ne_bytes(pinned),
        9,
        "a program that is no member any more sees what the members write"
    );
    assert_ne!(inode(&daemon), before);
    assert_eq!(daemon.inspect()["blocks"], json!([]));
    // It is said before anybody stops the VMs.
    assert!(first.contains("programs of the host") && first.contains("what is kept in it ends"), "{first}");
    assert!(daemon.log().contains("what was kept in it ends"));
}

#[test]
fn what_is_kept_in_a_segment_outlives_the_qemu_of_a_former_member() {
    let mut daemon = start(ALL);
    let mut b = Vm::start(&daemon, Some("b"), "web");
    let before = inode(&daemon);
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("web", &options).unwrap();
    host.create_block("kept", 4096, &BlockOptions { persistent: true, ..BlockOptions::default() }).unwrap();
    drop(host);
    restart(&mut daemon, &config(WITHOUT_B));
    refused(&daemon);
    b.kill();
    in_service(&daemon);
    assert_eq!(inode(&daemon), before);
    assert_eq!(daemon.inspect()["blocks"][0]["name"], "kept");
}

#[test]
fn more_members_disturb_nobody() {
    let mut daemon = start(WITHOUT_B);
    let mut a = Vm::start(&daemon, Some("a"), "web");
    let host = daemon.attach("web", "x");
    host.memory.store_release_u64(AT, 7);
    let (before, epoch, back) = (inode(&daemon), host.wire.epoch, host.hang_up());
    restart(&mut daemon, &config("members = [\"host\", \"a\", \"b\"]\nreaders = [\"c\"]"));
    let host = daemon.client().attach_as(back).unwrap();
    assert_eq!((host.wire.epoch, inode(&daemon)), (epoch, before));
    host.memory.store_release_u64(AT, 8);
    assert_eq!(a.sees(), 8);
    // A member that has not run since it was added is no reason to disturb the others either.
    restart(&mut daemon, &config(WITHOUT_B));
    daemon.attach("web", "y");
    assert_eq!(inode(&daemon), before);
}

#[test]
fn a_segment_that_is_declared_anew_gets_a_new_file() {
    let mut daemon = start(ALL);
    let mut b = Vm::start(&daemon, Some("b"), "web");
    let without = "[vm.a]\n[vm.b]\n[vm.c]\n";
    let create = json!({"op": "segment-create", "name": "web", "size": "8M", "members": ["host", "c"]});
    let mut before = inode(&daemon);
    for by_request in [true, false, true] {
        // Its file stays where it is.
        restart(&mut daemon, without);
        assert_eq!(inode(&daemon), before);
        match by_request {
            true => drop(daemon.admin(create.clone()).unwrap()),
            false => restart(&mut daemon, &config("members = [\"host\", \"c\"]")),
        }
        let host = daemon.attach("web", "x");
        assert_eq!(host.memory.load_acquire_u64(AT), 0);
        host.memory.store_release_u64(AT, 7);
        assert_eq!(b.sees(), 0, "the memory of the others");
        assert_ne!(inode(&daemon), before);
        before = inode(&daemon);
        // A daemon that was killed makes nothing of it again.
        daemon.restart();
        assert_eq!(inode(&daemon), before);
        if by_request {
            drop(host);
            let remove = json!({"op": "segment-remove", "name": "web", "force": true});
            // What a daemon without such a request leaves: the file.
            let kept = daemon.dir.path().join("shm/ginnel/kept");
            fs::hard_link(daemon.shm("web"), &kept).unwrap();
            daemon.admin(remove).unwrap();
            fs::rename(kept, daemon.shm("web")).unwrap();
        }
    }
}

#[test]
fn slices_lose_a_member_too() {
    let mut daemon = Daemon::prepare("", "");
    let qemu = daemon.dir.path().join("qemu");
    fs::write(&qemu, "#!/bin/sh\necho 'QEMU emulator version 9.0.0 (of a test)'\n").unwrap();
    fs::set_permissions(&qemu, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let config = |members: &str| {
        format!(
            "[host]\nqemu = {qemu:?}\n[vm.m]\n[vm.w1]\n[vm.w2]\n[segment.job]\nsize = \"8M\"\nmembers = {members}\n\
             slices = [\"w1\", \"w2\"]\n"
        )
    };
    daemon.write_config("vectors = 4\n", &config("[\"host\", \"m\"]"));
    daemon.start();
    let (mut m, _w1) = (Vm::start(&daemon, Some("m"), "job"), Vm::start(&daemon, Some("w1"), "job"));
    let offsets =
        |daemon: &Daemon| ["job.w1", "job.w2"].map(|name| segment(daemon, name)["offset"].as_u64().unwrap());
    let before = offsets(&daemon);
    restart(&mut daemon, &config("[\"host\"]"));
    let refused = daemon.client().attach("job.w1", "x").err().unwrap();
    assert!(refused.text.contains("VM m"), "{}", refused.text);
    // Nobody uses the other one, so it gets another part of the file.
    daemon.attach("job.w2", "x");
    let after = offsets(&daemon);
    assert!(after[0] == before[0] && after[1] > before[1], "{before:?} {after:?}");
    assert_eq!(segment(&daemon, "job.w1")["strangers"].as_array().map(Vec::len), Some(1), "VM m alone");
    m.kill();
    wait_for("the segment", || daemon.client().attach("job.w1", "x").ok());
    assert_eq!(offsets(&daemon), after);
}

#[test]
fn the_status_shows_who_has_a_segment_and_is_no_member() {
    let daemon = Daemon::start_with(
        "vectors = 4\n",
        "[vm.a]\n[vm.b]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n\
         [segment.own]\nsize = \"8M\"\nmembers = [\"a\"]\n",
    );
    let strangers = |segment_name: &str| {
        let all = segment(&daemon, segment_name)["strangers"].as_array().unwrap().clone();
        all.iter()
            .map(|s| (s["vm"].as_str().map(str::to_owned), s["pid"].as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    let _a = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, None, "web"));
    let mut b = Vm::start(&daemon, Some("b"), "web");
    wait_for("VM b", || (strangers("web") == [(Some("b".into()), b.pid().into())]).then_some(()));
    b.kill();
    wait_for("its end", || strangers("web").is_empty().then_some(()));
    let other = Vm::start(&daemon, None, "own");
    wait_for("a process", || (strangers("own") == [(None, other.pid().into())]).then_some(()));
    drop(other);
    wait_for("its end", || strangers("own").is_empty().then_some(()));
}

#[test]
fn a_reload_takes_nobody_out_of_a_segment_that_waits() {
    let mut daemon = start(ALL);
    let (mut a, mut b) = (Vm::start(&daemon, Some("a"), "web"), Vm::start(&daemon, Some("b"), "web"));
    restart(&mut daemon, &config(WITHOUT_B));
    refused(&daemon);
    for fewer in ["members = [\"host\"]", "members = [\"host\"]\nreaders = [\"a\"]"] {
        daemon.write_config("vectors = 4\n", &config(fewer));
        let before = daemon.log().matches("a is to lose rights").count();
        daemon.signal(Signal::HUP);
        wait_for("the reason", || {
            (daemon.log().matches("a is to lose rights").count() > before).then_some(())
        });
        refused(&daemon);
    }
    b.kill();
    wait_for("the segment", || daemon.client().attach("web", "x").ok());
    // The QEMU of `a` is waited for by the next daemon.
    daemon.restart();
    refused(&daemon);
    a.kill();
    wait_for("the segment", || daemon.client().attach("web", "x").ok());
}
