//! When a volume holds the locks of its images.
//!
//! A VM that migrates has two volumes for a while, one at each end, and only the one at which the VM runs may have the
//! image. QEMU's own disks do the same: their block layer is inactive at the destination until the VM runs there, and
//! it releases its locks at the source when the VM stops. A volume knows from its queues where the VM runs:
//!
//! - Before a queue starts, the images are [locked](Ownership::take) if they are not already. A volume that cannot lock
//!   them serves no queue, so no two VMs write at the same time, whatever their QEMUs do.
//! - When the last queue has stopped while dirty pages were logged, the images are [unlocked](Ownership::vm_stopped):
//!   the VM is about to continue elsewhere. QEMU starts no queue at the destination before all have stopped at the
//!   source. If the migration is cancelled, QEMU starts the queues again here.
//! - Queues that stop while no dirty pages are logged change nothing. A VM that is paused, or whose driver resets the
//!   disk, relies on what it knows about the image.
//!
//! A volume that locks its image when it starts ([`Lock::Volume`]) fails early and clearly if the image is in use. A
//! volume that waits for a VM to arrive cannot lock the image yet, so its configuration must say so ([`Lock::Vm`]); at
//! its start it logs which process has the image, and it unlocks the image when its VM has ended.
//!
//! Two volumes on one host see the same bytes at any time: they share the page cache, or both bypass it. NVMe commands do not: they know
//! nothing of the page cache. So a namespace is [claimed](Backend::claim) from the start of the volume to its end.

use crate::backend::{Backend, ImageError};
use crate::lock::{self, LockError, Use};
use ginnel_volume_control::config::{self, Lock};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tracing::{error, info, warn};

/// Why an image cannot be locked for use.
#[derive(Debug, Error)]
pub enum OwnershipError {
    /// Another program has the image.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The image was locked, but it cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The images of a volume, and which of them it has locked.
pub struct Ownership(Mutex<Vec<Claim>>);

/// How a volume uses one disk's image, and whether it has locked it.
struct Claim {
    disk: usize,
    backend: Backend,
    lock: Lock,
    want: Use,
    held: bool,
}

impl Ownership {
    /// Locks the images that the volume holds from its start, and gives each the size that its disk is to have. Waits
    /// up to `patience` for an image that another program has. `disks` are those of the configuration, in order.
    pub fn new<'a>(
        disks: impl IntoIterator<Item = (&'a config::Disk, &'a Backend)>,
        patience: Duration,
    ) -> Result<Self, OwnershipError> {
        let mut claims = Vec::new();
        for (disk, (spec, backend)) in disks.into_iter().enumerate() {
            let Some(image) = backend.image() else { continue };
            if spec.lock == Lock::Off {
                image.fit()?;
                continue;
            }
            let want = if spec.read_only { Use::Read } else { Use::Write };
            if spec.lock == Lock::Volume {
                lock::lock(image.file(), image.path(), want, patience)?;
                backend.claim()?;
                image.fit()?;
            } else if let Err(error) = lock::look(image.file(), image.path(), want) {
                warn!("{error}; no VM can run on it here until then");
            }
            let held = spec.lock == Lock::Volume;
            claims.push(Claim { disk, backend: backend.clone(), lock: spec.lock, want, held });
        }
        Ok(Self(Mutex::new(claims)))
    }

    /// Locks all images that are not locked yet, or none of them. Called before a queue is served. Returns the disks
    /// whose images were locked. Waits up to `patience` for an image that another program has.
    pub fn take(&self, patience: Duration) -> Result<Vec<usize>, OwnershipError> {
        let mut claims = self.claims();
        let mut taken = Vec::new();
        for at in 0..claims.len() {
            if claims[at].held {
                continue;
            }
            if let Err(error) = claims[at].take(patience) {
                claims.iter_mut().filter(|claim| taken.contains(&claim.disk)).for_each(Claim::release);
                return Err(error);
            }
            taken.push(claims[at].disk);
        }
        if !taken.is_empty() {
            info!(disks = ?taken, "the VM runs here: its images are locked");
        }
        Ok(taken)
    }

