//! Clients that try to do harm, and files that vanish: the daemon keeps serving the others.

use ginnel::{AttachOptions, Endpoint, MessageChannel, StreamChannel};
use ginnel_daemon::packet;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::daemon::*;
use kit::random::Random;
use kit::wait::{WATCHDOG, wait_for};
use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError};
use serde_json::json;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

kit::test_that_skips_are_seen!();

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";

/// Checks that two programs that follow the protocol get a channel in time.
fn serves(daemon: &mut Daemon) {
    assert!(daemon.is_running());
    let before = Instant::now();
    let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
    // The name is unique: after a restart, endpoints of this living process that were dropped meanwhile are still known.
    let at = format!("honest-{}-{}", a.wire.endpoint, a.wire.epoch);
    a.listen(&at).unwrap();
    b.connect(&at).unwrap();
    a.incoming();
    assert!(before.elapsed() < WATCHDOG / 2, "served, but late");
}

/// Receives a refusal and returns its code. Checks whether the connection ends after it.
fn refusal(client: &Client, ends: bool) -> u32 {
    let packet = client.receive().expect("no answer");
    let (header, body) = wire::split(&packet.bytes).unwrap();
    assert_eq!(header.kind, Kind::ERROR);
    let (error, text) = wire::Error::read_from_prefix(body).unwrap();
    assert!(text.len() > 10);
    let time = if ends { WATCHDOG } else { Duration::from_millis(50) };
    let ended = readable(&client.fd, time) && client.receive().is_none();
    assert_eq!(ended, ends, "the end of the connection");
    error.code.0
}

#[test]
fn malformed_packets_are_refused() {
    let mut daemon = Daemon::start_new(WEB);
    let mut other = Client::raw(&daemon.socket());
    other.send(Kind::HELLO, wire::Hello { version: 99, reserved: 0, features: 0 }.as_bytes());
    assert_eq!(refusal(&other, true), ErrorCode::VERSION.0);

    let short = Client::raw(&daemon.socket());
    short.send_raw(b"x").unwrap();
    assert_eq!(refusal(&short, true), ErrorCode::PROTOCOL.0);

    let long = daemon.client();
    long.send_raw(&vec![7; wire::MAX_PACKET + 1]).unwrap();
    assert_eq!(refusal(&long, true), ErrorCode::PROTOCOL.0);

    let with_fds = daemon.client();
    let fd = std::fs::File::open("/dev/null").unwrap();
    let header = Header { kind: Kind::INSPECT, flags: 0, request: 1 };
    packet::send(with_fds.fd.as_fd(), header.as_bytes(), &[&fd, &fd]).unwrap();
    assert_eq!(refusal(&with_fds, true), ErrorCode::PROTOCOL.0);

    // Before HELLO every request is refused. An unknown kind and a wrong length are refused too. The connection continues after
    // each of these.
    let mut rude = Client::raw(&daemon.socket());
    rude.send(Kind::INSPECT, b"");
    assert_eq!(refusal(&rude, false), ErrorCode::PROTOCOL.0);
    let mut client = daemon.client();
    for (kind, len) in
        [(Kind(0), 0), (Kind(777), 3), (Kind::ATTACH, 151), (Kind::CONNECT, 0), (Kind::INSPECT, 1)]
    {
        client.send(kind, &vec![0; len]);
        assert_eq!(refusal(&client, false), ErrorCode::PROTOCOL.0);
    }
    client.status();
    // Invalid names.
    client.send(Kind::ATTACH, &[b'/'; size_of::<wire::Attach>()]);
    assert_eq!(refusal(&client, false), ErrorCode::PROTOCOL.0);
    serves(&mut daemon);
}

