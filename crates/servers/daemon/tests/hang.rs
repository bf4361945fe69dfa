//! Guests whose daemon does not answer, and the QEMU that stops them.

use ginnel::{AttachOptions, Endpoint};
use ginnel_layout::relay::RelayKind;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{self, Kind};
use kit::daemon::qemu::{Guest, Qemu};
use kit::daemon::*;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

fn world(more: &str) -> (Daemon, Guest) {
    let config = format!("[vm.a]\n{more}\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n");
    let daemon = Daemon::start_new(&config);
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    guest.open(1, 100);
    let body = wire::Attach { segment: name("web"), name: name("guest"), ..FromZeros::new_zeroed() };
    guest.attach(1, body).unwrap();
    (daemon, guest)
}

fn hangs(daemon: &Daemon) -> bool {
    daemon.inspect()["members"][1]["hangs"] == json!(true)
}

#[test]
fn a_guest_that_hangs_is_fenced_if_configured() {
    let (daemon, mut guest) = world("hang_after = 1\non_hang = \"fence\"");
    let open = wire::SyncOpen {
        name: name("m"),
        kind: SyncKind::MUTEX.0,
        limit: 0,
        initial: 0,
        flags: wire::SyncOpen::CREATE,
        nonce: 1,
    };
    let object: wire::Sync = guest.ask(1, Kind::SYNC_OPEN, open.as_bytes(), Kind::SYNC).unwrap();
    let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
    let host = Endpoint::attach_with("web", &options).unwrap();
    let mut mutex = host.mutex("m").unwrap();
    // Take the lock as the guest does before it hangs.
    let (number, slot) = (daemon.inspect()["endpoints"][0]["number"].as_u64().unwrap(), object.slot as usize);
    let word = ginnel_layout::sync::OwnerWord::owned(slot, object.epoch as u16, number as u32);
    let page = host.memory().part((object.offset - ginnel_layout::segment::RESERVED) as usize, 4096).unwrap();
    ginnel_shmem::SharedMemory::store_release_u64(&page, ginnel_layout::sync::STATE, word.0);
    mutex.set_timeout(Some(Duration::from_millis(100)));
    assert!(mutex.lock().is_err(), "it has the lock");
    mutex.set_timeout(Some(WATCHDOG));
    assert!(mutex.lock().unwrap().owner_died());
    assert!(hangs(&daemon));
    assert_eq!(daemon.inspect()["members"][1]["endpoints"], json!(0));
    // The guest was asked before it was fenced. When it answers after all, it does not count as hung any more.
    guest.message(RelayKind::PING, 0);
    guest.send(RelayKind::PONG, 0, &[]);
    wait_for("the guest to count as alive", || (!hangs(&daemon)).then_some(()));
}

#[test]
fn a_guest_that_answers_does_not_hang() {
    let attempt = || {
        let (daemon, mut guest) = world("hang_after = 1\non_hang = \"fence\"");
        let begin = Instant::now();
        let (mut answered, mut longest) = (begin, Duration::ZERO);
        while begin.elapsed() < Duration::from_millis(2500) {
            guest.message(RelayKind::PING, 0);
            guest.send(RelayKind::PONG, 0, &[]);
            longest = longest.max(answered.elapsed());
            answered = Instant::now();
            daemon.inspect();
        }
        let kept = daemon.inspect()["members"][1]["endpoints"] == json!(1);
        (longest, kept && !daemon.log().contains("hangs"))
    };
    // The machine may keep this thread from answering in time. Such an attempt proves nothing.
    takes_less_than(Duration::from_millis(900), || {
        let (longest, lives) = attempt();
        assert!(lives || longest >= Duration::from_millis(900), "silent for {longest:?} at most");
        longest
    });
}

