//! Processes that get the connection, and that end.

use crate::random::model::Reset;
use crate::random::players::PATIENCE;
use crate::random::program::Step;
use crate::random::run::{LAST_PROCESS, Outcome, Run, fail};

impl Run<'_> {
    pub(super) fn fork(&mut self, process: u32) -> Outcome {
        // A process ends with the one that has made it, and that one ends when another gets its number.
        let Some(child) = (2..=LAST_PROCESS).find(|id| self.model.open.keys().all(|(owner, _)| owner < id))
        else {
            return Ok(());
        };
        if self.ask(process, "fork", &[child.into()])?.result != 0 || !self.players.meet() {
            return fail("fork");
        }
        // The child has the parent's epoll instance, which the model does not follow there.
        self.ask(child, "forget", &[])?;
        let own: Vec<_> = self.model.open.iter().filter(|((owner, _), _)| *owner == process).collect();
        let own: Vec<_> = own.into_iter().map(|((_, place), end)| ((child, *place), *end)).collect();
        self.model.open.extend(own);
        Ok(())
    }

    /// Does something for which another process must take part: a connection goes back to TCP only then. Meanwhile, that process makes
    /// calls with the other end.
    pub(super) fn with_peer<T>(
        &mut self,
        end: usize,
        what: impl FnOnce(&mut Self) -> T,
    ) -> Result<T, String> {
        let peer = self.model.open.iter().find(|(_, other)| **other != end).map(|(at, _)| *at);
        let attending =
            peer.map(|(process, place)| (process, self.players.tell(process, true, "attend", &[place])));
        let result = what(self);
        if let Some((process, number)) = attending {
            let relaxed = self.players.ask(process, "relax", &[]);
            if relaxed.is_none() || self.players.hear(process, number, PATIENCE).is_none() {
                return fail("poll does not return");
            }
        }
        Ok(result)
    }

    /// Returns the processes that have an end.
    pub(super) fn owners(&self, end: usize) -> Vec<u32> {
        let mut owners: Vec<u32> = self
            .model
            .open
            .iter()
            .filter(|(_, other)| **other == end)
            .map(|((owner, _), _)| *owner)
            .collect();
        owners.dedup();
        owners
    }

    pub(super) fn exec(&mut self, process: u32) -> Outcome {
        let own = |run: &Self, end: usize| run.owners(end) == [process];
        let Some(end) = [0, 1].into_iter().find(|end| {
            let peers = self.owners(1 - end);
            let is_idle = self.model.available(*end) + self.model.outstanding(*end) == 0;
            is_idle && own(self, *end) && !peers.contains(&process)
        }) else {
            return Ok(());
        };
        if self.is_waiting(process) {
            return Ok(());
        }
        self.note(format!("process {process}: exec"));
        if !self.with_peer(end, |run| run.players.replace(process))? {
            return fail("exec");
        }
        self.model.watches.retain(|(owner, _), _| *owner != process);
        if process == 0 {
            // The listener was closed.
            self.players.port = self.ask(0, "listen", &[])?.result;
        }
        Ok(())
    }

    pub(super) fn exit(&mut self, process: u32) -> Outcome {
        self.note(format!("process {process}: exit"));
        if !self.players.dismiss(process) {
            return fail("a process does not end");
        }
        self.model.exit(process);
        Ok(())
    }

    pub(super) fn pass(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let others: Vec<u32> = (0..=LAST_PROCESS)
            .filter(|id| *id < 2 || self.model.open.keys().any(|(owner, _)| owner == id))
            .collect();
        let to = others[usize::from(step.how) % others.len()];
        let Some(new) = self.free_place(to) else { return Ok(()) };
        // The thread that passes a connection on cannot take part for the other end at the same time, and what is left of a broken
        // connection need not go back.
        let is_shared = self.owners(end).len() > 1
            || self.owners(1 - end) == [process]
            || self.model.ends[end].reset != Reset::No;
        let answer = self.with_peer(end, |run| run.ask(process, "pass", &[place, to.into()]))??;
        // Another process that has the connection may use it, and more may be unread than the kernel takes at once.
        let is_under_way = self.model.available(end) + self.model.outstanding(end) > 0;
        if (is_shared || is_under_way) && (answer.result, answer.error) == (-1, libc::EAGAIN) {
            return Ok(());
        }
        if answer.result != 1 || self.ask(to, "take", &[new])?.result != 1 {
            return fail(format!("pass: {answer:?}"));
        }
        self.model.open.insert((to, new), end);
        Ok(())
    }
}
