//! Calls that move bytes, or count them.

use crate::random::model::{IN, Reset};
use crate::random::players::{Answer, PATIENCE};
use crate::random::program::Step;
use crate::random::run::{Outcome, Run, SMALL, fail, pause};
use std::time::Instant;

impl Run<'_> {
    pub(super) fn send(&mut self, process: u32, place: i64, end: usize, form: i64, size: i64) -> Outcome {
        let own = &self.model.ends[end];
        let outstanding = self.model.outstanding(end);
        let must_not_wait = outstanding > 0 || size > SMALL;
        // `write`, `writev` and `sendfile` have no flags.
        let form = if must_not_wait && !own.is_nonblocking { form % 4 } else { form };
        let flags = if must_not_wait { libc::MSG_DONTWAIT } else { 0 };
        let position = own.sent as i64;
        let (has_ended, reset, peer_is_deaf) = (
            own.has_ended,
            own.reset,
            self.model.ends[1 - end].is_deaf || self.model.ends[1 - end].is_closed,
        );
        let answer = self.ask(process, "send", &[place, form, flags.into(), size, end as i64, position])?;
        let signals = i64::from(answer.result == -1 && answer.error == libc::EPIPE && form >= 4);
        // `sendfile` sends in parts, and returns how much it has sent before the one that has failed.
        let is_cut = form == 6 && answer.result > 0 && answer.result < size && peer_is_deaf;
        if answer.more != [signals] && !(is_cut && answer.more == [1]) {
            return fail(format!("{:?} SIGPIPE have come", answer.more));
        }
        match (answer.result, answer.error) {
            (0, _) if size == 0 => {}
            (n, _) if n > 0 && n <= size && !has_ended => {
                if outstanding == 0 && size <= SMALL && n != size && !peer_is_deaf {
                    return fail(format!("a small message is cut: {n} of {size}"));
                }
                self.model.sent(end, n as u64);
            }
            (-1, libc::EPIPE) if has_ended || reset != Reset::No => {}
            (-1, libc::ECONNRESET) if reset != Reset::No => {}
            (-1, libc::EAGAIN) if outstanding > 0 => self.model.found_full(end),
            other => return fail(format!("send: {other:?}")),
        }
        Ok(())
    }

    pub(super) fn receive(
        &mut self,
        process: u32,
        place: i64,
        end: usize,
        form: i64,
        size: i64,
        more: i32,
    ) -> Outcome {
        if size == 0 {
            return Ok(());
        }
        let is_readable = self.model.is_readable(end);
        let form = if is_readable || self.model.ends[end].is_nonblocking { form } else { form % 4 };
        let flags = if is_readable { more } else { libc::MSG_DONTWAIT | more };
        let position = self.model.ends[end].received as i64;
        let stream = 1 - end as i64;
        let arguments = [place, form, flags.into(), size, stream, position];
        let mut answer = self.ask(process, "receive", &arguments)?;
        if (answer.result, answer.error) == (-1, libc::EAGAIN) && is_readable {
            // What was sent may still be on its way.
            self.poll(process, place, end, 0, IN)?;
            answer = self.ask(process, "receive", &arguments)?;
        }
        self.has_received(end, size, &answer, flags & libc::MSG_PEEK != 0)
    }

    pub(super) fn has_received(&mut self, end: usize, size: i64, answer: &Answer, peeks: bool) -> Outcome {
        let available = self.model.available(end);
        let own = &self.model.ends[end];
        let (is_deaf, reset, fin) = (own.is_deaf, own.reset, self.model.peer_has_ended(end));
        match (answer.result, answer.error) {
            (n, _) if n > 0 && n <= size && n as u64 <= available => {
                if answer.more[0] != n {
                    return fail(format!("byte {} of {n} is wrong", answer.more[0]));
                }
                if !peeks {
                    self.model.received(end, n as u64);
                }
            }
            // Bytes may still be on their way, and a deaf end does not wait for them.
            (0, _) if available == 0 && fin || is_deaf || reset != Reset::No => {}
            (-1, libc::EAGAIN) if !self.model.is_readable(end) => {}
            (-1, libc::ECONNRESET | libc::EPIPE) if reset != Reset::No => {}
            other => return fail(format!("receive, with {available} bytes there: {other:?}")),
        }
        Ok(())
    }

    pub(super) fn count(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let asks_input = step.how.is_multiple_of(2);
        let request = if asks_input { libc::FIONREAD } else { libc::TIOCOUTQ };
        let begun = Instant::now();
        let mut answer = self.ask(process, "count", &[place, request as i64])?;
        // What was sent may still be on its way.
        let reset = self.model.ends[end].reset;
        while asks_input
            && answer.result == 0
            && reset == Reset::No
            && self.model.available(end) > 0
            && begun.elapsed() < PATIENCE
        {
            pause(begun);
            answer = self.ask(process, "count", &[place, request as i64])?;
        }
        // The peer acknowledges bytes, the first ones and the end of the stream among them, some time after they have come.
        let most = match asks_input {
            true => self.model.available(end),
            false => self.model.ends[end].sent + 13,
        };
        if reset == Reset::No && (answer.result < 0 || answer.result > most as i64) {
            return fail(format!("ioctl: {answer:?} of {most}"));
        }
        if asks_input && self.is_settled && reset == Reset::No && most > 0 && answer.result == 0 {
            return fail(format!("FIONREAD says 0 of {most}"));
        }
        Ok(())
    }
}
