//! A completion queue and its submission queues, as their device sees them.

use crate::QueueSetup;
use crate::completions::{CompletionState, Completions};
use crate::error::{Broken, SetupError};
use crate::state::State;
use crate::submissions::{SubmissionState, Submissions};
use ginnel_layout::nvme::{Command, Status};
use ginnel_shmem::SharedMemory;

/// A command that the device has taken. The device must complete it exactly once, in the group that it came from. A command whose ticket is
/// dropped stays in flight: the next [`QueueGroup`] that is made of the same state takes it again.
#[must_use = "each command must be completed"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    number: u64,
    /// Index of the submission queue in the group.
    queue: u16,
    slot: u16,
    cid: u16,
}

impl Ticket {
    /// Returns the identifier by which the driver knows the command. It is unique only in the command's submission queue.
    pub fn cid(&self) -> u16 {
        self.cid
    }

    /// Returns the number of the command among all of its submission queue, from 1. A command that is taken again has the same one.
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// One completion queue, and the submission queues whose commands it completes: the unit that a thread owns. No method blocks, calls the
/// kernel, or allocates. Two threads must not use it at the same time.
pub struct QueueGroup<M: SharedMemory> {
    completions: Completions<M>,
    submissions: Vec<Submissions<M>>,
    /// Index of the submission queue whose turn it is.
    turn: usize,
    /// Commands to take again, with the first one at the end: index of the queue, slot, number.
    again: Vec<(u16, u16, u64)>,
    /// Number of commands that were ever taken from this group.
    total: u64,
    outstanding: u32,
}

impl<M: SharedMemory> QueueGroup<M> {
    /// Makes a group of queues that exist in the state, and takes over what a previous process has left: commands whose completion was
    /// posted are done, and the others will be taken again. `submissions` must be all submission queues of this completion queue.
    ///
    /// The previous process must have ended, and so must all that it had begun: the kernel may still write for it into the guest's
    /// memory. A group of the same process that is to be made anew must have nothing [outstanding](Self::outstanding).
    pub fn new(
        state: &State<M>,
        completion: QueueSetup<M>,
        submissions: Vec<QueueSetup<M>>,
    ) -> Result<Self, SetupError> {
        let mut completions = Completions::new(state, completion)?;
        let mut group = Vec::with_capacity(submissions.len());
        let mut again = Vec::new();
        for (index, setup) in submissions.into_iter().enumerate() {
            let (mut queue, in_flight) = Submissions::new(state, setup, completions.id())?;
            for command in in_flight {
                let cid = queue.slots.command(command.slot).cid;
                let posted =
                    command.completing.map(|position| completions.was_posted(position, queue.id(), cid));
                match posted.transpose()? {
                    Some(true) => queue.slots.completed(command.slot, command.number),
                    Some(false) => {
                        queue.slots.not_completing(command.slot);
                        again.push((index as u16, command.slot, command.number));
                    }
                    None => again.push((index as u16, command.slot, command.number)),
                }
            }
            group.push(queue);
        }
        completions.begin()?;
        again.reverse();
        Ok(Self { completions, submissions: group, turn: 0, again, total: 0, outstanding: 0 })
    }

    /// Takes the next command, if there is one and the completion queue has room for its completion. Commands that a previous process had
    /// in flight come first, those of a queue in their order. The submission queues take turns. After an error, the group must not be
    /// used any more.
    ///
    /// CDW2, CDW3 and MPTR of the command are 0, whatever the driver wrote there.
    #[inline]
    pub fn take(&mut self) -> Result<Option<(Ticket, Command)>, Broken> {
        if !self.again.is_empty() {
            return self.take_again();
        }
        for _ in 0..self.submissions.len() {
            let queue = &mut self.submissions[self.turn];
            if queue.has_next() || queue.look()? {
                if self.completions.room == 0 && !self.completions.look()? {
                    return Ok(None);
                }
                if let Some((slot, number, command)) = queue.take() {
                    self.completions.room -= 1;
                    self.total += 1;
                    self.outstanding += 1;
                    let ticket = Ticket { number, queue: self.turn as u16, slot, cid: command.cid };
                    if !queue.has_next() {
                        self.pass_turn();
                    }
                    return Ok(Some((ticket, command)));
                }
            }
            self.pass_turn();
        }
        Ok(None)
    }

    #[inline]
    fn pass_turn(&mut self) {
        self.turn += 1;
        if self.turn >= self.submissions.len() {
            self.turn = 0;
        }
    }

