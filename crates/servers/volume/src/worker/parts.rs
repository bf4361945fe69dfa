//! Requests that consist of several operations, such as a command that deallocates several ranges.
//!
//! The operations are executed one after the other, each in another turn, so a request with many of them delays neither
//! orders nor other requests. Meanwhile the request keeps its slot. If its queue is stopped, the rest is dropped.

use super::queue::State;
use super::source::Source;
use super::{COPY_LIMIT, Worker};

impl<S: Source> Worker<S> {
    /// Returns whether a request goes on, in the next turn, with another operation. The last one has succeeded.
    #[cold]
    pub(super) fn goes_on(&mut self, slot: u32) -> bool {
        let entry = self.slots.at(slot);
        let queue = self.queues.iter().find(|queue| queue.serial == entry.serial);
        let Some(queue) = queue.filter(|queue| queue.state == State::Running) else { return false };
        let Some(op) = S::next(&self.device, &queue.memory, &mut entry.request) else { return false };
        entry.op = op;
        self.parts.push_back(slot);
        true
    }

    /// Begins the next operation of each request that goes on.
    #[cold]
    pub(super) fn go_on(&mut self) {
        self.copied = 0;
        for _ in 0..self.parts.len() {
            if self.copied >= COPY_LIMIT {
                break;
            }
            let Some(slot) = self.parts.pop_front() else { break };
            let serial = self.slots.at(slot).serial;
            match self.queues.iter().position(|queue| queue.serial == serial) {
                Some(at) => self.dispatch(at, slot),
                None => self.slots.done.push((slot, Ok(()))),
            }
        }
    }
}