#[test]
fn random_packets_do_no_harm() {
    let mut daemon = Daemon::start_new(WEB);
    let mut random = Random::new(0x2545_f491_4f6c_dd1d);
    for _ in 0..40 {
        let mut attached = daemon.attach("web", "random");
        let mut fds = Vec::new();
        for _ in 0..100 {
            let len = random.next() as usize % 300;
            let mut packet: Vec<u8> = (0..len.max(8)).map(|_| random.next() as u8).collect();
            packet[..2].copy_from_slice(&(random.next() as u16 % 12).to_le_bytes());
            if attached.client.send_raw(&packet).is_err() {
                break;
            }
            while readable(&attached.client.fd, Duration::ZERO) {
                match attached.client.receive() {
                    Some(packet) => fds.extend(packet.fds),
                    None => break,
                }
            }
        }
        attached.client.events.clear();
    }
    serves(&mut daemon);
}

#[test]
fn thousands_of_connections_that_never_attach_do_no_harm() {
    let mut daemon = Daemon::start_with("", &format!("[limits]\nmax_clients = 100\n{WEB}"));
    let held = daemon.attach("web", "held");
    let mut idle = Vec::new();
    for n in 0..3000 {
        let client = Client::raw(&daemon.socket());
        if n % 3 == 0 {
            let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
            let packet =
                [Header { kind: Kind::HELLO, flags: 0, request: 1 }.as_bytes(), hello.as_bytes()].concat();
            // The daemon may have closed the connection already.
            let _ = client.send_raw(&packet);
        }
        idle.push(client);
        if n % 1000 == 999 {
            serves(&mut daemon);
        }
    }
    let status = daemon.inspect();
    assert!(status["daemon"]["connections"].as_u64().unwrap() <= 100);
    assert_eq!(status["endpoints"].as_array().unwrap().len(), 1, "those who are attached stay");
    drop((idle, held));
    serves(&mut daemon);
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let config = format!("[limits]\nmax_clients = 12\nendpoints_per_member = 20\n{WEB}");
    let mut daemon = Daemon::start_with("", &config);
    let all: Vec<Attached> = (0..12).map(|_| daemon.attach("web", "one")).collect();
    let refused = Client::raw(&daemon.socket());
    assert_eq!(refusal(&refused, true), ErrorCode::LIMIT.0);
    drop(all);
    wait_for("room", || {
        let mut client = Client::raw(&daemon.socket());
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        client.try_send(Kind::HELLO, hello.as_bytes())?;
        let answer = client.receive()?;
        (wire::split(&answer.bytes)?.0.kind == Kind::HELLO_OK).then_some(())
    });
    serves(&mut daemon);
}

#[test]
fn clients_that_never_read_cost_bounded_memory() {
    let mut daemon = Daemon::start_with("", &format!("[limits]\nqueue = \"64K\"\n{WEB}"));
    let before = resident(&daemon);
    let mut deaf = Vec::new();
    for _ in 0..20 {
        let client = daemon.client();
        // Requests with a long answer, as many as the socket takes.
        let header = Header { kind: Kind::INSPECT, flags: 0, request: 1 };
        let packet = [header.as_bytes(), wire::Inspect::FIRST.as_bytes()].concat();
        rustix::io::ioctl_fionbio(&client.fd, true).unwrap();
        for _ in 0..5000 {
            if client.send_raw(&packet).is_err() {
                break;
            }
        }
        deaf.push(client);
    }
    // An endpoint that is told of connections and never reads.
    let mut listener = daemon.attach("web", "deaf");
    listener.listen("deaf").unwrap();
    let mut caller = daemon.attach("web", "caller");
    for _ in 0..400 {
        match caller.connect("deaf") {
            Ok(channel) => caller.close(channel.wire.channel).unwrap(),
            Err(refused) => {
                assert_eq!(refused.code, ErrorCode::LIMIT.0);
                break;
            }
        }
    }
    serves(&mut daemon);
    let after = resident(&daemon);
    assert!(after < before + (20 << 20), "{before} -> {after}");
}

