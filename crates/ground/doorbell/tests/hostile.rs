//! A hostile holder of a doorbell tampers with it, and a ring still arrives.

use kit::wait::Watchdog;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn bed(event: &OwnedFd) -> OwnedFd {
    let bed = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&bed, event, epoll::EventData::new_u64(0), flags).unwrap();
    bed
}

fn is_woken(bed: &OwnedFd) -> bool {
    let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
    epoll::wait(bed, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

/// Calls `ring` this many times in a thread, and fails if one call does not return.
fn does_not_hang(what: &str, count: u64, ring: impl Fn() + Send + 'static) {
    let rung = Arc::new(AtomicU64::new(0));
    let rings = std::thread::spawn({
        let rung = rung.clone();
        move || {
            (0..count).for_each(|_| {
                ring();
                rung.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    let mut watchdog = Watchdog::new(what);
    while !rings.is_finished() {
        watchdog.look(rung.load(Ordering::Relaxed));
        std::thread::sleep(Duration::from_millis(1));
    }
    rings.join().unwrap();
}

#[test]
fn each_ring_wakes_each_sleeper() {
    let event = doorbell();
    let beds = [bed(&event), bed(&event)];
    assert!(ginnel_doorbell::is_safe());
    for _ in 0..1000 {
        ginnel_doorbell::ring(event.as_fd());
        assert!(beds.iter().all(is_woken));
        assert!(!beds.iter().any(is_woken));
    }
}

#[test]
fn a_full_counter_that_blocks_neither_blocks_a_ring_nor_swallows_it() {
    let event = doorbell();
    let bed = bed(&event);
    fcntl_setfl(&event, OFlags::empty()).unwrap();
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    assert!(is_woken(&bed));
    does_not_hang("rings of a full doorbell", 100, move || {
        ginnel_doorbell::ring(event.as_fd());
        assert!(is_woken(&bed));
    });
}

#[test]
fn a_holder_that_fills_the_counter_without_end_blocks_nobody() {
    let event = doorbell();
    let (stop, attacker) = (doorbell(), event.try_clone().unwrap());
    let stopped = stop.try_clone().unwrap();
    let attack = std::thread::spawn(move || {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        while poll(&mut [PollFd::new(&stopped, PollFlags::IN)], Some(&now)) == Ok(0) {
            let _ = fcntl_setfl(&attacker, OFlags::NONBLOCK);
            let _ = rustix::io::write(&attacker, &(u64::MAX - 1).to_ne_bytes());
            let _ = rustix::io::read(&attacker, &mut [0u8; 8]);
            let _ = rustix::io::write(&attacker, &(u64::MAX - 1).to_ne_bytes());
            let _ = fcntl_setfl(&attacker, OFlags::empty());
        }
    });
    does_not_hang("rings under attack", 20_000, move || ginnel_doorbell::ring(event.as_fd()));
    rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
    attack.join().unwrap();
}

#[test]
fn threads_ring_at_once() {
    let event = doorbell();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..5000).for_each(|_| ginnel_doorbell::ring(event.as_fd())));
        }
    });
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 40_000, "no ring is lost");
}
