//! VMs: their QEMU on the ivshmem socket, their daemon in the control memory, their programs.

use ginnel::{AttachOptions, Endpoint};
use ginnel_layout::relay::{self, RelayKind};
use ginnel_layout::ring::SideState;
use ginnel_layout::segment::RESERVED;
use ginnel_layout::sync::{self, SyncKind};
use ginnel_layout::wire::{self, BellKind, ErrorCode, Fds, Kind, Rights};
use ginnel_shmem::SharedMemory;
use kit::daemon::qemu::*;
use kit::daemon::*;
use kit::random::Random;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

const TWO: &str = "
[vm.vm-a]
[vm.vm-b]
number = 7
[vm.stranger]
[segment.web]
size = \"8M\"
members = [\"host\", \"vm-a\", \"vm-b\"]
";
const VECTORS: &str = "vectors = 4\n";
const DEAD: (u32, u32) = (SideState::DEAD.0, SideState::DEAD.0);

fn attach_to(segment: &str) -> wire::Attach {
    wire::Attach { segment: name(segment), name: name("in-guest"), ..wire::Attach::new_zeroed() }
}

#[test]
fn a_joining_qemu_is_told_everything_at_once() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut a = Qemu::join(&daemon.run("vm-a.sock"), 4);
    // Version, own id, memory, own vectors; then the vectors of other members that have a segment in common with this one,
    // whether they run or not.
    let mut expected = vec![(0, false), (a.id, false), (-1, true)];
    expected.extend([(a.id, true); 4]);
    expected.extend([(0, true); 4]); // No more than the VM has vectors itself: one of the host's daemon, and three for programs.
    expected.push((7, true));
    while a.received.len() < expected.len() {
        a.next_message();
    }
    assert_eq!(a.received, expected);
    // A doorbell belongs to a member, so both VMs ring the same one.
    let mut b = Qemu::join(&daemon.run("vm-b.sock"), 4);
    assert_eq!(b.id, 7);
    a.ring(7, 0);
    assert!(b.is_rung(1, WATCHDOG));
    assert!(!b.is_rung(2, Duration::ZERO));
    b.ring(a.id, 0);
    assert!(a.is_rung(1, WATCHDOG));
    // A VM cannot truncate its control memory.
    assert!(rustix::fs::ftruncate(&a.control, 0).is_err());
    // Unexpected bytes on the socket do not end a VM.
    b.socket.write_all(&[7; 20_000]).unwrap();
    assert_eq!(
        daemon.inspect()["members"].as_array().unwrap().iter().filter(|m| m["live"] == json!(true)).count(),
        2
    );
    // A second QEMU for a VM that runs is refused, and the first does not notice.
    let mut second = UnixStream::connect(daemon.run("vm-a.sock")).unwrap();
    assert_eq!(second.read(&mut [0; 8]).unwrap(), 0);
    assert!(!b.is_rung(3, Duration::ZERO));
    a.ring(a.id, 2);
    assert!(a.is_rung(2, WATCHDOG));
}

#[test]
fn running_vms_are_told_of_members_that_are_declared_later() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut stranger = Qemu::join(&daemon.run("stranger.sock"), 4);
    assert_eq!(stranger.next_message(), (0, true), "the host's daemon, and nobody else on the host");
    assert_eq!(stranger.peers.keys().copied().collect::<Vec<_>>(), [0, stranger.id]);
    let answer = daemon.admin(json!({"op": "vm-add", "name": "late"})).unwrap();
    let vm: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let number = vm["vm"]["number"].as_i64().unwrap();
    let request =
        json!({"op": "segment-create", "name": "pair", "size": "3M", "members": ["late", "stranger"]});
    let segment: serde_json::Value = serde_json::from_str(&daemon.admin(request).unwrap()).unwrap();
    assert_eq!(segment["segment"]["size"], json!(16 << 20));
    assert_eq!(stranger.next_message(), (number, true));
    // The new VM can be started.
    let mut late = Qemu::join(&daemon.run("late.sock"), 4);
    assert_eq!([late.next_message(), late.next_message()], [(0, true), (stranger.id, true)]);
    let refused = daemon.admin(json!({"op": "vm-remove", "name": "late"})).unwrap_err();
    assert_eq!(refused.code, ErrorCode::IN_USE.0);
    drop(late);
    wait_for("the end of that VM", || {
        daemon.admin(json!({"op": "segment-remove", "name": "pair", "force": true})).ok();
        daemon.admin(json!({"op": "vm-remove", "name": "late"})).ok()
    });
    assert_eq!(stranger.next_message(), (number, false), "gone");
    assert!(!daemon.shm("pair").exists() && !daemon.run("late.sock").exists());
}