    /// Unlocks the images of a VM that has stopped to continue elsewhere. `make_durable` makes all acknowledged writes of a
    /// disk durable, and says whether that succeeded. If it did not, the image stays locked, because its next user
    /// would not know that writes are missing.
    pub fn vm_stopped(&self, make_durable: impl Fn(usize) -> Result<(), String>) {
        self.release(|_| true, make_durable);
    }

    /// Does the same as [`Ownership::vm_stopped`] when the VM has ended or lost its connection, but only for images
    /// that are locked only while a VM runs.
    pub fn vm_gone(&self, make_durable: impl Fn(usize) -> Result<(), String>) {
        self.release(|claim| claim.lock == Lock::Vm, make_durable);
    }

    /// Unlocks all images at the end of the volume. All requests must be complete.
    ///
    /// Without this, an image would stay locked for some time after the end of the process, until the kernel closes the
    /// files of its io_uring. Another program may want the image at once, as QEMU does after a stop.
    pub fn end(&self) {
        self.claims().iter_mut().filter(|claim| claim.held).for_each(Claim::release);
    }

    /// Does work that only the volume that holds the image of a disk may do. Returns `None` if this volume does not
    /// hold it.
    pub fn as_owner<T>(&self, disk: usize, work: impl FnOnce() -> T) -> Option<T> {
        let claims = self.claims();
        let held = claims.iter().find(|claim| claim.disk == disk).is_none_or(|claim| claim.held);
        // The list stays locked, so no image is unlocked meanwhile.
        held.then(work)
    }

    fn release(&self, which: impl Fn(&Claim) -> bool, make_durable: impl Fn(usize) -> Result<(), String>) {
        let mut released = Vec::new();
        for claim in
            self.claims().iter_mut().filter(|claim| claim.held && !claim.backend.is_kept() && which(claim))
        {
            if let Err(error) = make_durable(claim.disk) {
                error!("{error}; its image stays locked until this volume ends");
                continue;
            }
            claim.release();
            released.push(claim.disk);
        }
        if !released.is_empty() {
            info!(disks = ?released, "the VM has left: its images are unlocked");
        }
    }

