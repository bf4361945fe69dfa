//! `kill -9` of the daemon: programs do not notice it, and the next daemon continues.

use ginnel::{AttachOptions, Block, BlockOptions, Endpoint};
use ginnel_layout::ring::SideState;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use rustix::process::Signal;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";
const DEAD: (u32, u32) = (SideState::DEAD.0, SideState::DEAD.0);

/// Attaches again as the same endpoint.
fn back(daemon: &Daemon, old: &Attached) -> Attached {
    daemon.client().attach_as(old.back).unwrap()
}

#[test]
fn endpoints_listeners_and_channels_outlive_the_daemon() {
    let mut daemon = Daemon::start_new(WEB);
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    let listener = a.listen("x").unwrap();
    let accepted = b.connect("x").unwrap();
    let there = a.incoming();
    a.accepted(&there);
    let waiting = b.connect("x").unwrap();
    for round in 0..5 {
        let before = Instant::now();
        daemon.restart();
        assert!(before.elapsed() < WATCHDOG / 2, "round {round}");
        // The data path is untouched.
        accepted.output.write(0x200, &[round; 8]);
        assert_eq!(there.input.load_relaxed_u64(0x200), u64::from_le_bytes([round; 8]));
        accepted.ring();
        let (mut a, mut b) = (back(&daemon, &a), back(&daemon, &b));
        assert_eq!(
            (a.wire.endpoint, a.wire.epoch, a.wire.vector),
            (a.back.endpoint, a.back.epoch, a.wire.vector)
        );
        // Only the channel that was not accepted is announced again.
        let again = a.incoming();
        assert_eq!((again.wire.channel, again.wire.listener), (waiting.wire.channel, listener));
        // A repeated request whose answer was lost gets the same answer.
        assert_eq!(b.connect_as("x", waiting.wire.nonce, 4096).unwrap().wire.channel, waiting.wire.channel);
        assert_eq!(a.listen("x").unwrap(), listener);
        // New channels lie elsewhere and have new numbers.
        let new = b.connect_as("x", 100 + u64::from(round), 4096).unwrap();
        assert!(new.wire.channel > waiting.wire.channel);
        assert!(new.wire.offset != waiting.wire.offset && new.wire.offset != accepted.wire.offset);
        let seen = a.incoming();
        assert_eq!(seen.wire.channel, new.wire.channel);
        a.close(new.wire.channel).unwrap();
        b.close(new.wire.channel).unwrap();
        // The doorbells are the same as before.
        new.ring();
        assert!(readable(&a.event, WATCHDOG));
        // The clients end together with the daemon, so that the end of this round's connections does not end their endpoints.
        daemon.kill();
        drop((a, b));
        daemon.start();
    }
    let status = daemon.inspect();
    assert_eq!(status["daemon"]["generation"], json!(11));
    assert_eq!(status["endpoints"].as_array().unwrap().len(), 2);
    assert_eq!(status["channels"].as_array().unwrap().len(), 2);
}

kit::program! {
    fn program() {
        let mut own = Client::hello(&program_socket()).attach("web", "program").unwrap();
        own.listen("program").unwrap();
        let _ = std::io::stdin().read(&mut [0]);
    }
}

#[test]
fn the_death_of_a_program_is_reported_within_100_ms() {
    let daemon = Daemon::start_new(WEB);
    let mut own = daemon.attach("web", "own");
    takes_less_than(Duration::from_millis(100), || {
        let mut program = daemon.start_program(program);
        let channel = wait_for("its listener", || own.connect("program").ok());
        own.clear_doorbell();
        let killed = Instant::now();
        program.kill().unwrap();
        assert!(readable(&own.event, WATCHDOG), "the bell");
        wait_for("the state", || (channel.peer_state() == DEAD).then_some(()));
        let told = killed.elapsed();
        program.wait().unwrap();
        told
    });
}

#[test]
fn a_death_while_the_daemon_is_away_or_before_the_program_returns_is_reported() {
    let mut daemon = Daemon::start_new(WEB);
    let own = daemon.attach("web", "own");
    let mut programs = Vec::new();
    for nonce in 1..=2 {
        // One program at a time: the name is free again when its owner has ended.
        let program = daemon.start_program(program);
        let mut asking = daemon.attach("web", "asking");
        let channel = wait_for("its listener", || asking.connect_as("program", nonce, 4096).ok());
        programs.push((program, asking, channel));
        if nonce == 1 {
            daemon.kill();
            programs[0].0.kill().unwrap();
            programs[0].0.wait().unwrap();
            assert_ne!(programs[0].2.peer_state(), DEAD, "nobody can know of the death yet");
            daemon.start();
            assert_eq!(programs[0].2.peer_state(), DEAD);
            assert!(readable(&programs[0].1.event, WATCHDOG));
        }
    }
    // The program is alive at the restart and never comes back, so the daemon must watch its process.
    daemon.restart();
    let (program, _, channel) = &mut programs[1];
    assert_ne!(channel.peer_state(), DEAD);
    program.kill().unwrap();
    program.wait().unwrap();
    wait_for("its end", || (channel.peer_state() == DEAD).then_some(()));
    drop(own);
}

