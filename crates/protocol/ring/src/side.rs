//! The state word of each side of a ring, and its effect on the other side.

use crate::cursor::Cursor;
use crate::error::{Corrupt, RecvError, SendError};
use ginnel_layout::ring::{self, CONSUMER_STATE, DATA_ARMED, HEAD, PRODUCER_STATE, SPACE_ARMED, SideState};
use ginnel_shmem::SharedMemory;

/// Checks the memory of a ring, and resets the producer's words. `published` is the offset of the word by which the consumer
/// sees that something was published.
pub(crate) fn begin_producing<M: SharedMemory>(memory: &M, capacity: usize, published: usize) {
    check(capacity, memory.len());
    memory.attend();
    memory.store_relaxed_u32(SPACE_ARMED, 0);
    memory.store_relaxed_u64(published, 0);
    open(memory, PRODUCER_STATE);
}

/// Checks the memory of a ring, and resets the consumer's words.
pub(crate) fn begin_consuming<M: SharedMemory>(memory: &M, capacity: usize) {
    check(capacity, memory.len());
    memory.attend();
    memory.store_relaxed_u64(HEAD, 0);
    memory.store_relaxed_u32(DATA_ARMED, 0);
    open(memory, CONSUMER_STATE);
}

/// Checks the memory of a ring. Returns an error if the producer's side, which the caller wants to resume, has ended.
pub(crate) fn resume_producing<M: SharedMemory>(memory: &M, capacity: usize) -> Option<SendError> {
    check(capacity, memory.len());
    memory.attend();
    match SideState(memory.load_relaxed_u32(PRODUCER_STATE)) {
        SideState::NEW | SideState::OPEN => None,
        SideState::FINISHED | SideState::ABORTED | SideState::DEAD => Some(SendError::AfterFinish),
        SideState::LOST => Some(SendError::Broken),
        SideState(other) => Some(Corrupt::State(other).into()),
    }
}

/// Checks the memory of a ring, and that the consumer has released no more than the cursor says: released bytes may have been
/// overwritten.
pub(crate) fn resume_consuming<M: SharedMemory>(
    memory: &M,
    capacity: usize,
    cursor: &Cursor,
) -> Result<(), Corrupt> {
    check(capacity, memory.len());
    memory.attend();
    let head = memory.load_relaxed_u64(HEAD);
    let Cursor { position, released, .. } = *cursor;
    if (released..=position).contains(&head) || is_lost(memory) {
        return Ok(());
    }
    Err(Corrupt::Head { head, seen: released, tail: position })
}

fn check(capacity: usize, len: usize) {
    assert!(ring::valid_capacity(capacity as u64), "a ring's capacity is a power of two in range");
    assert!(len >= ring::footprint(capacity), "a ring must lie within its memory");
}

fn open<M: SharedMemory>(memory: &M, state: usize) {
    // The daemon may have declared this side dead already, or the memory lost. Such a state stays.
    if ![SideState::DEAD, SideState::LOST].contains(&SideState(memory.load_relaxed_u32(state))) {
        memory.store_release_u32(state, SideState::OPEN.0);
    }
}

/// Returns an error if the producer has ended. The consumer asks when the ring has nothing for it.
pub(crate) fn producer_ended<M: SharedMemory>(memory: &M) -> Result<(), RecvError> {
    // ORDER ring.finish: once the state says that the producer has ended, all that it published is seen.
    // Pairs with: `finish`.
    match SideState(memory.load_acquire_u32(PRODUCER_STATE)) {
        SideState::NEW | SideState::OPEN => Ok(()),
        SideState::FINISHED => Err(RecvError::Finished),
        SideState::ABORTED => Err(RecvError::Aborted),
        SideState::DEAD => Err(RecvError::PeerDead),
        SideState::LOST => Err(RecvError::Broken),
        SideState(other) => Err(Corrupt::State(other).into()),
    }
}

/// Returns an error if the consumer has ended. The producer asks before it sends.
#[inline]
pub(crate) fn consumer_ended<M: SharedMemory>(memory: &M) -> Result<(), SendError> {
    memory.attend();
    match SideState(memory.load_relaxed_u32(CONSUMER_STATE)) {
        // Memory that is gone reads as these states too, and this load may be the first to find it gone.
        SideState::NEW | SideState::OPEN if memory.is_broken() => Err(SendError::Broken),
        SideState::NEW | SideState::OPEN => Ok(()),
        SideState::FINISHED => Err(SendError::Closed),
        SideState::ABORTED => Err(SendError::Aborted),
        SideState::DEAD => Err(SendError::PeerDead),
        SideState::LOST => Err(SendError::Broken),
        SideState(other) => Err(Corrupt::State(other).into()),
    }
}

/// Returns whether the producer has aborted, so that the consumer must not receive anything more, even if it is there. The
/// consumer asks before it takes anything. It may miss an abort for a moment, as if the producer had aborted a moment later.
#[inline]
pub(crate) fn producer_aborted<M: SharedMemory>(memory: &M) -> bool {
    SideState(memory.load_relaxed_u32(PRODUCER_STATE)) == SideState::ABORTED
}

/// Returns whether the memory is gone, or the daemon says that its content is. Then no peer is to blame for what it contains.
#[cold]
pub(crate) fn is_lost<M: SharedMemory>(memory: &M) -> bool {
    let lost = |state| SideState(memory.load_relaxed_u32(state)) == SideState::LOST;
    memory.is_broken() || lost(PRODUCER_STATE) || lost(CONSUMER_STATE)
}

/// Marks that the producer will publish nothing more: [`SideState::FINISHED`], or [`SideState::ABORTED`].
pub(crate) fn end_producing<M: SharedMemory>(memory: &M, how: SideState) {
    memory.attend();
    end(memory, PRODUCER_STATE, how);
}

/// Marks that the consumer will take nothing more.
pub(crate) fn end_consuming<M: SharedMemory>(memory: &M, how: SideState) {
    memory.attend();
    end(memory, CONSUMER_STATE, how);
}

fn end<M: SharedMemory>(memory: &M, state: usize, how: SideState) {
    // Loss stays, since the other side must see it too, whichever side notices it first. A side that has aborted cannot
    // finish afterwards.
    if ![SideState::LOST, SideState::ABORTED].contains(&SideState(memory.load_relaxed_u32(state))) {
        // ORDER ring.finish: everything that was published is visible before the state. Pairs with: `producer_ended`.
        memory.store_release_u32(state, how.0);
    }
}
