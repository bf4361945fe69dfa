//! Requests from a virtqueue.

use super::{Requests, Source};
use crate::backend::{Failure, Op};
use crate::device::{Begin, Device, Request};
use crate::disk::Disk;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Chain, Corrupt, DeviceQueue, DirtyLog, Kind, Ticket};
use ginnel_volume_control::QueueState;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// A virtqueue, seen from the device's side.
pub struct Virtqueue {
    /// The queue itself.
    pub ring: DeviceQueue<Mapping>,
    /// The log in which written pages are marked.
    pub log: Option<DirtyLog<Mapping>>,
    /// Whether notifications are suppressed by index (`VIRTIO_F_EVENT_IDX`).
    pub event_idx: bool,
}

impl Source for Virtqueue {
    type Device = Arc<dyn Device>;
    type Ticket = Ticket;
    type Found = Chain;
    type Request = Request;
    /// The number of bytes that were written to the driver's memory.
    type Answer = u32;
    type Broken = Corrupt;

    fn of(requests: Requests) -> Option<Self> {
        match requests {
            Requests::Virtqueue(queue) => Some(queue),
            Requests::Nvme(_) => None,
        }
    }

    fn disks(device: &Self::Device) -> Vec<Arc<Disk>> {
        device.disks()
    }

    fn event_queue(device: &Self::Device) -> Option<u16> {
        device.event_queue()
    }

    fn size(&self) -> usize {
        self.ring.state().size.into()
    }

    #[inline]
    fn take(&mut self, memory: &GuestMemory<Mapping>, found: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        self.ring.pop(memory, found)
    }

    #[inline]
    fn begin(
        &self,
        device: &Self::Device,
        index: u16,
        memory: &GuestMemory<Mapping>,
        found: &Chain,
        request: &mut Request,
    ) -> Begin {
        let begin = device.begin(index, memory, found, request);
        if let (Begin::Done(_), Some(log)) = (&begin, &self.log) {
            log.mark_buffers(memory, found.writable(), u64::MAX);
        }
        begin
    }

    #[inline]
    fn data(request: &Request) -> &[Buffer] {
        &request.data
    }

    #[inline]
    fn bytes(request: &Request) -> u64 {
        request.bytes
    }

    #[inline]
    fn finish(
        &self,
        device: &Self::Device,
        memory: &GuestMemory<Mapping>,
        request: &Request,
        op: Op,
        result: Result<(), Failure>,
    ) -> u32 {
        let written = device.finish(memory, request, result);
        if let Some(log) = &self.log {
            if let Op::Read { .. } = op {
                log.mark_buffers(memory, &request.data, u64::MAX);
            }
            log.mark_buffers(memory, &request.reply, u64::MAX);
        }
        written
    }

    #[inline]
    fn give_back(&mut self, ticket: Ticket, answer: u32) {
        self.ring.push(ticket, answer);
    }

    #[inline]
    fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }

    fn taken(&self) -> u64 {
        self.ring.taken()
    }

    fn visible(&self) -> u64 {
        self.ring.visible()
    }

    fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    fn resubmit(&self) -> u64 {
        self.ring.state().resubmit.into()
    }

    fn base(&self) -> u32 {
        self.ring.base()
    }

    fn tell(
        &mut self,
        memory: &GuestMemory<Mapping>,
        event: Event,
        found: &mut Chain,
    ) -> Result<bool, Corrupt> {
        let Some(ticket) = self.ring.pop(memory, found)? else { return Ok(false) };
        let written = memory.write(found.writable(), 0, event.as_bytes());
        if let Some(log) = &self.log {
            log.mark_buffers(memory, found.writable(), written as u64);
        }
        self.ring.push(ticket, written as u32);
        Ok(true)
    }

    fn states(&self, index: u16) -> Vec<QueueState> {
        let state = self.ring.state();
        vec![QueueState {
            queue: index,
            format: if state.kind == Kind::Packed { "packed" } else { "split" }.into(),
            size: state.size,
            event_index: self.event_idx,
            driver_index: state.driver_index.unwrap_or(0),
            taken_index: state.available,
            used_index: state.used,
            armed: state.armed,
            ..QueueState::default()
        }]
    }

    fn place(&self, index: u16, ticket: &Ticket) -> (u16, u16) {
        (index, ticket.id())
    }
}
