//! A file that is truncated while QEMUs use it gets its size back, so that they survive. All other users learn that the bytes
//! behind the cut are lost.

use ginnel::{
    AttachOptions, BlockOptions, ChannelOptions, Endpoint, Error, MessageChannel, ReadySet, StreamChannel,
    WaitMode,
};
use ginnel_layout::ring::{self, SideState};
use ginnel_layout::wire;
use ginnel_layout::wire::{ErrorCode, Kind};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

kit::test_that_skips_are_seen!();

const SIZE: u64 = 16 << 20;
const WEB: &str = "[vm.a]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n";
const VECTORS: usize = 32;

fn cut(file: &Path, len: u64) {
    File::options().write(true).open(file).unwrap().set_len(len).unwrap();
}

/// Waits until a file has its full size and all its memory.
fn wait_until_whole(file: &Path, size: u64) {
    wait_for("its size and its memory", || {
        let stat = std::fs::metadata(file).unwrap();
        (stat.len() == size && stat.blocks() * 512 == size).then_some(())
    });
}

fn endpoint(daemon: &Daemon, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: daemon.socket(), name: Some(name.into()), mode: WaitMode::Interrupt };
    Endpoint::attach_with("web", &options).unwrap()
}

/// No QEMU runs, so the file stays short, and a readiness set whose board is gone notices that by itself.
#[test]
fn a_readiness_set_reports_all_channels_when_its_board_is_gone() {
    let daemon = Daemon::start_new(WEB);
    let (one, two) = (endpoint(&daemon, "one"), endpoint(&daemon, "two"));
    let listener = two.listen::<MessageChannel>("x").unwrap();
    let mut set = ReadySet::new().unwrap();
    let mut keys = Vec::new();
    let small = ChannelOptions { capacity: ring::MIN_CAPACITY, ..ChannelOptions::default() };
    let mut channels: Vec<(MessageChannel, MessageChannel)> = (0..100)
        .map(|key| {
            let ours = one.connect_with("x", &small).unwrap();
            let mut theirs: MessageChannel = listener.accept().unwrap();
            theirs.receiver().register(&set, key).unwrap();
            (ours, theirs)
        })
        .collect();
    set.wait(&mut keys, Some(WATCHDOG)).unwrap();
    for key in keys.drain(..) {
        assert!(matches!(channels[key as usize].1.recv(), Err(Error::WouldBlock)));
    }
    set.wait(&mut keys, Some(Duration::from_millis(20))).unwrap();
    cut(&daemon.shm("web"), 0);
    set.wait(&mut keys, Some(WATCHDOG)).unwrap();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys, (0..100).collect::<Vec<_>>());
    assert!(channels.iter_mut().all(|(_, theirs)| matches!(theirs.recv(), Err(Error::Broken))));
}

/// No program is attached, so the daemon does not look by itself: the kernel notifies it.
#[test]
fn the_size_comes_back_at_once_for_a_qemu_that_runs() {
    let daemon = Daemon::start_new(WEB);
    let file = daemon.shm("web");
    let qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    let memory = Mapping::of_file(File::open(&file).unwrap(), 0, SIZE as usize, Protection::Read).unwrap();
    for len in [0, 4096, SIZE / 2] {
        cut(&file, len);
        let before = Instant::now();
        while std::fs::metadata(&file).unwrap().len() < SIZE {
            assert!(before.elapsed() < WATCHDOG, "it stays short");
            std::hint::spin_loop();
        }
        println!("cut to {len}: its size is back after {:?}", before.elapsed());
        wait_until_whole(&file, SIZE);
        // QEMU reads such memory.
        assert_eq!((memory.load_acquire_u64(SIZE as usize - 8), memory.is_broken()), (0, false));
    }
    assert_eq!(daemon.client().attach("web", "late").err().unwrap().code, ErrorCode::BROKEN.0);
    assert_eq!(daemon.inspect()["segments"][0]["broken"], true);
    assert_eq!(daemon.log().matches("segment broken").count(), 1);
    drop(qemu);
}

