//! A disk on an NVMe device that this process drives: a namespace, or a range of one.

use super::controller::Controller;
use crate::backend::commands::CommandLimits;
use crate::backend::{Failure, ImageError, Op};
use anyhow::{Result, ensure};
use ginnel_volume_control::config;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The controllers that disks of a volume share.
#[derive(Default)]
pub struct Controllers(BTreeMap<String, Arc<Controller>>);

impl Controllers {
    /// Returns the controller at a PCI address, for so many workers.
    fn find(&mut self, address: &str, workers: usize) -> Result<Arc<Controller>> {
        if let Some(found) = self.0.get(address) {
            return Ok(found.clone());
        }
        let opened = Arc::new(Controller::open(address, workers)?);
        self.0.insert(address.to_owned(), opened.clone());
        Ok(opened)
    }
}

/// A namespace of a controller, or a range of it.
pub struct NvmeRange {
    controller: Arc<Controller>,
    nsid: u32,
    /// Where the disk begins, in bytes.
    start: u64,
    /// What there is from there on, in bytes.
    room: u64,
    limits: CommandLimits,
}

impl NvmeRange {
    /// Opens the place of a disk. Disks on one device share its controller.
    pub fn open(
        disk: &config::Disk,
        workers: usize,
        controllers: &mut Controllers,
    ) -> Result<Self, ImageError> {
        let place = disk.nvme.clone().unwrap_or_default();
        Self::find(disk, &place, workers, controllers)
            .map_err(|error| ImageError::Nvme { address: place.pci, why: format!("{error:#}") })
    }

    fn find(
        disk: &config::Disk,
        place: &config::NvmePlace,
        workers: usize,
        controllers: &mut Controllers,
    ) -> Result<Self> {
        let controller = controllers.find(&place.pci, workers)?;
        let nsid = place.namespace.map_or_else(|| controller.only_namespace(), Ok)?;
        let found = controller.namespace(nsid)?;
        let format = { found.lbaf }[usize::from(found.flbas & 15)];
        ensure!(
            format & 0xffff == 0,
            "the blocks of namespace {nsid} have metadata; format it without (nvme-cli)"
        );
        let block = 1_u64.checked_shl(format >> 16 & 0xff).unwrap_or(0);
        ensure!(
            (512..=4096).contains(&block),
            "the blocks of namespace {nsid} have {block} bytes, and not 512 or 4096"
        );
        ensure!(
            block <= u64::from(disk.sector),
            "namespace {nsid} has blocks of {block} bytes, and the disk has sectors of {}; write sector = 4096",
            disk.sector
        );
        ensure!(
            disk.read_only || found.nsattr & 1 == 0,
            "namespace {nsid} is write-protected; write read-only = true"
        );
        let bytes = { found.nsze }.saturating_mul(block);
        let start = place.offset;
        ensure!(
            start.is_multiple_of(block),
            "the offset {start} is no multiple of its blocks of {block} bytes"
        );
        let end = start.saturating_add(disk.size.unwrap_or(u64::from(disk.sector)));
        ensure!(end <= bytes, "namespace {nsid} has {bytes} bytes, and the disk ends at {end}");
        if found.nmic & 1 != 0 {
            let what = "other controllers may have the namespace too; see that nobody uses it through them";
            tracing::warn!(device = place.pci, namespace = nsid, "{what}");
        }
        // Another disk begins where this one must end.
        let bytes = place.end.map_or(bytes, |end| end.min(bytes));
        let data = controller.data() / block * block;
        let limits = CommandLimits {
            block,
            data,
            segments: u64::MAX,
            discard: if controller.can_discard() { u64::from(u32::MAX) * block } else { 0 },
            // (A device may take more, but many do not say how much. Linux sends no more either.)
            zeroes: if controller.makes_zeroes() { data } else { 0 },
        };
        Ok(Self { controller, nsid, start, room: bytes - start, limits })
    }

    pub(super) fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    #[inline]
    pub(super) fn nsid(&self) -> u32 {
        self.nsid
    }

    #[inline]
    pub(super) fn limits(&self) -> CommandLimits {
        self.limits
    }

    /// Returns the most bytes that a disk can have here.
    pub fn room(&self) -> u64 {
        self.room
    }

    /// Returns the operation with its place on the namespace.
    #[inline]
    pub(super) fn place(&self, op: Op) -> Op {
        let start = self.start;
        match op {
            Op::Read { at } => Op::Read { at: start + at },
            Op::Write { at, through } => Op::Write { at: start + at, through },
            Op::Discard { at, len } => Op::Discard { at: start + at, len },
            Op::WriteZeroes { at, len, unmap, through } => {
                Op::WriteZeroes { at: start + at, len, unmap, through }
            }
            Op::Flush => Op::Flush,
        }
    }

    /// Returns the result of an operation for which no command is needed, or for which there is none.
    #[inline]
    pub(super) fn answer(&self, op: Op) -> Option<Result<(), Failure>> {
        match op {
            Op::Flush if !self.controller.has_cache() => Some(Ok(())),
            Op::Discard { .. } if self.limits.discard == 0 => Some(Err(Failure::Unsupported)),
            Op::Discard { len: 0, .. } | Op::WriteZeroes { len: 0, .. } => Some(Ok(())),
            _ => None,
        }
    }

    /// Returns whether another range has the same cache: it is that of the controller.
    pub(in crate::backend) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.controller, &other.controller)
    }

    /// Lets the controller shut down, once. No command may be under way.
    pub(in crate::backend) fn end(&self) {
        self.controller.shut_down();
    }

    /// Makes all writes so far durable, without a worker. Blocks for as long as the device takes.
    pub fn flush(&self) -> Result<(), Failure> {
        self.controller.flush(self.nsid)
    }

    /// Returns the size that a disk may have from now on.
    pub fn resize(&self, bytes: Option<u64>, now: u64) -> Result<u64, String> {
        let bytes = bytes.unwrap_or(now);
        match bytes <= self.room {
            true => Ok(bytes),
            false => Err(format!("the namespace has only {} bytes for it", self.room)),
        }
    }
}
