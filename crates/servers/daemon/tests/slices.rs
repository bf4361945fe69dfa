//! Slices of one file, or a file for each slice if QEMU cannot use a part of a file.

use ginnel_layout::dax::{self, InfoBlock};
use ginnel_layout::segment::{MAGIC, RESERVED};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use zerocopy::FromBytes;

const SIZE: u64 = 16 << 20;

/// Returns a configuration with these slices, for a QEMU that reports this version.
fn config(daemon: &Daemon, version: &str, slices: &[&str], size: &str) -> String {
    let qemu = daemon.dir.path().join("qemu");
    std::fs::write(&qemu, format!("#!/bin/sh\necho 'QEMU emulator version {version} (of a test)'\n"))
        .unwrap();
    std::fs::set_permissions(&qemu, PermissionsExt::from_mode(0o755)).unwrap();
    format!(
        "[host]\nqemu = {qemu:?}\n[vm.w1]\n[vm.w2]\n[vm.w3]\n[segment.job]\nsize = \"{size}\"\nmembers = [\"host\"]\n\
         slices = {slices:?}\n"
    )
}

/// Starts a daemon with these slices.
fn with(version: &str, slices: &[&str]) -> Daemon {
    let mut daemon = Daemon::prepare("", "");
    daemon.write_config("", &config(&daemon, version, slices, "16M"));
    daemon.start();
    daemon
}

/// Kills the daemon and starts another with other slices.
fn change(daemon: &mut Daemon, version: &str, slices: &[&str], size: &str) {
    daemon.kill();
    daemon.write_config("", &config(daemon, version, slices, size));
    daemon.start();
}

/// Returns name, file and offset of each slice.
fn places(daemon: &Daemon) -> Vec<(String, String, u64)> {
    let status = daemon.inspect();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let file = |value: &Value| text(value).rsplit_once('/').unwrap().1.to_owned();
    let segments = status["segments"].as_array().unwrap().iter();
    segments.map(|s| (text(&s["name"]), file(&s["path"]), s["offset"].as_u64().unwrap())).collect()
}

fn place(slice: &str, file: &str, offset: u64) -> (String, String, u64) {
    (format!("job.{slice}"), file.to_owned(), offset)
}

/// Checks that the slice's info block and header stand at its beginning.
fn is_whole(daemon: &Daemon, slice: &str, file: &str, offset: u64) {
    let attached = daemon.attach(slice, "who");
    assert_eq!(attached.memory.load_acquire_u64(0), MAGIC);
    assert_eq!(attached.wire.map_offset, offset + RESERVED);
    let mut bytes = [0; size_of::<InfoBlock>()];
    File::open(daemon.shm(file)).unwrap().read_exact_at(&mut bytes, offset + dax::AT).unwrap();
    let block = InfoBlock::read_from_bytes(&bytes).unwrap();
    assert_eq!(block.check(attached.wire.uuid, SIZE, 2 << 20), Ok(()));
}

fn nothing_was_repaired(daemon: &Daemon) -> bool {
    let status = daemon.inspect();
    let mut segments = status["segments"].as_array().unwrap().iter();
    segments.all(|s| s["info_block_repairs"] == 0 && s["header_repairs"] == 0)
}

#[test]
fn slices_lie_side_by_side_in_one_file() {
    let daemon = with("8.1.0", &["w1", "w2"]);
    assert_eq!(places(&daemon), [place("w1", "job", 0), place("w2", "job", SIZE)]);
    assert_eq!(std::fs::metadata(daemon.shm("job")).unwrap().len(), 2 * SIZE);
    assert!(!daemon.shm("job.w1").exists());
    is_whole(&daemon, "job.w1", "job", 0);
    is_whole(&daemon, "job.w2", "job", SIZE);
    let members = &daemon.inspect()["segments"][1]["members"];
    assert_eq!(members, &json!(["host", "w2"]));
    // Bytes written to one slice do not appear in the other.
    let (one, two) = (daemon.attach("job.w1", "one"), daemon.attach("job.w2", "two"));
    assert_ne!(one.wire.uuid, two.wire.uuid);
    let last = one.memory.len() - 8;
    one.memory.store_release_u64(last, 7);
    assert_eq!((one.memory.load_acquire_u64(last), two.memory.load_acquire_u64(last)), (7, 0));
    assert_eq!(two.memory.load_acquire_u64(0), MAGIC);
}

