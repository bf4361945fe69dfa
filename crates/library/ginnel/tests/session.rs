//! Programs whose daemon is stopped, slow or away: requests wait for it, and nothing else is affected.

use ginnel::{
    AttachOptions, BlockOptions, ChannelOptions, Endpoint, Error, Listener, MessageChannel, Rights,
    StreamChannel,
};
use ginnel_daemon::packet;
use ginnel_layout::ring;
use ginnel_layout::wire::{self, Kind};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use rustix::net::SocketType;
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const WEB: &str = "[segment.web]\nsize = \"64M\"\npage = \"4K\"\nmembers = [\"host\"]\n";
/// Far longer than any call that must not wait, even on a busy machine; half of any wait for the daemon.
const AT_ONCE: Duration = Duration::from_secs(5);

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: daemon.socket(), name: Some(name.into()), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

/// Opens a channel and returns both of its ends.
fn pair(from: &Endpoint, to: &Listener<MessageChannel>, name: &str) -> (MessageChannel, MessageChannel) {
    let mut near: MessageChannel = from.connect(name).unwrap();
    let mut far = to.accept_timeout(WATCHDOG).unwrap();
    near.set_timeout(Some(WATCHDOG));
    far.set_timeout(Some(WATCHDOG));
    ping(&mut near, &mut far);
    (near, far)
}

fn fill_and_empty(from: &mut MessageChannel, to: &mut MessageChannel, round: u8) {
    let capacity = from.info().capacity;
    let message = vec![round; 1000];
    from.sender().set_nonblocking(true);
    let mut sent = 0;
    while from.send(&message).is_ok() {
        sent += 1;
    }
    // A record takes whole cache lines, and the receiver may not have returned the last space yet.
    assert!(sent <= capacity / 1000 && sent >= capacity * 3 / 4 / 1024, "{sent} in {capacity} bytes");
    from.sender().set_nonblocking(false);
    for _ in 0..sent {
        assert_eq!(to.recv().unwrap(), message);
    }
}

#[test]
fn each_direction_gets_the_larger_of_two_requested_capacities() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    // The acceptor wants 16 KiB towards itself; the initiator wants 4 KiB there and 64 KiB back.
    let least = ChannelOptions { capacity: 4096, input_capacity: 16_000, ..ChannelOptions::default() };
    let listener = a.listen_with::<MessageChannel>("a", &least).unwrap();
    let body = ChannelOptions { capacity: 4096, input_capacity: 65_536, ..ChannelOptions::default() };
    let mut near: MessageChannel = b.connect_with("a", &body).unwrap();
    let mut far = listener.accept_timeout(WATCHDOG).unwrap();
    let rings = |channel: &MessageChannel| (channel.info().capacity, channel.info().input_capacity);
    assert_eq!((rings(&near), rings(&far)), ((16_384, 65_536), (65_536, 16_384)));
    assert_eq!(near.max_message(), ring::max_message(16_384));
    assert_eq!(far.max_message(), ring::max_message(65_536));
    // As many bytes fit as each side reports, several times around the ring, and the two rings do not overlap.
    for round in 0..20 {
        fill_and_empty(&mut near, &mut far, round);
        fill_and_empty(&mut far, &mut near, round);
    }
    // The status shows both capacities, and the next daemon knows them.
    let mut daemon = daemon;
    for _ in 0..2 {
        let channel = &daemon.inspect()["channels"][0];
        assert_eq!((&channel["capacity"], &channel["acceptor_capacity"]), (&16_384.into(), &65_536.into()));
        daemon.restart();
    }
    ping(&mut near, &mut far);
    // A capacity that is too large is refused for either direction.
    let most = ChannelOptions { input_capacity: 1 << 40, ..ChannelOptions::default() };
    let error = b.connect_with::<MessageChannel>("a", &most).err().unwrap();
    assert_eq!(error.code(), Some(wire::ErrorCode::INVALID), "{error}");
}

fn ping(near: &mut MessageChannel, far: &mut MessageChannel) {
    near.send(b"ping").unwrap();
    assert_eq!(far.recv().unwrap(), b"ping");
    far.send(b"pong").unwrap();
    assert_eq!(near.recv().unwrap(), b"pong");
}

/// Returns how many entries a list of the status has.
fn count(daemon: &Daemon, of: &str) -> usize {
    daemon.inspect()[of].as_array().unwrap().len()
}

/// Runs `work`, which must not wait.
fn at_once<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let done = work();
    let took = begin.elapsed();
    assert!(took < AT_ONCE, "{what} took {took:?}");
    done
}

/// Stops the daemon as long as this value lives.
struct Stopped<'a>(&'a Daemon);

