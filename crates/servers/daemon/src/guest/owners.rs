//! The processes of this guest that own endpoints. The host's daemon cannot see them, so this daemon reports their ends to it.

use crate::pidwatch::{self, ExecChecks};
use crate::poller::{Interest, Poller};
use ginnel_broker::process::{Image, Process};
use ginnel_layout::relay;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

/// The first epoll token of watches. Their numbers are never used again, so an event that was fetched before its watch ended
/// matches nothing.
pub const FIRST_TOKEN: u64 = 1 << 40;

/// The result of the attempt to watch a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// The end of the process will be reported.
    Set,
    /// The process has ended already.
    Ended,
    /// The process cannot be watched.
    Impossible,
}

/// Returns the message to the host about a process that owns an endpoint.
pub fn owner(endpoint: u32, epoch: u32, process: Process) -> relay::Endpoint {
    relay::Endpoint { endpoint, epoch, pid: process.pid, reserved: 0, started: process.started }
}

/// An endpoint's number and epoch, and an owner.
type Key = (u32, u32, Process);

fn key(owner: &relay::Endpoint) -> Key {
    (owner.endpoint, owner.epoch, Process { pid: owner.pid, started: owner.started })
}

/// The owners that are watched.
pub struct Owners {
    poller: Rc<Poller>,
    /// The most watches at a time; each has a descriptor. Further processes own their endpoints as long as they are connected.
    most: usize,
    watches: BTreeMap<u64, (relay::Endpoint, OwnedFd)>,
    numbers: BTreeMap<Key, u64>,
    last: u64,
    /// The owners that may run another program now.
    exec_checks: ExecChecks<relay::Endpoint>,
}

impl Owners {
    /// Starts without owners; `most` limits the watches.
    pub fn new(poller: Rc<Poller>, most: usize) -> Self {
        let (watches, numbers) = (BTreeMap::new(), BTreeMap::new());
        Self { poller, most, watches, numbers, last: 0, exec_checks: ExecChecks::default() }
    }

    /// Watches a process until it ends or is forgotten.
    pub fn watch(&mut self, owner: relay::Endpoint) -> Watch {
        let key = key(&owner);
        if self.numbers.contains_key(&key) {
            return Watch::Set;
        }
        let watched = match pidwatch::watch(&key.2) {
            Ok(None) => return Watch::Ended,
            Ok(Some(_)) if self.watches.len() >= self.most => Err(rustix::io::Errno::MFILE.into()),
            Ok(Some(ended)) => {
                self.poller.add(&ended, FIRST_TOKEN + self.last + 1, Interest::READ).map(|()| ended)
            }
            Err(errno) => Err(errno.into()),
        };
        match watched {
            Ok(ended) => {
                self.last += 1;
                self.watches.insert(self.last, (owner, ended));
                self.numbers.insert(key, self.last);
                Watch::Set
            }
            Err(error) => {
                tracing::warn!(
                    pid = owner.pid,
                    "an endpoint's process cannot be watched, so the end of its connection will count as its end: {error}"
                );
                Watch::Impossible
            }
        }
    }

    /// Stops watching a process that does not own the endpoint any more.
    pub fn forget(&mut self, owner: &relay::Endpoint) {
        if let Some(number) = self.numbers.remove(&key(owner))
            && let Some((_, ended)) = self.watches.remove(&number)
        {
            self.poller.remove(&ended);
        }
    }

    /// Returns the owner whose watch has this token, and which has ended.
    pub fn ended(&mut self, token: u64) -> Option<relay::Endpoint> {
        let owner = self.watches.get(&(token - FIRST_TOKEN))?.0;
        self.forget(&owner);
        Some(owner)
    }

    /// Examines an owner whose connection has ended. Returns the owner if it runs another program now than when it attached.
    pub fn examine(&mut self, owner: relay::Endpoint, image: Image) -> Option<relay::Endpoint> {
        self.exec_checks.add(key(&owner).2, image, owner)
    }

    /// Accepts an owner that comes back for its endpoint, whatever program it runs now.
    pub fn recognize(&mut self, owner: &relay::Endpoint) {
        self.exec_checks.settle(|checked| key(checked) == key(owner));
    }

    /// Returns the owners that turn out to run another program.
    pub fn take_changed(&mut self) -> Vec<relay::Endpoint> {
        self.exec_checks.take_changed()
    }

    /// Returns the time until [`Owners::take_changed`] has something to do.
    pub fn until_next(&self) -> Option<Duration> {
        self.exec_checks.until_next()
    }

    /// Forgets all owners.
    pub fn clear(&mut self) {
        for (_, ended) in std::mem::take(&mut self.watches).values() {
            self.poller.remove(ended);
        }
        self.numbers.clear();
        self.exec_checks = ExecChecks::default();
    }
}
