//! Shared copies, as a queue pair takes part in them: it helps its peer to copy, and waits for a peer that is helping it.

use super::{QueuePair, Sender};
use crate::peer::{Peer, Windows};
use crate::shared_copy;
use ginnel_layout::verbs::{Access, Executing, Kind, OFFERS, qp};
use ginnel_shmem::SharedMemory;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a queue pair does not help a peer whose regions could not be looked up. The daemon may not be answering, and otherwise each
/// poll would wait for it.
const REST: Duration = Duration::from_secs(1);
/// A lookup that takes this long has waited for the daemon.
const LONG: Duration = Duration::from_millis(5);

/// Encodes the number of an offer that has ended. The value 0 means that none has ended yet.
fn ended_as(number: u32) -> u64 {
    1 << 32 | u64::from(number)
}

impl<M: SharedMemory> QueuePair<M> {
    /// Returns how many copies the peers of this endpoint have offered to share so far.
    pub(crate) fn offers(&self) -> u64 {
        // A loom model calls `help` itself.
        // ORDER verbs.offers: the count is loaded before the offers. Pairs with: `Sharing::offer`.
        if cfg!(loom) { 0 } else { self.tables.load_acquire_u64(OFFERS) }
    }

    /// Copies pieces of a copy that the peer has offered to share, until about `most` bytes are copied, and subtracts them from `most`.
    /// Returns whether there may be more to copy.
    #[cold]
    pub fn help(&self, most: &mut usize) -> bool {
        if self.kind != Kind::RC || !self.state().receives() {
            return false;
        }
        let Some(at) = self.number().copy_at() else { return false };
        let ended = self.ended_offer.load(Ordering::Relaxed);
        if shared_copy::number(&self.tables, at, self.incarnation())
            .is_none_or(|number| ended_as(number) == ended)
        {
            return false;
        }
        // If the lock is taken, another thread is posting, or is helping already.
        let Some(mut sender) = self.sender.try_lock() else { return true };
        let Some(offer) = shared_copy::find(&self.tables, at, self.incarnation()) else { return false };
        let end = || self.ended_offer.store(ended_as(offer.number), Ordering::Relaxed);
        let what = &offer.what;
        let is_allowed = |wanted| Access(self.access.load(Ordering::Relaxed)).allows(wanted);
        // Others wait for this thread, so it must not wait for a daemon that does not answer.
        let is_connected = sender.remote.is_some()
            || sender.owner.is_some() && self.connect(&mut sender, Peer::place_soon).is_ok();
        let own = || self.adapter.peer(self.number().endpoint()).map(Windows::new);
        if let Some((wanted, _)) = what.wanted()
            && is_allowed(wanted)
            && is_connected
        {
            let Sender { remote, own_windows, not_learned, counters, .. } = &mut *sender;
            *own_windows = own_windows.take().or_else(own);
            if let (Some(remote), Some(own)) = (remote, own_windows)
                && !remote.is_dead()
                && not_learned.is_none_or(|then| then.elapsed() >= REST)
            {
                let begun = Instant::now();
                if !remote.prepare_to_help(own, what) {
                    *not_learned = Some(Instant::now()).filter(|now| *now - begun >= LONG);
                    end();
                    return false;
                }
                while *most > 0 {
                    let mut helped = None;
                    // The region cannot be removed during the call.
                    self.adapter.with_region(what.key, &mut |region| {
                        if region.allows(&what.remote(), wanted, self.domain) {
                            helped = remote.help(own, self.domain, &offer);
                        }
                    });
                    let Some(bytes) = helped else {
                        end();
                        return false;
                    };
                    counters.helped(bytes);
                    *most = most.saturating_sub(bytes);
                }
                return true;
            }
        }
        end();
        false
    }

    /// Waits until the peer has stopped copying for a request that is about to end, because the program may reuse its buffer afterwards.
    /// Gives up after the adapter's patience.
    pub(super) fn wait_for_helper(&self, sender: &Sender<M>) {
        let Some(remote) = sender.remote.as_ref().filter(|remote| remote.is_sharing()) else { return };
        let end = Instant::now() + self.adapter.patience();
        // ORDER verbs.executing: the peer's accesses have ended before anything that follows here. Pairs with: `Remote::finish`.
        let executing = || Executing(self.tables.load_acquire_u64(self.at + qp::EXECUTING));
        while executing().is_of(self.incarnation()) && !remote.is_dead() && Instant::now() < end {
            self.adapter.attend();
            std::thread::yield_now();
        }
    }
}
