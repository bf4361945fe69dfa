//! What a worker does when it is ordered to: above all, how it starts and stops a queue.

use super::Worker;
use super::mailbox::Order;
use super::queue::{Queue, State};
use super::source::{Source, Start};
use std::sync::mpsc::SyncSender;
use tracing::error;

impl<S: Source> Worker<S> {
    /// Answers the stop orders of queues that have no requests left.
    pub(super) fn answer_stops(&mut self) {
        let mut at = 0;
        while at < self.queues.len() {
            let queue = &mut self.queues[at];
            if queue.has_ended() {
                queue.publish();
                let mut queue = self.queues.swap_remove(at);
                self.sleep.forget(&queue);
                self.missed |= queue.missed;
                queue.answer_stop();
            } else {
                at += 1;
            }
        }
    }

    pub(super) fn execute_orders(&mut self) {
        while let Some(order) = self.inbox.next() {
            match order {
                Order::Start(start) => self.start(*start),
                Order::Stop { index, suspend, answer } => {
                    // If there is no such queue, the dropped channel tells the caller that nobody answers.
                    if let Some(at) = self.queues.iter().position(|q| q.index == index) {
                        self.stop(at, suspend, answer);
                    }
                }
                Order::Call { index, call } => {
                    if let Some(queue) = self.queues.iter_mut().find(|q| q.index == index) {
                        queue.set_call(call);
                    }
                }
                Order::Tell { index, event } => match self.queues.iter_mut().find(|q| q.index == index) {
                    Some(queue) => _ = queue.tell(event, &mut self.found),
                    None => self.missed = true,
                },
                Order::Wake => {}
                Order::Barrier(barrier) => {
                    self.barriers.ask(&mut self.queues, &self.slots, barrier);
                    // A driver that aborts commands waits for their answers.
                    self.fail_held(|_| true);
                }
                Order::Resume { fail } => self.resume(fail),
                Order::Dump { answer } => {
                    let now = self.now();
                    let dump = |queue: &Queue<S>| queue.dump(self.number, &self.slots, &self.on_hold, now);
                    let states = self.queues.iter().flat_map(dump).collect();
                    // The caller may have given up.
                    let _ = answer.send(states);
                }
                Order::End => self.over = true,
            }
        }
        self.answer_stops();
    }

    fn start(&mut self, start: Start) {
        let index = start.index;
        let counters = self.counters.queues.get(usize::from(index)).cloned().unwrap_or_default();
        counters.thread.set(self.number as u64);
        let is_event = S::event_queue(&self.device) == Some(index);
        let Some(mut queue) = Queue::<S>::new(start, counters, self.limiter.clone(), is_event) else {
            // Whoever stops the queue learns that it is not here.
            return error!("queue {index} is not of the kind that this volume serves");
        };
        self.slots.reserve(queue.source.size());
        if self.pins {
            self.stores.pin(Some(&queue.memory));
        }
        queue.missed = queue.is_event && std::mem::take(&mut self.missed);
        if let Err(error) = self.sleep.watch(&queue) {
            queue.broken(&format!("its kick descriptor cannot be polled: {error}"));
        }
        self.queues.push(queue);
    }

    /// Stops a queue: from now on none of its requests waits for other requests or for the limits.
    fn stop(&mut self, at: usize, suspend: bool, answer: SyncSender<u32>) {
        let queue = &mut self.queues[at];
        let serial = queue.serial;
        let mut own = |slot| self.slots.at(slot).serial == serial;
        queue.begin_stop(suspend && !self.barriers.anybody_waits(&mut own), answer);
        if queue.state == State::Suspending {
            queue.held = None;
            queue.slots -= self.slots.leave(serial);
            self.barriers.forget(&self.slots);
            self.forget_held(at);
        } else {
            self.barriers.hurry(own, &self.peers);
            self.fail_held(|queue| queue == serial);
        }
    }
}