/// What everybody can do who may write to the file.
#[test]
fn holes_get_memory_again_and_a_file_that_was_made_longer_its_size() {
    let mut daemon = Daemon::start_new(WEB);
    let path = daemon.shm("web");
    let client = daemon.attach("web", "one");
    let file = File::options().write(true).open(&path).unwrap();
    let punch = |at: u64, len: u64| {
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len).unwrap();
    };
    for (at, len) in [(SIZE - 8192, 4096), (0, SIZE), (SIZE / 2, 4096)] {
        punch(at, len);
        wait_until_whole(&path, SIZE);
    }
    for longer in [SIZE + 1, 4 * SIZE] {
        fallocate(&file, FallocateFlags::empty(), SIZE, longer - SIZE).unwrap();
        wait_until_whole(&path, SIZE);
    }
    assert_eq!(daemon.inspect()["segments"][0]["broken"], false);
    // The same while no daemon runs, with a program that uses the segment, and without.
    let mut client = Some(client);
    for _ in 0..2 {
        daemon.kill();
        fallocate(&file, FallocateFlags::empty(), SIZE, SIZE).unwrap();
        punch(SIZE / 2, 4096);
        daemon.start();
        wait_until_whole(&path, SIZE);
        assert_eq!(daemon.inspect()["segments"][0]["broken"], false);
        daemon.attach("web", "late");
        drop(client.take());
    }
}

#[test]
fn slices_behind_the_cut_are_broken_and_those_in_front_are_not() {
    let mut daemon = Daemon::prepare("", "");
    let qemu = daemon.dir.path().join("qemu");
    std::fs::write(&qemu, "#!/bin/sh\necho 'QEMU emulator version 9.0.0 (of a test)'\n").unwrap();
    std::fs::set_permissions(&qemu, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    daemon.write_config(
        "",
        &format!(
            "[host]\nqemu = {qemu:?}\n[vm.w1]\n[vm.w2]\n[vm.w3]\n[segment.job]\nsize = \"16M\"\nmembers = [\"host\"]\n\
             slices = [\"w1\", \"w2\", \"w3\"]\n"
        ),
    );
    daemon.start();
    let file = daemon.shm("job");
    let first = daemon.attach("job.w1", "first");
    first.memory.store_release_u64(1 << 20, 7);
    let third = daemon.attach("job.w3", "third");
    // Only the second VM runs, but the slices share one file.
    let _qemu = Qemu::join(&daemon.run("w2.sock"), VECTORS);
    cut(&file, SIZE + 4096);
    wait_until_whole(&file, 3 * SIZE);
    assert_eq!(first.memory.load_acquire_u64(1 << 20), 7);
    daemon.attach("job.w1", "another");
    for slice in ["job.w2", "job.w3"] {
        assert_eq!(daemon.client().attach(slice, "late").err().unwrap().code, ErrorCode::BROKEN.0);
    }
    let told = third.client.receive().expect("a report of the cut");
    assert_eq!(wire::split(&told.bytes).unwrap().0.kind, Kind::SEGMENT_CUT);
}

#[test]
fn programs_that_touched_nothing_meanwhile_are_told_too() {
    let mut daemon = Daemon::start_new(WEB);
    let file = daemon.shm("web");
    let (one, two) = (endpoint(&daemon, "one"), endpoint(&daemon, "two"));
    let messages = two.listen::<MessageChannel>("messages").unwrap();
    let streams = two.listen::<StreamChannel>("streams").unwrap();
    let mut message: MessageChannel = one.connect("messages").unwrap();
    let mut stream: StreamChannel = one.connect("streams").unwrap();
    let (mut incoming, mut bytes) = (messages.accept().unwrap(), streams.accept().unwrap());
    for n in 0..5000u64 {
        message.send(&n.to_le_bytes()).unwrap();
        assert_eq!(incoming.recv().unwrap(), n.to_le_bytes());
    }
    stream.write_all(b"hello").unwrap();
    bytes.read_exact(&mut [0; 5]).unwrap();
    let block = one.create_block("b", 4096, &BlockOptions::default()).unwrap();
    block.write(0, b"kept").unwrap();
    let mut lock = one.mutex("l").unwrap();
    drop(lock.lock().unwrap());
    let raw = daemon.attach("web", "raw");
    let back = raw.hang_up();
    let _qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);

    // This receiver sleeps in `recv`.
    let sleeper = std::thread::spawn(move || incoming.recv().map(|_| ()));
    daemon.signal(Signal::STOP);
    cut(&file, 0);
    daemon.signal(Signal::CONT);
    wait_until_whole(&file, SIZE);
    assert!(matches!(sleeper.join().unwrap(), Err(Error::Broken)));
    // Zeros must not be taken for an empty or full ring, for bytes of a block, or for a free lock.
    wait_for("the end of the channel", || match message.send(b"x") {
        Err(Error::Broken) => Some(()),
        // The daemon has not marked the ring yet.
        Ok(()) => None,
        other => panic!("{other:?}"),
    });
    let mut got = [0; 8];
    assert!(matches!(bytes.receiver().recv(&mut got), Err(Error::Broken)));
    wait_for("the block to be broken", || block.read(0, &mut got).is_err().then_some(()));
    assert!(matches!(block.read(0, &mut got), Err(Error::Broken)));
    assert!(lock.lock().is_err());

    // The next daemons know that the segment is broken although the file has its size, and tell programs that come back.
    daemon.restart();
    daemon.restart();
    assert_eq!(daemon.client().attach("web", "late").err().unwrap().code, ErrorCode::BROKEN.0);
    let mut client = daemon.client();
    let (attached, fds) = client
        .ask::<wire::Attached>(Kind::ATTACH, zerocopy::IntoBytes::as_bytes(&back), Kind::ATTACHED)
        .unwrap();
    assert_eq!((attached.fds.0 & wire::Fds::MEMORY, fds.len()), (0, 1), "there is no memory to give");
    let told = client.receive().expect("a report of the cut");
    assert_eq!(wire::split(&told.bytes).unwrap().0.kind, Kind::SEGMENT_CUT);
}

