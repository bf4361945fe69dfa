//! The descriptors of members that outlive the daemon: doorbells, and the control memory of VMs.

use ginnel_config::Problem;
use ginnel_layout::control;
use ginnel_shmem::{Mapping, Protection};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The descriptors of one member.
#[derive(Debug)]
pub struct MemberFds {
    /// An eventfd for each doorbell vector.
    pub vectors: BTreeMap<u32, Arc<OwnedFd>>,
    /// The control memory, if the member is a VM.
    pub control: Option<Arc<OwnedFd>>,
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
            fds.vectors.extend(vectors);
        }
    }

    /// Drops some vectors of a member.
    pub fn drop_vectors(&mut self, member: u32, vectors: &[u32]) {
        if let Some(fds) = self.0.get_mut(&member) {
            fds.vectors.retain(|vector, _| !vectors.contains(vector));
        }
    }

    /// Returns the descriptors of a member.
    pub fn get(&self, member: u32) -> Option<&MemberFds> {
        self.0.get(&member)
    }

    /// Returns the eventfd of a vector.
    pub fn event(&self, member: u32, vector: u32) -> Option<Arc<OwnedFd>> {
        self.0.get(&member)?.vectors.get(&vector).cloned()
    }

    /// Rings a vector. Programs hold its eventfd too; whatever they do to it, this does not block (if
    /// [`ginnel_doorbell::is_safe`]).
    pub fn ring(&self, member: u32, vector: u32) {
        if let Some(event) = self.event(member, vector) {
            ginnel_doorbell::ring(event.as_fd());
        }
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
    Mapping::of_file(file, 0, control::SIZE, Protection::ReadWrite).map_err(|error| {
        Problem::new(
            "control memory",
            format!("it cannot be mapped: {error}"),
            "see which resource of the system is used up",
        )
    })
}
