//! Where the doorbells of a queue lie: in the file that the holder has made, and, once the driver has configured them,
//! in shadow pages of the guest's memory (NVMe 1.4, sections 3.1.25 and 5.7).

use super::memory::Memory;
use ginnel_layout::nvme::{DOORBELLS, cap, completion_doorbell, submission_doorbell};
use ginnel_layout::nvme_state::{DBBUF_EVENTS, DBBUF_SHADOW};
use ginnel_nvme::{Doorbell, State};
use ginnel_shmem::Mapping;

/// The doorbells of the queues with one number.
pub(super) struct Pair {
    pub submission: Doorbell<Mapping>,
    pub completion: Doorbell<Mapping>,
}

/// Returns the doorbells of a queue as they are at present. The admin queue never has shadows.
pub(super) fn of(
    state: &State<Mapping>,
    file: &Mapping,
    memory: &Memory,
    queue: u16,
) -> Result<Pair, String> {
    let (submission, completion) = plain(state, file, queue)?;
    let (values, events) = (state.load(DBBUF_SHADOW), state.load(DBBUF_EVENTS));
    if queue == 0 || events == 0 {
        return Ok(Pair { submission: submission.0, completion: completion.0 });
    }
    let shadow = |(doorbell, at): (Doorbell<Mapping>, usize)| {
        let (value, event) = words(memory, at, values, events)?;
        doorbell.with_shadow_of_predecessor(&value, &event).map_err(|e| e.to_string())
    };
    Ok(Pair { submission: shadow(submission)?, completion: shadow(completion)? })
}

/// Stores the present values of the doorbells of a queue in the shadows at these addresses.
pub(super) fn begin_shadows(
    state: &State<Mapping>,
    file: &Mapping,
    memory: &Memory,
    queue: u16,
    (values, events): (u64, u64),
) -> Result<(), String> {
    let (submission, completion) = plain(state, file, queue)?;
    for (doorbell, at) in [submission, completion] {
        let (value, event) = words(memory, at, values, events)?;
        doorbell.with_shadow(&value, &event).map_err(|e| e.to_string())?;
    }
    Ok(())
}

type Placed = (Doorbell<Mapping>, usize);

fn plain(state: &State<Mapping>, file: &Mapping, queue: u16) -> Result<(Placed, Placed), String> {
    let stride = cap::stride(state.constants().cap);
    let at =
        |at: usize| Doorbell::new(file.clone(), at).map(|doorbell| (doorbell, at)).map_err(|e| e.to_string());
    Ok((at(submission_doorbell(queue, stride))?, at(completion_doorbell(queue, stride))?))
}

type Area = ginnel_guest_memory::Area<Mapping>;

/// Returns the shadow of the doorbell at an offset of BAR 0, and its event index.
fn words(memory: &Memory, at: usize, values: u64, events: u64) -> Result<(Area, Area), String> {
    let word = |page: u64| memory.area(page + (at - DOORBELLS) as u64, 4);
    Ok((word(values)?, word(events)?))
}
