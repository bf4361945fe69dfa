//! One thread waits for many halves of channels with a readiness set.

use ginnel::{
    AttachOptions, ChannelOptions, Endpoint, Error, Listener, MessageChannel, MessageReceiver, MessageSender,
    ReadySet, StreamChannel, WaitMode,
};
use ginnel_layout::{board, ring};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::process::is_asleep;
use kit::random::Random;
use kit::wait::{WATCHDOG, wait_for};
use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

const WEB: &str = "[segment.web]\nsize = \"128M\"\nmembers = [\"host\"]\n";

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: daemon.socket(), name: Some(name.into()), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

fn small() -> ChannelOptions {
    ChannelOptions { capacity: ring::MIN_CAPACITY, ..ChannelOptions::default() }
}

fn pair(from: &Endpoint, to: &Listener<MessageChannel>, name: &str) -> (MessageSender, MessageReceiver) {
    let near: MessageChannel = from.connect_with(name, &small()).unwrap();
    let far = to.accept_timeout(WATCHDOG).unwrap();
    // Dropping the other two halves ends their directions, which nobody uses.
    (near.split().0, far.split().1)
}

/// Waits for the next keys, of which there must be some within [`WATCHDOG`].
fn ready(set: &mut ReadySet) -> Vec<u64> {
    let mut keys = Vec::new();
    set.wait(&mut keys, Some(WATCHDOG)).unwrap();
    assert!(!keys.is_empty(), "nothing came");
    keys
}

/// Tries each half once so that it is at rest. The first keys are reported because the halves were just registered.
fn settle(set: &mut ReadySet, receivers: &mut [MessageReceiver]) {
    let mut begun = BTreeSet::new();
    while begun.len() < receivers.len() {
        for key in ready(set) {
            assert!(matches!(receivers[key as usize].recv(), Err(Error::WouldBlock)));
            begun.insert(key);
        }
    }
}

fn nothing_comes(set: &mut ReadySet) {
    let mut keys = Vec::new();
    set.wait(&mut keys, Some(Duration::from_millis(20))).unwrap();
    assert!(keys.is_empty(), "{keys:?}");
}

/// Sends messages over many channels in any order. One thread, which sleeps whenever it can, must receive each of them once.
fn all_arrive(mode: WaitMode, channels: usize, messages: u64) {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen_with::<MessageChannel>("a", &small()).unwrap();
    let (mut senders, mut receivers): (Vec<_>, Vec<_>) =
        (0..channels).map(|_| pair(&b, &listener, "a")).unzip();
    let mut set = ReadySet::new().unwrap();
    set.set_mode(mode);
    for (key, receiver) in receivers.iter_mut().enumerate() {
        receiver.register(&set, key as u64).unwrap();
    }
    settle(&mut set, &mut receivers);

    let sending = thread::spawn(move || {
        let mut sent = vec![0u64; channels];
        let mut random = Random::new(0x9e37_79b9);
        for _ in 0..messages {
            // A few channels are busy, the others have a message now and then.
            let among = if random.below(4) == 0 { channels } else { 12.min(channels) };
            let at = random.below(among as u64) as usize;
            senders[at].send(&sent[at].to_ne_bytes()).unwrap();
            sent[at] += 1;
        }
        (senders, sent)
    });
    let mut received = vec![0u64; channels];
    let mut missing = messages;
    while missing > 0 {
        for key in ready(&mut set) {
            let at = key as usize;
            loop {
                match receivers[at].recv() {
                    Ok(message) => assert_eq!(message, received[at].to_ne_bytes()),
                    Err(Error::WouldBlock) => break,
                    Err(error) => panic!("{error}"),
                }
                received[at] += 1;
                missing -= 1;
            }
        }
    }
    let (_senders, sent) = sending.join().unwrap();
    assert_eq!(sent, received);
    nothing_comes(&mut set);
}

#[test]
fn thousands_of_channels_are_served_by_a_thread_that_sleeps() {
    all_arrive(WaitMode::Interrupt, 4000, 40_000);
}

#[test]
fn channels_are_served_by_a_thread_that_polls_and_sleeps() {
    all_arrive(WaitMode::Adaptive { budget: Duration::from_micros(20) }, 300, 100_000);
}

