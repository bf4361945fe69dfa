//! Ringing the doorbells whose numbers are in the slots of locks.
//!
//! A slot is shared memory, so its contents may be anything. Only the daemon can say whether a number is a doorbell of
//! the segment and how to ring it. A thread that unlocks must not wait for that answer, because it may hold other
//! locks, and the daemon may be slow or away. So the endpoint asks once per doorbell and continues. The daemon itself
//! rings a doorbell that it is asked about, so the sleeper is woken all the same. Without a daemon the sleeper checks
//! by itself, within [`ginnel_sync::LOOK_EVERY`].
//!
//! A doorbell is valid as long as its member is declared. When a member has been removed, its number may be reused for
//! a member with other doorbells. So an answer is valid for the endpoints for which the daemon was asked, and is
//! replaced when the daemon answers for another one.

use crate::connection::Packet;
use crate::doorbell::Doorbell;
use ginnel_layout::wire::{self, BellKind, Kind};
use ginnel_shmem::device::Registers;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most doorbells to remember. A hostile member may write any number of them into the slots, and each may cost a
/// descriptor.
const MAX_ENTRIES: usize = 256;
/// How long to wait before asking again for a doorbell that cannot be rung. Its member may join meanwhile.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// The known doorbells of other endpoints, for one endpoint in one process.
#[derive(Default)]
pub(crate) struct PeerDoorbells {
    /// The doorbell registers of the control device, in a VM.
    pub registers: Option<Arc<Registers>>,
    known: HashMap<u32, Entry>,
}

/// The number and epoch of an endpoint that sleeps on a doorbell. No other endpoint ever has the same pair.
pub(crate) type EndpointId = (u32, u32);

enum Entry {
    /// The daemon has been asked, for `sleeper`, and rings the doorbell itself. `again` is the endpoint for which the
    /// doorbell was to be rung once more since then. `known` is what was known before the question.
    Asked { sleeper: EndpointId, again: Option<EndpointId>, known: Option<Known> },
    /// The daemon has answered.
    Known(Known),
    /// There is no such doorbell, or nobody sleeps on it.
    Refused { sleeper: EndpointId, at: Instant },
}

struct Known {
    doorbell: Arc<Doorbell>,
    sleepers: HashSet<EndpointId>,
}

/// The way to ring a doorbell.
pub(crate) enum Ring {
    /// Ring this doorbell.
    By(Arc<Doorbell>),
    /// Ask the daemon.
    Ask,
    /// Nothing can be done now.
    Nothing,
}

impl PeerDoorbells {
    /// Decides how to ring the doorbell number `bell` for `sleeper`.
    pub fn ring(&mut self, bell: u32, sleeper: EndpointId, now: Instant) -> Ring {
        let mut known = None;
        match self.known.get_mut(&bell) {
            Some(Entry::Known(there)) if there.sleepers.contains(&sleeper) => {
                return Ring::By(there.doorbell.clone());
            }
            Some(Entry::Asked { known: Some(there), .. }) if there.sleepers.contains(&sleeper) => {
                return Ring::By(there.doorbell.clone());
            }
            Some(Entry::Asked { again, .. }) => {
                *again = Some(sleeper);
                return Ring::Nothing;
            }
            Some(Entry::Refused { sleeper: asked_for, at })
                if *asked_for == sleeper && now.saturating_duration_since(*at) < REFUSED_FOR =>
            {
                return Ring::Nothing;
            }
            Some(Entry::Known(_)) => {
                if let Some(Entry::Known(there)) = self.known.remove(&bell) {
                    known = Some(there);
                }
            }
            Some(Entry::Refused { .. }) | None => {}
        }
        if self.known.len() >= MAX_ENTRIES {
            // Forgotten entries can be asked for again; entries that are being asked for are under way.
            self.known.retain(|_, entry| matches!(entry, Entry::Asked { .. }));
        }
        if self.known.len() >= MAX_ENTRIES {
            return Ring::Nothing;
        }
        self.known.insert(bell, Entry::Asked { sleeper, again: None, known });
        Ring::Ask
    }

