//! Requests from NVMe queues: the commands of a completion queue and of its submission queues.

use super::{Requests, Source};
use crate::backend::{Failure, Op};
use crate::device::Begin;
use crate::device::nvme::{Namespace, Request};
use crate::disk::Disk;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Status};
use ginnel_nvme::{Broken, QueueGroup, SubmissionState, Ticket};
use ginnel_shmem::Mapping;
use ginnel_volume_control::QueueState;
use std::sync::Arc;
use zerocopy::FromZeros;

/// A completion queue and its submission queues, seen from the controller's side. In [`Start`](super::Start), its number is
/// that of the completion queue, and its kicks are those of the completion queue and of all submission queues. A controller
/// whose doorbells are mapped gets no kicks.
///
/// When it is stopped, all commands that were taken are complete. If it is suspended, those that were not begun stay in
/// flight in the controller's state. Commands that were not taken stay in the submission queues either way.
pub struct Nvme {
    /// The queues.
    pub group: QueueGroup<Mapping>,
    /// Whether the queues have shadow doorbells, by which the driver sees whether a notification is needed.
    pub shadow: bool,
}

/// A command that was taken.
pub struct Found(Command);

impl Default for Found {
    fn default() -> Self {
        Self(Command::new_zeroed())
    }
}

impl Source for Nvme {
    type Device = Arc<Namespace>;
    type Ticket = Ticket;
    type Found = Found;
    type Request = Request;
    type Answer = Status;
    type Broken = Broken;

    fn of(requests: Requests) -> Option<Self> {
        match requests {
            Requests::Nvme(queues) => Some(queues),
            Requests::Virtqueue(_) => None,
        }
    }

    fn disks(device: &Self::Device) -> Vec<Arc<Disk>> {
        vec![device.disk().clone()]
    }

    fn size(&self) -> usize {
        let (completion, submissions) = self.group.states();
        let all: usize = submissions.iter().map(|queue| usize::from(queue.size)).sum();
        // A command is taken only if there is room for its completion. Those of a predecessor are taken in any case.
        all.min(completion.size.into())
    }

    #[inline]
    fn take(&mut self, _: &GuestMemory<Mapping>, found: &mut Found) -> Result<Option<Ticket>, Broken> {
        Ok(self.group.take()?.map(|(ticket, command)| {
            found.0 = command;
            ticket
        }))
    }

    #[inline]
    fn begin(
        &self,
        device: &Self::Device,
        _: u16,
        memory: &GuestMemory<Mapping>,
        found: &Found,
        request: &mut Request,
    ) -> Begin<Status> {
        device.begin(memory, &found.0, request)
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
    fn has_more(request: &Request) -> bool {
        request.has_more()
    }

    fn next(device: &Self::Device, memory: &GuestMemory<Mapping>, request: &mut Request) -> Option<Op> {
        device.next(memory, request)
    }

    #[inline]
    fn finish(
        &self,
        device: &Self::Device,
        _: &GuestMemory<Mapping>,
        request: &Request,
        op: Op,
        result: Result<(), Failure>,
    ) -> Status {
        device.finish(request, op, result)
    }

    #[inline]
    fn give_back(&mut self, ticket: Ticket, answer: Status) {
        self.group.complete(ticket, answer, 0);
    }

    #[inline]
    fn publish(&mut self) -> bool {
        self.group.publish()
    }

    fn arm(&mut self) -> bool {
        self.group.arm()
    }

    fn disarm(&mut self) {
        self.group.disarm();
    }

    fn taken(&self) -> u64 {
        self.group.taken()
    }

    fn visible(&self) -> u64 {
        self.group.visible()
    }

    fn is_empty(&self) -> bool {
        self.group.is_empty()
    }

    fn resubmit(&self) -> u64 {
        let (_, submissions) = self.group.states();
        submissions.iter().map(|queue| u64::from(queue.resubmit)).sum()
    }

    fn states(&self, _: u16) -> Vec<QueueState> {
        let (completion, submissions) = self.group.states();
        let full = match completion.room {
            1.. => String::new(),
            _ => format!("completion queue {} is full", completion.id),
        };
        let state = |queue: &SubmissionState| QueueState {
            queue: queue.id,
            state: full.clone(),
            format: "nvme".into(),
            size: queue.size,
            event_index: self.shadow,
            driver_index: queue.driver_tail as u16,
            taken_index: queue.head,
            used_index: completion.tail,
            armed: queue.armed,
            ..QueueState::default()
        };
        submissions.iter().map(state).collect()
    }

    fn place(&self, _: u16, ticket: &Ticket) -> (u16, u16) {
        (self.group.queue_of(ticket), ticket.cid())
    }
}