#[test]
fn a_program_in_a_vm_and_one_on_the_host_get_a_channel() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    let mut guest = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, true);
    let segments = guest.segments();
    assert_eq!(segments.len(), 1);
    assert_eq!(
        (segments[0].name.as_str(), segments[0].size, segments[0].uuid),
        ("web", 16 << 20, host.wire.uuid)
    );
    assert!(guest.endpoints().is_empty());

    guest.open(5, 77);
    let id = guest.qemu.id as u32;
    let attached = guest.attach(5, attach_to("web")).unwrap();
    assert_eq!((attached.member, attached.fds.0), (id, 0));
    assert_eq!(attached.segment_len, 16 << 20);
    let listener = guest.listen(5, "cp@vm-a");
    let there = host.connect("cp@vm-a").unwrap();
    assert_eq!((there.wire.bell_kind, there.wire.peer_member), (BellKind::EVENT, id));
    assert_eq!(there.wire.peer_member_name.as_str(), "vm-a");
    let here = guest.incoming(5);
    assert_eq!(
        (here.channel, here.listener, here.peer_name.as_str()),
        (there.wire.channel, listener, "on-host")
    );
    assert_eq!((here.bell_kind, here.bell >> 16, here.fds.0), (BellKind::REGISTER, 0, 0));
    // The host's program rings the vector that the guest's program waits for, and the other way round.
    there.ring();
    assert!(guest.qemu.is_rung(attached.vector, WATCHDOG));
    guest.qemu.ring(0, here.bell as usize);
    assert!(readable(&host.event, WATCHDOG));

    // The status shows what the guest reports about its mapping.
    let mapped = relay::Mapped {
        name: name("web"),
        kind: relay::MappingKind::BAR,
        trusts_members: 1,
        read_mb_s: 9000,
        write_mb_s: 8000,
    };
    guest.send(RelayKind::MAPPED, 0, mapped.as_bytes());
    let shown = wait_for("the mapping", || {
        let status = daemon.inspect();
        let web = status["segments"].as_array()?.iter().find(|s| s["name"] == "web").cloned()?;
        web["mappings"].get(0).cloned()
    });
    let what = json!({
        "member": "vm-a", "kind": "bar", "trusts_members": true, "read_mb_s": 9000, "write_mb_s": 8000,
    });
    assert_eq!(shown, what);

    // A guest sees only its own segments.
    guest.open(6, 78);
    assert_eq!(guest.attach(6, attach_to("nothing")).unwrap_err().0, ErrorCode::NO_SEGMENT.0);

    // The program loses its connection, and comes back.
    guest.send(RelayKind::CLOSE, 5, &[]);
    guest.open(7, 77);
    let wire::Attached { endpoint, epoch, token, .. } = attached;
    let back = wire::Attach { endpoint, epoch, token, ..attach_to("web") };
    assert_eq!(guest.attach(7, back).unwrap().endpoint, endpoint);
    assert_ne!(there.peer_state(), DEAD);
    // The program starts a child and ends. Then the child ends, while another process still holds the connection.
    let process = |pid| relay::Endpoint { endpoint, epoch, pid, reserved: 0, started: 5 };
    guest.send(RelayKind::JOIN, 0, process(99).as_bytes());
    guest.send(RelayKind::GONE, 0, process(77).as_bytes());
    let pids = |pids: serde_json::Value| {
        wait_for("the owners", || {
            let status = daemon.inspect();
            let mut all = status["endpoints"].as_array()?.iter();
            (all.find(|e| e["number"] == json!(endpoint))?["pids"] == pids).then_some(())
        });
    };
    pids(json!([99]));
    guest.send(RelayKind::GONE, 0, process(99).as_bytes());
    pids(json!([]));
    assert_ne!(there.peer_state(), DEAD);
    // When that connection is closed too, the peer on the host is told.
    guest.send(RelayKind::CLOSE, 7, &[]);
    wait_for("death", || (there.peer_state() == DEAD).then_some(()));
}

