//! The state of a controller, for people who look at a guest that hangs.

use super::admin::submissions;
use super::doorbells;
use super::memory::Memory;
use ginnel_layout::nvme_state::{CC, CSTS, DBBUF_EVENTS};
use ginnel_nvme::{CompletionRecord, State};
use ginnel_shmem::Mapping;
use ginnel_volume_control::{CompletionQueue, Controller};

/// Returns the state of a controller. It is read while the workers serve the queues, so its numbers may not belong to one
/// moment.
pub(super) fn controller(
    state: &State<Mapping>,
    file: &Mapping,
    memory: &Memory,
    event_requests: usize,
) -> Controller {
    let constants = state.constants();
    let doorbells = match (constants.mapped, state.load(DBBUF_EVENTS)) {
        (true, _) => "mapped",
        (false, 0) => "trapped",
        (false, _) => "shadow",
    };
    let queue = |queue: u16| {
        let record = state.completion(queue)?;
        let doorbell = doorbells::of(state, file, memory, queue).ok();
        let driver_head = doorbell.map_or(0, |pair| pair.completion.value());
        Some(completion_queue(state, queue, &record, driver_head))
    };
    Controller {
        cc: state.load(CC) as u32,
        csts: state.load(CSTS) as u32,
        doorbells: doorbells.into(),
        event_requests: event_requests as u32,
        completion_queues: (0..=constants.queues).filter_map(queue).collect(),
    }
}

fn completion_queue(
    state: &State<Mapping>,
    queue: u16,
    record: &CompletionRecord,
    driver_head: u32,
) -> CompletionQueue {
    let submission_queues: Vec<u16> = submissions(state, queue).map(|(queue, _)| queue).collect();
    let size = i32::from(record.size);
    let posted = state.posted(queue);
    let tail = posted.checked_rem(record.size.into()).unwrap_or(0) as u16;
    let waiting = (i32::from(tail) - driver_head.min(u16::MAX.into()) as i32).rem_euclid(size.max(1));
    let in_flight: i32 = submission_queues.iter().map(|queue| i32::from(state.in_flight(*queue))).sum();
    CompletionQueue {
        queue,
        submission_queues,
        size: record.size,
        tail,
        driver_head,
        posted,
        room: size - 1 - waiting - in_flight,
        vector: record.interrupts.then_some(record.vector),
    }
}
