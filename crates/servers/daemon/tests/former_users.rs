//! Users of the host who are taken out of `allow_users` and `allow_groups` of a segment while their programs have its memory.

use ginnel::{AttachOptions, BlockOptions, Endpoint};
use ginnel_broker::lines::{replay, snapshot};
use ginnel_layout::segment::RESERVED;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::wait_for;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use zerocopy::{FromZeros, IntoBytes};

kit::test_that_skips_are_seen!();

const BOB: u32 = 12345;
const EVE: u32 = 12346;
/// A group of which both are members.
const GROUP: u32 = 12300;
const OTHER_GROUP: u32 = 12301;
/// A place in a segment that nothing else uses.
const AT: usize = 1 << 20;

/// A program of another user that was given the memory of a segment, or the QEMU of a VM.
struct Program(Child);

kit::program! {
    /// Joins as the VM of this socket.
    fn vm() {
        let _qemu = Qemu::join(std::env::var_os("TEST_SOCKET").unwrap().as_ref(), 4);
        println!("ready");
        let _ = std::io::stdin().lines().next();
    }
}

kit::program! {
    /// Attaches, gives the endpoint up if that is wanted, and says what is in the memory for each line that comes. With TEST_PLACE it reads
    /// there in the file.
    fn program() {
        let body = wire::Attach {
            segment: name(&std::env::var("TEST_SEGMENT").unwrap()),
            name: name("program"),
            ..wire::Attach::new_zeroed()
        };
        let mut client = Client::hello(&program_socket());
        let (attached, fds) = match client.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED) {
            Ok(attached) => attached,
            Err(refused) => {
                println!("refused {}", refused.code);
                return;
            }
        };
        let file = File::from(fds.into_iter().next().unwrap());
        let len = attached.mapped_len().unwrap() as usize;
        let memory = Mapping::of_file(&file, attached.map_offset, len, Protection::ReadWrite).unwrap();
        if std::env::var_os("TEST_DETACHES").is_some() {
            client.text(Kind::DETACH, &[]).unwrap();
        }
        println!("ready");
        for line in std::io::stdin().lines() {
            match line.unwrap().parse::<u64>() {
                Ok(at) => {
                    let mut bytes = [0; 8];
                    let is_there = file.read_exact_at(&mut bytes, at).is_ok();
                    println!("{}", if is_there { u64::from_ne_bytes(bytes) } else { 0 });
                }
                Err(_) => println!("{}", memory.load_acquire_u64(AT)),
            }
        }
    }
}

impl Program {
    /// Starts it, and returns what it says first.
    fn run(daemon: &Daemon, user: u32, segment: &str, detaches: bool) -> (Self, String) {
        let mut command = daemon.program(program);
        command.uid(user).gid(GROUP).current_dir("/").env("TEST_SEGMENT", segment);
        if detaches {
            command.env("TEST_DETACHES", "1");
        }
        let mut program = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let said = program.line();
        (program, said)
    }

    /// Starts one that keeps the memory, and not the endpoint.
    fn start(daemon: &Daemon, user: u32, segment: &str) -> Self {
        let (program, said) = Self::run(daemon, user, segment, true);
        assert_eq!(said, "ready");
        program
    }

    fn start_vm(daemon: &Daemon, name: &str) -> Self {
        let mut command = daemon.program(vm);
        command.env("TEST_SOCKET", daemon.run(&format!("{name}.sock")));
        let mut vm = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        assert_eq!(vm.line(), "ready");
        vm
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, what: &str) -> u64 {
        writeln!(self.0.stdin.as_mut().unwrap(), "{what}").unwrap();
        self.line().parse().unwrap()
    }