#[test]
fn a_torn_journal_costs_its_last_record_only() {
    let mut daemon = Daemon::start_new(WEB);
    let a = daemon.attach("web", "a");
    daemon.kill();
    let path = daemon.dir.path().join("state/journal");
    let mut journal = std::fs::read(&path).unwrap();
    journal.extend_from_slice(b"0badc0de 7 {\"dea");
    std::fs::write(&path, journal).unwrap();
    daemon.start();
    assert_eq!(back(&daemon, &a).wire.epoch, a.wire.epoch);
    assert!(daemon.log().contains("its end is torn or damaged"));
}

#[test]
fn without_a_keeper_all_programs_must_attach_anew() {
    let mut daemon = Daemon::start_new(WEB);
    // Daemon and keeper die at once: the doorbells are lost, so no program may rely on them any more.
    let mut b = daemon.attach("web", "b");
    let mut c = daemon.attach("web", "c");
    b.listen("x").unwrap();
    let channel = c.connect("x").unwrap();
    daemon.kill();
    stop_keeper(&daemon);
    daemon.start();
    assert_eq!(channel.peer_state(), DEAD);
    assert_eq!(daemon.client().attach_as(b.back).err().unwrap().code, ErrorCode::STALE.0);
}

fn stop_keeper(daemon: &Daemon) {
    let keeper = ginnel_daemon::packet::connect_to(&daemon.run("keeper.sock")).unwrap();
    ginnel_daemon::packet::send::<std::os::fd::OwnedFd>(keeper.as_fd(), b"X", &[]).unwrap();
    assert_eq!(ginnel_daemon::packet::receive(keeper.as_fd(), 100, 0).unwrap().bytes, b"K");
    assert!(readable(&keeper, WATCHDOG) && ginnel_daemon::packet::receive(keeper.as_fd(), 100, 0).is_err());
}

#[test]
fn a_keeper_that_dies_is_replaced() {
    let mut daemon = Daemon::start_new(WEB);
    let a = daemon.attach("web", "a");
    stop_keeper(&daemon);
    wait_for("another keeper", || daemon.run("keeper.sock").exists().then_some(()));
    wait_for("its contents", || daemon.log().contains("another one takes its place").then_some(()));
    // The daemon serves again only after everything is stored in the new keeper.
    daemon.inspect();
    daemon.restart();
    let mut a = back(&daemon, &a);
    let mut b = daemon.attach("web", "b");
    b.listen("x").unwrap();
    let channel = a.connect("x").unwrap();
    b.incoming().ring();
    assert!(readable(&a.event, WATCHDOG), "the doorbell is the one that it has");
    drop(channel);
}

#[test]
fn a_clean_exit_removes_the_sockets_and_keeps_the_data_path() {
    let mut daemon = Daemon::start_new(&format!("[vm.vm-a]\n{WEB}"));
    let a = daemon.attach("web", "a");
    assert!(daemon.run("vm-a.sock").exists());
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().success());
    assert!(!daemon.socket().exists() && !daemon.run("vm-a.sock").exists());
    assert!(daemon.shm("web").exists());
    daemon.start();
    assert_eq!(back(&daemon, &a).wire.epoch, a.wire.epoch);
}

#[test]
fn two_daemons_never_serve_the_same_folders() {
    let daemon = Daemon::start_new(WEB);
    let second = daemon.output(&[]);
    assert!(!second.status.success());
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.contains(&format!("another ginneld (process {}) serves", daemon.pid())), "{text}");
    daemon.attach("web", "still-served");
}