impl<'a> Stopped<'a> {
    fn new(daemon: &'a Daemon) -> Self {
        daemon.signal(Signal::STOP);
        Self(daemon)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

#[test]
fn a_stopped_daemon_only_delays_requests() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let (mut near, mut far) = pair(&b, &listener, "a");
    let (other_near, other_far) = pair(&b, &listener, "a");
    let block = a.create_block("", 4096, &BlockOptions::default()).unwrap();
    let mutex = a.mutex("mutex").unwrap();
    let unused = a.listen::<MessageChannel>("unused").unwrap();
    let before = daemon.inspect()["endpoints"].clone();

    let stopped = Stopped::new(&daemon);
    let begin = Instant::now();
    at_once("a channel's end", || drop((other_near, other_far)));
    at_once("a block's end", || drop(block));
    at_once("a lock's end", || drop(mutex));
    at_once("a listener's end", || drop(unused));
    // A request waits.
    let asking = thread::spawn(move || {
        a.create_block("", 4096, &BlockOptions::default()).unwrap();
        a
    });
    thread::sleep(Duration::from_secs(3));
    assert!(!asking.is_finished());
    ping(&mut near, &mut far);
    drop(stopped);
    let a = asking.join().unwrap();
    assert!(begin.elapsed() < WATCHDOG, "it waited for something else");

    wait_for("the pending requests to be executed", || {
        let status = daemon.inspect();
        let count = |of: &str| status[of].as_array().unwrap().len();
        (count("channels") == 1 && count("blocks") == 0 && count("locks") == 0).then_some(())
    });
    assert_eq!(daemon.inspect()["endpoints"].as_array().unwrap().len(), 2, "{before}");
    assert!(!daemon.log().contains("endpoint gone"), "nobody has died");
    ping(&mut near, &mut far);
    drop((a, b));
}

#[test]
fn messages_that_do_not_fit_into_the_socket_are_sent_later() {
    let daemon = Daemon::start_new(&format!(
        "{WEB}[limits]\nhandles_per_endpoint = 4096\nblocks_per_endpoint = 4096\n"
    ));
    let a = attach(&daemon, "a");
    let make =
        |_| a.create_block("", 4096, &BlockOptions { zero: false, ..BlockOptions::default() }).unwrap();
    let blocks: Vec<_> = (0..1000).map(make).collect();
    let stopped = Stopped::new(&daemon);
    at_once("the end of 1000 blocks", || drop(blocks));
    drop(stopped);
    wait_for("all blocks to be closed", || {
        a.process_events();
        (count(&daemon, "blocks") == 0).then_some(())
    });
    assert_eq!(count(&daemon, "endpoints"), 1);
}

#[test]
fn calls_that_do_not_ask_the_daemon_never_wait_for_it() {
    let mut daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    let block = a.create_block("", 4096, &BlockOptions::default()).unwrap();
    let look = || {
        let mut bytes = [0; 8];
        at_once("process_events", || a.process_events());
        at_once("try_accept", || assert!(matches!(listener.try_accept(), Err(Error::WouldBlock))));
        at_once("write", || block.write(0, b"whatever").unwrap());
        at_once("read", || block.read(0, &mut bytes).unwrap());
        at_once("rights", || assert_eq!(block.rights(), Rights::READ_WRITE));
    };
    for restarted in [false, true] {
        if restarted {
            // The next daemon is stopped before any program has come back to it.
            daemon.restart();
        }
        let stopped = Stopped::new(&daemon);
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            look();
        }
        drop(stopped);
        // The endpoint works again when the daemon continues.
        b.create_block("", 4096, &BlockOptions::default()).unwrap().close().unwrap();
        let connecting = thread::spawn({
            let b = b.clone();
            move || b.connect::<MessageChannel>("a").unwrap()
        });
        let accepted = listener.accept_timeout(WATCHDOG).unwrap();
        drop((accepted, connecting.join().unwrap()));
    }
}

#[test]
fn a_channel_that_was_closed_while_the_daemon_was_away_is_not_accepted_again() {
    let mut daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let listener = a.listen::<MessageChannel>("a").unwrap();
    for accepted_before in [true, false] {
        let mut near: MessageChannel = b.connect("a").unwrap();
        near.set_timeout(Some(WATCHDOG));
        // The connection has been announced.
        assert!(readable(listener.as_fd(), WATCHDOG));
        let mut far = match accepted_before {
            true => listener.accept_timeout(WATCHDOG).unwrap(),
            false => {
                a.process_events();
                daemon.kill();
                listener.accept_timeout(WATCHDOG).unwrap()
            }
        };
        far.set_timeout(Some(WATCHDOG));
        if accepted_before {
            daemon.inspect(); // `ACCEPTED` was sent before this request.
            daemon.kill();
        }
        ping(&mut near, &mut far);
        drop((near, far));
        daemon.start();
        // Wait until both endpoints are back and have sent all that they had to send.
        for endpoint in [&a, &b] {
            endpoint.create_block("", 4096, &BlockOptions::default()).unwrap().close().unwrap();
        }
        wait_for("the channel's end", || {
            assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)), "a phantom");
            b.process_events();
            (count(&daemon, "channels") == 0).then_some(())
        });
        assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)), "a phantom");
    }
}

