//! Access to images through io_uring, with rings of each worker's own.
#![allow(unsafe_code)] // The kernel is handed raw addresses of guest memory.

mod copies;
mod flight;
mod pinned;
pub(crate) mod ring;

use super::blkdiscard::Discards;
use super::{Failure, Image, Op};
use copies::Copies;
use flight::{Flight, ZEROS};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::Mapping;
use pinned::Pinned;
pub(super) use ring::can_discard;
use ring::{OPERATIONS, Ring};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use tracing::warn;

/// With this many requests queued for a disk, they are submitted at once, so that the disk begins with them while the
/// next ones are prepared.
const AT_ONCE: usize = 4;

pub(super) struct Uring {
    // Dropped, and drained, before the memory that the kernel may still use.
    ring: Ring,
    /// A second ring, whose completions are polled from the devices, if there are disks that need one. It can only read
    /// and write.
    polled: Option<Ring>,
    files: Vec<Option<Arc<Image>>>,
    /// For each disk, whether its completions are polled.
    polls: Vec<bool>,
    /// For each disk, whether zeros had to be written as data, because its file system cannot create them.
    writes_zeros: Vec<bool>,
    flights: Vec<Flight>,
    pending: u32,
    zeros: Option<Mapping>,
    copies: Copies,
    pinned: Option<Pinned>,
    discards: Discards,
}

// SAFETY: the raw addresses in `flights` are of guest memory and of mappings that live until the operation has ended; they
// belong to no thread.
unsafe impl Send for Uring {}

