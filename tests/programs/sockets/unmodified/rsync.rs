//! rsync and its daemon: at each end, one process sends and another one receives.

use programs::stage::{MODES, Stage, changed, free_port};
use std::fs;
use std::path::Path;

/// Makes a folder with files of many sizes.
fn fill(folder: &Path) {
    fs::create_dir(folder).unwrap();
    for (number, len) in (0..100).map(|i| i * 100).chain([8 << 20]).enumerate() {
        let bytes: Vec<u8> =
            (0..len as u32).map(|i| ((i + number as u32).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(folder.join(format!("file-{number}")), bytes).unwrap();
    }
}

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn rsync() {
    kit::require_programs!(&["rsync"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let folder = stage.world.files();
        let at = folder.display().to_string();
        fill(&folder.join("here"));
        fs::create_dir(folder.join("there")).unwrap();
        let port = free_port();
        let me = rustix::process::geteuid().as_raw();
        let group = rustix::process::getegid().as_raw();
        fs::write(
            folder.join("rsyncd.conf"),
            format!(
                "use chroot = no\nuid = {me}\ngid = {group}\nlog file = {at}/rsyncd.log\n\
                 [there]\npath = {at}/there\nread only = no\n"
            ),
        )
        .unwrap();
        let configuration = format!("--config={at}/rsyncd.conf");
        let listen = format!("--port={port}");
        stage.serve(
            port,
            &["rsync", "--daemon", "--no-detach", "--address=127.0.0.1", &listen, &configuration],
        );
        let there = format!("rsync://127.0.0.1:{port}/there/");
        // Each run copies everything again. rsync compares checksums of everything that it receives.
        let rsync = ["rsync", "-a", "--whole-file", "--ignore-times"];
        // rsync forks soon after the first bytes, and from then on one process sends and another one receives. A
        // connection that has not changed over by then stays on TCP, so the number of changes depends on the machine.
        for turn in 0..5 {
            stage.client(&[&rsync[..], &["here/", &there]].concat());
            assert!(
                files(&folder.join("there")) == files(&folder.join("here")),
                "{mode} {turn}: not what was sent"
            );
            stage.client(&[&rsync[..], &[&there, "back/"]].concat());
            assert!(
                files(&folder.join("back")) == files(&folder.join("here")),
                "{mode} {turn}: not what was fetched"
            );
        }
        let connections = stage.end();
        let ends = connections.iter().filter(|end| end.program == "rsync").count();
        let changed = changed(&connections, "rsync").len();
        println!("{mode}: {changed} of {ends} ends have changed over");
        assert!(ends >= 2, "{mode}: the library has not seen them all: {connections:#?}");
    }
}
