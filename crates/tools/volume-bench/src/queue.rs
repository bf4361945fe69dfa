//! One request queue of a disk, for one thread.
//!
//! A request occupies a slot: its header, its status and its buffer, all in memory that the server sees. To execute a
//! request, claim a slot, fill its buffer, submit it, publish, and poll until it is done. Then use the slot again or
//! release it. Only [`sleep`] and [`Queue::call`] block, and nothing allocates.

use crate::connection::wait;
use crate::device::{Encoding, Frame};
use crate::echo::Echo;
use crate::error::Error;
use crate::request::{Request, Status};
use ginnel_shmem::{Mapping, SharedSlice};
use ginnel_virtqueue::{AddError, DriverQueue, Segment};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of a slot without its buffer, in bytes: the part that the device reads and, from [`ANSWER`] on, the part that
/// it writes.
pub(crate) const HEAD: usize = 256;
/// Offset of the device's answer in a slot's head. It is not in the cache line that the client writes.
pub(crate) const ANSWER: usize = 128;

/// A place for one request. It is valid only for the queue from which it was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    /// Returns its number, which is less than [`Queue::slots`].
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A request that the server has answered.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The slot of the request. It stays claimed.
    pub slot: Slot,
    /// The request.
    pub request: Request,
    /// The disk's answer.
    pub status: Status,
    /// Number of bytes that the device has written, according to itself: data and answer.
    pub written: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    Claimed,
    Submitted(Request),
}

/// The parts of a queue.
pub(crate) struct Parts {
    pub ring: DriverQueue<Mapping>,
    pub heads: Mapping,
    pub heads_guest: u64,
    pub buffers: Mapping,
    pub buffers_guest: u64,
    /// Answers the requests instead of the server, if it exists.
    pub echo: Option<Echo>,
}

/// The eventfds through which both sides wake each other.
pub(crate) struct Eventfds {
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
}

impl Eventfds {
    /// Kicks the server.
    pub fn kick(&self) -> Result<(), Error> {
        match rustix::io::write(&self.kick, &1u64.to_ne_bytes()) {
            // The counter is full: the server has not read it for a long time, and it is still readable.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(Error::io("kicking a queue")(errno)),
        }
    }
}

/// How requests are put into the ring.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub encoding: Encoding,
    pub slots: u16,
    /// Size of a slot's buffer, in bytes.
    pub buffer: u32,
    /// Largest number of bytes of a buffer in one descriptor.
    pub segment: u32,
    pub indirect: bool,
}

/// A request queue.
pub struct Queue {
    index: usize,
    shape: Shape,
    parts: Parts,
    pub(crate) eventfds: Eventfds,
    /// The connection's socket, by which the end of the server is detected.
    pub(crate) socket: Arc<OwnedFd>,
    states: Vec<State>,
    free: Vec<u16>,
    /// The slot for each token of the ring.
    slot_of: Vec<u16>,
    segments: Vec<Segment>,
    submitted: usize,
    kicks: u64,
}

impl Queue {
    pub(crate) fn new(
        index: usize,
        shape: Shape,
        parts: Parts,
        eventfds: Eventfds,
        socket: Arc<OwnedFd>,
        ring_size: u16,
    ) -> Self {
        let mut parts = parts;
        // The client polls, and needs no calls.
        parts.ring.disarm();
        Self {
            index,
            shape,
            parts,
            eventfds,
            socket,
            states: vec![State::Free; shape.slots.into()],
            free: (0..shape.slots).rev().collect(),
            slot_of: vec![0; ring_size.into()],
            segments: Vec::with_capacity(ring_size.into()),
            submitted: 0,
            kicks: 0,
        }
    }

    /// Sets the encoding of requests. No request may be in flight.
    pub(crate) fn set_encoding(&mut self, encoding: Encoding) {
        self.shape.encoding = encoding;
    }

    /// Returns its number among the request queues.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns how many requests can be in flight.
    pub fn slots(&self) -> usize {
        self.states.len()
    }

    /// Returns the size of a slot's buffer, in bytes.
    pub fn buffer_len(&self) -> usize {
        self.shape.buffer as usize
    }

