//! Programs on the host attach, listen, connect, close and die.

use ginnel_layout::ring::SideState;
use ginnel_layout::segment::MAGIC;
use ginnel_layout::wire::ErrorCode;
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use std::time::{Duration, Instant};

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";
const DEAD: (u32, u32) = (SideState::DEAD.0, SideState::DEAD.0);

#[test]
fn two_programs_get_a_channel() {
    let daemon = Daemon::start_new(WEB);
    let (mut a, mut b) = (daemon.attach("web", "server"), daemon.attach("web", "client"));
    assert_eq!(a.memory.load_acquire_u64(0), MAGIC);
    assert_ne!((a.wire.endpoint, a.wire.epoch, a.wire.token), (b.wire.endpoint, b.wire.epoch, b.wire.token));
    assert_eq!(b.connect("echo").err().unwrap().code, ErrorCode::REFUSED.0);
    let listener = a.listen("echo").unwrap();
    let there = b.connect("echo").unwrap();
    let here = a.incoming();
    assert_eq!(
        (here.wire.channel, here.wire.listener, here.wire.initiator),
        (there.wire.channel, listener, 0)
    );
    assert_eq!((here.wire.peer_endpoint, here.wire.peer_name.as_str()), (b.wire.endpoint, "client"));
    assert_eq!((there.wire.peer_epoch, there.wire.peer_member_name.as_str()), (a.wire.epoch, "host"));
    a.accepted(&here);
    there.output.write(0x200, b"one memory");
    let mut bytes = [0; 10];
    here.input.read(0x200, &mut bytes);
    assert_eq!(&bytes, b"one memory");
    there.ring();
    assert!(readable(&a.event, WATCHDOG));
    here.ring();
    assert!(readable(&b.event, WATCHDOG));

    // The same request gets the same channel.
    assert_eq!(b.connect_as("echo", there.wire.nonce, 4096).unwrap().wire.channel, there.wire.channel);
    // The peer sees that one side has closed. When both have closed, the memory is free again.
    a.close(here.wire.channel).unwrap();
    assert_eq!(there.peer_state(), (SideState::FINISHED.0, SideState::FINISHED.0));
    assert_eq!(a.close(here.wire.channel).unwrap_err().code, ErrorCode::NOT_FOUND.0);
    let second = b.connect("echo").unwrap();
    assert_ne!(second.wire.offset, there.wire.offset, "a survivor's memory is not given away");
    b.close(there.wire.channel).unwrap();
    let third = b.connect("echo").unwrap();
    assert_eq!(third.wire.offset, there.wire.offset);
    assert_eq!(third.peer_state(), (0, 0), "old states are wiped");
}

#[test]
fn a_death_is_reported_within_100_ms_and_its_number_returns_with_a_new_epoch() {
    let daemon = Daemon::start_new(WEB);
    takes_less_than(Duration::from_millis(100), || {
        let (mut a, mut b) = (daemon.attach("web", "a"), daemon.attach("web", "b"));
        a.listen("x").unwrap();
        let channel = b.connect("x").unwrap();
        let (number, epoch) = (a.wire.endpoint, a.wire.epoch);
        drop(channel.bell);
        let channel = b.connect("x").unwrap();
        drop(a);
        let died = Instant::now();
        assert!(readable(&b.event, WATCHDOG), "the bell");
        wait_for("the state", || (channel.peer_state() == DEAD).then_some(()));
        let told = died.elapsed();
        let c = daemon.attach("web", "c");
        assert_eq!(c.wire.endpoint, number);
        assert!(c.wire.epoch > epoch);
        assert_eq!(b.connect("x").err().unwrap().code, ErrorCode::REFUSED.0, "its listener is gone too");
        told
    });
}