impl Uring {
    /// Creates the rings for the worker of that number. They do nothing before [`Uring::enable`]. The kernel holds
    /// `held` open until all requests have ended. It writes to `bell` when a request has ended, while notifications are enabled
    /// ([`Uring::arm`]).
    pub fn new(
        files: Vec<Option<Arc<Image>>>,
        worker: usize,
        held: Option<BorrowedFd<'_>>,
        bell: Arc<OwnedFd>,
    ) -> io::Result<Self> {
        let polls: Vec<_> = files.iter().map(|f| f.as_ref().is_some_and(|image| image.is_iopoll())).collect();
        let fds = |file: for<'a> fn(&'a Image, usize) -> &'a File| -> Vec<RawFd> {
            files.iter().map(|f| f.as_ref().map_or(-1, |f| file(f, worker).as_raw_fd())).collect()
        };
        // The files for requests are followed by those that carry the locks. No request names them, but the ring keeps
        // them open: the lock of a killed volume lasts until the kernel has ended all requests of each of its rings.
        let held = held.iter().map(AsRawFd::as_raw_fd).collect();
        let fds = [fds(Image::file_of), fds(|image, _| image.file()), held].concat();
        let discards = Discards::new(bell.clone());
        let ring = Ring::new(&OPERATIONS, &fds, Some(bell.as_fd()))?;
        let polled = match polls.contains(&true) {
            true => Some(Ring::new(&OPERATIONS, &fds, None)?),
            false => None,
        };
        Ok(Self {
            ring,
            polled,
            files,
            writes_zeros: vec![false; polls.len()],
            polls,
            flights: Vec::new(),
            pending: 0,
            zeros: None,
            copies: Copies::default(),
            pinned: None,
            discards,
        })
    }

    /// Enables the rings for the calling thread. No other thread can submit.
    pub fn enable(&self) -> io::Result<()> {
        self.ring.enable()?;
        self.polled.as_ref().map_or(Ok(()), Ring::enable)
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Returns whether there are requests whose completions must be polled.
    pub fn must_poll(&self) -> bool {
        self.polled.as_ref().is_some_and(|ring| ring.pending() > 0)
    }

    /// Enables notifications. Returns true if a request has ended already, in which case the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    /// Disables notifications.
    pub fn disarm(&mut self) {
        self.ring.disarm();
    }

    pub fn start(&mut self, id: u32, disk: u16, op: Op, data: &[Buffer], memory: &GuestMemory<Mapping>) {
        let index = id as usize;
        if self.flights.len() <= index {
            self.flights.resize_with(index + 1, Flight::idle);
        }
        let image = self.files.get(usize::from(disk)).and_then(Option::as_deref);
        let buffer = self.pinned.as_ref().and_then(|pinned| pinned.buffer(memory, data));
        self.flights[index].begin(disk, op, data, memory, image, buffer);
        self.pending += 1;
        if !self.flights[index].needs_copy() || self.lend_copy(index) {
            self.push(index);
        }
    }

    /// Lends an operation memory for a copy. Returns false if the operation must wait for memory.
    #[cold]
    fn lend_copy(&mut self, index: usize) -> bool {
        match self.copies.lend(index) {
            Ok(None) => return false,
            Ok(Some(copy)) => self.flights[index].take_copy(copy),
            Err(error) => self.flights[index].go_without_copy(&error),
        }
        true
    }

    /// Queues the next step of an operation.
    fn push(&mut self, index: usize) {
        let flight = &mut self.flights[index];
        if let Some((at, len)) = flight.discard()
            && let Some(Some(image)) = self.files.get(usize::from(flight.disk))
            && let Some(discarder) = image.discarder()
        {
            return self.discards.begin(discarder, index, at, len);
        }
        let Some(entry) = flight.entry(self.zeros.as_ref()) else { return };
        let entry = entry.user_data(index as u64);
        flight.polled = flight.can_be_polled() && self.polls.get(usize::from(flight.disk)) == Some(&true);
        let ring = match &mut self.polled {
            Some(ring) if flight.polled => ring,
            _ => &mut self.ring,
        };
        // SAFETY: the addresses in the entry stay valid until its completion: guest memory because the worker keeps it until
        // its queues are drained, pieces and bounce buffers because they are the flight's until then, zeros because they are
        // ours. The rings are dropped, and drained, before all of them.
        let queued = unsafe { ring.push(&entry) };
        // Requests through the page cache complete within the call, so an early submission would not help them.
        if queued >= AT_ONCE && flight.is_direct() {
            // If this fails, so does the submission at the end of the turn, whose error is handled.
            let _ = ring.submit();
        }
    }

    /// Submits the queued entries, and lets the kernel process completions.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()?;
        match &mut self.polled {
            Some(ring) => ring.submit(),
            None => Ok(()),
        }
    }

    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u32, Result<(), Failure>)) {
        // The operation may continue from here, so no ring is borrowed while its completion is handled.
        while let Some((index, result)) = self.take() {
            let Some(flight) = self.flights.get_mut(index) else { continue };
            if flight.polled && result == -libc::EOPNOTSUPP {
                self.poll_no_more(index);
                self.push(index);
                continue;
            }
            let result = match flight.advance(result) {
                Some(result) => result,
                None => match self.make_zeros(index) {
                    Ok(()) => {
                        self.push(index);
                        continue;
                    }
                    Err(failure) => Err(failure),
                },
            };
            self.pending -= 1;
            if let Some(copy) = self.flights[index].end()
                && let Some((next, copy)) = self.copies.give_back(copy)
            {
                self.flights[next].take_copy(copy);
                self.push(next);
            }
            done(index as u32, result);
        }
    }

    #[inline]
    fn take(&mut self) -> Option<(usize, i32)> {
        self.ring.take().or_else(|| self.polled.as_mut()?.take()).or_else(|| self.discards.take())
    }

    /// Allocates the zeros to write, if the operation needs them.
    fn make_zeros(&mut self, index: usize) -> Result<(), Failure> {
        if !self.flights[index].needs_zeros() {
            return Ok(());
        }
        self.writes_zeros[usize::from(self.flights[index].disk)] = true;
        if self.zeros.is_none() {
            let zeros = Mapping::anonymous(ZEROS);
            let zeros = zeros.map_err(|e| Failure::Errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
            self.zeros = Some(zeros);
        }
        Ok(())
    }

    /// Returns whether zeros had to be written to a disk as data.
    pub fn writes_zeros(&self, disk: u16) -> bool {
        self.writes_zeros.get(usize::from(disk)) == Some(&true)
    }

    /// Stops polling a disk, because its device or file system does not support it.
    #[cold]
    fn poll_no_more(&mut self, index: usize) {
        let disk = usize::from(self.flights[index].disk);
        if std::mem::take(&mut self.polls[disk])
            && let Some(Some(image)) = self.files.get(disk)
        {
            warn!(image = %image.path().display(), "its device has no queues to poll: continuing without iopoll");
        }
    }

    /// Returns whether memory is pinned.
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Pins this memory instead of any other; `None` only unpins. No request may be under way.
    pub fn pin(&mut self, memory: Option<&Arc<GuestMemory<Mapping>>>) {
        if let (Some(pinned), Some(memory)) = (&self.pinned, memory)
            && pinned.is(memory)
        {
            return;
        }
        if self.pinned.take().is_some() {
            self.ring.unregister_buffers();
            if let Some(ring) = &mut self.polled {
                ring.unregister_buffers();
            }
        }
        let Some(memory) = memory else { return };
        let Some((pinned, buffers)) = Pinned::new(memory.clone()) else {
            return warn!("the front end's memory has too many regions to be pinned: continuing without");
        };
        let result = self.ring.register_buffers(&buffers).and_then(|()| match &mut self.polled {
            Some(ring) => ring.register_buffers(&buffers),
            None => Ok(()),
        });
        match result {
            Ok(()) => self.pinned = Some(pinned),
            Err(error) => {
                self.ring.unregister_buffers();
                let fix = "raise RLIMIT_MEMLOCK (LimitMEMLOCK= in a unit), or remove pin-memory";
                warn!("the front end's memory cannot be pinned: {error}; continuing without; {fix}");
            }
        }
    }
}

#[cfg(test)]
mod tests;
