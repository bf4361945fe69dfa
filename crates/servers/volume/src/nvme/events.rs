//! Asynchronous events (NVMe 1.4, section 5.2). There is one: the namespace has another size.
//!
//! A driver keeps some Asynchronous Event Requests outstanding for ever. An event completes one of them, and the driver
//! then reads the log page with the changed namespaces. Until it has, no further event of this kind is sent.

use super::features::Word;
use ginnel_layout::nvme::event::NAMESPACE_NOTICES;
use ginnel_nvme::identify::ASYNC_EVENTS;
use ginnel_nvme::{State, Ticket};
use ginnel_shmem::Mapping;

/// [`Word::Changed`]: the namespace has changed, and the driver was not told.
const UNTOLD: u64 = 1;
/// [`Word::Changed`]: the driver was told, and has not read the log page.
const TOLD: u64 = 2;

/// The requests that wait for an event. They are parked.
#[derive(Default)]
pub(super) struct Requests(Vec<Ticket>);

impl Requests {
    /// Returns whether a driver may have no more requests outstanding. In short queues, one slot is left for other commands.
    pub fn is_full(&self, state: &State<Mapping>) -> bool {
        let slots = usize::from(state.constants().slots);
        self.0.len() >= usize::from(ASYNC_EVENTS).min(slots - 1)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn add(&mut self, ticket: Ticket) {
        self.0.push(ticket);
    }

    pub fn take(&mut self) -> Option<Ticket> {
        self.0.pop()
    }
}

/// Returns whether there is something to tell the driver.
pub(super) fn is_due(state: &State<Mapping>) -> bool {
    Word::Changed.load(state) == UNTOLD
}

/// Notes that the driver was told. A process that is killed before this tells it once more, which does no harm.
pub(super) fn told(state: &State<Mapping>) {
    Word::Changed.store(state, TOLD);
}

/// Notes that the namespace has changed, if the driver wants to be told.
pub(super) fn change(state: &State<Mapping>) {
    let wanted = Word::AsyncEvents.load(state) & u64::from(NAMESPACE_NOTICES) != 0;
    if wanted && Word::Changed.load(state) == 0 {
        Word::Changed.store(state, UNTOLD);
    }
}

/// Returns whether the namespace has changed since the driver last read which ones have.
pub(super) fn is_changed(state: &State<Mapping>) -> bool {
    Word::Changed.load(state) != 0
}

/// Notes that the driver has read which namespaces have changed.
pub(super) fn forget(state: &State<Mapping>) {
    Word::Changed.store(state, 0);
}