    /// Handles the daemon's answer. Returns true if the daemon must be asked once more, for another endpoint that
    /// sleeps on this doorbell.
    #[must_use = "an endpoint may keep sleeping if the daemon is not asked again"]
    pub fn answered(&mut self, bell: u32, answer: Packet, now: Instant) -> bool {
        let Some(Entry::Asked { sleeper, again, known }) = self.known.remove(&bell) else { return false };
        let Some(doorbell) = self.doorbell(answer).map(Arc::new) else {
            self.known.insert(bell, Entry::Refused { sleeper, at: now });
            return false;
        };
        let mut sleepers = known.map(|known| known.sleepers).unwrap_or_default();
        if sleepers.len() >= MAX_ENTRIES {
            sleepers.clear();
        }
        sleepers.insert(sleeper);
        let next = again.filter(|again| !sleepers.contains(again));
        if again.is_some() && next.is_none() {
            doorbell.ring();
        }
        let known = Known { doorbell, sleepers };
        self.known.insert(
            bell,
            match next {
                Some(sleeper) => Entry::Asked { sleeper, again: None, known: Some(known) },
                None => Entry::Known(known),
            },
        );
        next.is_some()
    }

    fn doorbell(&self, answer: Packet) -> Option<Doorbell> {
        if answer.header.kind != Kind::BELL_OK {
            return None;
        }
        let ok: wire::BellOk = wire::body(&answer.body)?;
        let mut fds = answer.fds;
        match (ok.kind, fds.pop(), &self.registers) {
            (BellKind::EVENT, Some(event), _) => Some(Doorbell::Event(event)),
            (BellKind::REGISTER, _, Some(registers)) => Some(Doorbell::Register(registers.clone(), ok.bell)),
            _ => None,
        }
    }