#[test]
fn a_slice_keeps_its_place_and_no_place_is_reused() {
    let mut daemon = with("8.1.0", &["w2"]);
    let job = daemon.attach("job.w2", "job");
    job.memory.store_release_u64(1 << 20, 7);
    // A new worker gets a place behind the existing one, although its name comes first in the list.
    change(&mut daemon, "8.1.0", &["w1", "w2"], "16M");
    assert_eq!(places(&daemon), [place("w1", "job", SIZE), place("w2", "job", 0)]);
    assert_eq!(daemon.attach("job.w2", "job").memory.load_acquire_u64(1 << 20), 7);
    is_whole(&daemon, "job.w1", "job", SIZE);
    // A worker whose slice was removed may still run and have it mapped, so nobody else gets that place.
    change(&mut daemon, "8.1.0", &["w2", "w3"], "16M");
    assert_eq!(places(&daemon), [place("w2", "job", 0), place("w3", "job", 2 * SIZE)]);
    is_whole(&daemon, "job.w3", "job", 2 * SIZE);
    assert!(nothing_was_repaired(&daemon));
}

#[test]
fn places_outlive_the_file() {
    let mut daemon = with("8.1.0", &["w2"]);
    change(&mut daemon, "8.1.0", &["w1", "w2"], "16M");
    // As after a reboot of the machine, when a tmpfs is empty.
    daemon.kill();
    std::fs::remove_file(daemon.shm("job")).unwrap();
    daemon.start();
    assert_eq!(places(&daemon), [place("w1", "job", SIZE), place("w2", "job", 0)]);
    is_whole(&daemon, "job.w1", "job", SIZE);
    is_whole(&daemon, "job.w2", "job", 0);
    assert!(nothing_was_repaired(&daemon));
}

#[test]
fn a_slice_in_use_keeps_file_and_size() {
    let mut daemon = with("7.2.22", &["w1", "w2"]);
    let own = [place("w1", "job.w1", 0), place("w2", "job.w2", 0)];
    assert_eq!(places(&daemon), own);
    let job = daemon.attach("job.w1", "job");
    // QEMU was replaced by a newer version: an attached endpoint keeps its file.
    change(&mut daemon, "8.2.0", &["w1", "w2"], "16M");
    assert_eq!(places(&daemon), [place("w1", "job.w1", 0), place("w2", "job", 0)]);
    drop(job);

    // A larger size for a slice in use would reach into the neighbouring slice.
    let mut daemon = with("8.1.0", &["w1", "w2"]);
    let job = daemon.attach("job.w1", "job");
    change(&mut daemon, "8.1.0", &["w1", "w2"], "18M");
    assert_eq!(places(&daemon)[1], place("w2", "job", 2 * SIZE));
    let status = daemon.inspect();
    assert_eq!(
        (&status["segments"][0]["broken"], &status["segments"][1]["broken"]),
        (&json!(true), &json!(false))
    );
    assert!(daemon.log().contains("its size is 16M while it is in use"));
    drop(job);
}

#[test]
fn a_truncated_file_breaks_the_slices_behind_the_cut() {
    let daemon = with("9.0.0", &["w1", "w2"]);
    File::options().write(true).open(daemon.shm("job")).unwrap().set_len(SIZE).unwrap();
    let refused = daemon.client().attach("job.w2", "who").err().expect("its memory is gone");
    assert!(refused.text.contains("job.w2"), "{refused:?}");
    is_whole(&daemon, "job.w1", "job", 0);
}

#[test]
fn slices_are_validated_and_cannot_be_made_at_run_time() {
    let daemon = Daemon::prepare("", "");
    let one = |version| format!("{}slice_files = \"one\"\n", config(&daemon, version, &["w1"], "16M"));
    daemon.write_config("", &one("7.2.22"));
    for args in [&["--check"][..], &[]] {
        let output = daemon.output(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains("version 7.2; "), "{text}");
    }
    daemon.write_config("", &one("8.1.0"));
    assert!(daemon.output(&["--check"]).status.success());
    assert!(!daemon.shm("job").exists());

    let daemon = with("8.1.0", &["w1"]);
    let request =
        json!({"op": "segment-create", "name": "late", "size": SIZE, "members": ["host"], "slices": ["w1"]});
    let refused = daemon.admin(request).unwrap_err();
    assert!(refused.text.contains("configuration file"), "{refused:?}");
}
