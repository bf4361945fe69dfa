//! What workloads need of a client, whatever its protocol is.

use crate::disk::Disk;
use crate::error::Error;
use crate::queue::Queue;
use crate::request::{Operation, Request, Status};
use crate::transport::Transport;
use std::time::Duration;

/// The longest time that one of a client's own requests may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A client of a disk.
pub trait Front {
    /// The kind of its queues.
    type Transport: Transport + Send;

    /// Returns the disk's properties.
    fn disk(&self) -> &Disk;

    /// Returns the request queues. Each may be used by a thread of its own.
    fn queues(&mut self) -> &mut [Queue<Self::Transport>];

    /// Connects again after the server has gone, and retries for at most `limit` while there is none. Afterwards all
    /// requests that were in flight are in flight again.
    fn resume(&mut self, limit: Duration) -> Result<(), Error>;

    /// Returns whether a successor of the server knows which requests are in flight.
    fn has_inflight_record(&self) -> bool;

    /// Returns the disk's serial number. No request may be in flight in the first queue.
    fn serial(&mut self) -> Result<String, Error>;

    /// Executes one request in the first queue, in which no other may be in flight. `bytes` must not be longer than a
    /// buffer. Blocks.
    fn execute(&mut self, request: Request, bytes: &mut [u8]) -> Result<(), Error> {
        let none = || Error::Invalid("connected without queues".into());
        let done = self.queues().first_mut().ok_or_else(none)?.call(request, bytes, PATIENCE)?;
        match done.status {
            Status::Ok => Ok(()),
            status => Err(Error::Failed { operation: request.to_string(), status }),
        }
    }

    /// Reads from the disk, as [`Front::execute`] does.
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.execute(Request::read(offset, bytes.len() as u32), bytes)
    }

    /// Writes to the disk, as [`Front::execute`] does.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.execute(Request::write(offset, bytes.len() as u32), &mut bytes.to_vec())
    }

    /// Flushes the disk's cache, as [`Front::execute`] does.
    fn flush(&mut self) -> Result<(), Error> {
        self.execute(Request::flush(), &mut [])
    }

    /// Discards a range, as [`Front::execute`] does.
    fn discard(&mut self, offset: u64, len: u32) -> Result<(), Error> {
        self.execute(Request { operation: Operation::Discard, offset, len }, &mut [])
    }

    /// Writes zeros to a range, as [`Front::execute`] does.
    fn write_zeroes(&mut self, offset: u64, len: u32, unmap: bool) -> Result<(), Error> {
        self.execute(Request { operation: Operation::WriteZeroes { unmap }, offset, len }, &mut [])
    }
}