#[test]
fn a_guest_without_interrupts_is_never_rung() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    let mut guest = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, false);
    guest.open(1, 77);
    guest.attach(1, attach_to("web")).unwrap();
    guest.listen(1, "x");
    assert_eq!(host.connect("x").unwrap().wire.bell_kind, BellKind::NONE);
    host.listen("y").unwrap();
    let out = guest.connect(1, "y").unwrap();
    assert_eq!(out.bell_kind, BellKind::REGISTER);
    guest.qemu.ring(0, out.bell as usize);
    assert!(readable(&host.event, WATCHDOG));
}

#[test]
fn the_end_of_a_qemu_is_the_end_of_its_programs() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    let mut b = Qemu::join(&daemon.run("vm-b.sock"), 4).guest(1, true);
    host.listen("x").unwrap();
    b.open(1, 77);
    b.attach(1, attach_to("web")).unwrap();
    let mut boot = 1;
    takes_less_than(Duration::from_millis(100), || {
        // In all rounds but the first, the VM comes back with its number, its doorbells and an empty control memory.
        boot += 1;
        let mut a = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(boot, true);
        assert!(a.endpoints().is_empty());
        a.open(1, 77);
        a.attach(1, attach_to("web")).unwrap();
        a.listen(1, "a");
        a.connect(1, "x").unwrap();
        let of_host = host.incoming();
        let of_b = rings(&host.memory, b.connect(1, "a").unwrap());
        host.clear_doorbell();
        drop(a);
        let died = Instant::now();
        assert!(readable(&host.event, WATCHDOG), "the bell");
        wait_for("the states", || (of_host.peer_state() == DEAD && of_b.peer_state() == DEAD).then_some(()));
        died.elapsed()
    });
    let mut a = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(boot + 1, true);
    assert!(a.endpoints().is_empty());
    a.open(1, 77);
    a.attach(1, attach_to("web")).unwrap();
}

#[test]
fn a_rebooted_guest_loses_its_programs_and_a_restarted_guest_daemon_does_not() {
    let daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    host.listen("x").unwrap();
    let mut guest = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, true);
    for (client, pid) in [(1, 77), (2, 78)] {
        guest.open(client, pid);
    }
    let first = guest.attach(1, attach_to("web")).unwrap();
    let second = guest.attach(2, attach_to("web")).unwrap();
    guest.connect(1, "x").unwrap();
    let channel = host.incoming();

    // The guest's daemon is restarted: its programs still exist, and it is told of them.
    let mut guest = guest.restart(1, true);
    let known: Vec<(u32, u32, u32)> =
        guest.endpoints().iter().map(|e| (e.endpoint, e.epoch, e.pid)).collect();
    assert_eq!(known, [(first.endpoint, first.epoch, 77), (second.endpoint, second.epoch, 78)]);
    assert_ne!(channel.peer_state(), DEAD);
    guest.open(9, 77);
    let back =
        wire::Attach { endpoint: first.endpoint, epoch: first.epoch, token: first.token, ..attach_to("web") };
    assert_eq!(guest.attach(9, back).unwrap().epoch, first.epoch);
    assert_eq!(guest.connect(9, "x").unwrap().channel, channel.wire.channel, "the same nonce");
    // One of the programs has died meanwhile.
    let gone =
        relay::Endpoint { endpoint: second.endpoint, epoch: second.epoch, pid: 78, reserved: 0, started: 5 };
    guest.send(RelayKind::GONE, 0, gone.as_bytes());
    wait_for("its end", || (daemon.inspect()["endpoints"].as_array()?.len() == 2).then_some(()));
    // A guest cannot end an endpoint that is not its own.
    let other = relay::Endpoint { endpoint: host.wire.endpoint, epoch: host.wire.epoch, ..gone };
    guest.send(RelayKind::GONE, 0, other.as_bytes());
    assert_ne!(channel.peer_state(), DEAD);

    // Another boot identity means that the guest has rebooted.
    let mut guest = guest.restart(2, true);
    assert!(guest.endpoints().is_empty());
    assert_eq!(channel.peer_state(), DEAD);
    assert_eq!(daemon.inspect()["endpoints"].as_array().unwrap().len(), 1);
}