#[test]
fn run_time_segments_and_vms_are_remembered() {
    let mut daemon = Daemon::start_new(WEB);
    daemon.admin(json!({"op": "vm-add", "name": "vm-x", "home": "4M"})).unwrap();
    let request = json!({"op": "segment-create", "name": "more", "size": "4M", "members": ["host", "vm-x"]});
    daemon.admin(request.clone()).unwrap();
    assert_eq!(daemon.admin(request).unwrap_err().code, ErrorCode::IN_USE.0);
    let a = daemon.attach("more", "a");
    let look = |daemon: &Daemon| {
        let status = daemon.inspect();
        let vms: Vec<_> = status["members"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| (m["name"].clone(), m["number"].clone()))
            .collect();
        let segments: Vec<_> = status["segments"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| (s["name"].clone(), s["members"].clone()))
            .collect();
        (vms, segments)
    };
    let before = look(&daemon);
    assert_eq!(before.1.len(), 3, "{before:?}");
    daemon.restart();
    assert_eq!(look(&daemon), before);
    let a = back(&daemon, &a);
    let refused = daemon.admin(json!({"op": "segment-remove", "name": "more"})).unwrap_err();
    assert_eq!(refused.code, ErrorCode::IN_USE.0);
    daemon.admin(json!({"op": "segment-remove", "name": "more", "force": true})).unwrap();
    daemon.admin(json!({"op": "vm-remove", "name": "vm-x"})).unwrap();
    assert!(a.client.receive().is_none(), "its connection has ended");
    assert!(!daemon.shm("more").exists() && !daemon.shm("home-vm-x").exists());
    daemon.restart();
    assert_eq!(look(&daemon).1.len(), 1);
    // A VM name keeps its number for ever.
    daemon.admin(json!({"op": "vm-add", "name": "vm-y"})).unwrap();
    daemon.admin(json!({"op": "vm-add", "name": "vm-x"})).unwrap();
    let after = look(&daemon).0;
    let number = |name: &str, of: &[(serde_json::Value, serde_json::Value)]| {
        of.iter().find(|m| m.0 == name).unwrap().1.clone()
    };
    assert_eq!(number("vm-x", &after), number("vm-x", &before.0));
    assert_ne!(number("vm-y", &after), number("vm-x", &after));
}

#[test]
fn invalid_admin_requests_are_refused() {
    let daemon = Daemon::start_new(&format!("[vm.vm-a]\n{WEB}"));
    let code = |request: serde_json::Value| daemon.admin(request).unwrap_err();
    for request in [
        json!([]),
        json!({}),
        json!({"op": "segment-create"}),
        json!({"op": "fly", "name": "x"}),
        json!({"op": "segment-create", "name": "x"}),
        json!({"op": "segment-create", "name": "x/y", "size": "4M", "members": ["host"]}),
        json!({"op": "segment-create", "name": "x", "size": 0, "members": ["host"]}),
        json!({"op": "segment-create", "name": "x", "size": "4M", "members": []}),
        json!({"op": "segment-create", "name": "x", "size": "4M", "members": ["host"], "colour": 1}),
        json!({"op": "segment-create", "name": "x", "size": "64T", "members": ["host"]}),
        json!({"op": "segment-remove", "name": "web"}),
        json!({"op": "segment-remove", "name": "web", "force": 1}),
        json!({"op": "vm-add", "name": "host"}),
        json!({"op": "vm-add", "name": "x", "number": 0}),
        json!({"op": "vm-remove", "name": "vm-a"}),
    ] {
        let refused = code(request.clone());
        assert_eq!(refused.code, ErrorCode::INVALID.0, "{request}: {refused:?}");
        assert!(refused.text.len() > 10 && !refused.text.contains('\n'), "{request}: {refused:?}");
    }
    assert_eq!(code(json!({"op": "segment-remove", "name": "nothing"})).code, ErrorCode::NOT_FOUND.0);
    assert_eq!(code(json!({"op": "vm-add", "name": "vm-a"})).code, ErrorCode::IN_USE.0);
    let request = json!({"op": "segment-create", "name": "x", "size": "4M", "members": ["nobody"]});
    assert_eq!(code(request).code, ErrorCode::NOT_FOUND.0);
    assert!(!daemon.shm("x").exists());
    let mut client = daemon.client();
    let request = client.send(Kind::ADMIN, &[0xff, 0xfe]);
    let packet = client.answer(request).unwrap();
    assert_eq!(wire::split(&packet.bytes).unwrap().0.kind, Kind::ERROR);
}