#[test]
fn a_request_that_is_granted_after_its_timeout_is_undone() {
    let late = thread::spawn(|| {
        let daemon = Daemon::start_new(WEB);
        let asking = Asking::in_vain(&daemon);
        asking.wait_until_undone(&daemon);
    });
    let mut daemon = Daemon::start_new(WEB);
    let asking = Asking::in_vain(&daemon);
    daemon.restart();
    asking.wait_until_undone(&daemon);
    late.join().unwrap();
}

struct Asking {
    a: Endpoint,
    listener: Listener<MessageChannel>,
}

impl Asking {
    fn wait_until_undone(&self, daemon: &Daemon) {
        self.a.create_block("", 4096, &BlockOptions::default()).unwrap().close().unwrap();
        let mut accepted = 0;
        wait_for("what was granted late to be undone", || {
            self.a.process_events();
            // A connection has come, and its initiator has closed it again.
            if let Ok(mut channel) = self.listener.try_accept() {
                channel.set_timeout(Some(WATCHDOG));
                assert!(channel.recv().is_err());
                accepted += 1;
            }
            let status = daemon.inspect();
            let count = |of: &str| status[of].as_array().unwrap().len();
            let counts = ["channels", "blocks", "locks", "listeners"].map(count);
            (accepted > 0 && counts == [0, 0, 0, 1]).then_some(())
        });
        assert_eq!(accepted, 1);
    }

    /// Makes every kind of request to a stopped daemon, until each has timed out.
    fn in_vain(daemon: &Daemon) -> Self {
        let (a, b) = (attach(daemon, "a"), attach(daemon, "b"));
        let listener = b.listen::<MessageChannel>("b").unwrap();
        let _stopped = Stopped::new(daemon);
        let begin = Instant::now();
        thread::scope(|scope| {
            let asks: [Box<dyn Fn() -> Option<Error> + Send + '_>; 5] = [
                Box::new(|| a.connect::<MessageChannel>("b").err()),
                Box::new(|| {
                    let options = ChannelOptions { patience: Duration::from_secs(1), ..Default::default() };
                    a.connect_with::<StreamChannel>("c", &options).err()
                }),
                Box::new(|| a.listen::<MessageChannel>("a").err()),
                Box::new(|| a.create_block("", 4096, &BlockOptions::default()).err()),
                Box::new(|| a.mutex("mutex").err()),
            ];
            for ask in asks {
                scope.spawn(move || assert!(matches!(ask(), Some(Error::TimedOut))));
            }
        });
        let took = begin.elapsed();
        assert!(took.as_secs() >= 9 && took < Duration::from_secs(10) + AT_ONCE, "{took:?}");
        drop(b);
        Self { a, listener }
    }
}

#[test]
fn a_listener_is_not_woken_by_a_connection_to_another_listener() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let busy = a.listen::<MessageChannel>("busy").unwrap();
    let idle = a.listen::<MessageChannel>("idle").unwrap();
    let waiting: MessageChannel = b.connect("busy").unwrap();
    assert!(readable(busy.as_fd(), WATCHDOG));
    let cpu = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let (begin, used) = (Instant::now(), cpu());
    assert!(matches!(idle.accept_timeout(Duration::from_millis(300)), Err(Error::TimedOut)));
    let (took, used) = (begin.elapsed(), cpu() - used);
    assert!(took >= Duration::from_millis(300), "{took:?}");
    assert!(used < Duration::from_millis(100), "it spins: {used:?} of CPU in {took:?}");
    assert!(readable(busy.as_fd(), Duration::ZERO) && !readable(idle.as_fd(), Duration::ZERO));
    let accepted = busy.try_accept().unwrap();
    wait_for("the listener to become unreadable", || (!readable(busy.as_fd(), Duration::ZERO)).then_some(()));
    drop((waiting, accepted));
}

#[test]
fn many_threads_ask_at_once() {
    let daemon = Daemon::start_new(WEB);
    let a = attach(&daemon, "a");
    thread::scope(|scope| {
        for k in 0..8 {
            let a = &a;
            scope.spawn(move || {
                for n in 0..50 {
                    let name = format!("block-{k}-{n}");
                    let block = a.create_block(&name, 4096, &BlockOptions::default()).unwrap();
                    let again = a.open_block(&name, Rights::READ).unwrap();
                    assert_eq!(block.number(), again.number());
                    a.unlink_block(&name).unwrap();
                    drop(again);
                    block.close().unwrap();
                }
            });
        }
    });
    wait_for("all blocks to be closed", || {
        a.process_events();
        (count(&daemon, "blocks") == 0).then_some(())
    });
}

