//! The event queue of a SCSI target (virtio 1.2, section 5.6.6.3), with a buffer for one event.

use crate::error::Error;
use ginnel_layout::virtio_scsi::{EVENT_QUEUE, Event};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{DriverQueue, Segment};
use zerocopy::FromBytes;

const LEN: usize = size_of::<Event>();

pub(crate) struct Events {
    ring: DriverQueue<Mapping>,
    buffer: Mapping,
    guest: u64,
}

impl Events {
    /// Creates the queue. `guest` is the guest physical address of the buffer.
    pub fn new(mut ring: DriverQueue<Mapping>, buffer: Mapping, guest: u64) -> Self {
        ring.disarm();
        Self { ring, buffer, guest }
    }

    /// Gives the server the buffer. Returns whether the server wants a kick.
    pub fn offer(&mut self) -> Result<bool, Error> {
        let buffer = Segment { address: self.guest, len: LEN as u32, writable: true };
        self.ring
            .add(&[buffer], false)
            .map_err(|error| Error::Invalid(format!("an event's buffer: {error}")))?;
        Ok(self.ring.publish())
    }

    /// Takes the event that the server has put into the buffer, if there is one.
    pub fn take(&mut self) -> Result<Option<Event>, Error> {
        let corrupt = |what| Error::Corrupt { queue: EVENT_QUEUE.into(), what };
        let Some((_, written)) = self.ring.poll().map_err(|error| corrupt(error.to_string()))? else {
            return Ok(None);
        };
        let mut bytes = [0; LEN];
        self.buffer.read(0, &mut bytes);
        match Event::read_from_bytes(&bytes) {
            Ok(event) if written as usize == LEN => Ok(Some(event)),
            _ => Err(corrupt(format!("an event of {written} bytes"))),
        }
    }
}