    /// Returns what it sees in the segment.
    fn sees(&mut self) -> u64 {
        self.ask("")
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns whether a program of this user may attach.
fn attaches(daemon: &Daemon, user: u32) -> bool {
    let (_program, said) = Program::run(daemon, user, "web", true);
    assert!(said == "ready" || said == format!("refused {}", ErrorCode::DENIED.0), "{said}");
    said == "ready"
}

/// A configuration with the VM `a`, and with the segment `web`, to which these may attach.
fn config(allowed: &str) -> String {
    format!("[vm.a]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n{allowed}\n")
}

fn both() -> String {
    format!("allow_users = [{BOB}, {EVE}]")
}

fn without_bob() -> String {
    format!("allow_users = [{EVE}]")
}

fn start(config: &str) -> Daemon {
    let mut daemon = Daemon::prepare("vectors = 4\n", config);
    daemon.start();
    for path in [daemon.dir.path(), &daemon.dir.path().join("run")] {
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    daemon
}

/// Kills the daemon and starts another one with this configuration.
fn restart(daemon: &mut Daemon, config: &str) {
    daemon.kill();
    daemon.write_config("vectors = 4\n", config);
    daemon.start();
}

/// Lets the daemon read this configuration, and returns what it says.
fn reload(daemon: &Daemon, config: &str) -> String {
    let before = daemon.log().len();
    daemon.write_config("vectors = 4\n", config);
    daemon.signal(Signal::HUP);
    wait_for("the daemon to have read its configuration", || {
        let said = daemon.log()[before..].to_owned();
        said.contains("the configuration was read again").then_some(said)
    })
}

fn segment(daemon: &Daemon, name: &str) -> Value {
    let status = daemon.inspect();
    status["segments"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap().clone()
}

fn inode(daemon: &Daemon, file: &str) -> u64 {
    fs::metadata(daemon.shm(file)).unwrap().ino()
}

/// Checks that the segment is out of service, and returns the reason.
fn refused(daemon: &Daemon, name: &str) -> String {
    let refused = daemon.client().attach(name, "x").err().expect("the segment is served");
    assert_eq!(refused.code, ErrorCode::BROKEN.0, "{}", refused.text);
    let segment = segment(daemon, name);
    assert!(refused.text.contains(segment["broken_why"].as_str().unwrap()), "{}", refused.text);
    refused.text
}

fn in_service(daemon: &Daemon, name: &str) -> Attached {
    wait_for("the segment", || daemon.client().attach(name, "x").ok())
}

/// Makes a block that stays when its maker ends.
fn keep_a_block(daemon: &Daemon) {
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("web", &options).unwrap();
    host.create_block("kept", 4096, &BlockOptions { persistent: true, ..BlockOptions::default() }).unwrap();
}

macro_rules! require_root {
    () => {
        kit::require!(rustix::process::geteuid().is_root(), "only root can be another user")
    };
}

#[test]
fn a_segment_is_out_of_service_as_long_as_a_former_user_may_have_it() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let vm = Program::start_vm(&daemon, "a");
    let mut bob = Program::start(&daemon, BOB, "web");
    let host = daemon.attach("web", "x");
    host.memory.store_release_u64(AT, 7);
    assert_eq!(bob.sees(), 7);
    let (before, back) = (inode(&daemon, "web"), host.hang_up());
    // Also for the daemons that follow, and for one whose predecessor has only just begun.
    for _ in 0..3 {
        restart(&mut daemon, &config(&without_bob()));
        let why = refused(&daemon, "web");
        assert!(
            why.contains(&format!("user {BOB} may not attach any more")) && !why.contains("12346"),
            "{why}"
        );
        assert!(why.contains("stop the segment's VMs") && why.contains("what is kept in it ends"), "{why}");
        assert!(daemon.client().attach_as(back).is_err(), "its endpoint has ended");
        daemon.kill();
        daemon.start();
    }
    // It is used by nobody then, and so it need not wait for him.
    drop(vm);
    let host = in_service(&daemon, "web");
    assert_ne!(inode(&daemon, "web"), before);
    host.memory.store_release_u64(AT, 8);
    assert_eq!(bob.sees(), 7, "the memory that he had");
    assert!(attaches(&daemon, EVE) && !attaches(&daemon, BOB));
    // Nobody was taken out since.
    let before = inode(&daemon, "web");
    daemon.restart();
    daemon.attach("web", "y");
    assert_eq!(inode(&daemon, "web"), before);
}

#[test]
fn what_is_kept_waits_until_nobody_has_the_file() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let mut bob = Program::start(&daemon, BOB, "web");
    keep_a_block(&daemon);
    let before = inode(&daemon, "web");
    restart(&mut daemon, &config(&without_bob()));
    let why = refused(&daemon, "web");
    assert!(why.contains("allow whom you have taken out"), "{why}");
    // He may come back by a reload, and nothing is lost.
    has(&reload(&daemon, &config(&both())), &["segment.web, which is out of service and is tried again"]);
    in_service(&daemon, "web");
    assert_eq!((inode(&daemon, "web"), &daemon.inspect()["blocks"][0]["name"]), (before, &json!("kept")));
    restart(&mut daemon, &config(&without_bob()));
    refused(&daemon, "web");
    bob.kill();
    in_service(&daemon, "web");
    assert_ne!(inode(&daemon, "web"), before);
    assert_eq!(daemon.inspect()["blocks"], json!([]));
    assert!(daemon.log().contains("what was kept in it ends"));
    assert!(attaches(&daemon, EVE) && !attaches(&daemon, BOB));
}

fn has(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in {said}");
    }
}

#[test]
fn a_user_who_was_never_given_the_memory_disturbs_nobody() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let _vm = Program::start_vm(&daemon, "a");
    assert!(attaches(&daemon, EVE));
    let host = daemon.attach("web", "x");
    let (before, back) = (inode(&daemon, "web"), host.hang_up());
    restart(&mut daemon, &config(&without_bob()));
    let host = daemon.client().attach_as(back).unwrap();
    has(&reload(&daemon, &config(&both())), &["reloaded=1", "not_reloaded=0"]);
    has(&reload(&daemon, &config(&without_bob())), &["reloaded=1", "not_reloaded=0"]);
    let back = host.hang_up();
    daemon.restart();
    daemon.client().attach_as(back).unwrap();
    assert_eq!(inode(&daemon, "web"), before);
}

