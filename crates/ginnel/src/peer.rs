//! Waking the other side of a ring.

use crate::channel::{Counters, Shared};
use ginnel_layout::board::{self, Place};
use ginnel_ring::board::Poster;
use ginnel_ring::wait::notified_at;
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// How one half of a channel wakes the other side of its ring.
pub(crate) struct PeerBell {
    pub shared: Arc<Shared>,
    ring: Mapping,
    /// The other side's wake word.
    armed: usize,
    /// The lane by way of which it was woken last.
    lane: Option<(u64, Mapping)>,
    poster: Poster,
}

impl PeerBell {
    pub fn new(shared: Arc<Shared>, ring: Mapping, armed: usize) -> Self {
        Self { shared, ring, armed, lane: None, poster: Poster::default() }
    }

    /// Wakes the other side, whose wake word was found armed: by way of its board if it says so, and its doorbell only if it
    /// sleeps there, too.
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

    /// The lane that the peer has named, if it can be one.
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
