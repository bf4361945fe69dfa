//! What belongs to a member and outlives the daemon: its doorbells, and a VM's control memory.

use ginnel_config::Problem;
use ginnel_layout::control;
use ginnel_shmem::{Mapping, Protection};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Descriptors of one member.
#[derive(Debug)]
pub struct MemberFds {
    /// One eventfd for each doorbell vector.
    pub vectors: Vec<Arc<OwnedFd>>,
    /// Control memory, of a VM.
    pub control: Option<Arc<OwnedFd>>,
}

/// Descriptors of all members.
#[derive(Debug, Default)]
pub struct Members(BTreeMap<u32, MemberFds>);

impl Members {
    /// Remembers the descriptors of a member.
    pub fn insert(&mut self, member: u32, fds: MemberFds) {
        self.0.insert(member, fds);
    }

    /// Forgets them.
    pub fn remove(&mut self, member: u32) {
        self.0.remove(&member);
    }

    /// Descriptors of a member.
    pub fn get(&self, member: u32) -> Option<&MemberFds> {
        self.0.get(&member)
    }

    /// The eventfd of a vector.
    pub fn event(&self, member: u32, vector: u32) -> Option<Arc<OwnedFd>> {
        self.0.get(&member)?.vectors.get(vector as usize).cloned()
    }

    /// Rings a vector.
    pub fn ring(&self, member: u32, vector: u32) {
        if let Some(event) = self.event(member, vector) {
            ring(event.as_fd());
        }
    }
}

/// Adds one to an eventfd. Nobody reads those of endpoints, so a counter that somebody has driven to its end would
/// swallow all rings; it is reset.
pub fn ring(event: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    if rustix::io::write(event, &one) == Err(Errno::AGAIN) {
        let _ = rustix::io::read(event, &mut [0u8; 8]);
        let _ = rustix::io::write(event, &one);
    }
}

/// New eventfds.
pub fn new_vectors(n: u32) -> Result<Vec<OwnedFd>, Problem> {
    let one = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    (0..n).map(|_| one()).collect::<Result<_, _>>().map_err(|errno| {
        let fix = "raise the limit on open files (LimitNOFILE=)";
        Problem::new("doorbells", format!("an eventfd cannot be made: {errno}"), fix)
    })
}

/// New control memory, sealed: no member can truncate it under the daemon.
pub fn new_control() -> Result<OwnedFd, Problem> {
    let make = || {
        let file = memfd_create("ginnel-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, control::SIZE as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    };
    make().map_err(|errno: Errno| {
        Problem::new("control memory", format!("it cannot be made: {errno}"), "see what the system lacks")
    })
}

/// Whether this is control memory that [`new_control`] has made.
pub fn is_control(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_size == control::SIZE as i64)
        && fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL))
}

/// Maps control memory.
pub fn map_control(file: &OwnedFd) -> Result<Mapping, Problem> {
    Mapping::of_file(file, 0, control::SIZE, Protection::ReadWrite).map_err(|error| {
        Problem::new("control memory", format!("it cannot be mapped: {error}"), "see what the system lacks")
    })
}
