//! What differs between the kinds of queues: how a request reaches the device, and how its answer comes back.

use crate::error::Error;
use crate::request::{Request, Status};
use crate::slots::Slot;
use std::os::fd::BorrowedFd;

/// The answer to the request of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The slot; it exists, but its request need not be in flight.
    pub slot: Slot,
    /// The disk's answer.
    pub status: Status,
    /// Number of bytes that the device says it has written.
    pub written: u32,
}

/// One queue between a driver and a device, under the slots of a [`Queue`](crate::Queue).
pub trait Transport {
    /// Writes a slot's request, which the device sees after the next [`publish`](Self::publish). Fails with [`Error::Full`]
    /// if there is no room now.
    fn put(&mut self, slot: Slot, request: Request) -> Result<(), Error>;
    /// Shows the device the requests, and notifies it if it wants that.
    fn publish(&mut self) -> Result<(), Error>;
    /// Returns the next answer, if there is one.
    fn poll(&mut self) -> Result<Option<Answer>, Error>;
    /// Returns whether the device writes the request's data, and the length of the data in bytes; `None` if there are none.
    fn data(&self, request: &Request) -> Option<(bool, u32)>;
    /// Returns how often the device had to be notified by a system call.
    fn kicks(&self) -> u64;
    /// Returns whether the device has given the queue up. Makes a system call.
    fn is_given_up(&self) -> bool;
    /// Returns the connection to the server.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Returns the descriptor that is readable when there are answers after [`arm`](Self::arm).
    fn wake_up(&self) -> BorrowedFd<'_>;
    /// Asks for a wake-up at the next answer. Returns true if there is one already.
    fn arm(&mut self) -> bool;
    /// Asks for no more wake-ups.
    fn disarm(&mut self);
}
