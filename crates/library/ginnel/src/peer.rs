//! Waking the peer at the other side of a ring.

use crate::shared::{Counters, Shared};
use ginnel_layout::board::{self, Place};
use ginnel_ring::board::Poster;
use ginnel_ring::wait::notified_at;
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// The means by which one half of a channel wakes the peer at the other side of its ring.
pub(crate) struct PeerWaker {
    pub shared: Arc<Shared>,
    ring: Mapping,
    /// Offset of the peer's wake word in the ring.
    armed: usize,
    /// The lane of the peer's readiness board that was used last, with its offset in the segment.
    lane: Option<(u64, Mapping)>,
    poster: Poster,
}

impl PeerWaker {
    pub fn new(shared: Arc<Shared>, ring: Mapping, armed: usize) -> Self {
        Self { shared, ring, armed, lane: None, poster: Poster::default() }
    }

    /// Wakes the peer, whose wake word was found armed: marks its readiness board if the peer has named one, and rings
    /// its doorbell only if the peer sleeps there as well.
    pub fn wake(&mut self, counters: &mut Counters) {
        let place = notified_at(&self.ring, self.armed);
        if let Some(lane) = self.lane(place)
            && !self.poster.post(&lane, place.slot())
        {
            return;
        }
        counters.rings += 1;
        self.shared.doorbell.ring();
    }

    /// Returns the lane that the peer has named, if it is a valid one.
    fn lane(&mut self, place: Place) -> Option<Mapping> {
        if place == Place::NONE {
            return None;
        }
        match &self.lane {
            Some((at, lane)) if *at == place.lane() => Some(lane.clone()),
            _ => {
                place.board()?;
                let lane = self.shared.endpoint.part(place.lane(), board::LANE)?;
                (self.lane, self.poster) = (Some((place.lane(), lane.clone())), Poster::default());
                Some(lane)
            }
        }
    }
}