#[test]
fn without_on_hang_the_daemon_only_warns_of_a_hung_guest() {
    let (daemon, guest) = world("hang_after = 1");
    wait_for("the warning", || daemon.log().contains("the VM hangs").then_some(()));
    assert!(hangs(&daemon));
    assert_eq!(daemon.inspect()["members"][1]["endpoints"], json!(1));
    drop(guest);
}

/// The control socket (QMP) of a QEMU.
struct Control {
    socket: UnixStream,
    lines: std::io::Lines<BufReader<UnixStream>>,
}

impl Control {
    /// Accepts the daemon's connection and greets it, as QEMU does.
    fn of(listener: &UnixListener) -> Self {
        let socket = listener.accept().unwrap().0;
        socket.set_read_timeout(Some(WATCHDOG)).unwrap();
        let lines = BufReader::new(socket.try_clone().unwrap()).lines();
        let mut control = Self { socket, lines };
        control.say(json!({ "QMP": { "version": {}, "capabilities": ["oob"] } }));
        assert_eq!(control.answer(json!({})), "qmp_capabilities");
        control
    }

    fn say(&mut self, what: Value) {
        writeln!(self.socket, "{what}\r").unwrap();
    }

    fn command(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    /// Answers the next command, and returns the name of that command.
    fn answer(&mut self, result: Value) -> String {
        let command = self.command();
        self.say(json!({ "return": result, "id": command["id"] }));
        command["execute"].as_str().unwrap().to_owned()
    }
}

/// Makes a VM that has a QMP socket and is to be fenced when it hangs.
fn controlled() -> (Daemon, Guest, UnixListener) {
    let mut daemon = Daemon::prepare("", "");
    let path = daemon.dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let vm = format!("[vm.a]\nhang_after = 1\non_hang = \"fence\"\nqmp = {path:?}\n");
    let segment = "[segment.web]\nsize = \"8M\"\nmemory = \"bar\"\nmembers = [\"host\", \"a\"]\n";
    daemon.write_config("", &format!("{vm}{segment}"));
    daemon.start();
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    guest.open(1, 100);
    let body = wire::Attach { segment: name("web"), name: name("guest"), ..FromZeros::new_zeroed() };
    guest.attach(1, body).unwrap();
    (daemon, guest, listener)
}

fn endpoints(daemon: &Daemon) -> u64 {
    daemon.inspect()["members"][1]["endpoints"].as_u64().unwrap()
}

#[test]
fn a_vm_is_stopped_before_its_programs_are_declared_dead() {
    let (daemon, mut guest, listener) = controlled();
    let mut qemu = Control::of(&listener);
    wait_for("the QMP connection", || (daemon.inspect()["members"][1]["qmp_ready"] == true).then_some(()));
    let stop = qemu.command();
    assert_eq!(stop["execute"], "stop");
    // QEMU takes its time to answer; meanwhile the daemon serves others.
    for _ in 0..20 {
        assert_eq!((endpoints(&daemon), hangs(&daemon)), (1, true));
    }
    qemu.say(json!({ "event": "STOP", "timestamp": {} }));
    qemu.say(json!({ "return": {}, "id": stop["id"] }));
    wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
    assert_eq!(daemon.inspect()["members"][1]["fenced"], true);

    // The daemon deletes only a device that can be unplugged and belongs to Ginnel.
    let mut deleted = Vec::new();
    let mut answered = 0;
    while answered < 7 {
        let command = qemu.command();
        let argument = |key: &str| command["arguments"][key].as_str().unwrap_or_default().to_owned();
        let result = match (command["execute"].as_str().unwrap(), &*argument("path"), &*argument("property"))
        {
            ("qom-list", "/machine/peripheral", _) => json!([{ "name": "type", "type": "string" },
                { "name": "theirs", "type": "child<ivshmem-plain>" }]),
            ("qom-list", "/machine/peripheral-anon", _) => json!([
                { "name": "device[0]", "type": "child<virtio-pmem-pci>" },
                { "name": "device[1]", "type": "child<ivshmem-plain>" }]),
            ("qom-get", "/machine/peripheral/theirs", "memdev") => json!("/objects/theirs"),
            ("qom-get", "/machine/peripheral-anon/device[1]", "memdev") => json!("/objects/ours"),
            ("qom-get", "/objects/theirs", "mem-path") => json!("/dev/shm/theirs"),
            ("qom-get", "/objects/ours", "mem-path") => json!(daemon.shm("web")),
            ("device_del", ..) => {
                deleted.push(argument("id"));
                json!({})
            }
            _ => panic!("{command}"),
        };
        qemu.say(json!({ "return": result, "id": command["id"] }));
        answered += 1;
    }
    assert_eq!(deleted, ["/machine/peripheral-anon/device[1]"]);
    wait_for("the device", || daemon.log().contains("is to be unplugged").then_some(()));

    // Somebody resumes the VM, and its daemon answers.
    qemu.say(json!({ "event": "RESUME" }));
    wait_for("the VM to go on", || (daemon.inspect()["members"][1]["fenced"] == false).then_some(()));
    guest.send(RelayKind::PONG, 0, &[]);
    wait_for("the guest to count as alive", || (!hangs(&daemon)).then_some(()));
}

#[test]
fn a_qemu_that_does_not_answer_is_given_up_after_5_s() {
    takes_less_than(Duration::from_secs(8), || {
        let (daemon, _guest, listener) = controlled();
        let mut qemu = Control::of(&listener);
        assert_eq!(qemu.command()["execute"], "stop");
        let begin = Instant::now();
        wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
        let waited = begin.elapsed();
        assert!(waited >= Duration::from_secs(4), "given up after {waited:?}");
        assert!(daemon.log().contains("QEMU does not answer within 5 s"), "{}", daemon.log());
        assert_eq!(daemon.inspect()["members"][1]["fenced"], false);
        waited
    });
}

#[test]
fn without_a_usable_qmp_socket_the_programs_of_a_hung_vm_are_declared_dead() {
    // First QEMU is there and does not greet, as if it spoke to another client; then it is not there.
    for gone in [false, true] {
        let (daemon, _guest, listener) = controlled();
        let connection = listener.accept().unwrap();
        if gone {
            drop((connection, listener));
        }
        wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
        let log = daemon.log();
        assert!(log.contains("the VM cannot be stopped"), "{log}");
        if gone {
            assert!(log.contains("start QEMU with what `ginnel qemu-args` prints"), "{log}");
        }
    }
}

#[test]
fn a_reset_ends_the_programs_of_a_vm_and_is_not_a_hang() {
    // The guest is silent. On a busy machine it may count as hung before it is reset; that proves nothing.
    let mut reset = None;
    takes_less_than(Duration::from_millis(900), || {
        let begin = Instant::now();
        let (daemon, guest, listener) = controlled();
        let mut qemu = Control::of(&listener);
        qemu.say(json!({ "event": "RESET", "data": { "guest": true, "reason": "guest-reset" } }));
        wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
        reset = Some((daemon, guest, listener, qemu));
        begin.elapsed()
    });
    let (daemon, guest, _listener, mut qemu) = reset.unwrap();
    // The guest takes its time to boot.
    let booted = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < booted {
        assert!(!hangs(&daemon));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!daemon.log().contains("hangs"), "{}", daemon.log());
    // Then the guest's daemon answers, and falls silent again without programs: nothing is to be fenced.
    let _guest = guest.restart(2, true);
    wait_for("the guest to count as hung", || hangs(&daemon).then_some(()));
    wait_for("the log line that no program is attached", || {
        daemon.log().contains("none of its programs is attached").then_some(())
    });
    qemu.socket.set_nonblocking(true).unwrap();
    assert!(qemu.lines.next().unwrap().is_err(), "it was stopped");
}

/// Makes a VM with a QMP socket whose guest may be silent.
fn quiet() -> (Daemon, UnixListener) {
    let mut daemon = Daemon::prepare("", "");
    let path = daemon.dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let segment = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n";
    daemon.write_config("", &format!("[vm.a]\nqmp = {path:?}\n{segment}"));
    daemon.start();
    (daemon, listener)
}

fn attached(mut guest: Guest) -> Guest {
    guest.open(1, 100);
    let body = wire::Attach { segment: name("web"), name: name("guest"), ..FromZeros::new_zeroed() };
    guest.attach(1, body).unwrap();
    guest
}

#[test]
fn resets_without_end_cost_little_and_the_last_one_counts() {
    let (daemon, listener) = quiet();
    let guest = attached(Qemu::join(&daemon.run("a.sock"), 32).guest(1, true));
    let mut qemu = Control::of(&listener);
    let begin = Instant::now();
    // What is no QMP ends the connection.
    let resets = "{\"event\":\"RESET\"}\n".repeat(10_000) + "end\n";
    qemu.socket.write_all(resets.as_bytes()).unwrap();
    wait_for("the daemon has read them", || daemon.log().contains("is not QMP").then_some(()));
    let handled = || daemon.log().matches("the VM was reset").count();
    let most = 2 + begin.elapsed().as_millis() / 100;
    assert!(handled() as u128 <= most, "{} resets, at most {most}", handled());
    assert_eq!(endpoints(&daemon), 0);
    // The last one is handled 0.1 seconds after the one before. A daemon that answers later has handled it.
    let rest = Instant::now() + Duration::from_millis(200);
    while Instant::now() < rest {
        daemon.inspect();
    }
    daemon.inspect();
    let before = handled();
    // The next kernel is reset once.
    let _guest = attached(guest.restart(2, true));
    let mut qemu = Control::of(&listener);
    assert_eq!(endpoints(&daemon), 1);
    qemu.say(json!({ "event": "RESET" }));
    wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
    assert_eq!(handled(), before + 1);
}

#[test]
fn a_qemu_that_connects_again_and_again_costs_few_processes() {
    const TIMES: u32 = 40;
    let (daemon, listener) = quiet();
    drop(listener);
    let begin = Instant::now();
    let says = |what: &str| daemon.log().matches(what).count() as u32;
    for n in 1..=TIMES {
        drop(Qemu::join(&daemon.run("a.sock"), 32));
        wait_for("the daemon has noticed its end", || (says("VM gone") == n).then_some(()));
    }
    let (looked, took) = (says("cannot be used"), begin.elapsed());
    assert!(u128::from(looked) <= 2 + took.as_millis() / 250, "{looked} finders in {took:?}");
}

#[test]
fn a_monitor_that_appears_after_the_guest_is_used_when_it_hangs() {
    let mut daemon = Daemon::prepare("", "");
    let path = daemon.dir.path().join("qmp");
    let vm = format!("[vm.a]\nhang_after = 2\non_hang = \"fence\"\nqmp = {path:?}\n");
    daemon.write_config("", &format!("{vm}[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n"));
    daemon.start();
    let _guest = attached(Qemu::join(&daemon.run("a.sock"), 32).guest(1, true));
    wait_for("the daemon to look for it", || daemon.log().contains("cannot be used").then_some(()));
    let listener = UnixListener::bind(&path).unwrap();
    let mut qemu = Control::of(&listener);
    assert_eq!(qemu.answer(json!({})), "stop");
    wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
    assert_eq!(daemon.inspect()["members"][1]["fenced"], true);
}

#[test]
fn a_guest_that_falls_silent_with_the_daemon_is_fenced_by_the_next() {
    let (mut daemon, _guest, listener) = controlled();
    drop(Control::of(&listener));
    daemon.kill();
    daemon.start();
    let mut qemu = Control::of(&listener);
    assert_eq!(qemu.answer(json!({})), "stop");
    wait_for("its endpoint's death", || (endpoints(&daemon) == 0).then_some(()));
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().success());
}
