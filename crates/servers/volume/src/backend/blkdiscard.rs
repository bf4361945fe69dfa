//! Discards on block devices where io_uring has no command for them (before Linux 6.12).
//!
//! There is only `BLKDISCARD`, which blocks for as long as the device takes. A thread for each disk makes the calls one
//! after another, for all workers. The workers learn of the end through the descriptor that also reports their rings'
//! completions.
//!
//! A discard counts as being at the disk from the moment it is queued here, like any request that the kernel has, so
//! stopping its queue waits for it. A discard does not write to the guest's memory. Still, it must not be left to a
//! successor: the successor would discard again while the first discard continues, and data that the guest writes after
//! the first answer would be lost to the second.
//!
//! If the process is killed, the kernel closes its files when the last thread has ended. So the locks that a successor
//! waits for last until the device has answered, as they do with rings.
#![allow(unsafe_code)] // An ioctl.

use rustix::ioctl::{Opcode, Setter, ioctl};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::{io, thread};

/// From linux/fs.h.
const BLKDISCARD: Opcode = 0x1277;

/// The thread of a disk, once it is started.
#[derive(Debug, Default)]
pub(super) struct Discarder {
    jobs: OnceLock<SyncSender<Job>>,
}

struct Job {
    index: usize,
    at: u64,
    len: u64,
    answer: Answer,
}

/// How the thread answers a worker.
#[derive(Clone)]
struct Answer {
    ended: Sender<(usize, i32)>,
    bell: Arc<OwnedFd>,
}

impl Discarder {
    /// Starts the thread, for a device that is open for writing and for at most `depth` discards at a time. The thread
    /// ends with the disk. It inherits the caller's CPUs and sandbox.
    pub fn start(&self, device: File, depth: usize) -> io::Result<()> {
        let (sender, jobs) = sync_channel(depth);
        thread::Builder::new().name("discard".to_owned()).spawn(move || work(&device, &jobs))?;
        // Called once. A second thread would end at once, as its channel is dropped here.
        let _ = self.jobs.set(sender);
        Ok(())
    }
}

fn work(device: &File, jobs: &Receiver<Job>) {
    for Job { index, at, len, answer } in jobs {
        // SAFETY: BLKDISCARD takes two u64, the offset and the length.
        let call = unsafe { Setter::<BLKDISCARD, [u64; 2]>::new([at, len]) };
        // SAFETY: the kernel reads those two, and changes no memory of this process.
        let result = unsafe { ioctl(device, call) };
        answer.tell(index, result.map_or_else(|errno| -errno.raw_os_error(), |()| 0));
    }
}

impl Answer {
    fn tell(&self, index: usize, result: i32) {
        // Nobody receives answers while the process ends.
        let _ = self.ended.send((index, result));
        // Watched edge-triggered, so no answer is lost, whether the worker has asked for notifications or not.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// The discards of one worker.
pub(super) struct Discards {
    answer: Answer,
    ended: Receiver<(usize, i32)>,
    pending: usize,
}

impl Discards {
    /// Creates the channel for answers. `bell` is written whenever a discard has ended.
    pub fn new(bell: Arc<OwnedFd>) -> Self {
        let (sender, ended) = channel();
        Self { answer: Answer { ended: sender, bell }, ended, pending: 0 }
    }

    /// Begins a discard. [`Discards::take`] reports its end, with `index`. Does not block.
    #[cold]
    pub fn begin(&mut self, discarder: &Discarder, index: usize, at: u64, len: u64) {
        self.pending += 1;
        let job = Job { index, at, len, answer: self.answer.clone() };
        let queued = discarder.jobs.get().is_some_and(|jobs| jobs.try_send(job).is_ok());
        if !queued {
            // More discards than descriptors, or no thread. Neither can happen.
            self.answer.tell(index, -libc::EIO);
        }
    }

    /// Returns a discard that has ended, with the kernel's result.
    #[inline]
    pub fn take(&mut self) -> Option<(usize, i32)> {
        if self.pending == 0 {
            return None;
        }
        let ended = self.ended.try_recv().ok()?;
        self.pending -= 1;
        Some(ended)
    }
}
