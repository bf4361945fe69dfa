//! What differs in the configuration of an `nvme` volume, and what follows from it.
//!
//! Two processes serve such a volume, and read the same configuration: the *holder*, which has QEMU's socket, and the
//! *engine*, which has the disk.

use super::{Config, Device, Lock, Spec, Wait};
use ginnel_config::Problem;
use std::path::{Path, PathBuf};

/// The largest number of I/O queue pairs of an `nvme` volume. Each has an eventfd for its doorbell and one for its
/// interrupt, in both processes.
pub const NVME_QUEUES_MAX: u16 = 64;
/// The longest queue of an `nvme` volume, in entries. The holder keeps room for each command that may be in flight.
pub const NVME_QUEUE_SIZE_MAX: u16 = 1024;
/// The fewest segments of an `nvme` volume. With fewer, MDTS would be 0, which means that there is no limit.
pub const NVME_SEGMENTS_MIN: u32 = 3;
/// The number of segments of an `nvme` volume without the key: those of a transfer of 512 KiB at any address.
pub(super) const NVME_SEGMENTS: u32 = 129;

/// Returns the path at which the engine of an `nvme` volume attaches to its holder, from that of the socket for QEMU: `SOCKET.engine`.
pub fn attach_socket(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".engine");
    path.into()
}

impl Spec {
    /// Refuses the keys that make no sense for an `nvme` volume.
    pub(super) fn check_nvme(&self, place: &str) -> Result<(), Problem> {
        let bad = |key: &str, what: &str, fix: &str| Err(Problem::new(format!("{place}: {key}"), what, fix));
        if self.packed == Some(true) {
            return bad("packed", "an nvme device has no virtqueues", "remove it");
        }
        if self.disk.iter().any(|disk| disk.lock == Some(Lock::Vm)) {
            let what = "\"vm\" is for a VM that migrates live, and a VM with an nvme device cannot";
            return bad("disk 0: lock", what, "remove it, or write device = \"blk\"");
        }
        Ok(())
    }
}

impl Config {
    /// Returns the path of the socket at which the engine of an `nvme` volume attaches to its holder.
    pub fn attach_socket(&self) -> PathBuf {
        attach_socket(&self.socket)
    }

    /// Returns whether the guest writes its doorbells into memory that the threads of an `nvme` volume read. If not,
    /// the threads may sleep, and the guest has shadow doorbells (NVMe 1.4, 5.7: Doorbell Buffer Config).
    pub fn are_doorbells_mapped(&self) -> bool {
        self.device == Device::Nvme && self.wait == Wait::Poll
    }

    /// Returns the largest transfer of an `nvme` volume, as MDTS of Identify Controller has it (NVMe 1.4, figure 247): a
    /// power of two of pages of 4096 bytes. A transfer that begins inside a page has one segment more than it has pages.
    pub fn mdts(&self) -> u8 {
        let pages = self.segments.saturating_sub(1);
        pages.checked_ilog2().unwrap_or(0) as u8
    }
}
