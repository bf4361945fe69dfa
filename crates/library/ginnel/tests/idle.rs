//! Idle channels cost no descriptors and no CPU time. This test has a process of its own, because both are counted for the
//! whole process.

use ginnel::{AttachOptions, ChannelOptions, Endpoint, Error, MessageChannel, MessageReceiver, ReadySet};
use ginnel_layout::ring;
use kit::daemon::*;
use kit::wait::WATCHDOG;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

const CHANNELS: usize = 2000;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the CPU time of this process.
fn used() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn idle_channels_cost_neither_descriptors_nor_cpu() {
    let daemon = Daemon::start_new("[segment.web]\nsize = \"64M\"\nmembers = [\"host\"]\n");
    let attach = |name: &str| {
        let options =
            AttachOptions { socket: daemon.socket(), name: Some(name.into()), ..AttachOptions::default() };
        Endpoint::attach_with("web", &options).unwrap()
    };
    let (a, b) = (attach("a"), attach("b"));
    let small = ChannelOptions { capacity: ring::MIN_CAPACITY, ..ChannelOptions::default() };
    let listener = a.listen_with::<MessageChannel>("a", &small).unwrap();
    let before = descriptors();
    let mut set = ReadySet::new().unwrap();
    let (mut senders, mut receivers): (Vec<MessageChannel>, Vec<MessageReceiver>) = (0..CHANNELS as u64)
        .map(|key| {
            let near = b.connect_with::<MessageChannel>("a", &small).unwrap();
            let (_, mut receiver) = listener.accept_timeout(WATCHDOG).unwrap().split();
            receiver.register(&set, key).unwrap();
            (near, receiver)
        })
        .unzip();
    let more = descriptors() - before;
    assert!(more <= 8, "{more} descriptors for {CHANNELS} channels");

    let mut keys = Vec::new();
    set.wait(&mut keys, Some(WATCHDOG)).unwrap();
    assert_eq!(keys.len(), CHANNELS, "once at the beginning");
    for receiver in &mut receivers {
        assert!(matches!(receiver.recv(), Err(Error::WouldBlock)));
    }
    // The set falls asleep, and arms the channels that it has still looked at by itself.
    set.wait(&mut keys, Some(Duration::from_millis(10))).unwrap();
    let begin = used();
    set.wait(&mut keys, Some(Duration::from_secs(1))).unwrap();
    let used = used() - begin;
    assert!(keys.is_empty() && used < Duration::from_millis(5), "{used:?} of CPU while nothing happens");

    for key in [1999, 0, 777] {
        senders[key].send(b"x").unwrap();
        set.wait(&mut keys, Some(WATCHDOG)).unwrap();
        assert_eq!(keys, [key as u64]);
        assert_eq!(receivers[key].recv().unwrap(), b"x");
        assert!(matches!(receivers[key].recv(), Err(Error::WouldBlock)));
    }
}
