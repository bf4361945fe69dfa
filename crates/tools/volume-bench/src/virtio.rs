//! A virtqueue as a [`Transport`]: requests with their heads and buffers in descriptors, kicks and calls through eventfds.

use crate::connection::wait;
use crate::device::{Encoding, Frame};
use crate::echo::Echo;
use crate::error::Error;
use crate::request::Request;
use crate::slots::{ANSWER, HEAD, Slot};
use crate::transport::{Answer, Transport};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{AddError, DriverQueue, Segment};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The parts of a queue.
pub(crate) struct Parts {
    pub ring: DriverQueue<Mapping>,
    pub heads: Mapping,
    pub heads_guest: u64,
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
    /// Size of a slot's buffer, in bytes.
    pub buffer: u32,
    /// Distance between the buffers of two slots, in bytes.
    pub stride: usize,
    /// Largest number of bytes of a buffer in one descriptor.
    pub segment: u32,
    pub indirect: bool,
}

/// A virtqueue.
pub struct VirtioTransport {
    index: usize,
    shape: Shape,
    parts: Parts,
    pub(crate) eventfds: Eventfds,
    /// The connection's socket, by which the end of the server is detected.
    pub(crate) socket: Arc<OwnedFd>,
    /// The slot for each token of the ring.
    slot_of: Vec<u16>,
    segments: Vec<Segment>,
    kicks: u64,
}

impl VirtioTransport {
    pub(crate) fn new(
        index: usize,
        shape: Shape,
        mut parts: Parts,
        eventfds: Eventfds,
        socket: Arc<OwnedFd>,
        ring_size: u16,
    ) -> Self {
        // The client polls, and needs no calls.
        parts.ring.disarm();
        let segments = Vec::with_capacity(ring_size.into());
        Self { index, shape, parts, eventfds, socket, slot_of: vec![0; ring_size.into()], segments, kicks: 0 }
    }

    /// Sets the encoding of requests. No request may be in flight.
    pub(crate) fn set_encoding(&mut self, encoding: Encoding) {
        self.shape.encoding = encoding;
    }

    /// Returns the base up to which the ring's answers have been polled.
    pub(crate) fn base(&self) -> u32 {
        self.parts.ring.base()
    }

    /// Continues with an empty ring.
    pub(crate) fn restart(&mut self, mut ring: DriverQueue<Mapping>) {
        ring.disarm();
        self.parts.ring = ring;
    }

    #[cold]
    fn corrupt(&self, what: String) -> Error {
        Error::Corrupt { queue: self.index, what }
    }
}

impl Transport for VirtioTransport {
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
                let from = parts.buffers_guest + (slot.index() * self.shape.stride) as u64;
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

    #[inline]
    fn publish(&mut self) -> Result<(), Error> {
        let wanted = self.parts.ring.publish();
        if let Some(echo) = &mut self.parts.echo {
            echo.answer(&self.parts.heads, &self.slot_of);
        } else if wanted {
            self.kicks += 1;
            self.eventfds.kick()?;
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self) -> Result<Option<Answer>, Error> {
        let polled = self.parts.ring.poll();
        let Some((token, written)) = polled.map_err(|corrupt| self.corrupt(corrupt.to_string()))? else {
            return Ok(None);
        };
        let Some(&slot) = self.slot_of.get(usize::from(token)) else {
            return Err(self.corrupt(format!("it completes {token}, which was not submitted")));
        };
        let status = self.shape.encoding.status(&self.parts.heads, usize::from(slot) * HEAD);
        Ok(Some(Answer { slot: Slot(slot), status, written }))
    }

    fn data(&self, request: &Request) -> Option<(bool, u32)> {
        self.shape.encoding.buffer(request)
    }

    fn kicks(&self) -> u64 {
        self.kicks
    }

    /// The server reports through the queue's error descriptor that it no longer serves the queue.
    fn is_given_up(&self) -> bool {
        matches!(wait(&[self.eventfds.error.as_fd()], Some(Duration::ZERO)), Ok(true))
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn wake_up(&self) -> BorrowedFd<'_> {
        self.eventfds.call.as_fd()
    }

    fn arm(&mut self) -> bool {
        self.parts.ring.arm()
    }

    fn disarm(&mut self) {
        self.parts.ring.disarm();
    }
}
