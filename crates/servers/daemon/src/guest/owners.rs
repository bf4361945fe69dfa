//! The processes of this guest that own endpoints. The host's daemon cannot see them, so this daemon reports their ends to it.

use crate::pidwatch::ExecChecks;
use crate::poller::Poller;
use crate::user_connections::Most;
use crate::watches::{EACH, ROOT, Watches};
use ginnel_broker::process::{Image, Process};
use ginnel_layout::relay;
use rustix::io::Errno;
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
    /// The most connections at a time. So many processes are watched as belong to them; each has a descriptor. Further processes own their
    /// endpoints as long as they are connected.
    most: Most,
    watches: Watches<Endpoint>,
    /// The owners that may run another program now.
    exec_checks: ExecChecks<relay::Endpoint>,
}

impl Owners {
    /// Starts without owners; `most` limits the watches.
    pub fn new(poller: Rc<Poller>, most: Most) -> Self {
        let watches = Watches::new(|number| FIRST_TOKEN + number);
        Self { poller, most, watches, exec_checks: ExecChecks::default() }
    }

    /// Watches a process, on the account of a user, until it ends or is forgotten.
    pub fn watch(&mut self, owner: relay::Endpoint, uid: u32) -> Watch {
        let (process, endpoint) = (process(&owner), (owner.endpoint, owner.epoch));
        let most = if uid == ROOT { usize::MAX } else { EACH * self.most.per_user };
        let added = match self.watches.count() < EACH * self.most.all || self.watches.has(&process) {
            true => self.watches.add(&self.poller, process, endpoint, uid, most),
            false => Err(Errno::MFILE.into()),
        };
        match added {
            Ok(true) => Watch::Set,
            Ok(false) => Watch::Ended,
            Err(error) => {
                tracing::warn!(
                    pid = owner.pid,
                    uid,
                    "an endpoint's process cannot be watched, so the end of its connection will count as its end: {error}; raise \
                     --clients-per-user, --max-clients or LimitNOFILE="
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
        let key = |owner: &relay::Endpoint| (owner.endpoint, owner.epoch);
        self.exec_checks.settle(&process(owner), |checked| key(checked) == key(owner));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pidwatch;
    use std::process::{Child, Command};

    /// Processes that are ended with this value.
    struct Processes(Vec<Child>);

    impl Processes {
        fn start(count: usize) -> Self {
            Self((0..count).map(|_| Command::new("sleep").arg("600").spawn().unwrap()).collect())
        }

        /// Returns the message about a process as an owner of an endpoint.
        fn owner(&self, of: usize, endpoint: u32) -> relay::Endpoint {
            owner(endpoint, 1, pidwatch::process(self.0[of].id()).unwrap())
        }
    }

    impl Drop for Processes {
        fn drop(&mut self) {
            for child in &mut self.0 {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    #[test]
    fn a_user_who_owns_much_leaves_watches_to_others() {
        let processes = Processes::start(8);
        let mut owners = Owners::new(Rc::new(Poller::new().unwrap()), Most { all: 3, per_user: 1 });
        let mut watch = |of, endpoint, uid| owners.watch(processes.owner(of, endpoint), uid);
        assert_eq!(
            [watch(0, 1, 7), watch(1, 2, 7), watch(2, 3, 7)],
            [Watch::Set, Watch::Set, Watch::Impossible]
        );
        assert_eq!(watch(0, 4, 7), Watch::Set, "a process has one watch, whatever it owns");
        assert_eq!([watch(3, 5, 8), watch(2, 3, 8)], [Watch::Set, Watch::Set], "another user");
        assert_eq!([watch(4, 6, ROOT), watch(5, 7, ROOT)], [Watch::Set, Watch::Set], "root");
        assert_eq!(
            [watch(6, 8, ROOT), watch(7, 9, 9)],
            [Watch::Impossible; 2],
            "there are two for each of all connections"
        );
        owners.forget(&processes.owner(4, 6));
        assert_eq!(owners.watch(processes.owner(7, 9), 9), Watch::Set);
    }
}