/// A readiness board of zeros shows nothing as ready, so the sleeper must be told in another way.
#[test]
fn a_sleeping_readiness_set_hears_of_each_lost_ring() {
    let daemon = Daemon::start_new(WEB);
    let (one, two) = (endpoint(&daemon, "one"), endpoint(&daemon, "two"));
    let listener = two.listen::<MessageChannel>("x").unwrap();
    let mut set = ReadySet::new().unwrap();
    set.set_mode(WaitMode::Interrupt);
    let mut keys = Vec::new();
    let small = ChannelOptions { capacity: ring::MIN_CAPACITY, ..ChannelOptions::default() };
    let channels: Vec<_> = (0..100)
        .map(|key| {
            let ours: MessageChannel = one.connect_with("x", &small).unwrap();
            let theirs = listener.accept().unwrap();
            let (_, mut receiver) = theirs.split();
            receiver.register(&set, key).unwrap();
            (ours, receiver)
        })
        .collect();
    let (_ours, mut receivers): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
    set.wait(&mut keys, Some(WATCHDOG)).unwrap();
    for key in keys.drain(..) {
        assert!(matches!(receivers[key as usize].recv(), Err(Error::WouldBlock)));
    }
    set.wait(&mut keys, Some(Duration::from_millis(20))).unwrap();
    assert!(keys.is_empty(), "{keys:?}");
    let _qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    cut(&daemon.shm("web"), 0);
    wait_until_whole(&daemon.shm("web"), SIZE);
    let mut told = BTreeSet::new();
    wait_for("a report for each channel", || {
        set.wait(&mut keys, Some(WATCHDOG)).unwrap();
        for key in keys.drain(..) {
            match receivers[key as usize].recv() {
                Err(Error::Broken) => drop(told.insert(key)),
                Err(Error::WouldBlock) => {}
                other => panic!("{other:?}"),
            }
        }
        (told.len() == receivers.len()).then_some(())
    });
}

#[test]
fn endless_truncation_disturbs_no_other_segment() {
    let daemon = Daemon::start_new(&format!("{WEB}[segment.other]\nsize = \"4M\"\nmembers = [\"host\"]\n"));
    let file = daemon.shm("web");
    let mut listener = daemon.attach("web", "listener");
    listener.listen("x").unwrap();
    let mut caller = daemon.attach("web", "caller");
    let _channels: Vec<Channel> = (0..50).map(|_| caller.connect("x").unwrap()).collect();
    let _qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    let (end, mut waits, mut cuts) = (Instant::now() + Duration::from_secs(3), Vec::new(), 0);
    while Instant::now() < end {
        for _ in 0..20 {
            cut(&file, 0);
            cuts += 1;
        }
        let before = Instant::now();
        daemon.attach("other", "honest");
        waits.push(before.elapsed());
    }
    waits.sort_unstable();
    let (usual, longest) = (waits[waits.len() / 2], waits[waits.len() - 1]);
    println!("cut {cuts} times; an attach elsewhere took {usual:?}, and at most {longest:?}");
    assert!(usual < Duration::from_secs(2) && longest < WATCHDOG, "{usual:?}, and {longest:?} once");
    wait_until_whole(&file, SIZE);
    // The log says once that the segment is broken, and once that the file has its size again.
    assert_eq!(daemon.log().matches("truncated").count(), 1);
    assert_eq!(daemon.log().matches("its size again").count(), 1);
}