    /// Takes a command of a previous process again. There is always room for it, unless it or others had been parked.
    #[cold]
    fn take_again(&mut self) -> Result<Option<(Ticket, Command)>, Broken> {
        if self.completions.room == 0 && !self.completions.look()? {
            return Ok(None);
        }
        let Some((index, slot, number)) = self.again.pop() else { return Ok(None) };
        self.completions.room -= 1;
        let queue = &mut self.submissions[usize::from(index)];
        let command = queue.slots.command(slot);
        queue.outstanding += 1;
        self.total += 1;
        self.outstanding += 1;
        Ok(Some((Ticket { number, queue: index, slot, cid: command.cid }, command)))
    }

    /// Completes a command. A driver that polls sees it at once; [`publish`](Self::publish) is for one that sleeps. A command that is
    /// [parked](Self::park) must be unparked first.
    #[inline]
    pub fn complete(&mut self, ticket: Ticket, status: Status, result: u32) {
        let Ticket { number, queue, slot, cid } = ticket;
        let queue = &mut self.submissions[usize::from(queue)];
        queue.slots.completing(slot, self.completions.position());
        self.completions.post(queue.id(), queue.head(), cid, status, result);
        queue.slots.completed(slot, number);
        queue.outstanding -= 1;
        self.outstanding -= 1;
    }

    /// Returns whether the interrupt must be raised: completions were posted since the last call, and the driver has enabled interrupts.
    /// The first call returns `true` too, because a predecessor may have died before it raised the interrupt.
    #[inline]
    #[must_use = "if it returns true, the driver may sleep until the interrupt"]
    pub fn publish(&mut self) -> bool {
        self.completions.publish()
    }

    /// Asks the driver for notifications. Returns `true` if there is something to take already; then the device must not sleep. If
    /// commands wait for room in the completion queue, the driver is asked to notify when it takes completions back.
    #[inline]
    #[must_use = "a caller that sleeps although it got `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        self.submissions.iter_mut().for_each(Submissions::arm);
        if self.completions.room == 0 {
            self.completions.arm();
        }
        // This fence is between the store of the event index and our second look at the shadow. The driver has a fence between the
        // store of the shadow and the load of the event index. Without shadows, every change of a doorbell is trapped or nobody sleeps.
        self.completions.fence();
        !self.is_empty()
    }

    /// Tells the driver that no notifications are needed. Some may still come.
    #[inline]
    pub fn disarm(&mut self) {
        self.submissions.iter_mut().for_each(Submissions::disarm);
        self.completions.keep_quiet();
    }

    /// Returns how many commands have been taken since this group was made.
    #[inline]
    pub fn taken(&self) -> u64 {
        self.total
    }

    /// Returns how many commands can be taken now. Once [`taken`](Self::taken) has grown by this number, all that were there have been
    /// taken.
    pub fn visible(&self) -> u64 {
        let ahead = |queue: &Submissions<M>| usize::from(queue.ahead()).min(queue.slots.free()) as u64;
        let there: u64 = self.submissions.iter().map(ahead).sum();
        if self.has_room() { self.again.len() as u64 + there } else { 0 }
    }

    /// Returns whether there is nothing to take now. Commands that wait for room in the completion queue do not count.
    pub fn is_empty(&self) -> bool {
        let can_take = |queue: &Submissions<M>| queue.slots.has_free() && queue.ahead() > 0;
        !((!self.again.is_empty() || self.submissions.iter().any(can_take)) && self.has_room())
    }

    fn has_room(&self) -> bool {
        self.completions.room > 0 || self.completions.has_moved()
    }

    /// Returns how many commands are taken and not completed, parked ones too.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Parks a command that may wait for ever (Asynchronous Event Request), so that it does not keep room in the completion queue.
    pub fn park(&mut self, _ticket: &Ticket) {
        self.completions.room += 1;
    }

    /// Prepares a parked command for [`complete`](Self::complete). Returns `false` if the completion queue has no room now.
    pub fn unpark(&mut self, _ticket: &Ticket) -> Result<bool, Broken> {
        if self.completions.room == 0 && !self.completions.look()? {
            return Ok(false);
        }
        self.completions.room -= 1;
        Ok(true)
    }

    /// Returns the number of the submission queue of a command.
    pub fn queue_of(&self, ticket: &Ticket) -> u16 {
        self.submissions[usize::from(ticket.queue)].id()
    }

    /// Returns the state of the completion queue, and of each submission queue.
    pub fn states(&self) -> (CompletionState, Vec<SubmissionState>) {
        let resubmit =
            |index: usize| self.again.iter().filter(|(queue, ..)| usize::from(*queue) == index).count();
        let submissions =
            self.submissions.iter().enumerate().map(|(index, queue)| queue.state(resubmit(index)));
        (self.completions.state(), submissions.collect())
    }
}