#[test]
fn who_may_attach_by_another_right_disturbs_nobody() {
    require_root!();
    let mut daemon = start(&config(&format!("allow_users = [{BOB}]")));
    let _vm = Program::start_vm(&daemon, "a");
    assert!(attaches(&daemon, BOB));
    let host = daemon.attach("web", "x");
    let (before, mut back) = (inode(&daemon, "web"), host.hang_up());
    for allowed in [
        format!("allow_groups = [{GROUP}]"),
        format!("allow_groups = [{GROUP}, {OTHER_GROUP}]"),
        format!("allow_groups = [{GROUP}]"),
        format!("allow_users = [{BOB}]"),
    ] {
        restart(&mut daemon, &config(&allowed));
        back = daemon.client().attach_as(back).unwrap().hang_up();
    }
    assert_eq!(inode(&daemon, "web"), before);
    restart(&mut daemon, &config(&format!("allow_groups = [{OTHER_GROUP}]")));
    has(&refused(&daemon, "web"), &[&format!("user {BOB} may not attach any more")]);
}

#[test]
fn a_reload_takes_nothing_from_the_others_and_says_what_a_restart_does() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let vm = Program::start_vm(&daemon, "a");
    let mut bob = Program::start(&daemon, BOB, "web");
    let mut host = daemon.attach("web", "x");
    let before = inode(&daemon, "web");
    let said = reload(&daemon, &config(&without_bob()));
    has(
        &said,
        &[
            "reloaded: segment.web: who may attach",
            &format!("not reloaded: segment.web, of which user {BOB} was given the memory"),
            "stop these programs and the segment's VMs, and restart the daemon",
            "not_reloaded=1",
        ],
    );
    assert!(!attaches(&daemon, BOB) && attaches(&daemon, EVE));
    host.listen("still").unwrap();
    host.memory.store_release_u64(AT, 7);
    assert_eq!(bob.sees(), 7, "as the log says");
    drop(host);
    daemon.restart();
    has(&refused(&daemon, "web"), &[&format!("user {BOB} may not attach any more")]);
    drop(vm);
    in_service(&daemon, "web");
    assert_ne!(inode(&daemon, "web"), before);
}