#[test]
fn a_guest_that_scribbles_on_its_control_memory_hurts_nobody() {
    let mut daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    let mut guest = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, true);
    let memory = guest.qemu.memory();
    let mut random = Random::new(88172645463325252);
    host.listen("x").unwrap();
    for round in 0..300 {
        for _ in 0..200 {
            let at = (random.next() as usize % memory.len()) & !7;
            memory.store_relaxed_u64(at, random.next());
        }
        // These are the most sensitive places: the session lines and the counters of the rings.
        for at in [64, 72, 128, 136, 0x1000, 0x1080, 0x12000, 0x12080, 0x12200] {
            memory.store_relaxed_u64(at, if round % 3 == 0 { random.next() } else { random.next() % 70000 });
        }
        guest.qemu.ring(0, 0);
        assert!(daemon.is_running());
        if round % 50 == 0 {
            let channel = host.connect("x").unwrap();
            host.close(channel.wire.channel).unwrap();
            host.incoming();
            host.close(channel.wire.channel).unwrap();
        }
    }
    // When the guest behaves again, it is served.
    let mut guest = guest.restart(4, true);
    guest.open(1, 77);
    guest.attach(1, attach_to("web")).unwrap();
}

kit::program! {
    fn qemu_process() {
        let socket = std::env::var("TEST_QEMU_SOCKET").unwrap();
        let _qemu = Qemu::join(socket.as_ref(), 4);
        // Waits until it is killed.
        let _ = std::io::stdin().read(&mut [0]);
    }
}

#[test]
fn after_a_restart_of_the_daemon_the_end_of_a_qemu_is_still_seen() {
    let mut daemon = Daemon::start_with(VECTORS, TWO);
    let mut qemu =
        daemon.program(qemu_process).env("TEST_QEMU_SOCKET", daemon.run("vm-a.sock")).spawn().unwrap();
    let connected = |daemon: &Daemon| {
        let status = daemon.inspect();
        status["members"]
            .as_array()
            .unwrap()
            .iter()
            .any(|m| m["name"] == "vm-a" && m["connected"] == json!(true))
    };
    wait_for("the VM", || connected(&daemon).then_some(()));
    daemon.restart();
    assert!(connected(&daemon));
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    wait_for("the end of the VM", || (!connected(&daemon)).then_some(()));
    Qemu::join(&daemon.run("vm-a.sock"), 4);
}

