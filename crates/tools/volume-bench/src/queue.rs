//! One request queue of a disk, for one thread.
//!
//! A request occupies a slot: a buffer in memory that the server sees, and whatever else the kind of queue needs. To
//! execute a request, claim a slot, fill its buffer, submit it, publish, and poll until it is done. Then use the slot
//! again or release it. Only [`sleep`] and [`Queue::call`] block, and nothing allocates.

use crate::connection::{is_closed, wait};
use crate::error::Error;
use crate::request::Request;
use crate::slots::{Done, Slot, Slots};
use crate::transport::{Answer, Transport};
use crate::virtio::VirtioTransport;
use ginnel_shmem::{Mapping, SharedSlice};
use std::time::{Duration, Instant};

/// The buffers of a queue's slots.
pub(crate) struct Buffers {
    pub memory: Mapping,
    /// Size of a slot's buffer, in bytes.
    pub len: u32,
}

/// A request queue: slots over a virtqueue or, in [`NvmeQueue`](crate::NvmeQueue), over a pair of NVMe queues.
pub struct Queue<T = VirtioTransport> {
    index: usize,
    slots: Slots,
    buffers: Buffers,
    pub(crate) transport: T,
}

impl<T: Transport> Queue<T> {
    pub(crate) fn new(index: usize, slots: u16, buffers: Buffers, transport: T) -> Self {
        Self { index, slots: Slots::new(slots), buffers, transport }
    }

    /// Returns its number among the request queues.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns how many requests can be in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the size of a slot's buffer, in bytes.
    pub fn buffer_len(&self) -> usize {
        self.buffers.len as usize
    }

    /// Returns how many requests are in flight.
    #[inline]
    pub fn submitted(&self) -> usize {
        self.slots.submitted()
    }

    /// Returns how often the server had to be notified: kicked, or by a write to a doorbell that is trapped.
    pub fn kicks(&self) -> u64 {
        self.transport.kicks()
    }

    /// Returns a free slot, or `None` if all are in use.
    #[inline]
    pub fn claim(&mut self) -> Option<Slot> {
        self.slots.claim()
    }

    /// Frees a slot. Does nothing if the slot is free or its request is in flight.
    #[inline]
    pub fn release(&mut self, slot: Slot) {
        self.slots.release(slot);
    }

    /// Returns the slot's buffer. While the request is in flight, both sides may write to it. Panics if the slot is
    /// from another queue with more slots.
    #[inline]
    pub fn buffer(&self, slot: Slot) -> SharedSlice<'_, Mapping> {
        SharedSlice::new(&self.buffers.memory, slot.index() * stride(self.buffers.len), self.buffer_len())
    }

    /// Writes the request into the queue. Fails with [`Error::Full`] if the queue has no room for it now. The server sees
    /// the request at the next [`Queue::publish`]. The disk checks whether the request is valid.
    #[inline]
    pub fn submit(&mut self, slot: Slot, request: Request) -> Result<(), Error> {
        self.check_claimed(slot)?;
        self.transport.put(slot, request)?;
        self.slots.submit(slot, request);
        Ok(())
    }

    #[inline]
    fn check_claimed(&self, slot: Slot) -> Result<(), Error> {
        if self.slots.is_claimed(slot) {
            return Ok(());
        }
        Err(Error::Invalid(format!("slot {} of queue {} is not claimed", slot.0, self.index)))
    }

    /// Submits what `put` writes into the queue, as [`Queue::submit`] does.
    pub(crate) fn submit_with(
        &mut self,
        slot: Slot,
        request: Request,
        put: impl FnOnce(&mut T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check_claimed(slot)?;
        put(&mut self.transport)?;
        self.slots.submit(slot, request);
        Ok(())
    }

    /// Publishes the submitted requests, and notifies the server if it wants that.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Error> {
        self.transport.publish()
    }

    /// Returns the next answered request, if there is one.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Done>, Error> {
        let Some(Answer { slot, status, written }) = self.transport.poll()? else { return Ok(None) };
        match self.slots.answer(slot) {
            Some(request) => Ok(Some(Done { slot, request, status, written })),
            None => Err(self.not_submitted(slot)),
        }
    }

    #[cold]
    fn not_submitted(&self, slot: Slot) -> Error {
        let what = format!("it completes the request of slot {}, which was not submitted", slot.0);
        Error::Corrupt { queue: self.index, what }
    }

    /// Returns whether the server has closed the connection, or has died. Makes a system call.
    pub fn is_server_gone(&self) -> bool {
        is_closed(self.transport.socket())
    }

    /// Returns whether the server has reported that it no longer serves the queue. Makes a system call.
    pub fn is_given_up(&self) -> bool {
        self.transport.is_given_up()
    }

    /// Executes one request while no other is in flight in this queue. `data` goes to the disk for a write, and comes
    /// from it for a read. Blocks for at most `patience`, and polls.
    pub fn call(&mut self, request: Request, data: &mut [u8], patience: Duration) -> Result<Done, Error> {
        if self.submitted() > 0 {
            return Err(Error::Invalid("other requests are on their way".into()));
        }
        let full = || Error::Invalid("all slots are claimed".into());
        let slot = self.claim().ok_or_else(full)?;
        let moves = self.transport.data(&request);
        if matches!(moves, Some((false, _))) {
            self.buffer(slot).write(0, data);
        }
        if let Err(error) = self.submit(slot, request) {
            self.release(slot);
            return Err(error);
        }
        self.publish()?;
        let done = self.wait_for_one(patience)?;
        if matches!(moves, Some((true, _))) {
            self.buffer(slot).read(0, data);
        }
        self.release(slot);
        Ok(done)
    }

    /// Polls until there is an answer, for at most `patience`.
    pub fn wait_for_one(&mut self, patience: Duration) -> Result<Done, Error> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(done) = self.poll()? {
                return Ok(done);
            }
            if self.is_server_gone() {
                // The server may have answered before it ended.
                return self.poll()?.ok_or(Error::Gone);
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut(patience));
            }
            std::thread::yield_now();
        }
    }

    /// Puts the requests in flight into the queue again, which the caller has emptied.
    pub(crate) fn put_again(&mut self) -> Result<(), Error> {
        let Self { slots, transport, .. } = self;
        slots.in_flight().try_for_each(|(slot, request)| transport.put(slot, request))
    }
}

/// Returns the distance between the buffers of two slots, in bytes. Buffers begin at pages, for direct I/O.
pub(crate) fn stride(buffer: u32) -> usize {
    (buffer as usize).next_multiple_of(4096)
}

/// Sleeps until one of the queues has something to poll, or the server is gone. Returns false if `limit` passes first.
pub fn sleep<T: Transport>(queues: &mut [&mut Queue<T>], limit: Duration) -> Result<bool, Error> {
    let mut there = false;
    for queue in queues.iter_mut() {
        there |= queue.transport.arm();
    }
    if !there {
        let mut fds: Vec<_> = queues.iter().map(|queue| queue.transport.wake_up()).collect();
        fds.extend(queues.first().map(|queue| queue.transport.socket()));
        there = wait(&fds, Some(limit))?;
    }
    for queue in queues.iter_mut() {
        // An empty counter is not an error.
        let _ = rustix::io::read(queue.transport.wake_up(), &mut [0; 8]);
        queue.transport.disarm();
    }
    Ok(there)
}
