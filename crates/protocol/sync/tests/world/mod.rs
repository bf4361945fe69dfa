//! Pages, users and worlds for tests.
#![allow(dead_code)] // Each test uses some of it.

use ginnel_layout::sync::{SIZE, SyncKind};
use ginnel_ring::wait::Sleeper;
use ginnel_shmem::{Mapping, Protection};
use ginnel_sync::{User, World, authority};
use kit::wait::WATCHDOG;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// User `k`, in the first epoch of its slot.
pub fn user(k: usize) -> User {
    User::new(k, 1, 7).unwrap()
}

/// Returns an object whose first users have slots, in memory that other processes can map.
pub fn page(kind: SyncKind, limit: u32, permits: u32, users: usize) -> Mapping {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(SIZE as u64).unwrap();
    let page = Mapping::of_file(&file, 0, SIZE, Protection::ReadWrite).unwrap();
    authority::format(&page, kind, limit, permits);
    (0..users).for_each(|k| authority::seat(&page, user(k), 1, k as u32));
    page
}

/// A world without doorbells: it rings no one, and sleeps to the deadline, which must exist (or to the next regular look).
pub struct NoDoorbells;

impl Sleeper for NoDoorbells {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        std::thread::sleep(deadline.unwrap().saturating_duration_since(Instant::now()));
        Ok(())
    }
}

impl World for NoDoorbells {
    fn ring(&mut self, slot: usize) {
        assert!(slot < 63);
    }
}

/// The doorbells of all users: eventfds that are never read, as in the library.
#[derive(Clone)]
pub struct Bells(pub Arc<Vec<OwnedFd>>);

impl Bells {
    pub fn new(users: usize) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Self(Arc::new((0..users).map(|_| eventfd(0, flags).unwrap()).collect()))
    }

    pub fn ring(&self, slot: usize) {
        rustix::io::write(&self.0[slot], &1u64.to_ne_bytes()).unwrap();
    }

    pub fn ring_all(&self, slots: u64) {
        (0..self.0.len()).filter(|k| slots & 1 << k != 0).for_each(|k| self.ring(k));
    }
}

/// A way to sleep for one user: an edge-triggered epoll on its eventfd.
pub struct EventSleeper {
    pub bells: Bells,
    epoll: OwnedFd,
}

impl EventSleeper {
    pub fn new(bells: &Bells, own: usize) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &bells.0[own], epoll::EventData::new_u64(0), flags).unwrap();
        Self { bells: bells.clone(), epoll }
    }
}

impl Sleeper for EventSleeper {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.unwrap().saturating_duration_since(Instant::now());
        let left = rustix::event::Timespec::try_from(left).unwrap();
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        match epoll::wait(&self.epoll, &mut events, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl World for EventSleeper {
    fn ring(&mut self, slot: usize) {
        self.bells.ring(slot);
    }
}

/// A sleeper without the regular look every 100 ms, so that a lost wake-up fails the test.
pub struct StrictSleeper(pub EventSleeper);

impl Sleeper for StrictSleeper {
    fn sleep(&mut self, _: Option<Instant>) -> io::Result<()> {
        let end = Instant::now() + WATCHDOG;
        self.0.sleep(Some(end))?;
        assert!(Instant::now() < end, "a wake-up was lost");
        Ok(())
    }
}

impl World for StrictSleeper {
    fn ring(&mut self, slot: usize) {
        self.0.ring(slot);
    }
}