#[test]
fn sessions_and_doorbells_outlive_the_daemon() {
    let mut daemon = Daemon::start_with(VECTORS, TWO);
    let mut host = daemon.attach("web", "on-host");
    host.listen("x").unwrap();
    let mut a = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, true);
    assert!(a.endpoints().is_empty());
    a.open(1, 77);
    let attached = a.attach(1, attach_to("web")).unwrap();
    a.connect(1, "x").unwrap();
    let channel = host.incoming();
    host.accepted(&channel);

    daemon.restart();
    // The guest's side notices the new session by itself, and finds its program as it was.
    a.until("a new session", |event| {
        matches!(event, ginnel_daemon::control_link::Event::Up(_)).then_some(())
    });
    let endpoints = a.endpoints();
    assert_eq!((endpoints[0].endpoint, endpoints[0].epoch), (attached.endpoint, attached.epoch));
    assert_ne!(channel.peer_state(), DEAD);
    // A VM that starts now and one that was there before can ring each other.
    let mut b = Qemu::join(&daemon.run("vm-b.sock"), 4);
    a.qemu.ring(7, 0);
    assert!(b.is_rung(1, WATCHDOG));
    b.ring(a.qemu.id, 0);
    assert!(a.qemu.is_rung(1, WATCHDOG));
    // A member that is declared while vm-a's QEMU has no connection: vm-a rings it through the daemon.
    daemon.admin(json!({"op": "vm-add", "name": "late"})).unwrap();
    daemon
        .admin(json!({"op": "segment-create", "name": "pair", "size": "4M", "members": ["late", "vm-a"]}))
        .unwrap();
    let mut late = Qemu::join(&daemon.run("late.sock"), 4).guest(9, true);
    late.open(1, 5);
    let theirs = late.attach(1, attach_to("pair")).unwrap();
    late.listen(1, "z");
    a.open(2, 99);
    a.attach(2, attach_to("pair")).unwrap();
    let channel = a.connect(2, "z").unwrap();
    assert_eq!((channel.bell_kind, channel.bell), (BellKind::REGISTER, 0));
    a.qemu.ring(0, 0);
    assert!(late.qemu.is_rung(theirs.vector, WATCHDOG));
}

#[test]
fn programs_in_a_vm_can_use_locks_and_blocks() {
    let daemon = Daemon::start_new("[vm.a]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n");
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("web", &options).unwrap();
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    guest.open(1, 100);
    let attached = guest
        .attach(1, wire::Attach { segment: name("web"), name: name("guest"), ..FromZeros::new_zeroed() })
        .unwrap();
    let mutex = host.mutex("m").unwrap();
    let open =
        wire::SyncOpen { name: name("m"), kind: SyncKind::MUTEX.0, limit: 0, initial: 0, flags: 0, nonce: 1 };
    let there: wire::Sync = guest.ask(1, Kind::SYNC_OPEN, open.as_bytes(), Kind::SYNC).unwrap();
    assert_eq!((there.slot, there.bell), (1, attached.member << 16 | attached.vector));
    // The page contains the values that the daemon has answered.
    let page = host.memory().part((there.offset - RESERVED) as usize, sync::SIZE).unwrap();
    let word = |at| page.load_acquire_u32(sync::slot(1) + at);
    assert_eq!(word(sync::SLOT_ENDPOINT), attached.endpoint);
    assert_eq!((word(sync::SLOT_EPOCH), word(sync::SLOT_BELL)), (there.epoch, there.bell));
    // The guest rings the host by its register.
    let bell = page.load_acquire_u32(sync::slot(0) + sync::SLOT_BELL);
    let ask = wire::BellOf { bell, reserved: 0 };
    let ring: wire::BellOk = guest.ask(1, Kind::BELL, ask.as_bytes(), Kind::BELL_OK).unwrap();
    assert_eq!((ring.kind, ring.bell, ring.fds), (BellKind::REGISTER, bell, Fds(0)));
    let block = wire::BlockCreate {
        name: name("b"),
        size: 1,
        rights: Rights::READ_WRITE,
        others: Rights::READ,
        nonce: 2,
        ..FromZeros::new_zeroed()
    };
    let block: wire::Block = guest.ask(1, Kind::BLOCK_CREATE, block.as_bytes(), Kind::BLOCK).unwrap();
    assert_eq!(block.owner_member, attached.member);
    let mine = host.open_block("b", Rights::READ).unwrap();
    assert_eq!(mine.len(), 1);
    drop(mutex);
}