    fn claims(&self) -> MutexGuard<'_, Vec<Claim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    fn take(&mut self, patience: Duration) -> Result<(), OwnershipError> {
        let Some(image) = self.backend.image() else { return Ok(()) };
        let lock = |patience| lock::lock(image.file(), image.path(), self.want, patience);
        match lock(Duration::ZERO) {
            Err(error @ LockError::InUse { .. }) => {
                warn!("{error}; the VM waits up to {patience:?} for it");
                lock(patience)?;
            }
            other => other?,
        }
        image.fit().inspect_err(|_| lock::unlock(image.file()))?;
        self.held = true;
        Ok(())
    }

    fn release(&mut self) {
        if let Some(image) = self.backend.image() {
            lock::unlock(image.file());
        }
        self.held = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_volume_control::VolumePaths;
    use ginnel_volume_control::config::Spec;
    use std::path::Path;

    const NONE: Duration = Duration::ZERO;

    fn volume(paths: &[&Path], lock: &str) -> Result<Ownership, OwnershipError> {
        sized(paths, lock, "")
    }

    fn sized(paths: &[&Path], lock: &str, more: &str) -> Result<Ownership, OwnershipError> {
        let disks: String =
            paths.iter().map(|path| format!("[[disk]]\npath = {path:?}\nlock = {lock}\n{more}")).collect();
        let text = format!("device = \"scsi\"\n{disks}");
        let config = Spec::parse(&text, Path::new("v.toml")).unwrap();
        let config = config.check("v", &VolumePaths::default(), "v.toml").unwrap();
        let backends: Vec<_> = config
            .disks
            .iter()
            .map(|disk| Backend::open(disk, 1, &mut crate::backend::Controllers::default()).unwrap().0)
            .collect();
        Ownership::new(config.disks.iter().zip(&backends), NONE)
    }

    fn images<const N: usize>() -> [tempfile::NamedTempFile; N] {
        std::array::from_fn(|_| {
            let image = tempfile::NamedTempFile::new().unwrap();
            image.as_file().set_len(1 << 20).unwrap();
            image
        })
    }

    #[test]
    fn an_image_goes_with_its_vm_and_comes_back() {
        let [image] = images();
        let source = volume(&[image.path()], "true").unwrap();
        assert_eq!(source.take(NONE).unwrap(), [0; 0], "it is held from the start");
        let destination = volume(&[image.path()], "\"vm\"").unwrap();
        assert_eq!(destination.as_owner(0, || ()), None);
        source.vm_stopped(|_| Err("it has lost something".to_owned()));
        destination.take(NONE).unwrap_err();
        source.vm_stopped(|_| Ok(()));
        assert_eq!(destination.take(NONE).unwrap(), [0]);
        assert_eq!(destination.as_owner(0, || 7), Some(7));
        assert_eq!(source.as_owner(0, || ()), None);
        // Back, because the volume at the destination ends.
        destination.vm_gone(|_| Ok(()));
        assert_eq!(source.take(NONE).unwrap(), [0]);
        source.vm_gone(|_| unreachable!("it is locked as long as the volume runs"));
        assert_eq!(source.as_owner(0, || 7), Some(7), "it is held without a VM");
        source.end();
        assert_eq!(destination.take(NONE).unwrap(), [0]);
    }

    #[test]
    fn only_one_process_owns_a_volume() {
        let [image] = images();
        let owner = volume(&[image.path()], "\"vm\"").unwrap();
        owner.take(NONE).unwrap();
        let other = volume(&[image.path()], "\"vm\"").unwrap();
        let error = other.take(NONE).unwrap_err().to_string();
        assert!(error.contains("in use"), "{error}");
        assert!(volume(&[image.path()], "true").is_err());
    }

    #[test]
    fn all_or_nothing() {
        let [first, second] = images();
        let owner = volume(&[second.path()], "true").unwrap();
        let other = volume(&[first.path(), second.path()], "\"vm\"").unwrap();
        other.take(NONE).unwrap_err();
        // The first image is free for others all the same.
        volume(&[first.path()], "true").unwrap().end();
        owner.end();
        assert_eq!(other.take(NONE).unwrap(), [0, 1]);
    }

    #[test]
    fn only_who_has_an_image_makes_it_larger() {
        let [image] = images();
        let bytes = || image.as_file().metadata().unwrap().len();
        let owner = volume(&[image.path()], "true").unwrap();
        sized(&[image.path()], "true", "size = '2M'\n").err().unwrap();
        let waiting = sized(&[image.path()], "\"vm\"", "size = '2M'\n").unwrap();
        assert_eq!(bytes(), 1 << 20);
        owner.end();
        waiting.take(NONE).unwrap();
        assert_eq!(bytes(), 2 << 20);
        waiting.end();
        let error =
            sized(&[image.path()], "true", "size = '4M'\nread-only = true\n").err().unwrap().to_string();
        assert!(error.contains("has only 2097152 bytes"), "{error}");
        sized(&[image.path()], "false", "size = '3M'\n").unwrap();
        assert_eq!(bytes(), 3 << 20);
    }

    #[test]
    fn an_image_without_a_lock_is_always_owned() {
        let [image] = images();
        let [one, two] = [(); 2].map(|()| volume(&[image.path()], "false").unwrap());
        assert_eq!((one.take(NONE).unwrap().len(), two.take(NONE).unwrap().len()), (0, 0));
        assert_eq!((one.as_owner(0, || 1), two.as_owner(0, || 2)), (Some(1), Some(2)));
    }
}
