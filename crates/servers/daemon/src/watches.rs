//! Watches processes: one descriptor for each process, whatever the number of things that end with it.

use crate::poller::{Interest, Poller};
use crate::{descriptors, pidwatch};
use ginnel_broker::process::Process;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;

/// The processes of a user that are watched for each connection that the user may have: its process, and a child.
pub const EACH: usize = 2;
/// The user for whose processes there is no limit but that for all.
pub const ROOT: u32 = 0;

/// The processes that are watched, and what ends with each.
#[derive(Debug)]
pub struct Watches<T> {
    /// Makes a token for the poller from the number of a watch. The numbers are never used again, so an event that was fetched
    /// before its watch ended matches nothing.
    token: fn(u64) -> u64,
    of_process: BTreeMap<Process, Watch<T>>,
    processes: BTreeMap<u64, Process>,
    of_user: BTreeMap<u32, usize>,
    last: u64,
}

#[derive(Debug)]
struct Watch<T> {
    number: u64,
    uid: u32,
    /// Becomes readable when the process ends.
    ended: OwnedFd,
    things: BTreeSet<T>,
}

impl<T: Ord> Watches<T> {
    /// Starts without watches. `token` makes tokens for the poller.
    pub fn new(token: fn(u64) -> u64) -> Self {
        Self {
            token,
            of_process: BTreeMap::new(),
            processes: BTreeMap::new(),
            of_user: BTreeMap::new(),
            last: 0,
        }
    }

    /// Notes that something ends with a process. Returns false if the process has ended already. Fails with `EMFILE` if it is not
    /// watched yet, and `most` processes are watched on the account of this user, or only the descriptors are free that are kept
    /// for root (user 0).
    pub fn add(
        &mut self,
        poller: &Poller,
        process: Process,
        thing: T,
        uid: u32,
        most: usize,
    ) -> io::Result<bool> {
        if let Some(watch) = self.of_process.get_mut(&process) {
            watch.things.insert(thing);
            return Ok(true);
        }
        if self.of_user.get(&uid).is_some_and(|count| *count >= most) {
            return Err(Errno::MFILE.into());
        }
        let Some(ended) = pidwatch::watch(&process)? else { return Ok(false) };
        if uid != 0 && descriptors::is_kept_for_root(&ended) {
            return Err(Errno::MFILE.into());
        }
        let number = self.last + 1;
        poller.add(&ended, (self.token)(number), Interest::READ)?;
        self.last = number;
        self.of_process.insert(process, Watch { number, uid, ended, things: BTreeSet::from([thing]) });
        self.processes.insert(number, process);
        *self.of_user.entry(uid).or_default() += 1;
        Ok(true)
    }

    /// Returns the number of processes that are watched.
    pub fn count(&self) -> usize {
        self.of_process.len()
    }

    /// Returns whether a process is watched.
    pub fn has(&self, process: &Process) -> bool {
        self.of_process.contains_key(process)
    }

    /// Notes that something does not end with a process any more. Returns false if that was not known.
    pub fn remove(&mut self, poller: &Poller, process: &Process, thing: &T) -> bool {
        let Some(watch) = self.of_process.get_mut(process) else { return false };
        let known = watch.things.remove(thing);
        if watch.things.is_empty() {
            self.forget(poller, process);
        }
        known
    }

    /// Returns the process that has ended, and what ends with it, for the event of this watch.
    pub fn take_ended(&mut self, poller: &Poller, number: u64) -> Option<(Process, BTreeSet<T>)> {
        let process = *self.processes.get(&number)?;
        Some((process, self.forget(poller, &process)))
    }

    /// Forgets all processes.
    pub fn clear(&mut self, poller: &Poller) {
        for process in self.of_process.keys().copied().collect::<Vec<_>>() {
            self.forget(poller, &process);
        }
    }

    fn forget(&mut self, poller: &Poller, process: &Process) -> BTreeSet<T> {
        let Some(watch) = self.of_process.remove(process) else { return BTreeSet::new() };
        poller.remove(&watch.ended);
        self.processes.remove(&watch.number);
        if let Some(count) = self.of_user.get_mut(&watch.uid) {
            *count -= 1;
            if *count == 0 {
                self.of_user.remove(&watch.uid);
            }
        }
        watch.things
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Process {
        pidwatch::process(std::process::id()).unwrap()
    }

    #[test]
    fn a_process_has_one_watch_for_all_that_ends_with_it() {
        let poller = Poller::new().unwrap();
        let mut watches = Watches::new(|number| number);
        for thing in 0..1000 {
            assert!(watches.add(&poller, me(), thing, 7, 1).unwrap());
        }
        assert_eq!((watches.of_process.len(), watches.of_user[&7]), (1, 1));
        for thing in 1..1000 {
            assert!(watches.remove(&poller, &me(), &thing));
            assert!(!watches.remove(&poller, &me(), &thing));
        }
        let (process, things) = watches.take_ended(&poller, 1).unwrap();
        assert_eq!((process, things), (me(), BTreeSet::from([0])));
        assert!(watches.of_process.is_empty() && watches.processes.is_empty() && watches.of_user.is_empty());
    }

    #[test]
    fn an_event_of_an_ended_watch_matches_nothing() {
        let poller = Poller::new().unwrap();
        let mut watches = Watches::new(|number| number);
        watches.add(&poller, me(), 'a', 7, 1).unwrap();
        let stale = watches.of_process[&me()].number;
        watches.remove(&poller, &me(), &'a');
        watches.add(&poller, me(), 'b', 7, 1).unwrap();
        assert_eq!(watches.take_ended(&poller, stale), None);
        watches.clear(&poller);
        assert!(watches.of_process.is_empty());
    }

    #[test]
    fn a_user_has_a_number_of_watches() {
        let poller = Poller::new().unwrap();
        let mut watches = Watches::new(|number| number);
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let other = pidwatch::process(child.id()).unwrap();
        assert!(watches.add(&poller, me(), 1, 7, 1).unwrap());
        assert_eq!(watches.add(&poller, other, 1, 7, 1).unwrap_err().raw_os_error(), Some(libc::EMFILE));
        assert!(watches.add(&poller, other, 1, 8, 1).unwrap(), "another user");
        child.kill().unwrap();
        child.wait().unwrap();
        watches.remove(&poller, &other, &1);
        assert!(!watches.add(&poller, other, 1, 8, 1).unwrap(), "it has ended");
    }
}
