//! A journal that is lost, damaged or old: memory that somebody has is not given to anybody else.

use ginnel_layout::wire::ErrorCode;
use ginnel_shmem::SharedMemory;
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::wait_for;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};

const WEB: &str = "[vm.vm-a]\n[vm.vm-b]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";

fn journal(daemon: &Daemon) -> PathBuf {
    daemon.dir.path().join("state/journal")
}

kit::program! {
    fn program() {
        let own = Client::hello(&program_socket()).attach("web", "program").unwrap();
        own.memory.write(4 << 20, &[7; 64]);
        println!("{}", own.wire.endpoint);
        let _ = std::io::stdin().read(&mut [0]);
        let mut bytes = [0; 64];
        own.memory.read(4 << 20, &mut bytes);
        assert_eq!(bytes, [7; 64], "somebody else has this memory");
        println!("alone");
        let _ = std::io::stdin().read(&mut [0]);
    }
}

/// Starts a program that has memory of the segment.
fn start(daemon: &Daemon) -> Child {
    let mut command = daemon.program(program);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    next_line(&mut child);
    child
}

fn next_line(child: &mut Child) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// Checks that the memory is as the program has left it, and ends the program.
fn end(mut child: Child) {
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    assert_eq!(next_line(&mut child), "alone\n");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// Checks that nobody gets memory of the segment, and that people are told why.
fn is_refused(daemon: &Daemon, why: &str) {
    let refused = daemon.client().attach("web", "other").err().unwrap();
    assert!(refused.text.contains("VMs or programs use it"), "{}", refused.text);
    let log = daemon.log();
    assert!(log.contains("the journal is not believed") && log.contains(why), "{log}");
}

/// Checks that the segment comes into service by itself, with memory that nobody has had.
fn comes_back(daemon: &Daemon) {
    let other = wait_for("the segment", || daemon.client().attach("web", "other").ok());
    let mut bytes = [1; 64];
    other.memory.read(4 << 20, &mut bytes);
    assert_eq!(bytes, [0; 64]);
}

/// Damages a journal in the way that the daemon should notice.
fn damage(journal: &mut Vec<u8>, how: &str) {
    match how {
        "emptied" => journal.clear(),
        "records are missing" => {
            let last = journal[..journal.len() - 1].iter().rposition(|&b| b == b'\n').unwrap();
            journal.truncate(last + 1);
        }
        _ => {
            let at = journal.windows(6).position(|text| text == b"attach").unwrap();
            journal[at + 20] ^= 1;
        }
    }
}

#[test]
fn memory_that_a_program_has_is_not_given_out_when_the_journal_is_lost() {
    let mut daemon = Daemon::start_new(WEB);
    daemon.admin(json!({"op": "vm-add", "name": "vm-x"})).unwrap();
    for why in ["emptied", "records are missing", "damaged"] {
        let program = start(&daemon);
        // A record behind the one of its attaching, so that the damage is not at the end.
        daemon.attach("web", "other");
        daemon.kill();
        let mut bytes = std::fs::read(journal(&daemon)).unwrap();
        damage(&mut bytes, why);
        std::fs::write(journal(&daemon), bytes).unwrap();
        daemon.start();
        is_refused(&daemon, why);
        // Its successor believes its journal, and does not know more.
        daemon.restart();
        assert!(daemon.client().attach("web", "other").is_err());
        end(program);
        comes_back(&daemon);
        // What was declared at run time is in the journal as far as that is not lost.
        let members: Value = daemon.inspect()["members"].clone();
        assert_eq!(members.to_string().contains("vm-x"), why != "emptied", "{members}");
        if why == "emptied" {
            daemon.admin(json!({"op": "vm-add", "name": "vm-x"})).unwrap();
        }
    }
}

#[test]
fn an_older_copy_of_the_journal_is_not_believed() {
    let mut daemon = Daemon::start_new(WEB);
    let copy = std::fs::read(journal(&daemon)).unwrap();
    let program = start(&daemon);
    daemon.kill();
    std::fs::write(journal(&daemon), copy).unwrap();
    daemon.start();
    is_refused(&daemon, "older copy");
    end(program);
    comes_back(&daemon);
}

#[test]
fn a_journal_that_is_removed_while_the_daemon_runs_is_made_anew() {
    let mut daemon = Daemon::start_new(WEB);
    let first = daemon.attach("web", "first");
    std::fs::remove_file(journal(&daemon)).unwrap();
    let second = daemon.attach("web", "second");
    wait_for("the journal", || journal(&daemon).exists().then_some(()));
    daemon.restart();
    for old in [&first, &second] {
        assert_eq!(daemon.client().attach_as(old.back).unwrap().wire.epoch, old.wire.epoch);
    }
}

#[test]
fn a_removed_journal_gives_no_vm_the_doorbells_and_control_memory_of_another() {
    // Without the mark too, only the keeper shows that there was a daemon.
    for mark_is_gone in [false, true] {
        let mut daemon = Daemon::start_new("[vm.vm-b]\n");
        let first = Qemu::join(&daemon.run("vm-b.sock"), 8);
        daemon.kill();
        std::fs::remove_file(journal(&daemon)).unwrap();
        if mark_is_gone {
            std::fs::remove_file(daemon.run("journal.mark")).unwrap();
        }
        // The number that vm-b had is free now, as far as the new journal knows.
        daemon.write_config("", "[vm.vm-a]\n");
        daemon.start();
        let other = Qemu::join(&daemon.run("vm-a.sock"), 8);
        let at = other.memory().len() - 8;
        other.memory().write(at, &[9; 8]);
        let mut bytes = [0; 8];
        first.memory().read(at, &mut bytes);
        assert_ne!(bytes, [9; 8], "both have the same memory");
    }
}

#[test]
fn a_journal_of_format_2_is_continued() {
    let mut daemon = Daemon::start_new(WEB);
    let a = daemon.attach("web", "a");
    daemon.kill();
    let text = std::fs::read_to_string(journal(&daemon)).unwrap();
    let lines = text.lines().filter(|line| !line.contains("snapshot_ends"));
    let old = lines.map(|line| {
        let mut record: Value = serde_json::from_str(line.splitn(3, ' ').nth(2).unwrap()).unwrap();
        if let Some(start) = record.get_mut("start") {
            start["format"] = json!(2);
        }
        if let Some(segment) = record.get_mut("segment").and_then(Value::as_object_mut) {
            segment.remove("file");
        }
        let json = record.to_string();
        format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
    });
    let old: String = old.collect();
    std::fs::write(journal(&daemon), old).unwrap();
    std::fs::remove_file(daemon.run("journal.mark")).unwrap();
    daemon.start();
    let again = daemon.client().attach_as(a.back).unwrap();
    assert_eq!(again.wire.epoch, a.wire.epoch);
    assert!(!daemon.log().contains("not believed"));
    // From now on the journal says which file it is.
    daemon.kill();
    let moved = daemon.shm("web").with_extension("other");
    std::fs::copy(daemon.shm("web"), &moved).unwrap();
    std::fs::rename(&moved, daemon.shm("web")).unwrap();
    daemon.start();
    let refused = daemon.client().attach("web", "b").err().unwrap();
    assert_eq!(refused.code, ErrorCode::BROKEN.0);
    assert!(refused.text.contains("was replaced"), "{}", refused.text);
}

/// A daemon may be killed when its first journal of this format is in place, and before its mark says so.
#[test]
fn a_first_journal_whose_daemon_was_killed_before_it_marked_it_is_believed() {
    let mut daemon = Daemon::start_new(WEB);
    let a = daemon.attach("web", "a");
    daemon.kill();
    // The number is the end of the mark. The daemon writes the name first, with 0.
    let mark = std::fs::File::options().write(true).open(daemon.run("journal.mark")).unwrap();
    let number = mark.metadata().unwrap().len() - 8;
    mark.write_all_at(&[0; 8], number).unwrap();
    daemon.start();
    assert!(!daemon.log().contains("not believed"));
    assert_eq!(daemon.client().attach_as(a.back).unwrap().wire.epoch, a.wire.epoch);
    // From now on, the mark guards it.
    daemon.kill();
    std::fs::remove_file(journal(&daemon)).unwrap();
    daemon.start();
    is_refused(&daemon, "");
}
