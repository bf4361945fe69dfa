//! One request queue of a disk, for one thread.
//!
//! A request lives in a slot: its header, its status and its buffer, all in memory that the server sees. Claim a slot, fill
//! its buffer, submit it, publish, poll until it is done, and use the slot again or release it. Nothing here blocks but
//! [`sleep`] and [`Queue::call`], and nothing allocates.

use crate::connection::wait;
use crate::device::{Frame, Wire};
use crate::echo::Echo;
use crate::error::Error;
use crate::request::{Request, Status};
use ginnel_shmem::{Mapping, SharedSlice};
use ginnel_virtqueue::{AddError, DriverQueue, Segment};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a slot that are not its buffer: what the device reads, and from [`ANSWER`] on what it writes.
pub(crate) const HEAD: usize = 256;
/// Where in a slot's head the device's answer lies: not in the cache line that we write.
pub(crate) const ANSWER: usize = 128;

/// A place for one request. Of use only with the queue that it was claimed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    /// Its number, from 0; less than [`Queue::slots`].
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A request that the server has answered.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Where it was. Claimed still.
    pub slot: Slot,
    /// What it was.
    pub request: Request,
    /// The answer.
    pub status: Status,
    /// Bytes that the device says it has written: buffer and answer.
    pub written: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    Claimed,
    Submitted(Request),
}

/// What a queue is made of.
pub(crate) struct Parts {
    pub ring: DriverQueue<Mapping>,
    pub heads: Mapping,
    pub heads_guest: u64,
    pub buffers: Mapping,
    pub buffers_guest: u64,
    /// Answers instead of the server.
    pub echo: Option<Echo>,
}

/// The descriptors through which both sides wake each other.
pub(crate) struct Bells {
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
}

impl Bells {
    /// Wakes the server.
    pub fn kick(&self) -> Result<(), Error> {
        match rustix::io::write(&self.kick, &1u64.to_ne_bytes()) {
            // Full: it has not been looked at for ages, and rings still.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(Error::io("kicking a queue")(errno)),
        }
    }
}

/// How requests are put into the ring.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub wire: Wire,
    pub slots: u16,
    /// Bytes of a slot's buffer.
    pub buffer: u32,
    /// Bytes of a buffer that one descriptor covers at most.
    pub segment: u32,
    pub indirect: bool,
}

