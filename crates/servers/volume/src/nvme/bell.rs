//! The interrupt of the admin queue. Its eventfd is the VMM's, which can make it block at any time, so a thread of its own writes it.

use super::Stuck;
use crate::worker::ring;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How many eventfds may wait for the thread. An honest VMM has one at a time.
const MANY: usize = 64;

/// The thread, as the main thread sees it. It ends with this, or with the process if it blocks.
pub(super) struct Bell(Arc<Rings>);

#[derive(Default)]
struct Rings {
    todo: Mutex<Todo>,
    changed: Condvar,
}

#[derive(Default)]
struct Todo {
    /// The eventfds to write. One that is to be written again before it was is there once: such interrupts are one.
    eventfds: VecDeque<Arc<OwnedFd>>,
    is_over: bool,
}

impl Bell {
    /// Starts the thread.
    pub fn new() -> io::Result<Self> {
        let rings = Arc::new(Rings::default());
        let of_thread = rings.clone();
        let work = move || std::iter::from_fn(|| of_thread.next()).for_each(|eventfd| ring(&eventfd));
        std::thread::Builder::new().name("volume-bell".to_owned()).spawn(work)?;
        Ok(Self(rings))
    }

    /// Writes an eventfd soon. Never blocks.
    pub fn ring(&self, eventfd: &Arc<OwnedFd>) -> Result<(), Stuck> {
        let mut todo = self.0.todo();
        if todo.eventfds.iter().any(|other| Arc::ptr_eq(other, eventfd)) {
            return Ok(());
        }
        if todo.eventfds.len() == MANY {
            return Err(Stuck("the VMM's eventfds of interrupt 0 block".to_owned()));
        }
        todo.eventfds.push_back(eventfd.clone());
        self.0.changed.notify_one();
        Ok(())
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.0.todo().is_over = true;
        self.0.changed.notify_one();
    }
}

impl Rings {
    fn todo(&self) -> MutexGuard<'_, Todo> {
        self.todo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next eventfd. Returns `None` at the end.
    fn next(&self) -> Option<Arc<OwnedFd>> {
        let mut todo = self.todo();
        loop {
            if let Some(eventfd) = todo.eventfds.pop_front() {
                return Some(eventfd);
            }
            if todo.is_over {
                return None;
            }
            todo = self.changed.wait(todo).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn blocked() -> Arc<OwnedFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        Arc::new(fd)
    }

    #[test]
    fn interrupts_that_wait_are_one_and_none_is_lost() {
        let bell = Bell::new().unwrap();
        let (first, other) = (blocked(), Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        for _ in 0..10_000 {
            bell.ring(&first).unwrap();
            bell.ring(&other).unwrap();
        }
        // The VMM takes its interrupts, and then the thread goes on.
        rustix::io::read(&first, &mut [0; 8]).unwrap();
        rustix::io::read(&other, &mut [0; 8]).unwrap();
        let mut blocked = (0..2 * MANY).map(|_| bell.ring(&blocked()));
        assert!(blocked.any(|rung| rung.is_err()), "a VMM has very many eventfds that block");
    }
}
