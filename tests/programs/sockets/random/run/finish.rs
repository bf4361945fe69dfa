//! The end of a program.

use crate::random::model::{IN, OUT, RDHUP, Reset};
use crate::random::players::PATIENCE;
use crate::random::program::{Do, Step};
use crate::random::run::{LAST_PROCESS, Outcome, Run, Waiting, fail, pause};
use std::time::Instant;

impl Run<'_> {
    /// Both ends stop sending, and receive everything. Then everything is closed.
    pub(super) fn finish(&mut self) -> Outcome {
        let ends: Vec<(usize, (u32, i64))> = [0, 1]
            .into_iter()
            .filter_map(|end| self.model.open.iter().find(|(_, e)| **e == end).map(|(at, _)| (end, *at)))
            .collect();
        for &(end, (process, place)) in &ends {
            if !self.model.ends[end].has_ended {
                self.shutdown(process, place, end, libc::SHUT_WR.into())?;
                self.collect()?;
            }
        }
        for &(end, (process, place)) in &ends {
            // Each turn receives something, or comes to the end.
            while self.model.available(end) > 0 {
                let before = self.model.ends[end].received;
                self.receive(process, place, end, 0, 100_000, 0)?;
                if self.model.ends[end].received == before {
                    if self.model.ends[end].reset == Reset::No {
                        return fail("bytes are lost");
                    }
                    break;
                }
            }
            if self.model.ends[end].reset == Reset::No {
                self.receive(process, place, end, 0, 1, 0)?;
                self.poll(process, place, end, 0, IN | OUT | RDHUP)?;
            }
        }
        // A watch that has reported once, or is edge-triggered, does not report the end again by itself.
        let waiting: Vec<u32> = self
            .pending
            .iter()
            .filter(|pending| matches!(pending.call, Waiting::Epoll { .. }))
            .map(|pending| pending.process)
            .collect();
        for process in waiting {
            let own = self.model.open.iter().find(|((owner, _), _)| *owner == process);
            if let Some((place, end)) = own.map(|((_, place), end)| (*place, *end)) {
                self.watch(process, place, end, &Step { what: Do::Watch, who: 0, how: 0, size: 3 })?;
            }
        }
        let begun = Instant::now();
        loop {
            self.collect()?;
            if self.pending.is_empty() {
                break;
            }
            // Of a connection that may be broken, the model does not say that they must return.
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail("a call sleeps for ever");
            }
        }
        for process in (0..=LAST_PROCESS).rev() {
            let places: Vec<i64> = self
                .model
                .open
                .keys()
                .filter(|(owner, _)| *owner == process)
                .map(|(_, place)| *place)
                .collect();
            for place in places.iter().copied() {
                self.close(process, place)?;
            }
            if process < 2 {
                self.ask(process, "forget", &[])?;
            }
        }
        for process in 2..=LAST_PROCESS {
            if self.players.has(process) && !self.players.dismiss(process) {
                return fail("a process does not end");
            }
        }
        Ok(())
    }
}