    /// Returns the table with which the child of a fork begins. Answers to the parent's questions go to the parent.
    pub fn inherited(&self) -> Self {
        let known = self.known.iter().filter_map(|(bell, entry)| match entry {
            Entry::Known(known) | Entry::Asked { known: Some(known), .. } => {
                let known = Known { doorbell: known.doorbell.clone(), sleepers: known.sleepers.clone() };
                Some((*bell, Entry::Known(known)))
            }
            Entry::Asked { .. } | Entry::Refused { .. } => None,
        });
        Self { registers: self.registers.clone(), known: known.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::private_event;
    use ginnel_layout::wire::{Fds, Header};
    use std::os::fd::OwnedFd;
    use zerocopy::IntoBytes;

    fn event() -> OwnedFd {
        private_event().unwrap()
    }

    fn found(event: &OwnedFd) -> Packet {
        let ok = wire::BellOk { kind: BellKind::EVENT, bell: 0, fds: Fds(Fds::PEER_EVENT), reserved: 0 };
        let header = Header { kind: Kind::BELL_OK, flags: 0, request: 1 };
        Packet { header, body: ok.as_bytes().to_vec(), fds: vec![event.try_clone().unwrap()] }
    }

    fn refused() -> Packet {
        let header = Header { kind: Kind::ERROR, flags: 0, request: 1 };
        Packet { header, body: Vec::new(), fds: Vec::new() }
    }

    fn rings(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(event, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    /// Two endpoints.
    const A: EndpointId = (1, 1);
    const B: EndpointId = (1, 2);

    #[test]
    fn the_daemon_is_asked_once_for_each_doorbell() {
        let (mut bells, now, event) = (PeerDoorbells::default(), Instant::now(), event());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        assert!(!bells.answered(7, found(&event), now));
        assert_eq!(rings(&event), 0, "the daemon has rung it");
        for _ in 0..3 {
            assert!(matches!(bells.ring(7, A, now), Ring::By(_)));
        }
        assert!(matches!(bells.ring(8, A, now), Ring::Ask));
    }

    #[test]
    fn rings_requested_before_the_answer_become_one_ring_with_it() {
        let (mut bells, now, event) = (PeerDoorbells::default(), Instant::now(), event());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        for _ in 0..3 {
            assert!(matches!(bells.ring(7, A, now), Ring::Nothing));
        }
        assert!(!bells.answered(7, found(&event), now));
        assert_eq!(rings(&event), 1);
    }

    /// A member was removed, and a new one has its number but other doorbells.
    #[test]
    fn a_doorbell_with_a_reused_number_is_asked_for_again() {
        let (mut bells, now, old, new) = (PeerDoorbells::default(), Instant::now(), event(), event());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        assert!(!bells.answered(7, found(&old), now));
        assert!(matches!(bells.ring(7, B, now), Ring::Ask));
        // Meanwhile the old answer stays valid for the endpoint for which it was given.
        assert!(matches!(bells.ring(7, A, now), Ring::By(_)));
        assert!(!bells.answered(7, found(&new), now));
        let Ring::By(doorbell) = bells.ring(7, B, now) else { panic!("asked again") };
        doorbell.ring();
        assert_eq!((rings(&old), rings(&new)), (0, 1));
    }

    #[test]
    fn the_daemon_is_asked_for_each_endpoint_that_sleeps_on_a_doorbell() {
        let (mut bells, now, event) = (PeerDoorbells::default(), Instant::now(), event());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        assert!(matches!(bells.ring(7, B, now), Ring::Nothing), "one question at a time");
        assert!(bells.answered(7, found(&event), now), "the answer need not be for B");
        assert!(!bells.answered(7, found(&event), now));
        assert_eq!(rings(&event), 0, "the daemon has rung it");
        for sleeper in [A, B, A] {
            assert!(matches!(bells.ring(7, sleeper, now), Ring::By(_)));
        }
        // A hostile member may write any of them into its slot.
        for epoch in 0..100_000 {
            if matches!(bells.ring(7, (2, epoch), now), Ring::Ask) {
                assert!(!bells.answered(7, found(&event), now));
            }
        }
        assert!(
            matches!(bells.known.get(&7), Some(Entry::Known(known)) if known.sleepers.len() <= MAX_ENTRIES)
        );
    }

    #[test]
    fn a_refused_doorbell_is_asked_for_again_after_a_while() {
        let (mut bells, now) = (PeerDoorbells::default(), Instant::now());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        assert!(!bells.answered(7, refused(), now));
        assert!(matches!(bells.ring(7, A, now + REFUSED_FOR / 2), Ring::Nothing));
        assert!(matches!(bells.ring(7, A, now + REFUSED_FOR), Ring::Ask));
    }

    #[test]
    fn a_hostile_member_cannot_make_the_table_grow_without_bound() {
        let (mut bells, now, event) = (PeerDoorbells::default(), Instant::now(), event());
        let asked = (0..100_000).filter(|&bell| matches!(bells.ring(bell, A, now), Ring::Ask)).count();
        assert_eq!((asked, bells.known.len()), (MAX_ENTRIES, MAX_ENTRIES), "no more under way");
        for bell in 0..MAX_ENTRIES as u32 {
            assert!(!bells.answered(bell, refused(), now));
        }
        // After that there is room for others.
        for bell in 0..100_000 {
            if matches!(bells.ring(bell | 1 << 31, A, now), Ring::Ask) {
                assert!(!bells.answered(bell | 1 << 31, found(&event), now));
            }
            assert!(bells.known.len() <= MAX_ENTRIES);
        }
    }

    #[test]
    fn a_forked_child_keeps_known_doorbells_and_asks_for_the_rest() {
        let (mut bells, now, event) = (PeerDoorbells::default(), Instant::now(), event());
        assert!(matches!(bells.ring(7, A, now), Ring::Ask));
        assert!(!bells.answered(7, found(&event), now));
        assert!(matches!(bells.ring(8, A, now), Ring::Ask));
        let mut child = bells.inherited();
        assert!(matches!(child.ring(7, A, now), Ring::By(_)));
        assert!(matches!(child.ring(8, A, now), Ring::Ask));
    }
}