/// Runs `send` with a peer that returns one line of the ring after the other, slowly and without end.
fn slow_peer<T: Send>(kind: u32, send: impl FnOnce(&Endpoint, &str) -> T + Send) -> T {
    let daemon = Daemon::start_new(WEB);
    let a = attach(&daemon, "a");
    let mut peer = daemon.attach("web", "peer");
    let body = wire::Listen { name: name("slow"), kind, backlog: 0, capacity: 0, input_capacity: 0 };
    peer.client.ask::<wire::Listening>(Kind::LISTEN, body.as_bytes(), Kind::LISTENING).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let channel = peer.incoming();
            peer.accepted(&channel);
            while !done.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(40));
                let (head, tail) =
                    (channel.input.load_acquire_u64(ring::HEAD), channel.input.load_acquire_u64(ring::TAIL));
                if tail - head >= 64 {
                    channel.input.store_release_u64(ring::HEAD, head + 64);
                    channel.ring();
                }
            }
        });
        let sent = send(&a, "slow");
        done.store(true, Ordering::Relaxed);
        sent
    })
}

const TERM: Duration = Duration::from_millis(200);

fn ends_in_time(mut send: impl FnMut() -> Result<(), Error>) {
    takes_less_than(TERM + Duration::from_secs(2), || {
        let begin = Instant::now();
        let sent = send();
        let took = begin.elapsed();
        assert!(matches!(sent, Err(Error::TimedOut)), "{sent:?} after {took:?}");
        assert!(took >= TERM, "{took:?}");
        took
    });
}

#[test]
fn a_slow_peer_cannot_extend_the_timeout_of_a_message() {
    slow_peer(1, |a, name| {
        let options = ChannelOptions { capacity: 4096, ..ChannelOptions::default() };
        let mut channel: MessageChannel = a.connect_with(name, &options).unwrap();
        let most = channel.max_message();
        for claims in [false, true] {
            for mode in [ginnel::WaitMode::Interrupt, ginnel::WaitMode::default()] {
                channel.set_mode(mode);
                channel.sender().set_nonblocking(true);
                while channel.send(&[1; 40]).is_ok() {}
                channel.sender().set_nonblocking(false);
                channel.set_timeout(Some(TERM));
                ends_in_time(|| match claims {
                    false => channel.send(&vec![2; most]),
                    true => channel.sender().claim(most).map(drop),
                });
            }
        }
    });
}

#[test]
fn a_slow_peer_cannot_extend_the_timeout_of_many_bytes() {
    slow_peer(2, |a, name| {
        let options = ChannelOptions { capacity: 4096, ..ChannelOptions::default() };
        let mut channel: StreamChannel = a.connect_with(name, &options).unwrap();
        channel.set_timeout(Some(TERM));
        ends_in_time(|| channel.sender().send_all(&[1; 64 << 10]));
    });
}

#[test]
fn an_attach_waits_for_a_silent_daemon() {
    let daemon = Daemon::start_new(WEB);
    let stopped = Stopped::new(&daemon);
    thread::scope(|scope| {
        let attaching = scope.spawn(|| attach(&daemon, "late"));
        let asking = scope.spawn(|| ginnel::Daemon::connect_to(&daemon.socket()).unwrap().inspect().unwrap());
        thread::sleep(Duration::from_secs(1));
        assert!(!attaching.is_finished() && !asking.is_finished());
        drop(stopped);
        attaching.join().unwrap();
        assert!(asking.join().unwrap().starts_with('{'));
    });
}

#[test]
fn a_lock_is_returned_when_the_daemons_answer_is_invalid() {
    let daemon = Daemon::start_new(WEB);
    let path = daemon.run("between.sock");
    let listener = packet::listen_at(&path, SocketType::SEQPACKET).unwrap();
    let (target, nonsense) = (daemon.socket(), |bytes: &mut [u8]| {
        let (header, body) = bytes.split_at_mut(size_of::<wire::Header>());
        if wire::Header::ref_from_bytes(header).unwrap().kind == Kind::SYNC {
            wire::Sync::mut_from_bytes(body).unwrap().kind += 1;
        }
    });
    thread::spawn(move || {
        loop {
            let program = wait_for("a program", || packet::accept(listener.as_fd()).unwrap());
            let daemon = packet::connect_to(&target).unwrap();
            thread::spawn(move || forward_packets(program, daemon, nonsense));
        }
    });
    let endpoint =
        Endpoint::attach_with("web", &AttachOptions { socket: path, ..AttachOptions::default() }).unwrap();
    let error = endpoint.mutex("m").err().unwrap();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
    wait_for("the lock's end", || (count(&daemon, "locks") == 0).then_some(()));
}