#[test]
fn a_key_is_reported_again_only_after_another_try() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let (mut sender, mut receiver) = pair(&b, &listener, "a");
    let mut set = ReadySet::new().unwrap();
    receiver.register(&set, 7).unwrap();
    assert_eq!(ready(&mut set), [7], "at the beginning");
    nothing_comes(&mut set);
    assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
    sender.send(b"one").unwrap();
    sender.send(b"two").unwrap();
    assert_eq!(ready(&mut set), [7]);
    assert_eq!(receiver.recv().unwrap(), b"one");
    nothing_comes(&mut set);
    assert_eq!(receiver.recv().unwrap(), b"two");
    assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
    sender.send(b"three").unwrap();
    assert_eq!(ready(&mut set), [7]);
    // A half that has left the set waits by itself.
    receiver.deregister();
    assert_eq!(receiver.recv().unwrap(), b"three");
    let receiving = rustix::thread::gettid();
    let sending = thread::spawn(move || {
        wait_for("the receiver to sleep", || is_asleep(receiving).then_some(()));
        sender.send(b"four").unwrap();
        sender
    });
    receiver.set_mode(WaitMode::Interrupt);
    receiver.set_timeout(Some(WATCHDOG));
    assert_eq!(receiver.recv().unwrap(), b"four");
    nothing_comes(&mut set);
    drop(sending.join().unwrap());
}

#[test]
fn a_sender_is_told_when_there_is_room() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<StreamChannel>("a").unwrap();
    let (mut sender, _back) = b.connect::<StreamChannel>("a").unwrap().split();
    let (_forth, mut receiver) = listener.accept_timeout(WATCHDOG).unwrap().split();
    let mut set = ReadySet::new().unwrap();
    sender.register(&set, 1).unwrap();
    assert_eq!(ready(&mut set), [1]);
    let reading = thread::spawn(move || {
        let (mut total, mut buffer) = (0, [0; 5000]);
        loop {
            match receiver.recv(&mut buffer).unwrap() {
                0 => return total,
                n => total += n,
            }
        }
    });
    let mut sent = 0;
    while sent < 20 << 20 {
        match sender.send(&[7; 30_000]) {
            Ok(n) => sent += n,
            Err(Error::WouldBlock) => assert_eq!(ready(&mut set), [1]),
            Err(error) => panic!("{error}"),
        }
    }
    drop(sender);
    assert_eq!(reading.join().unwrap(), sent);
}

/// The daemon's report of a death reaches a sleeping set, also when the daemon has been restarted.
#[test]
fn the_end_of_a_peer_is_reported() {
    let mut daemon = Daemon::start_new(WEB);
    let a = attach(&daemon, "a");
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let mut set = ReadySet::new().unwrap();
    set.set_mode(WaitMode::Interrupt);
    for restarted in [false, true] {
        let mut peer = daemon.attach("web", "peer");
        let _channel = peer.connect("a").unwrap();
        let (mut sender, mut receiver) = listener.accept_timeout(WATCHDOG).unwrap().split();
        receiver.register(&set, 1).unwrap();
        sender.register(&set, 2).unwrap();
        let mut keys = ready(&mut set);
        keys.sort_unstable();
        assert_eq!(keys, [1, 2]);
        assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
        while sender.send(&[0; 1000]).is_ok() {}
        nothing_comes(&mut set);
        if restarted {
            let back = peer.hang_up();
            daemon.restart();
            peer = daemon.client().attach_as(back).unwrap();
        }
        drop(peer);
        let mut told = BTreeSet::new();
        while told.len() < 2 {
            told.extend(ready(&mut set));
        }
        assert!(matches!(receiver.recv(), Err(Error::PeerDead)));
        assert!(matches!(sender.send(b"x"), Err(Error::PeerDead)));
    }
}