    /// Returns how many requests are in flight.
    pub fn submitted(&self) -> usize {
        self.submitted
    }

    /// Returns how often the server had to be kicked.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Returns a free slot, or `None` if all are in use.
    pub fn claim(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.states[usize::from(slot)] = State::Claimed;
        Some(Slot(slot))
    }

    /// Frees a slot. Does nothing if the slot is free or its request is in flight.
    pub fn release(&mut self, slot: Slot) {
        if let Some(state @ State::Claimed) = self.states.get_mut(slot.index()) {
            *state = State::Free;
            self.free.push(slot.0);
        }
    }

    /// Returns the slot's buffer. While the request is in flight, both sides may write to it. Panics if the slot is
    /// from another queue with more slots.
    #[inline]
    pub fn buffer(&self, slot: Slot) -> SharedSlice<'_, Mapping> {
        let len = self.shape.buffer as usize;
        SharedSlice::new(&self.parts.buffers, slot.index() * self.stride(), len)
    }

    /// Returns the distance between two buffers, in bytes.
    fn stride(&self) -> usize {
        stride(self.shape.buffer)
    }

    /// Puts the request into the ring. Fails with [`Error::Full`] if the ring has no room for its descriptors now. The
    /// server sees the request at the next [`Queue::publish`]. The disk checks whether the request is valid.
    #[inline]
    pub fn submit(&mut self, slot: Slot, request: Request) -> Result<(), Error> {
        let Some(State::Claimed) = self.states.get(slot.index()) else {
            return Err(Error::Invalid(format!("slot {} of queue {} is not claimed", slot.0, self.index)));
        };
        self.put(slot, request)?;
        self.states[slot.index()] = State::Submitted(request);
        self.submitted += 1;
        Ok(())
    }

    #[inline]
    fn put(&mut self, slot: Slot, request: Request) -> Result<(), Error> {
        let parts = &self.parts;
        let head = slot.index() * HEAD;
        let Frame { asked, answered } = self.shape.encoding.frame(&parts.heads, head, request);
        let head = parts.heads_guest + head as u64;
        let piece = |address, len, writable| Segment { address, len, writable };
        let answer = piece(head + ANSWER as u64, answered, true);
        let list = &mut self.segments;
        list.clear();
        list.push(piece(head, asked, false));
        match self.shape.encoding.buffer(&request) {
            None => list.push(answer),
            Some((_, len)) if len > self.shape.buffer => {
                let room = self.shape.buffer;
                return Err(Error::Invalid(format!(
                    "{request}: a buffer has {room} bytes; connect with larger ones"
                )));
            }
            Some((writable, len)) => {
                // Buffers that the device reads come before those that it writes. SCSI has the answer before the data
                // that the device writes.
                let first = writable && self.shape.encoding.answers_first();
                if first {
                    list.push(answer);
                }
                let from = parts.buffers_guest + (slot.index() * stride(self.shape.buffer)) as u64;
                let mut at = 0;
                while at < len {
                    let bytes = (len - at).min(self.shape.segment);
                    list.push(piece(from + u64::from(at), bytes, writable));
                    at += bytes;
                }
                if !first {
                    list.push(answer);
                }
            }
        }
        let added = self.parts.ring.add(&self.segments, self.shape.indirect);
        let token = added.map_err(|error| match error {
            AddError::Full => Error::Full,
            error => Error::Invalid(format!("{request}: {error}")),
        })?;
        self.slot_of[usize::from(token)] = slot.0;
        Ok(())
    }

    /// Publishes the submitted requests, and kicks the server if it wants that.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Error> {
        let wanted = self.parts.ring.publish();
        if let Some(echo) = &mut self.parts.echo {
            echo.answer(&self.parts.heads, &self.slot_of);
        } else if wanted {
            self.kicks += 1;
            self.eventfds.kick()?;
        }
        Ok(())
    }

    /// Returns the next answered request, if there is one.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Done>, Error> {
        let polled = self.parts.ring.poll();
        let Some((token, written)) = polled.map_err(|corrupt| self.corrupt(corrupt.to_string()))? else {
            return Ok(None);
        };
        let slot = self.slot_of.get(usize::from(token)).copied().unwrap_or(u16::MAX);
        let Some(&State::Submitted(request)) = self.states.get(usize::from(slot)) else {
            return Err(self.corrupt(format!("it completes {token}, which was not submitted")));
        };
        self.states[usize::from(slot)] = State::Claimed;
        self.submitted -= 1;
        let status = self.shape.encoding.status(&self.parts.heads, usize::from(slot) * HEAD);
        Ok(Some(Done { slot: Slot(slot), request, status, written }))
    }

    #[cold]
    fn corrupt(&self, what: String) -> Error {
        Error::Corrupt { queue: self.index, what }
    }

    /// Returns whether the server has closed the connection, or has died. Makes a system call.
    pub fn is_server_gone(&self) -> bool {
        crate::connection::is_closed(self.socket.as_fd())
    }

    /// Returns whether the server has reported, through the queue's error descriptor, that it no longer serves the
    /// queue. Makes a system call.
    pub fn is_given_up(&self) -> bool {
        matches!(wait(&[self.eventfds.error.as_fd()], Some(Duration::ZERO)), Ok(true))
    }

    /// Executes one request while no other is in flight in this queue. `data` goes to the disk for a write, and comes
    /// from it for a read. Blocks for at most `patience`, and polls.
    pub fn call(&mut self, request: Request, data: &mut [u8], patience: Duration) -> Result<Done, Error> {
        if self.submitted > 0 {
            return Err(Error::Invalid("other requests are on their way".into()));
        }
        let full = || Error::Invalid("all slots are claimed".into());
        let slot = self.claim().ok_or_else(full)?;
        let buffer = self.shape.encoding.buffer(&request);
        if matches!(buffer, Some((false, _))) {
            self.buffer(slot).write(0, data);
        }
        if let Err(error) = self.submit(slot, request) {
            self.release(slot);
            return Err(error);
        }
        self.publish()?;
        let deadline = Instant::now() + patience;
        let done = loop {
            if let Some(done) = self.poll()? {
                break done;
            }
            if self.is_server_gone() {
                // The server may have answered before it ended.
                break self.poll()?.ok_or(Error::Gone)?;
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut(patience));
            }
            std::thread::yield_now();
        };
        if matches!(buffer, Some((true, _))) {
            self.buffer(slot).read(0, data);
        }
        self.release(slot);
        Ok(done)
    }

    /// Returns the base up to which the ring's answers have been polled.
    pub(crate) fn base(&self) -> u32 {
        self.parts.ring.base()
    }

    /// Continues with an empty ring, and puts the requests in flight into it again.
    pub(crate) fn restart(&mut self, ring: DriverQueue<Mapping>) -> Result<(), Error> {
        self.parts.ring = ring;
        self.parts.ring.disarm();
        for slot in 0..self.shape.slots {
            if let State::Submitted(request) = self.states[usize::from(slot)] {
                self.put(Slot(slot), request)?;
            }
        }
        Ok(())
    }

    /// Kicks the server, whether it wants that or not.
    pub(crate) fn kick(&mut self) -> Result<(), Error> {
        self.eventfds.kick()
    }
}

/// Returns the distance between the buffers of two slots, in bytes. Buffers begin at pages, for direct I/O.
pub(crate) fn stride(buffer: u32) -> usize {
    (buffer as usize).next_multiple_of(4096)
}

/// Sleeps until one of the queues has something to poll, or the server is gone. Returns false if `limit` passes first.
pub fn sleep(queues: &mut [&mut Queue], limit: Duration) -> Result<bool, Error> {
    let mut there = false;
    for queue in queues.iter_mut() {
        there |= queue.parts.ring.arm();
    }
    if !there {
        let mut fds: Vec<_> = queues.iter().map(|queue| queue.eventfds.call.as_fd()).collect();
        fds.extend(queues.first().map(|queue| queue.socket.as_fd()));
        there = wait(&fds, Some(limit))?;
    }
    for queue in queues.iter_mut() {
        // An empty counter is not an error.
        let _ = rustix::io::read(&queue.eventfds.call, &mut [0; 8]);
        queue.parts.ring.disarm();
    }
    Ok(there)
}
