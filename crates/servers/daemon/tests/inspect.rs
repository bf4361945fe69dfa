//! What the status shows to each client, and how much work an answer is for the daemon.

use ginnel_layout::relay::RelayKind;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use kit::daemon::qemu::{Guest, Qemu};
use kit::daemon::*;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use zerocopy::{FromBytes, IntoBytes};

kit::test_that_skips_are_seen!();

const STRANGER: u32 = 4242;

kit::program! {
    /// Asks for the status as another user. [`status_as`] runs this in a process of its own.
    fn program() {
        let status = Client::hello(&program_socket()).status();
        println!("{status}");
    }
}

fn status_as(daemon: &Daemon, uid: u32) -> Value {
    let dir = daemon.socket().parent().unwrap().parent().unwrap().to_owned();
    for path in [&dir, &dir.join("run")] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let output = daemon.program(program).current_dir("/").uid(uid).gid(uid).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names<'a>(status: &'a Value, list: &str, key: &str) -> Vec<&'a str> {
    status[list].as_array().unwrap().iter().map(|entry| entry[key].as_str().unwrap()).collect()
}

#[test]
fn a_user_sees_the_segments_that_it_may_attach_to_and_no_other() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can become another user");
    let config = format!(
        "[vm.vm-a]\nuser = {STRANGER}\n[vm.vm-b]\n[vm.vm-c]\n\
         [segment.mine]\nsize = \"4M\"\nmembers = [\"host\", \"vm-b\"]\nallow_users = [{STRANGER}]\n\
         [segment.disk]\nsize = \"4M\"\nmembers = [\"vm-a\"]\n\
         [segment.secret]\nsize = \"4M\"\nmembers = [\"host\", \"vm-c\"]\n"
    );
    let daemon = Daemon::start_new(&config);
    let (mut a, mut b) = (daemon.attach("mine", "seen"), daemon.attach("secret", "unseen"));
    for endpoint in [&mut a, &mut b] {
        endpoint.listen("here").unwrap();
        endpoint.connect("here").unwrap();
    }
    let all = daemon.inspect();
    assert_eq!(names(&all, "segments", "name"), ["disk", "mine", "secret"]);
    assert_eq!(all["members"].as_array().unwrap().len(), 4);
    assert_eq!(all["endpoints"][1]["pid"], std::process::id());
    assert_eq!(all["members"][0]["endpoints"], 2);
    assert!(all["daemon"]["connections"].is_u64());

    let status = status_as(&daemon, STRANGER);
    assert_eq!(names(&status, "segments", "name"), ["disk", "mine"]);
    assert_eq!(names(&status, "members", "name"), ["host", "vm-a", "vm-b"]);
    assert_eq!(names(&status, "endpoints", "name"), ["seen"]);
    assert_eq!(
        (names(&status, "listeners", "segment"), names(&status, "channels", "segment")),
        (vec!["mine"], vec!["mine"])
    );
    // The status hides processes of other users, and what a member has in segments that this user may not see.
    assert_eq!(
        (&status["endpoints"][0]["pid"], &status["endpoints"][0]["uid"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(
        (&status["members"][0]["endpoints"], &status["members"][0]["channels"]),
        (&json!(1), &json!(1))
    );
    // This user runs the QEMU of vm-a, and so needs the path of its socket.
    assert!(status["members"][1]["socket"].is_string() && status["members"][2]["socket"].is_null());
    assert!(!status.to_string().contains("secret") && !status.to_string().contains("unseen"));

    let nobody = status_as(&daemon, STRANGER + 1);
    assert_eq!(names(&nobody, "members", "name"), ["host"]);
    for list in ["segments", "endpoints", "listeners", "channels", "reports", "blocks", "locks"] {
        assert_eq!(nobody[list], json!([]), "{list}");
    }
}

/// Attaches a program that has this many channels in one segment.
fn crowd(daemon: &Daemon, channels: usize) -> Attached {
    let mut program = daemon.attach("web", "crowd");
    program.listen("here").unwrap();
    for nonce in 0..channels as u64 {
        let body = wire::Connect {
            name: name("here"),
            kind: 1,
            reserved: 0,
            capacity: 64,
            input_capacity: 0,
            nonce: 1 << 32 | nonce,
        };
        program.client.ask::<wire::Channel>(Kind::CONNECT, body.as_bytes(), Kind::CHANNEL).unwrap();
        program.client.events.clear();
    }
    program
}

const MANY: &str = "[limits]\nchannels_per_endpoint = 100000\nchannels_per_member = 100000\nbytes_per_endpoint = \"1G\"\n\
    backlog = 100000\nqueue = \"64K\"\n[vm.vm-a]\n[segment.web]\nsize = \"256M\"\nmembers = [\"host\", \"vm-a\"]\n";

#[test]
fn clients_that_ask_and_never_read_cost_a_page_each() {
    let daemon = Daemon::start_with("", MANY);
    let _crowd = crowd(&daemon, 4200);
    assert_eq!(daemon.inspect()["channels"].as_array().unwrap().len(), 4200);
    let before = resident(&daemon);
    let mut deaf = Vec::new();
    for _ in 0..200 {
        let mut client = daemon.client();
        for _ in 0..4 {
            client.send(Kind::INSPECT, wire::Inspect::FIRST.as_bytes());
        }
        deaf.push(client);
    }
    // This request is answered after all of those.
    daemon.inspect();
    let after = resident(&daemon);
    assert!(after < before + (8 << 20), "{before} -> {after}");
    // A client that reads late still gets its answer.
    assert_eq!(deaf[77].receive().map(|packet| wire::split(&packet.bytes).unwrap().0.kind), Some(Kind::PAGE));
}

/// Returns the whole status, as a program in the VM gets it.
fn status_in_vm(guest: &mut Guest, client: u32) -> Value {
    let (mut text, mut from, mut request) = (Vec::new(), wire::Inspect::FIRST, 0);
    loop {
        request += 1;
        ask_in_vm(guest, client, request, from);
        loop {
            let packet = guest.message(RelayKind::DATA, client);
            let (header, body) = wire::split(&packet).unwrap();
            assert_eq!(header.request, request);
            if header.kind == Kind::TEXT {
                text.extend_from_slice(body);
                continue;
            }
            assert_eq!(header.kind, Kind::PAGE);
            let (next, rest) = wire::Inspect::read_from_prefix(body).unwrap();
            text.extend_from_slice(rest);
            from = next;
            break;
        }
        if !from.is_more() {
            return serde_json::from_slice(&text).unwrap();
        }
    }
}

fn ask_in_vm(guest: &mut Guest, client: u32, request: u32, from: wire::Inspect) {
    let header = Header { kind: Kind::INSPECT, flags: 0, request };
    guest.send(RelayKind::DATA, client, &[header.as_bytes(), from.as_bytes()].concat());
}

#[test]
fn a_vm_gets_the_status_of_thousands_of_channels_and_keeps_its_session() {
    let daemon = Daemon::start_with("", MANY);
    let _crowd = crowd(&daemon, 4200);
    let mut guest = Qemu::join(&daemon.run("vm-a.sock"), 32).guest(1, true);
    guest.open(1, 50);
    let status = status_in_vm(&mut guest, 1);
    assert_eq!(status["channels"].as_array().unwrap().len(), 4200);
    assert_eq!(status["endpoints"][0]["pid"], Value::Null, "a process of the host");

    // Many clients ask at once, and the guest's daemon is slow: the host's daemon sends no more than fits into the ring.
    for client in 2..66 {
        guest.open(client, 50 + client);
        ask_in_vm(&mut guest, client, 7, wire::Inspect::FIRST);
    }
    // A second request on a connection whose first is not answered yet is refused.
    ask_in_vm(&mut guest, 65, 8, wire::Inspect::FIRST);
    daemon.inspect();
    for client in 2..66 {
        let mut kinds = Vec::new();
        while !kinds.contains(&Kind::PAGE) {
            let packet = guest.message(RelayKind::DATA, client);
            let (header, body) = wire::split(&packet).unwrap();
            if header.kind == Kind::ERROR {
                assert_eq!(wire::Error::read_from_prefix(body).unwrap().0.code, ErrorCode::BUSY);
            }
            kinds.push(header.kind);
        }
    }
    assert_eq!(status_in_vm(&mut guest, 65)["channels"].as_array().unwrap().len(), 4200);
    assert!(!daemon.log().contains("does not read"), "its session was ended");
}

#[test]
fn forged_cursors_are_answered() {
    let daemon = Daemon::start_with("", MANY);
    let _crowd = crowd(&daemon, 10);
    let mut client = daemon.client();
    for section in (0..13).chain([u32::MAX]) {
        for (entries, after, at) in [(0, 0, 0), (7, 3, b'm'), (u32::MAX, u64::MAX, 255), (1, 1 << 40, b'/')] {
            let from = wire::Inspect {
                section,
                entries,
                after,
                name: ginnel_layout::Name::read_from_bytes(&[at; 64]).unwrap(),
            };
            let request = client.send(Kind::INSPECT, from.as_bytes());
            let packet = client.answer(request).unwrap();
            let expected = if section <= 10 { Kind::PAGE } else { Kind::ERROR };
            assert_eq!(wire::split(&packet.bytes).unwrap().0.kind, expected, "{from:?}");
        }
    }
    client.status();
}
