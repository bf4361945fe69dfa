//! What each side says of itself, and what the other makes of it.

use crate::error::{Corrupt, RecvError, SendError};
use ginnel_layout::ring::{CONSUMER_STATE, PRODUCER_STATE, SideState};
use ginnel_shmem::Memory;

/// What the consumer should do about the producer's state word, once the ring has nothing for it.
pub(crate) fn producer_ended<M: Memory>(memory: &M) -> Result<(), RecvError> {
    // ORDER ring.finish: once the state says that the producer is done, all it published is seen.
    // Pairs with: `finish_producing`.
    match SideState(memory.load_acquire_u32(PRODUCER_STATE)) {
        SideState::NEW | SideState::OPEN => Ok(()),
        SideState::FINISHED => Err(RecvError::Finished),
        SideState::DEAD => Err(RecvError::PeerDead),
        SideState(other) => Err(Corrupt::State(other).into()),
    }
}

/// What the producer should do about the consumer's state word, before it sends.
#[inline]
pub(crate) fn consumer_ended<M: Memory>(memory: &M) -> Result<(), SendError> {
    match SideState(memory.load_relaxed_u32(CONSUMER_STATE)) {
        SideState::NEW | SideState::OPEN => Ok(()),
        SideState::FINISHED => Err(SendError::Closed),
        SideState::DEAD => Err(SendError::PeerDead),
        SideState(other) => Err(Corrupt::State(other).into()),
    }
}

/// Nothing more will be published.
pub(crate) fn finish_producing<M: Memory>(memory: &M) {
    // ORDER ring.finish: everything published before this. Pairs with: `producer_ended`.
    memory.store_release_u32(PRODUCER_STATE, SideState::FINISHED.0);
}

/// Nothing more will be taken.
pub(crate) fn finish_consuming<M: Memory>(memory: &M) {
    memory.store_release_u32(CONSUMER_STATE, SideState::FINISHED.0);
}
