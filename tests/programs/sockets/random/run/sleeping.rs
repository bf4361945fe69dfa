//! Calls that wait, in threads of their own.

use crate::random::model::{ERR, HUP, IN, RDHUP};
use crate::random::players::PATIENCE;
use crate::random::program::Step;
use crate::random::run::{Outcome, Pending, Run, SIZES, Waiting, fail};
use std::collections::BTreeMap;
use std::time::Duration;

impl Run<'_> {
    /// Begins a call that waits, in a thread of its own.
    pub(super) fn sleep(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        if self.pending.len() >= 6 {
            return Ok(());
        }
        let (name, arguments, call) = match step.how % 3 {
            0 if !self.model.is_readable(end)
                && !self.model.ends[end].is_nonblocking
                && !self.someone_receives(end) =>
            {
                let size = SIZES[usize::from(step.size) % SIZES.len()].max(1);
                let (stream, position) = (1 - end as i64, self.model.ends[end].received as i64);
                let arguments = vec![place, i64::from(step.size % 6), 0, size, stream, position];
                ("receive", arguments, Waiting::Receive { end, size })
            }
            1 => {
                // Without events, nobody would wake it when another thread shuts down (docs/sockets.md).
                let events = [IN, IN | RDHUP, RDHUP][usize::from(step.size % 3)];
                let seen = self.model.may(end);
                let arguments = vec![place, i64::from(step.size % 2), events.into(), -1];
                ("poll", arguments, Waiting::Poll { end, events, seen })
            }
            2 if self.model.watches.keys().any(|(owner, _)| *owner == process)
                && !self.someone_waits(process) =>
            {
                ("wait", vec![-1], Waiting::Epoll { seen: BTreeMap::new() })
            }
            _ => return Ok(()),
        };
        let number = self.players.tell(process, true, name, &arguments);
        self.note(format!("process {process}: {name} {arguments:?} begins"));
        self.pending.push(Pending { process, number, call });
        Ok(())
    }

    /// Notes the events that calls which wait may see now.
    pub(super) fn note_seen(&mut self) {
        for pending in &mut self.pending {
            match &mut pending.call {
                Waiting::Receive { .. } => {}
                Waiting::Poll { end, seen, .. } => *seen |= self.model.may(*end),
                Waiting::Epoll { seen } => {
                    let own = self.model.watches.iter().filter(|((owner, _), _)| *owner == pending.process);
                    for ((_, place), watch) in own {
                        let asked = watch.interest | HUP | ERR;
                        *seen.entry(*place).or_default() |= self.model.may(watch.end) & asked;
                    }
                }
            }
        }
    }

    /// Collects the answers of the calls that had to wait and have a reason to return.
    pub(super) fn collect(&mut self) -> Outcome {
        self.note_seen();
        // Who receives changes what the others see.
        for wants_bytes in [true, false] {
            let mut index = 0;
            while index < self.pending.len() {
                let is_receive = matches!(self.pending[index].call, Waiting::Receive { .. });
                if is_receive != wants_bytes || !self.has_returned(index)? {
                    index += 1;
                }
            }
        }
        Ok(())
    }

    /// Returns whether the pending call with this index has returned. If it must, waits for it.
    pub(super) fn has_returned(&mut self, index: usize) -> Result<bool, String> {
        let pending = &self.pending[index];
        let process = pending.process;
        let must = match pending.call {
            Waiting::Receive { end, .. } => self.model.is_readable(end),
            Waiting::Poll { end, events, .. } => self.model.must(end) & (events | HUP | ERR) != 0,
            Waiting::Epoll { .. } => !self.expected(process).is_empty(),
        };
        let patience = if must { PATIENCE } else { Duration::ZERO };
        let Some(answer) = self.players.hear(process, pending.number, patience) else {
            let what = match pending.call {
                Waiting::Receive { .. } => "receive",
                Waiting::Poll { .. } => "poll",
                Waiting::Epoll { .. } => "epoll_wait",
            };
            return if must {
                fail(format!("{what} of process {process} sleeps for ever"))
            } else {
                Ok(false)
            };
        };
        self.note(format!("process {process}: a call has returned {answer:?}"));
        match self.pending.remove(index).call {
            Waiting::Receive { end, size } => self.has_received(end, size, &answer, false)?,
            Waiting::Poll { events, seen, .. } => {
                let found = *answer.more.first().unwrap_or(&0) as i16;
                if answer.result != 1 || found == 0 || found & !(seen & (events | HUP | ERR)) != 0 {
                    return fail(format!("poll has returned {answer:?}, of {seen:#x}"));
                }
            }
            Waiting::Epoll { seen } => {
                if answer.result == 0 {
                    return fail("epoll_wait has returned nothing");
                }
                self.was_told(process, &answer, &seen, &mut BTreeMap::new())?;
            }
        }
        Ok(true)
    }
}
