//! The doorbells that programs and VMs may ring. A hostile holder of a doorbell cannot block the daemon or the sends of its
//! peers, and cannot reach other segments.

use ginnel::{AttachOptions, Endpoint, MessageChannel};
use ginnel_layout::wire::{self, BellKind, ErrorCode, Kind};
use kit::daemon::qemu::*;
use kit::daemon::*;
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_for};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

const TWO: &str = "
[segment.web]
size = \"8M\"
members = [\"host\"]
[segment.db]
size = \"8M\"
members = [\"host\"]
";

/// Makes every later write to an eventfd block, as any holder of the eventfd can.
fn spoil(event: &OwnedFd) {
    fcntl_setfl(event, OFlags::empty()).unwrap();
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

/// Runs a closure in a thread, and fails if it does not return.
fn does_not_hang<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || drop(done.send(run())));
    ended.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("{what} hangs"))
}

#[test]
fn a_program_that_fills_its_doorbell_does_not_hang_the_daemon() {
    let mut daemon = Daemon::start_new(TWO);
    let mut hostile = daemon.attach("web", "hostile");
    hostile.listen("x").unwrap();
    let mut peer = daemon.attach("web", "peer");
    let channel = peer.connect("x").unwrap();
    hostile.incoming();
    spoil(&hostile.event);
    // The daemon rings the hostile program because its peer has closed the channel.
    peer.close(channel.wire.channel).unwrap();
    daemon.attach("db", "other").listen("y").unwrap();
    // The next daemon gets the same open file description from the keeper.
    daemon.restart();
    let mut peer = daemon.client().attach_as(peer.back).unwrap();
    let mut hostile = daemon.client().attach_as(hostile.back).unwrap();
    let channel = peer.connect_as("x", 77, 4096).unwrap();
    hostile.incoming();
    peer.close(channel.wire.channel).unwrap();
    daemon.attach("db", "other").listen("z").unwrap();
    assert!(daemon.is_running());
}

#[test]
fn a_program_that_fills_its_doorbell_does_not_hang_a_peers_send() {
    let daemon = Daemon::start_new(TWO);
    let mut hostile = daemon.attach("web", "hostile");
    hostile.listen("x").unwrap();
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("web", &options).unwrap();
    let mut channel: MessageChannel = endpoint.connect("x").unwrap();
    let theirs = hostile.incoming();
    spoil(&hostile.event);
    // To the sender, the hostile program seems to sleep.
    let armed = ginnel_layout::ring::DATA_ARMED;
    ginnel_shmem::SharedMemory::store_release_u32(&theirs.input, armed, 1);
    does_not_hang("a send to a spoiled doorbell", move || {
        channel.send(b"hello").unwrap();
        assert_eq!(channel.sender().counters().rings, 1, "it rang");
        drop((channel, endpoint));
    });
}

#[test]
fn a_doorbell_serves_one_segment() {
    let daemon = Daemon::start_new(TWO);
    let web: Vec<Attached> = (0..20).map(|_| daemon.attach("web", "w")).collect();
    let db: Vec<Attached> = (0..20).map(|_| daemon.attach("db", "d")).collect();
    // Nothing that is done to the doorbells of the programs in one segment wakes programs of the other segment, or keeps a
    // wake-up from them.
    for attached in &web {
        rustix::io::write(&attached.event, &1u64.to_ne_bytes()).unwrap();
    }
    assert!(db.iter().all(|attached| !readable(&attached.event, Duration::ZERO)));
    let vectors =
        |of: &[Attached]| of.iter().map(|a| a.wire.vector).collect::<std::collections::BTreeSet<_>>();
    assert!(vectors(&web).is_disjoint(&vectors(&db)));
    assert!(vectors(&web).len() > 1, "not all wake for one");

    // The daemon does not hand out a doorbell of another segment either, whatever vector the program has found in shared
    // memory.
    let mut asking = web.into_iter().next().unwrap();
    for vector in vectors(&db).into_iter().chain([0, 31, 0xffff]) {
        let body = wire::BellOf { bell: vector, reserved: 0 };
        let refused =
            asking.client.ask::<wire::BellOk>(Kind::BELL, body.as_bytes(), Kind::BELL_OK).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NOT_FOUND.0);
    }
}