/// Does what systemd does for a unit with a descriptor store, as seen from outside.
#[test]
fn under_systemd_its_descriptor_store_replaces_the_keeper() {
    use ginnel_daemon::packet;
    use std::os::fd::OwnedFd;
    let daemon = Daemon::prepare("vectors = 2\n", WEB);
    let notify = daemon.dir.path().join("notify");
    let store = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    let start = |held: &[(String, OwnedFd)]| {
        // Descriptors are passed from number 3 on, to the process that LISTEN_PID names.
        let copies: Vec<OwnedFd> = held.iter().map(|(_, fd)| rustix::io::dup(fd).unwrap()).collect();
        let moves: String = copies
            .iter()
            .enumerate()
            .map(|(i, fd)| format!("exec {}<&{};", i + 100, std::os::fd::AsRawFd::as_raw_fd(fd)))
            .chain((0..copies.len()).map(|i| format!("exec {}<&{};", i + 3, i + 100)))
            .collect();
        let names: Vec<&str> = held.iter().map(|(name, _)| name.as_str()).collect();
        let script = format!(
            "{moves} export LISTEN_PID=$$; exec {} host --config {}",
            kit::build::program("ginneld").display(),
            daemon.config().display()
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).env("NOTIFY_SOCKET", &notify).env("GINNEL_FDSTORE", "1");
        if !held.is_empty() {
            command.env("LISTEN_FDS", held.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        let log = std::fs::OpenOptions::new().create(true).append(true).open(daemon.dir.path().join("log"));
        command.stderr(log.unwrap()).spawn().unwrap()
    };
    // Receives the notifications until the daemon is ready: descriptors to store, then READY.
    let hear = || {
        let mut stored: Vec<(String, OwnedFd)> = Vec::new();
        loop {
            assert!(readable(&store, WATCHDOG), "it never gets ready");
            let packet = packet::receive(store.as_fd(), 4096, 8).unwrap();
            let text = String::from_utf8(packet.bytes).unwrap();
            if text.contains("READY=1") {
                return stored;
            }
            let name = text.lines().find_map(|l| l.strip_prefix("FDNAME=")).unwrap().to_owned();
            if text.contains("FDSTORE=1") {
                stored.push((name, packet.fds.into_iter().next().unwrap()));
            }
        }
    };
    let mut child = start(&[]);
    let mut stored = hear();
    let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"vectors-0.0") && names.contains(&"doorbells-web.0"), "{names:?}");
    assert!(!daemon.run("keeper.sock").exists());
    let a = daemon.attach("web", "a");
    child.kill().unwrap();
    child.wait().unwrap();

    stored.reverse(); // systemd guarantees no order.
    let mut child = start(&stored);
    assert!(hear().is_empty(), "nothing new to store");
    let mut a = back(&daemon, &a);
    let mut b = daemon.attach("web", "b");
    a.listen("x").unwrap();
    b.connect("x").unwrap().ring();
    assert!(readable(&a.event, WATCHDOG), "the doorbell is the one that it has");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Some blocks live while others come and go, so that the journal grows long and most of its records are obsolete.
#[test]
fn a_daemon_killed_while_it_rewrites_the_journal_forgets_nothing() {
    let mut daemon =
        Daemon::start_new("[segment.web]\nsize = \"8M\"\nmemory = \"bar\"\nmembers = [\"host\"]\n");
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("web", &options).unwrap();
    let mut live: BTreeMap<String, Block> = BTreeMap::new();
    let new = daemon.dir.path().join("state/journal.new");
    let (mut next, mut hit) = (0u64, 0);
    let mut rounds = 0u64..;
    // On a busy machine, all kills of the first rounds may come too late.
    while let Some(round) = rounds.next().filter(|&round| round < 6 || hit == 0) {
        assert!(round < 60, "none of the kills came in time");
        let begun = next;
        while !new.exists() {
            assert!(next - begun < 100_000, "it is not rewritten");
            let name = format!("block-{next}");
            let block = endpoint.create_block(&name, 4096, &BlockOptions::default()).unwrap();
            next += 1;
            if live.len() < 300 {
                live.insert(name, block);
            } else {
                endpoint.unlink_block(&name).unwrap();
                block.close().unwrap();
            }
        }
        // Each round kills at another moment; in the last rounds, when the daemon has had a turn to rename the new journal.
        std::thread::sleep(Duration::from_millis((round % 6).pow(2)));
        if round % 6 >= 4 {
            daemon.inspect();
        }
        daemon.kill();
        hit += u32::from(new.exists());
        // The next daemon may begin to rewrite it at once.
        daemon.start();
        let status = daemon.inspect();
        let blocks = status["blocks"].as_array().unwrap();
        let names: Vec<&str> = blocks.iter().map(|block| block["name"].as_str().unwrap()).collect();
        assert_eq!(names.len(), live.len(), "round {round}");
        assert!(names.iter().all(|name| live.contains_key(*name)), "round {round}: {names:?}");
        // In each round one block is deleted.
        let (name, block) = live.pop_first().unwrap();
        endpoint.unlink_block(&name).unwrap();
        block.close().unwrap();
    }
    println!("{hit} kills came before the new journal had its name");
}