#[test]
fn at_a_reload_a_segment_that_nobody_uses_gets_a_new_file() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let mut bob = Program::start(&daemon, BOB, "web");
    let host = daemon.attach("web", "x");
    host.memory.store_release_u64(AT, 7);
    drop(host);
    wait_for("its end", || (daemon.inspect()["endpoints"] == json!([])).then_some(()));
    let before = inode(&daemon, "web");
    let said = reload(&daemon, &config(&without_bob()));
    has(
        &said,
        &[&format!("user {BOB} had its memory, and nobody uses it, so it gets a new file"), "not_reloaded=0"],
    );
    let host = in_service(&daemon, "web");
    assert_ne!(inode(&daemon, "web"), before);
    host.memory.store_release_u64(AT, 8);
    assert_eq!(bob.sees(), 7);
    let back = host.hang_up();
    daemon.restart();
    daemon.client().attach_as(back).unwrap();
}

#[test]
fn if_an_earlier_version_did_not_note_who_has_the_memory_all_who_may_attach_count() {
    require_root!();
    let mut daemon = start(&config(&both()));
    let _vm = Program::start_vm(&daemon, "a");
    assert!(attaches(&daemon, EVE));
    daemon.kill();
    let path = daemon.dir.path().join("state/journal");
    let mut journal = replay(&fs::read(&path).unwrap());
    journal.books.segments.values_mut().for_each(|segment| segment.recipients = None);
    let lines = snapshot(&journal.books, journal.journal.unwrap(), journal.last);
    fs::write(&path, lines.flatten().collect::<Vec<u8>>()).unwrap();
    daemon.start();
    daemon.attach("web", "x");
    restart(&mut daemon, &config(&without_bob()));
    has(&refused(&daemon, "web"), &[&format!("user {BOB} may not attach any more")]);
}

