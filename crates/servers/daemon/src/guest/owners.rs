//! The processes of this guest that own endpoints. The host's daemon cannot see them, so this daemon reports their ends to it.

use crate::pidwatch::ExecChecks;
use crate::poller::Poller;
use crate::watches::Watches;
use ginnel_broker::process::{Image, Process};
use ginnel_layout::relay;
use std::rc::Rc;
use std::time::Duration;

/// The first epoll token of watches.
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

/// Returns the owner of such a message.
fn process(owner: &relay::Endpoint) -> Process {
    Process { pid: owner.pid, started: owner.started }
}

/// The number and epoch of an endpoint.
type Endpoint = (u32, u32);

/// The owners that are watched.
pub struct Owners {
    poller: Rc<Poller>,
    /// The most processes that are watched at a time; each has a descriptor. Further processes own their endpoints as long as they
    /// are connected.
    most: usize,
    watches: Watches<Endpoint>,
    /// The owners that may run another program now.
    exec_checks: ExecChecks<relay::Endpoint>,
}

impl Owners {
    /// Starts without owners; `most` limits the watches.
    pub fn new(poller: Rc<Poller>, most: usize) -> Self {
        let watches = Watches::new(|number| FIRST_TOKEN + number);
        Self { poller, most, watches, exec_checks: ExecChecks::default() }
    }

    /// Watches a process until it ends or is forgotten.
    pub fn watch(&mut self, owner: relay::Endpoint) -> Watch {
        let endpoint = (owner.endpoint, owner.epoch);
        match self.watches.add(&self.poller, process(&owner), endpoint, 0, self.most) {
            Ok(true) => Watch::Set,
            Ok(false) => Watch::Ended,
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
        self.watches.remove(&self.poller, &process(owner), &(owner.endpoint, owner.epoch));
    }

    /// Returns all ownerships of the process whose watch has this token, and which has ended.
    pub fn ended(&mut self, token: u64) -> Vec<relay::Endpoint> {
        let ended = self.watches.take_ended(&self.poller, token - FIRST_TOKEN);
        let owners = ended.into_iter().flat_map(|(process, endpoints)| {
            endpoints.into_iter().map(move |(endpoint, epoch)| owner(endpoint, epoch, process))
        });
        owners.collect()
    }

    /// Examines an owner whose connection has ended. Returns the owner if it runs another program now than when it attached.
    pub fn examine(&mut self, owner: relay::Endpoint, image: Image) -> Option<relay::Endpoint> {
        self.exec_checks.add(process(&owner), image, owner)
    }

    /// Accepts an owner that comes back for its endpoint, whatever program it runs now.
    pub fn recognize(&mut self, owner: &relay::Endpoint) {
        let key = |owner: &relay::Endpoint| (owner.endpoint, owner.epoch, process(owner));
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
        self.watches.clear(&self.poller);
        self.exec_checks = ExecChecks::default();
    }
}