/// One queue.
pub struct Queue {
    index: usize,
    shape: Shape,
    parts: Parts,
    pub(crate) bells: Bells,
    /// The connection, to see that the server is gone.
    pub(crate) socket: Arc<OwnedFd>,
    states: Vec<State>,
    free: Vec<u16>,
    /// Which slot a ring's token stands for.
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
        bells: Bells,
        socket: Arc<OwnedFd>,
        ring_size: u16,
    ) -> Self {
        let mut parts = parts;
        // We look, and need not be called.
        parts.ring.disarm();
        Self {
            index,
            shape,
            parts,
            bells,
            socket,
            states: vec![State::Free; shape.slots.into()],
            free: (0..shape.slots).rev().collect(),
            slot_of: vec![0; ring_size.into()],
            segments: Vec::with_capacity(ring_size.into()),
            submitted: 0,
            kicks: 0,
        }
    }

    /// From now on, requests have this form. None may be on its way.
    pub(crate) fn set_wire(&mut self, wire: Wire) {
        self.shape.wire = wire;
    }

    /// Its number among the request queues.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many requests can be on their way.
    pub fn slots(&self) -> usize {
        self.states.len()
    }

    /// Bytes that a slot's buffer has.
    pub fn buffer_len(&self) -> usize {
        self.shape.buffer as usize
    }

    /// How many are on their way.
    pub fn submitted(&self) -> usize {
        self.submitted
    }

    /// How often the server had to be woken.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// A free slot; none if all are in use.
    pub fn claim(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.states[usize::from(slot)] = State::Claimed;
        Some(Slot(slot))
    }

    /// Gives a slot back. One that is free, or with the server, stays as it is.
    pub fn release(&mut self, slot: Slot) {
        if let Some(state @ State::Claimed) = self.states.get_mut(slot.index()) {
            *state = State::Free;
            self.free.push(slot.0);
        }
    }

    /// The slot's buffer. While the request is with the server, both may write to it. Panics if the slot is of another queue
    /// and there is no such one here.
    #[inline]
    pub fn buffer(&self, slot: Slot) -> SharedSlice<'_, Mapping> {
        let len = self.shape.buffer as usize;
        SharedSlice::new(&self.parts.buffers, slot.index() * self.stride(), len)
    }

    /// Bytes from one buffer to the next.
    fn stride(&self) -> usize {
        stride(self.shape.buffer)
    }

    /// Puts the request into the ring; [`Error::Full`] if that has no room for its descriptors now. The server sees it at the next [`Queue::publish`]. Whether it makes sense to the disk
    /// is for the disk to say.
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
        let Frame { asked, answered } = self.shape.wire.frame(&parts.heads, head, request);
        let head = parts.heads_guest + head as u64;
        let piece = |address, len, writable| Segment { address, len, writable };
        let answer = piece(head + ANSWER as u64, answered, true);
        let list = &mut self.segments;
        list.clear();
        list.push(piece(head, asked, false));
        match self.shape.wire.buffer(&request) {
            None => list.push(answer),
            Some((_, len)) if len > self.shape.buffer => {
                let room = self.shape.buffer;
                return Err(Error::Invalid(format!(
                    "{request}: a buffer has {room} bytes; connect with larger ones"
                )));
            }
            Some((writable, len)) => {
                // What the device reads comes before what it writes; SCSI has the answer in front of the data then.
                let first = writable && self.shape.wire.answers_first();
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

    /// Makes what was submitted visible, and wakes the server if it wants to be woken.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Error> {
        let wanted = self.parts.ring.publish();
        if let Some(echo) = &mut self.parts.echo {
            echo.answer(&self.parts.heads, &self.slot_of);
        } else if wanted {
            self.kicks += 1;
            self.bells.kick()?;
        }
        Ok(())
    }

    /// The next answered request; none if there is none now.
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
        let status = self.shape.wire.status(&self.parts.heads, usize::from(slot) * HEAD);
        Ok(Some(Done { slot: Slot(slot), request, status, written }))
    }

    #[cold]
    fn corrupt(&self, what: String) -> Error {
        Error::Corrupt { queue: self.index, what }
    }

    /// Whether the server has closed the connection, or died. A system call.
    pub fn is_server_gone(&self) -> bool {
        crate::connection::is_closed(self.socket.as_fd())
    }

    /// Whether the server has said, through the queue's error descriptor, that it gave the queue up. A system call.
    pub fn is_given_up(&self) -> bool {
        matches!(wait(&[self.bells.error.as_fd()], Some(Duration::ZERO)), Ok(true))
    }

    /// Does one request with nothing else on its way in this queue: `data` goes to the disk with a write, and comes from it
    /// with a read. Blocks for at most `patience`, looking all the time.
    pub fn call(&mut self, request: Request, data: &mut [u8], patience: Duration) -> Result<Done, Error> {
        if self.submitted > 0 {
            return Err(Error::Invalid("other requests are on their way".into()));
        }
        let full = || Error::Invalid("all slots are claimed".into());
        let slot = self.claim().ok_or_else(full)?;
        let buffer = self.shape.wire.buffer(&request);
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
                // It may have answered before.
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

    /// How far the answers of the ring have been polled.
    pub(crate) fn base(&self) -> u32 {
        self.parts.ring.base()
    }

    /// Begins anew with an empty ring, and puts what was on its way into it again.
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

    /// Wakes the server whether it wants to or not.
    pub(crate) fn kick(&mut self) -> Result<(), Error> {
        self.bells.kick()
    }
}

/// Bytes from one slot's buffer to the next: they begin at pages, for direct I/O.
pub(crate) fn stride(buffer: u32) -> usize {
    (buffer as usize).next_multiple_of(4096)
}

/// Sleeps until one of the queues has something to poll, or the server is gone, or the time is up (false then).
pub fn sleep(queues: &mut [&mut Queue], limit: Duration) -> Result<bool, Error> {
    let mut there = false;
    for queue in queues.iter_mut() {
        there |= queue.parts.ring.arm();
    }
    if !there {
        let mut fds: Vec<_> = queues.iter().map(|queue| queue.bells.call.as_fd()).collect();
        fds.extend(queues.first().map(|queue| queue.socket.as_fd()));
        there = wait(&fds, Some(limit))?;
    }
    for queue in queues.iter_mut() {
        // Nothing there: fine as well.
        let _ = rustix::io::read(&queue.bells.call, &mut [0; 8]);
        queue.parts.ring.disarm();
    }
    Ok(there)
}
