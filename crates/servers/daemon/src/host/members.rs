//! The descriptors of members that outlive the daemon: doorbells, and the control memory of VMs.

use super::ringing::Doorbell;
use ginnel_config::Problem;
use ginnel_layout::control;
use ginnel_shmem::{Mapping, Protection};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time that the last rings may take when the daemon ends.
const LAST_RINGS: Duration = Duration::from_millis(500);

/// The descriptors of one member.
#[derive(Debug)]
pub struct MemberFds {
    doorbells: BTreeMap<u32, Doorbell>,
    /// The control memory, if the member is a VM.
    pub control: Option<Arc<OwnedFd>>,
}

impl MemberFds {
    /// Makes the descriptors of a member, with an eventfd for each doorbell vector.
    pub fn new(
        vectors: impl IntoIterator<Item = (u32, Arc<OwnedFd>)>,
        control: Option<Arc<OwnedFd>>,
    ) -> Self {
        let mut fds = Self { doorbells: BTreeMap::new(), control };
        fds.add(vectors);
        fds
    }

    fn add(&mut self, vectors: impl IntoIterator<Item = (u32, Arc<OwnedFd>)>) {
        self.doorbells.extend(vectors.into_iter().map(|(vector, event)| (vector, Doorbell::new(event))));
    }

    /// Returns the eventfds, by vector.
    pub fn events(&self) -> impl Iterator<Item = (u32, &Arc<OwnedFd>)> {
        self.doorbells.iter().map(|(vector, doorbell)| (*vector, doorbell.event()))
    }
}

/// The descriptors of all members.
#[derive(Debug, Default)]
pub struct Members(BTreeMap<u32, MemberFds>);

impl Members {
    /// Adds the descriptors of a member.
    pub fn insert(&mut self, member: u32, fds: MemberFds) {
        self.0.insert(member, fds);
    }

    /// Drops the descriptors of a member.
    pub fn remove(&mut self, member: u32) {
        self.0.remove(&member);
    }

    /// Adds more vectors of a member.
    pub fn add(&mut self, member: u32, vectors: impl IntoIterator<Item = (u32, Arc<OwnedFd>)>) {
        if let Some(fds) = self.0.get_mut(&member) {
            fds.add(vectors);
        }
    }

    /// Drops some vectors of a member.
    pub fn drop_vectors(&mut self, member: u32, vectors: &[u32]) {
        if let Some(fds) = self.0.get_mut(&member) {
            fds.doorbells.retain(|vector, _| !vectors.contains(vector));
        }
    }

    /// Returns the descriptors of a member.
    pub fn get(&self, member: u32) -> Option<&MemberFds> {
        self.0.get(&member)
    }

    /// Returns the eventfd of a vector.
    pub fn event(&self, member: u32, vector: u32) -> Option<Arc<OwnedFd>> {
        self.0.get(&member)?.doorbells.get(&vector).map(|doorbell| doorbell.event().clone())
    }

    /// Rings a vector, soon. Programs hold its eventfd too; whatever they do to it, this does not block.
    pub fn ring(&self, member: u32, vector: u32) {
        if let Some(doorbell) = self.0.get(&member).and_then(|fds| fds.doorbells.get(&vector)) {
            doorbell.ring();
        }
    }

    /// Waits until all doorbells have rung, for a moment at most.
    pub fn finish_ringing(&self) {
        let until = Instant::now() + LAST_RINGS;
        self.0.values().flat_map(|fds| fds.doorbells.values()).for_each(|doorbell| doorbell.finish(until));
    }
}

/// Makes new eventfds.
pub fn new_vectors(n: u32) -> Result<Vec<OwnedFd>, Problem> {
    let one = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    (0..n).map(|_| one()).collect::<Result<_, _>>().map_err(|errno| {
        let fix = "raise the limit on open files (LimitNOFILE=)";
        Problem::new("doorbells", format!("an eventfd cannot be made: {errno}"), fix)
    })
}

/// Makes new control memory, sealed so that no member can truncate it while the daemon uses it.
pub fn new_control() -> Result<OwnedFd, Problem> {
    let make = || {
        let file = memfd_create("ginnel-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, control::SIZE as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    };
    make().map_err(|errno: Errno| {
        Problem::new(
            "control memory",
            format!("it cannot be made: {errno}"),
            "see which resource of the system is used up",
        )
    })
}

/// Returns whether this is control memory that [`new_control`] has made.
pub fn is_control(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_size == control::SIZE as i64)
        && fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL))
}

/// Maps control memory.
pub fn map_control(file: &OwnedFd) -> Result<Mapping, Problem> {
    let mapping = Mapping::of_file(file, 0, control::SIZE, Protection::ReadWrite);
    mapping.inspect(Mapping::keep_from_children).map_err(|error| {
        Problem::new(
            "control memory",
            format!("it cannot be mapped: {error}"),
            "see which resource of the system is used up",
        )
    })
}