#[test]
fn doorbells_of_the_host_outlive_the_daemon_and_the_keeper() {
    let mut daemon = Daemon::start_new(TWO);
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    a.listen("x").unwrap();
    let channel = b.connect("x").unwrap();
    a.incoming();
    daemon.restart();
    let a = daemon.client().attach_as(a.back).unwrap();
    channel.ring();
    assert!(
        readable(&a.event, WATCHDOG),
        "the eventfd that it was given before is the one that it is given now"
    );
}

/// Returns a configuration with so many VMs that their greeting can be too long for a socket.
fn many(vms: usize) -> String {
    let names: Vec<String> = (0..vms).map(|n| format!("vm-{n}")).collect();
    let declared: String = names.iter().map(|name| format!("[vm.{name}]\n")).collect();
    let members: String = names.iter().map(|name| format!(", \"{name}\"")).collect();
    format!("{declared}[segment.all]\nsize = \"8M\"\nmembers = [\"host\"{members}]\n")
}

#[test]
fn a_vm_that_joins_while_the_daemon_is_killed_gets_interrupts_and_rings_through_the_next_daemon() {
    let mut daemon = Daemon::start_with("vectors = 17\n", &many(130));
    let socket = std::os::unix::net::UnixStream::connect(daemon.run("vm-0.sock")).unwrap();
    // The daemon has accepted the VM's connection, and the VM has not read anything.
    wait_for("the VM", || {
        let status = daemon.inspect();
        status["members"].as_array()?.iter().any(|m| m["name"] == "vm-0" && m["live"] == true).then_some(())
    });
    daemon.kill();
    let qemu = Qemu::take_over(socket, 17);
    daemon.start();

    let mut guest = qemu.guest(1, true);
    guest.open(1, 77);
    let body = wire::Attach { segment: name("all"), name: name("in-guest"), ..wire::Attach::new_zeroed() };
    let attached = guest.attach(1, body).unwrap();
    guest.listen(1, "here");
    let mut host = daemon.attach("all", "on-host");
    host.listen("there").unwrap();
    let out = guest.connect(1, "there").unwrap();
    host.incoming();
    // As far as the daemon knows, this QEMU has no doorbells of other members.
    assert_eq!((out.bell_kind, out.bell), (BellKind::REGISTER, 0));
    guest.qemu.ring(0, 0);
    assert!(readable(&host.event, WATCHDOG));
    // It has its own vectors.
    host.connect("here").unwrap().ring();
    assert!(guest.qemu.is_rung(attached.vector, WATCHDOG));
}

/// The number of waiters that a hostile program adds to its doorbell.
const WAITERS: u64 = 400_000;

kit::program! {
    /// Attaches, adds very many waiters to its doorbell, and listens.
    fn crowd() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let mut hostile = Client::hello(&program_socket()).attach("web", "hostile").unwrap();
        let _epolls = kit::hold::crowd(&hostile.event, WAITERS);
        hostile.listen("x").unwrap();
        println!("{WAITERS}");
        let _ = std::io::stdin().read_line(&mut String::new());
    }
}

#[test]
fn a_program_with_very_many_waiters_at_its_doorbell_delays_nobody() {
    let mut daemon = Daemon::start_new(TWO);
    let mut hostile = Process(daemon.program(crowd).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(hostile.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim().parse(), Ok(WAITERS));
    // Others in its segment connect to it, and each of them that ends makes the daemon ring.
    let begin = Instant::now();
    for _ in 0..50 {
        let mut peer = daemon.attach("web", "peer");
        let channel = peer.connect("x").unwrap();
        peer.close(channel.wire.channel).unwrap();
        daemon.attach("db", "other").listen("y").unwrap();
    }
    assert!(begin.elapsed() < WATCHDOG / 6, "others wait: {:?}", begin.elapsed());
    // Doorbells of others ring meanwhile.
    let mut victim = daemon.attach("db", "victim");
    victim.listen("z").unwrap();
    let mut peer = daemon.attach("db", "peer");
    victim.clear_doorbell();
    let channel = peer.connect("z").unwrap();
    victim.incoming();
    peer.close(channel.wire.channel).unwrap();
    assert!(readable(&victim.event, WATCHDOG / 6), "its doorbell does not ring");
    assert!(daemon.is_running());
}