/// A daemon with slices in one file.
fn slices(allowed: &str, members: &str) -> (Daemon, impl Fn(&str, &str) -> String + use<>) {
    let mut daemon = Daemon::prepare("", "");
    let qemu = daemon.dir.path().join("qemu");
    fs::write(&qemu, "#!/bin/sh\necho 'QEMU emulator version 9.0.0 (of a test)'\n").unwrap();
    fs::set_permissions(&qemu, PermissionsExt::from_mode(0o755)).unwrap();
    let config = move |allowed: &str, members: &str| {
        format!(
            "[host]\nqemu = {qemu:?}\n[vm.w1]\n[vm.w2]\n[vm.w3]\n[segment.job]\nsize = \"8M\"\nmembers = {members}\n{allowed}\n"
        )
    };
    daemon.write_config("vectors = 4\n", &config(allowed, members));
    daemon.start();
    for path in [daemon.dir.path(), &daemon.dir.path().join("run")] {
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    (daemon, config)
}

#[test]
fn slices_of_one_file_wait_together() {
    require_root!();
    let two = "slices = [\"w1\", \"w2\"]";
    let allowed = format!("{two}\nallow_users = [{BOB}]");
    let (mut daemon, config) = slices(&allowed, "[\"host\"]");
    let vm = Program::start_vm(&daemon, "w2");
    let mut bob = Program::start(&daemon, BOB, "job.w1");
    // His descriptor is that of the whole file.
    let other = segment(&daemon, "job.w2")["offset"].as_u64().unwrap() + RESERVED + AT as u64;
    daemon.attach("job.w2", "x").memory.store_release_u64(AT, 7);
    assert_eq!(bob.ask(&other.to_string()), 7);
    let before = inode(&daemon, "job");
    // Also if the slice that he was given is not there any more, and for one that is new.
    let slices = "slices = [\"w2\", \"w3\"]";
    restart(&mut daemon, &config(slices, "[\"host\"]"));
    for _ in 0..2 {
        for slice in ["job.w2", "job.w3"] {
            has(&refused(&daemon, slice), &[&format!("user {BOB} may not attach any more")]);
        }
        daemon.restart();
    }
    drop(vm);
    for slice in ["job.w2", "job.w3"] {
        let host = in_service(&daemon, slice);
        host.memory.store_release_u64(AT, 9);
        let at = segment(&daemon, slice)["offset"].as_u64().unwrap() + RESERVED + AT as u64;
        assert_eq!(bob.ask(&at.to_string()), if at == other { 7 } else { 0 }, "{slice}");
    }
    assert_ne!(inode(&daemon, "job"), before);
}

#[test]
fn slices_that_nobody_uses_get_a_new_file_at_once() {
    require_root!();
    let two = "slices = [\"w1\", \"w2\"]";
    let allowed = format!("{two}\nallow_users = [{BOB}]");
    for (allowed, members) in [(allowed.as_str(), "[]"), (two, "[\"host\"]")] {
        let (mut daemon, config) = slices(&format!("{two}\nallow_users = [{BOB}]"), "[\"host\"]");
        let bob = Program::start(&daemon, BOB, "job.w1");
        let place = |daemon: &Daemon, slice| segment(daemon, slice)["offset"].clone();
        let (before, places) =
            (inode(&daemon, "job"), ["job.w1", "job.w2"].map(|slice| place(&daemon, slice)));
        restart(&mut daemon, &config(allowed, members));
        for (slice, before) in ["job.w1", "job.w2"].into_iter().zip(places) {
            assert_eq!(segment(&daemon, slice)["broken"], json!(false));
            assert_eq!(place(&daemon, slice), before, "there is nothing in front of it");
        }
        assert_ne!(inode(&daemon, "job"), before, "{members}: he has all of that file");
        drop(bob);
    }
}

#[test]
fn what_is_kept_in_a_slice_waits_until_nobody_has_the_file() {
    require_root!();
    let two = "slices = [\"w1\", \"w2\"]";
    let (mut daemon, config) = slices(&format!("{two}\nallow_users = [{BOB}]"), "[\"host\"]");
    let mut bob = Program::start(&daemon, BOB, "job.w1");
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("job.w2", &options).unwrap();
    host.create_block("kept", 4096, &BlockOptions { persistent: true, ..BlockOptions::default() }).unwrap();
    drop(host);
    let before = inode(&daemon, "job");
    restart(&mut daemon, &config(two, "[\"host\"]"));
    for slice in ["job.w1", "job.w2"] {
        refused(&daemon, slice);
    }
    bob.kill();
    for slice in ["job.w1", "job.w2"] {
        in_service(&daemon, slice);
    }
    assert_ne!(inode(&daemon, "job"), before);
}

#[test]
fn a_slice_waits_for_those_who_had_slices_that_are_gone() {
    let (mut daemon, config) = slices("slices = [\"w1\", \"w2\"]", "[\"host\"]");
    let vms = ["w2", "w3"].map(|name| Program::start_vm(&daemon, name));
    drop(daemon.attach("job.w1", "x"));
    let before = inode(&daemon, "job");
    for slices in ["slices = [\"w1\", \"w2\", \"w3\"]", "slices = [\"w3\"]", "slices = [\"w3\"]"] {
        restart(&mut daemon, &config(slices, "[]"));
        let why = segment(&daemon, "job.w3")["broken_why"].as_str().expect("out of service").to_owned();
        has(&why, &["programs of the host"]);
    }
    drop(vms);
    wait_for("the segment", || (segment(&daemon, "job.w3")["broken"] == false).then_some(()));
    assert_ne!(inode(&daemon, "job"), before);
}
