//! Locks whose owner dies, with and without a daemon, and how the status shows locks.

use ginnel::{AttachOptions, Endpoint, WaitMode};
use ginnel_layout::sync::{self, OwnerWord, SyncKind};
use ginnel_shmem::{Mapping, SharedMemory};
use kit::daemon::*;
use kit::wait::{WATCHDOG, takes_less_than, wait_for};
use rustix::process::Signal;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";

fn attach(socket: &Path, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: socket.into(), name: Some(name.into()), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

kit::program! {
    fn program() {
        let endpoint = attach(&program_socket(), "program");
        let mut mutex = endpoint.mutex("m").unwrap();
        let mut ready = endpoint.semaphore("ready", 9, 0).unwrap();
        let _guard = mutex.lock().unwrap();
        ready.release(1).unwrap();
        let _ = std::io::stdin().read(&mut [0]);
    }
}

#[test]
fn a_lock_is_handed_on_when_its_owner_is_killed_with_or_without_a_daemon() {
    let mut daemon = Daemon::start_new(WEB);
    let endpoint = attach(&daemon.socket(), "own");
    let mut ready = endpoint.semaphore("ready", 9, 0).unwrap();
    let mut mutex = endpoint.mutex("m").unwrap();
    mutex.set_timeout(Some(WATCHDOG));
    ready.set_timeout(Some(WATCHDOG));
    for daemon_is_away in [false, true] {
        let mut program = daemon.start_program(program);
        ready.acquire().unwrap();
        assert!(mutex.try_lock().is_err());
        if daemon_is_away {
            daemon.kill();
        }
        program.kill().unwrap();
        program.wait().unwrap();
        if daemon_is_away {
            mutex.set_timeout(Some(Duration::from_millis(50)));
            assert!(mutex.lock().is_err(), "nobody can know of the death yet");
            mutex.set_timeout(Some(WATCHDOG));
            daemon.start();
        }
        let mut guard = mutex.lock().unwrap();
        assert!(guard.owner_died());
        guard.make_consistent().unwrap();
    }
    let lock = &daemon.inspect()["locks"][1];
    assert_eq!((&lock["name"], &lock["kind"], &lock["users"]), (&"m".into(), &"mutex".into(), &1.into()));
    assert!(lock["owner"].is_null());
}

#[test]
fn the_status_shows_the_owner_and_the_waiters_of_a_lock() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon.socket(), "a"), attach(&daemon.socket(), "b"));
    let (mut mine, mut other) = (a.mutex("m").unwrap(), b.mutex("m").unwrap());
    let guard = mine.lock().unwrap();
    let waiting = std::thread::spawn(move || other.lock().map(drop));
    let lock = wait_for("a waiter", || {
        let lock = daemon.inspect()["locks"][0].clone();
        (!lock["waiters"][0]["since_s"].is_null()).then_some(lock)
    });
    assert_eq!((&lock["owner"]["name"], &lock["waiters"][0]["name"]), (&"a".into(), &"b".into()));
    drop(guard);
    waiting.join().unwrap().unwrap();
}

/// Returns how long it takes to wake sleepers whose doorbells the waker does not know yet, while the daemon is stopped.
fn wakes_without_daemon(daemon: &Daemon) -> Duration {
    const SLEEPERS: u32 = 4;
    let endpoint = attach(&daemon.socket(), "waker");
    let mut permits = endpoint.semaphore("permits", SLEEPERS, 0).unwrap();
    let sleepers: Vec<_> = (0..SLEEPERS)
        .map(|_| {
            let sleeper = attach(&daemon.socket(), "sleeper");
            std::thread::spawn(move || {
                let mut permits = sleeper.semaphore("permits", SLEEPERS, 0).unwrap();
                permits.set_mode(WaitMode::Interrupt);
                permits.set_timeout(Some(WATCHDOG));
                permits.acquire().unwrap();
            })
        })
        .collect();
    wait_for("all to sleep", || {
        let status = daemon.inspect();
        let waiters = status["locks"][0]["waiters"].as_array()?;
        (waiters.len() == SLEEPERS as usize).then_some(())
    });
    daemon.signal(Signal::STOP);
    let begin = Instant::now();
    permits.release(SLEEPERS).unwrap();
    let took = begin.elapsed();
    // The sleepers look by themselves from time to time.
    sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    daemon.signal(Signal::CONT);
    took
}

#[test]
fn waking_others_does_not_wait_for_a_stopped_daemon() {
    let daemon = Daemon::start_new(WEB);
    takes_less_than(Duration::from_millis(25), || wakes_without_daemon(&daemon));
}

/// Returns the page of the only mutex in the segment that is held, which contains its owner word.
fn page_of_lock(endpoint: &Endpoint, owner: u32) -> Mapping {
    let memory = endpoint.memory();
    let pages = (0..memory.len() / sync::SIZE).map(|n| memory.part(n * sync::SIZE, sync::SIZE).unwrap());
    let word = |page: &Mapping| OwnerWord(page.load_acquire_u64(sync::STATE));
    let is = |page: &Mapping| {
        page.load_relaxed_u32(sync::KIND) == SyncKind::MUTEX.0
            && word(page).is_valid()
            && word(page).endpoint() == owner
    };
    pages.into_iter().find(is).expect("a lock that is held")
}

/// A program is declared dead after it has checked its slot for the last time. It takes a lock without the daemon's knowledge,
/// and dies with it.
#[test]
fn a_lock_taken_by_a_program_already_declared_dead_is_handed_on() {
    let mut daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon.socket(), "a"), attach(&daemon.socket(), "b"));
    let mut ready = a.semaphore("ready", 9, 0).unwrap();
    let (mut mutex, mut other) = (a.mutex("m").unwrap(), b.mutex("m").unwrap());
    ready.set_timeout(Some(WATCHDOG));
    mutex.set_timeout(Some(WATCHDOG));
    other.set_timeout(Some(WATCHDOG));
    let mut program = daemon.start_program(program);
    ready.acquire().unwrap();
    let endpoints = daemon.inspect()["endpoints"].clone();
    let dead =
        endpoints.as_array().unwrap().iter().find(|e| e["name"] == "program").unwrap()["number"].clone();
    let page = page_of_lock(&a, dead.as_u64().unwrap() as u32);
    let word = page.load_acquire_u64(sync::STATE);
    program.kill().unwrap();
    program.wait().unwrap();
    let mut guard = mutex.lock().unwrap();
    assert!(guard.owner_died());
    guard.make_consistent().unwrap();
    guard.unlock().unwrap();
    // Nobody asks the daemon whether the owner lives.
    daemon.kill();
    page.swap_u64(sync::STATE, word);
    let mut guard = mutex.lock().unwrap();
    assert!(guard.owner_died());
    guard.make_consistent().unwrap();
    // The same while another program sleeps waiting for the lock.
    other.set_mode(WaitMode::Interrupt);
    let waiting = std::thread::spawn(move || other.lock().map(|guard| guard.owner_died()));
    wait_for("a waiter", || (page.load_relaxed_u64(sync::ARMED) != 0).then_some(()));
    page.swap_u64(sync::STATE, word);
    assert!(waiting.join().unwrap().unwrap());
    assert!(guard.unlock().is_err(), "it was taken away");
}
