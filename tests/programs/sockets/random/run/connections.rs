//! Calls that end a connection, or set how it behaves.

use crate::random::model::Reset;
use crate::random::program::Step;
use crate::random::run::{Outcome, Run, fail};

impl Run<'_> {
    pub(super) fn shutdown(&mut self, process: u32, place: i64, end: usize, how: i64) -> Outcome {
        let answer = self.ask(process, "shutdown", &[place, how])?;
        let is_gone = self.model.ends[end].reset != Reset::No
            || (self.model.ends[end].has_ended && self.model.peer_has_ended(end));
        match (answer.result, answer.error) {
            (0, _) => {}
            (-1, libc::ENOTCONN) if is_gone => return Ok(()),
            other => return fail(format!("shutdown: {other:?}")),
        }
        self.model.shut_down(end, how != i64::from(libc::SHUT_WR), how != i64::from(libc::SHUT_RD));
        Ok(())
    }

    pub(super) fn close(&mut self, process: u32, place: i64) -> Outcome {
        // A call under way keeps a socket open. A watch stays while another descriptor of the socket does, but nobody can change it.
        if self.is_waiting(process) {
            return Ok(());
        }
        if self.model.watches.contains_key(&(process, place)) {
            self.unwatch(process, place)?;
        }
        if self.ask(process, "close", &[place])?.result != 0 {
            return fail("close");
        }
        self.model.close(process, place);
        Ok(())
    }

    pub(super) fn set(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let (what, value) = (i64::from(step.how % 6), i64::from(step.size % 2));
        // A call that waits would not end, or would change the way in which it waits.
        if what < 2 && self.someone_receives(end) || what == 3 && !step.size.is_multiple_of(4) {
            return Ok(());
        }
        let answer = self.ask(process, "set", &[place, what, value])?;
        let is_gone = self.model.ends[end].reset != Reset::No;
        if answer.result != 0 && !is_gone {
            return fail(format!("set: {answer:?}"));
        }
        match what {
            0 | 1 => self.model.ends[end].is_nonblocking = value == 1,
            3 if answer.result == 0 => self.model.ends[end].lingers_not = true,
            _ => {}
        }
        Ok(())
    }
}
