//! A look for the processes that have a segment's file, and somebody who makes it last. (Alone in its program: it would do so for others.)

use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::{spin_for, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};

kit::program! {
    /// Has as many descriptors as it may.
    fn many_descriptors() {
        let one = File::open("/dev/null").unwrap();
        let all: Vec<File> = std::iter::from_fn(|| one.try_clone().ok()).take(50_000).collect();
        println!("{}", all.len());
        let _ = std::io::stdin().read(&mut [0]);
    }
}

/// Stops the process that looks for the holders of a daemon's segments as soon as there is one.
fn stop_look(shm: &str) {
    spin_for("the look", || {
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let looks = |pid: &i32| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.contains("\0holders\0") && line.contains(shm)
        };
        kill_process(Pid::from_raw(pids.find(looks)?)?, Signal::STOP).ok()
    });
}

#[test]
fn a_look_that_was_not_completed_is_not_believed() {
    let segment =
        |members: &str| format!("[vm.a]\n[vm.b]\n[segment.web]\nsize = \"8M\"\nmembers = {members}\n");
    let mut daemon = Daemon::start_with("vectors = 4\n", &segment("[\"a\", \"b\"]"));
    let many =
        || daemon.program(many_descriptors).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut many: Vec<Child> = (0..10).map(|_| many()).collect();
    for child in &mut many {
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    }
    let _a = Qemu::join(&daemon.run("a.sock"), 4);
    let inode = |daemon: &Daemon| fs::metadata(daemon.shm("web")).unwrap().ino();
    let (before, shm) = (inode(&daemon), daemon.dir.path().join("shm").display().to_string());
    let stopper = std::thread::spawn(move || stop_look(&shm));
    daemon.kill();
    daemon.write_config("vectors = 4\n", &segment("[\"a\"]"));
    daemon.start();
    stopper.join().unwrap();
    assert!(daemon.log().contains("may not be known completely"), "{}", daemon.log());
    assert!(daemon.log().contains("perhaps VM b"), "the segment is in service: {}", daemon.log());
    // The daemon looks again by itself, and then there is nobody.
    wait_for("the segment", || (daemon.inspect()["segments"][0]["broken"] == false).then_some(()));
    assert_eq!(inode(&daemon), before);
    for mut child in many {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