#[test]
fn a_truncated_segment_is_broken_and_nothing_else() {
    let two = format!("{WEB}[segment.other]\nsize = \"4M\"\nmembers = [\"host\"]\n");
    let mut daemon = Daemon::start_new(&two);
    let (mut a, mut b) = (daemon.attach("other", "a"), daemon.attach("other", "b"));
    a.listen("x").unwrap();
    let channel = b.connect("x").unwrap();
    a.incoming();
    std::fs::OpenOptions::new().write(true).open(daemon.shm("other")).unwrap().set_len(0).unwrap();
    // Sleeping programs are woken to notice it, although nobody has sent a request to the daemon.
    assert!(readable(&a.event, WATCHDOG) && readable(&b.event, WATCHDOG));
    assert_eq!(b.connect("x").err().unwrap().code, ErrorCode::BROKEN.0);
    assert_eq!(daemon.client().attach("other", "c").err().unwrap().code, ErrorCode::BROKEN.0);
    let status = daemon.inspect();
    let broken = |name: &str| {
        status["segments"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()["broken"].clone()
    };
    assert_eq!((broken("other"), broken("web")), (json!(true), json!(false)));
    // Deaths and closes now write into memory that does not exist any more.
    b.close(channel.wire.channel).unwrap();
    drop(a);
    serves(&mut daemon);
    // After a restart the segment is broken as before, and the others are served.
    daemon.restart();
    assert_eq!(daemon.client().attach("other", "c").err().unwrap().code, ErrorCode::BROKEN.0);
    serves(&mut daemon);
}

/// Zero-copy operations are under way when the segment's file is truncated.
#[test]
fn zero_copy_operations_fail_when_the_memory_is_gone() {
    let members = "size = \"8M\"\nmembers = [\"host\", \"vm\"]\nmemory = \"bar\"\n";
    let daemon = Daemon::start_new(&format!("[vm.vm]\n[segment.one]\n{members}[segment.two]\n{members}"));
    let attach = |segment: &str| {
        let options = AttachOptions { socket: daemon.socket(), ..AttachOptions::default() };
        Endpoint::attach_with(segment, &options).unwrap()
    };
    let truncate = |segment| {
        std::fs::OpenOptions::new().write(true).open(daemon.shm(segment)).unwrap().set_len(0).unwrap();
    };
    fn broken(operation: &str, outcome: Result<(), ginnel::Error>) {
        assert!(matches!(outcome, Err(ginnel::Error::Broken)), "{operation}: {outcome:?}");
    }

    let (a, b) = (attach("one"), attach("one"));
    let (at, mut by) = (a.listen::<MessageChannel>("m").unwrap(), b.connect("m").unwrap());
    let mut accepted: MessageChannel = at.accept().unwrap();
    let by: &mut MessageChannel = &mut by;
    by.send(b"seen").unwrap();
    let message = accepted.receiver().peek().unwrap();
    by.sender().claim(8).unwrap().commit(8);
    truncate("one");
    message.slice().to_vec();
    broken("Message::release", message.release());
    broken("MessageSender::publish", by.sender().publish());

    let (a, b) = (attach("two"), attach("two"));
    let (at, mut by) = (a.listen::<StreamChannel>("s").unwrap(), b.connect("s").unwrap());
    let (other_at, mut other) = (a.listen::<MessageChannel>("m").unwrap(), b.connect("m").unwrap());
    let (mut accepted, by): (StreamChannel, &mut StreamChannel) = (at.accept().unwrap(), &mut by);
    let (_accepted, other): (MessageChannel, &mut MessageChannel) = (other_at.accept().unwrap(), &mut other);
    by.sender().send_all(b"seen").unwrap();
    let bytes = accepted.receiver().peek().unwrap();
    let (room, claim) = (by.sender().claim(8).unwrap(), other.sender().claim(8).unwrap());
    truncate("two");
    broken("Room::send", room.send(8));
    broken("Claim::send", claim.send(8));
    bytes.slice().to_vec();
    broken("Bytes::release", bytes.release(4));
}

#[test]
fn a_segment_file_that_is_replaced_is_not_taken_for_the_old_one() {
    let mut daemon =
        Daemon::start_new(&format!("{WEB}[segment.other]\nsize = \"4M\"\nmembers = [\"host\"]\n"));
    let a = daemon.attach("other", "a");
    std::fs::remove_file(daemon.shm("other")).unwrap();
    std::fs::File::create(daemon.shm("other")).unwrap().set_len(4 << 20).unwrap();
    assert_eq!(daemon.client().attach("other", "b").err().unwrap().code, ErrorCode::BROKEN.0);
    drop(a);
    serves(&mut daemon);
}

#[test]
fn sixty_four_segments_cost_little_memory_and_an_idle_daemon_no_cpu() {
    let mut config = String::new();
    for n in 0..64 {
        config.push_str(&format!("[segment.s{n}]\nsize = \"4M\"\nmembers = [\"host\", \"vm-{}\"]\n", n % 8));
    }
    for n in 0..8 {
        config.push_str(&format!("[vm.vm-{n}]\n"));
    }
    let mut daemon = Daemon::start_with("vectors = 32\n", &config);
    let mut all = Vec::new();
    for n in 0..64 {
        let (mut a, mut b) = (daemon.attach(&format!("s{n}"), "a"), daemon.attach(&format!("s{n}"), "b"));
        a.listen("x").unwrap();
        all.push((b.connect("x").unwrap(), a, b));
    }
    let resident = resident(&daemon);
    println!("{} MiB resident with 64 segments, 128 endpoints, 64 channels", resident >> 20);
    assert!(resident < 30 << 20, "{} MiB", resident >> 20);
    drop(all);
    // (A request for the status lets it look for processes that have segments.)
    wait_for("their end", || {
        let status = daemon.inspect();
        (status["endpoints"] == serde_json::json!([]) && status["daemon"]["is_looking"] == false)
            .then_some(())
    });
    // Without any program the daemon is not woken even once.
    wait_for("the daemon to rest", || {
        (switches(&daemon) == {
            std::thread::sleep(Duration::from_millis(100));
            switches(&daemon)
        })
        .then_some(())
    });
    let before = (switches(&daemon), ticks(&daemon));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((switches(&daemon), ticks(&daemon)), before, "an idle daemon sleeps");
    assert!(daemon.is_running());
}

/// Returns how often the daemon has gone to sleep (voluntary context switches).
fn switches(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|l| l.starts_with("voluntary_ctxt_switches")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the CPU time of the daemon in clock ticks.
fn ticks(daemon: &Daemon) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn only_permitted_users_may_attach() -> std::io::Result<()> {
    // Asks as another user, in a process of its own.
    kit::require!(rustix::process::geteuid().is_root(), "only root can become others");
    let config = "[segment.closed]\nsize = \"4M\"\nmembers = [\"host\"]\n\
                  [segment.open]\nsize = \"4M\"\nmembers = [\"host\"]\nallow_users = [65533]\nallow_groups = [\"daemon\"]\n";
    let daemon = Daemon::start_new(config);
    std::fs::set_permissions(daemon.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let code = |uid: u32, gid: u32, segment: &str| {
        let mut command = daemon.program(stranger);
        // The standard library clears the groups too.
        command.uid(uid).gid(gid).env("TEST_STRANGER_SEGMENT", segment);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().parse::<u32>().unwrap()
    };
    assert_eq!(code(65533, 65533, "closed"), ErrorCode::DENIED.0);
    assert_eq!(code(65533, 65533, "open"), 0);
    assert_eq!(code(65532, 65532, "open"), ErrorCode::DENIED.0);
    assert_eq!(code(65532, 1, "open"), 0, "by its group");
    Ok(())
}

kit::program! {
    fn stranger() {
        let segment = std::env::var("TEST_STRANGER_SEGMENT").unwrap();
        let client = Client::hello(&program_socket());
        let code = client.attach(&segment, "stranger").map_or_else(|refused| refused.code, |_| 0);
        println!("{code}");
        let mut admin = Client::hello(&program_socket());
        let request = json!({"op": "segment-remove", "name": segment, "force": true}).to_string();
        assert_eq!(admin.text(Kind::ADMIN, request.as_bytes()).unwrap_err().code, ErrorCode::DENIED.0);
    }
}

#[test]
fn hostile_connections_to_the_socket_of_a_vm_do_no_harm() {
    let mut daemon = Daemon::start_with(
        "vectors = 64\n",
        &format!("[vm.vm-a]\n[segment.s]\nsize=\"4M\"\nmembers=[\"host\",\"vm-a\"]\n{WEB}"),
    );
    // As far as the daemon knows, a connection that never reads is this VM's QEMU. Other connections are refused, and nobody
    // else is affected.
    let first = std::os::unix::net::UnixStream::connect(daemon.run("vm-a.sock")).unwrap();
    let mut others: Vec<OwnedFd> = Vec::new();
    for _ in 0..500 {
        others.push(std::os::unix::net::UnixStream::connect(daemon.run("vm-a.sock")).unwrap().into());
    }
    serves(&mut daemon);
    drop((first, others));
    wait_for("the end of that VM", || {
        let status = daemon.inspect();
        status["members"]
            .as_array()?
            .iter()
            .all(|m| m["name"] == "host" || m["connected"] == json!(false))
            .then_some(())
    });
    kit::daemon::qemu::Qemu::join(&daemon.run("vm-a.sock"), 64);
    serves(&mut daemon);
}

#[test]
fn an_attached_program_cannot_truncate_its_segment() -> Result<(), RulesetError> {
    let landlock =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(AccessFs::Truncate);
    kit::require!(landlock.is_ok(), "no Landlock with the right to truncate (Linux 6.2)");
    let mut daemon = Daemon::start_new(
        "[vm.a]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n[segment.other]\nsize = \"4M\"\nmembers = [\"host\"]\n",
    );
    for segment in ["web", "other"] {
        let body = wire::Attach { segment: name(segment), name: name("a"), ..wire::Attach::new_zeroed() };
        let mut client = daemon.client();
        let (attached, fds) =
            client.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED).unwrap();
        let memory = std::fs::File::from(fds.into_iter().next().unwrap());
        let size = memory.metadata().unwrap().len();
        for len in [0, size / 2, size * 2] {
            assert!(memory.set_len(len).is_err(), "{segment}: truncated to {len}");
        }
        assert_eq!(memory.metadata().unwrap().len(), size);
        // The descriptor can still be mapped.
        let len = attached.mapped_len().unwrap() as usize;
        let mapping = Mapping::of_file(&memory, attached.map_offset, len, Protection::ReadWrite).unwrap();
        mapping.write(len - 8, b"written!");
    }
    serves(&mut daemon);
    Ok(())
}

#[test]
fn adding_a_large_segment_delays_nobody() {
    let mut daemon = Daemon::start_new(WEB);
    let create = json!({"op": "segment-create", "name": "large", "size": "3G", "members": ["host"]});
    // On a busy machine the segment may be complete before another program was served, which proves nothing.
    let proven = (0..5).any(|_| {
        let mut asking = daemon.client();
        let request = asking.send(Kind::ADMIN, create.to_string().as_bytes());
        // Other programs are served while the memory is zeroed, and the name cannot be taken meanwhile.
        serves(&mut daemon);
        assert_eq!(daemon.admin(create.clone()).unwrap_err().code, ErrorCode::IN_USE.0);
        let in_time = !readable(&asking.fd, Duration::ZERO);
        let answer = asking.answer(request).expect("no answer");
        assert_eq!(wire::split(&answer.bytes).unwrap().0.kind, Kind::TEXT);
        daemon.attach("large", "a");
        daemon.admin(json!({"op": "segment-remove", "name": "large", "force": true})).unwrap();
        assert!(!daemon.shm("large").exists());
        in_time
    });
    assert!(proven, "nobody was served while the segment was made");

    // A segment that cannot be made is refused, and leaves nothing behind.
    let create = json!({"op": "segment-create", "name": "huge", "size": "1T", "members": ["host"]});
    assert!(daemon.admin(create).unwrap_err().text.contains("no room"));
    assert!(!daemon.shm("huge").exists());
    // A request whose client has gone does not block its name either.
    let create = json!({"op": "segment-create", "name": "late", "size": "8M", "members": ["host"]});
    let mut gone = daemon.client();
    gone.send(Kind::ADMIN, create.to_string().as_bytes());
    drop(gone);
    wait_for("its segment", || daemon.client().attach("late", "a").ok());
}