/// The marks that the daemon writes into a lost ring stay, whatever else happens to the channel.
#[test]
fn a_lost_ring_stays_lost() {
    let daemon = Daemon::start_new(WEB);
    let mut listener = daemon.attach("web", "listener");
    listener.listen("x").unwrap();
    let mut caller = daemon.attach("web", "caller");
    let channel = caller.connect("x").unwrap();
    let _qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    cut(&daemon.shm("web"), 0);
    wait_until_whole(&daemon.shm("web"), SIZE);
    let lost = (SideState::LOST.0, SideState::LOST.0);
    // Look through a new mapping, because the old one may have been replaced by zeros.
    let file = File::open(daemon.shm("web")).unwrap();
    let memory = Mapping::of_file(&file, 0, SIZE as usize, Protection::Read).unwrap();
    let (output, _) = channel.wire.capacities().rings(true);
    let at = channel.wire.offset as usize + output;
    let states = || {
        let word = |word| memory.load_acquire_u32(at + word);
        (word(ring::PRODUCER_STATE), word(ring::CONSUMER_STATE))
    };
    wait_for("the marks", || (states() == lost).then_some(()));
    caller.close(channel.wire.channel).unwrap();
    drop(listener);
    wait_for("its end", || (daemon.inspect()["endpoints"].as_array()?.len() == 1).then_some(()));
    assert_eq!(states(), lost);
}

/// A host program survives the missing pages, and learns from them that they are missing.
#[test]
fn without_a_qemu_the_file_stays_as_short_as_it_was_made() {
    let mut daemon = Daemon::start_new(WEB);
    let attached = daemon.attach("web", "program");
    cut(&daemon.shm("web"), 4096);
    assert!(readable(&attached.event, WATCHDOG));
    assert_eq!(daemon.client().attach("web", "late").err().unwrap().code, ErrorCode::BROKEN.0);
    assert_eq!(std::fs::metadata(daemon.shm("web")).unwrap().len(), 4096);
    attached.memory.load_acquire_u64(1 << 20);
    assert!(attached.memory.is_broken());
    // When nobody uses the segment any more, it is made anew.
    drop(attached);
    wait_for("its end", || daemon.inspect()["endpoints"].as_array()?.is_empty().then_some(()));
    daemon.kill();
    std::fs::remove_file(daemon.shm("web")).unwrap();
    daemon.start();
    daemon.attach("web", "new");
}

#[test]
fn a_segment_that_nobody_uses_any_more_is_whole_again() {
    let mut daemon = Daemon::start_new(WEB);
    let qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    cut(&daemon.shm("web"), 0);
    wait_until_whole(&daemon.shm("web"), SIZE);
    drop(qemu);
    wait_for("its end", || {
        let status = daemon.inspect();
        let vm = status["members"].as_array()?.iter().find(|m| m["name"] == "a")?.clone();
        (vm["connected"] == false).then_some(())
    });
    daemon.restart();
    daemon.attach("web", "new");
    daemon.restart();
    daemon.attach("web", "newer");
}

#[test]
fn on_a_full_disk_the_size_comes_back_and_missing_memory_is_logged() -> std::io::Result<()> {
    let mut daemon = Daemon::prepare("", WEB);
    let shm = daemon.dir.path().join("shm");
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=20M", "ginnel-test"]).arg(&shm).status();
    kit::require!(mounted.is_ok_and(|status| status.success()), "only root can mount a file system");
    struct Mounted(std::path::PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _mounted = Mounted(shm.clone());
    daemon.start();
    let qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    daemon.signal(Signal::STOP);
    cut(&daemon.shm("web"), 4096);
    let mut filler = File::create(shm.join("filler"))?;
    while filler.write(&[7; 4096]).is_ok() {}
    daemon.signal(Signal::CONT);
    wait_for("a line in the log", || daemon.log().contains("cannot be allocated again").then_some(()));
    assert_eq!(std::fs::metadata(daemon.shm("web"))?.len(), SIZE);
    assert_eq!(daemon.inspect()["segments"][0]["broken"], true);
    // The daemon tries again when the file is cut again.
    std::fs::remove_file(shm.join("filler"))?;
    drop(filler);
    cut(&daemon.shm("web"), 0);
    wait_until_whole(&daemon.shm("web"), SIZE);
    drop(qemu);
    Ok(())
}