#[test]
fn a_set_watches_listeners_and_works_in_another_event_loop() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let mut set = ReadySet::new().unwrap();
    set.watch(&listener, 9).unwrap();
    nothing_comes(&mut set);
    let near: MessageChannel = b.connect("a").unwrap();
    assert_eq!(ready(&mut set), [9]);
    // A wait without a timeout reports watched descriptors, too.
    for mode in [WaitMode::Interrupt, WaitMode::Poll, WaitMode::default()] {
        set.set_mode(mode);
        let mut keys = Vec::new();
        set.wait(&mut keys, Some(Duration::ZERO)).unwrap();
        assert_eq!(keys, [9], "{mode:?}");
    }
    let (mut sender, _) = near.split();
    let (_, mut receiver) = listener.try_accept().unwrap().split();
    receiver.register(&set, 3).unwrap();
    settle_one(&mut set, &mut receiver, 3);

    // Another event loop sleeps on the set's descriptor.
    assert!(!set.arm().unwrap());
    assert!(!readable(&set, Duration::from_millis(20)));
    sender.send(b"x").unwrap();
    assert!(readable(&set, WATCHDOG));
    assert_eq!(ready(&mut set), [3]);
    assert_eq!(receiver.recv().unwrap(), b"x");
    // A message that is there before the set sleeps is reported at once.
    assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
    sender.send(b"y").unwrap();
    assert!(set.arm().unwrap());
    assert_eq!(ready(&mut set), [3]);
    set.unwatch(&listener).unwrap();
    let _third: MessageChannel = b.connect("a").unwrap();
    nothing_comes(&mut set);
}

/// A set that polls never sleeps, and yet reports a connection that arrives while it waits.
#[test]
fn a_set_that_polls_reports_descriptors() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let mut set = ReadySet::new().unwrap();
    set.set_mode(WaitMode::Poll);
    set.watch(&listener, 9).unwrap();
    nothing_comes(&mut set);
    // A polling set never sleeps, so the test cannot know whether it waits already. It must not matter.
    let connecting = thread::spawn(move || b.connect::<MessageChannel>("a").unwrap());
    assert_eq!(ready(&mut set), [9]);
    drop(connecting.join().unwrap());
}

fn settle_one(set: &mut ReadySet, receiver: &mut MessageReceiver, key: u64) {
    assert_eq!(ready(set), [key]);
    assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
    nothing_comes(set);
}

/// A half becomes at rest in one thread while another thread sleeps with the set; the set must then report it.
#[test]
fn halves_may_work_in_other_threads_than_the_set() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let (mut sender, mut receiver) = pair(&b, &listener, "a");
    let mut set = ReadySet::new().unwrap();
    set.set_mode(WaitMode::Interrupt);
    receiver.register(&set, 1).unwrap();
    let (report, reports) = std::sync::mpsc::channel();
    let waiting = thread::spawn(move || {
        for _ in 0..501 {
            assert_eq!(ready(&mut set), [1]);
            report.send(()).unwrap();
        }
    });
    for turn in 0..501u64 {
        reports.recv_timeout(WATCHDOG).unwrap();
        if turn > 0 {
            assert_eq!(receiver.recv().unwrap(), turn.to_ne_bytes());
        }
        assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
        if turn < 500 {
            sender.send(&(turn + 1).to_ne_bytes()).unwrap();
        }
    }
    waiting.join().unwrap();
}

#[test]
fn a_dropped_set_returns_its_lanes_and_slots() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let (_sender, mut receiver) = pair(&b, &listener, "a");
    // More sets than all boards have lanes.
    for key in 0..200 {
        let mut set = ReadySet::new().unwrap();
        receiver.register(&set, key).unwrap();
        assert_eq!(ready(&mut set), [key]);
    }
    // More registrations than all boards have slots.
    let set = ReadySet::new().unwrap();
    for key in 0..300_000 {
        receiver.register(&set, key).unwrap();
    }
}

/// A peer may claim to sleep at any place.
#[test]
fn a_place_that_a_peer_names_is_checked() {
    let daemon = Daemon::start_new(WEB);
    let a = attach(&daemon, "a");
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let mut peer = daemon.attach("web", "peer");
    let channel = peer.connect("a").unwrap();
    let (mut sender, _) = listener.accept_timeout(WATCHDOG).unwrap().split();
    let places = [1, 1 << 12, u64::MAX, board::Place::new(120 << 20, 77).0, board::Place::new(1 << 40, 0).0];
    for (token, place) in (1..).zip(places.into_iter().cycle().take(20)) {
        channel.input.store_relaxed_u64(ring::DATA_NOTIFY, place);
        channel.input.store_release_u32(ring::DATA_ARMED, token);
        sender.send(b"x").unwrap();
    }
    drop(peer);
}
