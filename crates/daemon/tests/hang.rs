//! Guests whose daemon says nothing.

mod support;

use ginnel::{AttachOptions, Endpoint};
use ginnel_layout::relay::RelayKind;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{self, Kind};
use serde_json::json;
use std::time::{Duration, Instant};
use support::qemu::{Guest, Qemu};
use support::*;
use zerocopy::{FromZeros, IntoBytes};

fn world(more: &str) -> (Daemon, Guest) {
    let config = format!("[vm.a]\n{more}\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n");
    let daemon = Daemon::start_new(&config);
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    guest.open(1, 100);
    let wish = wire::Attach { segment: name("web"), name: name("guest"), ..FromZeros::new_zeroed() };
    guest.attach(1, wish).unwrap();
    (daemon, guest)
}

fn hangs(daemon: &Daemon) -> bool {
    daemon.inspect()["members"][1]["hangs"] == json!(true)
}

#[test]
fn a_guest_that_hangs_is_fenced_if_that_is_asked_for() {
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
    // As a guest locks it, before it hangs.
    let (number, slot) = (daemon.inspect()["endpoints"][0]["number"].as_u64().unwrap(), object.slot as usize);
    let word = ginnel_layout::sync::OwnerWord::owned(slot, object.epoch as u16, number as u32);
    let page = host.memory().part((object.offset - ginnel_layout::segment::RESERVED) as usize, 4096).unwrap();
    ginnel_shmem::Memory::store_release_u64(&page, ginnel_layout::sync::STATE, word.0);
    mutex.set_timeout(Some(Duration::from_millis(100)));
    assert!(mutex.lock().is_err(), "it has the lock");
    mutex.set_timeout(Some(WATCHDOG));
    assert!(mutex.lock().unwrap().owner_died());
    assert!(hangs(&daemon));
    assert_eq!(daemon.inspect()["members"][1]["endpoints"], json!(0));
    // It was asked before it was fenced; when it answers after all, it is no longer said to hang.
    guest.message(RelayKind::PING, 0);
    guest.send(RelayKind::PONG, 0, &[]);
    wait_for("it to be heard of", || (!hangs(&daemon)).then_some(()));
}

#[test]
fn a_guest_that_answers_or_is_not_asked_does_not_hang() {
    let (daemon, mut guest) = world("hang_after = 1\non_hang = \"fence\"");
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(2500) {
        guest.message(RelayKind::PING, 0);
        guest.send(RelayKind::PONG, 0, &[]);
        assert!(!hangs(&daemon));
    }
    assert_eq!(daemon.inspect()["members"][1]["endpoints"], json!(1));
    assert!(!daemon.log().contains("hangs"), "{}", daemon.log());
}

#[test]
fn others_are_only_warned_of() {
    let (daemon, guest) = world("hang_after = 1");
    wait_for("the warning", || daemon.log().contains("the VM hangs").then_some(()));
    assert!(hangs(&daemon));
    assert_eq!(daemon.inspect()["members"][1]["endpoints"], json!(1));
    drop(guest);
}
