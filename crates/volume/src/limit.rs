//! Limits of a volume: requests and bytes a second, for all queues together, without a lock.
//!
//! Virtual scheduling (the generic cell rate algorithm, ITU-T I.371): for each limited quantity one shared clock says up to
//! when everything that has passed so far pays. Who wants to pass moves it on by what that costs, and may go when the real
//! time has come to where it stood. The clock is never further behind the real time than the burst, which is all that
//! idle time can save.
//!
//! A queue moves the clock by a quantum, half a millisecond's worth or one request, keeps what it does not need for its
//! next requests, and has never more than one move to wait for. So queues that want more than there is come in turns, each
//! for a quantum: they get the same, in requests where these are short and in bytes where those are, however deep the
//! queues and however long the requests.
//!
//! What passes in any span of time `t` is at most `rate * (t + burst)` and a quantum for each queue. Nothing that was allowed is
//! lost but what a queue keeps when it falls silent: less than a quantum.
//!
//! Some requests cannot wait: a queue that is stopped must not be held up for as long as a limit says, and of some it is known
//! only afterwards what they have cost. They move the clock on all the same: who comes later waits until it is paid.

use ginnel_volume_control::Limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Clocks count 64ths of a nanosecond: three million requests a second are then exact to 20 ppm, and 9 years have room.
const TICKS: u64 = 64;
const SECOND: u64 = 1_000_000_000 * TICKS;

/// Quanta of a second.
const QUANTA: u64 = 2000;
/// The smallest quantum of bytes: the smallest sector.
const LEAST_BYTES: u64 = 512;

/// It may go, but not before this time, in nanoseconds. Ask again then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBefore(pub u64);

/// The limits of a volume. Shared by its queues; may be changed at any time by any thread.
#[derive(Debug, Default)]
pub struct Limiter {
    limited: AtomicBool,
    /// Counts changes, so that queues forget what they have reserved under other limits.
    generation: AtomicU32,
    requests: Clock,
    bytes: Clock,
}

#[derive(Debug, Default)]
struct Clock {
    /// A second; 0: no limit.
    rate: AtomicU64,
    /// Ticks.
    burst: AtomicU64,
    /// Up to when everything that has passed pays, in ticks.
    paid: AtomicU64,
}

impl Limiter {
    /// With these limits.
    pub fn new(limits: Limits) -> Self {
        let limiter = Self::default();
        limiter.set(limits);
        limiter
    }

    /// Whether there is any limit.
    #[inline]
    pub fn limits(&self) -> bool {
        self.limited.load(Relaxed)
    }

    /// Has these limits from now on. Queues that wait for an older one must be woken to look again.
    pub fn set(&self, limits: Limits) {
        for (clock, rate) in [(&self.requests, limits.iops), (&self.bytes, limits.bandwidth.0)] {
            let before = clock.rate.swap(rate, Relaxed);
            clock.burst.store(ticks(limits.burst.0), Relaxed);
            if before != rate {
                // What was reserved under another rate is forgotten; a queue's next move puts the clock where it belongs.
                clock.paid.store(0, Relaxed);
            }
        }
        self.generation.fetch_add(1, Relaxed);
        self.limited.store(limits.iops > 0 || limits.bandwidth.0 > 0, Relaxed);
    }
}

impl Clock {
    /// Pays for `amount`. Returns when it may go, in ticks.
    fn reserve(&self, now: u64, rate: u64, amount: u64) -> u64 {
        let cost = u128::from(amount) * u128::from(SECOND) / u128::from(rate);
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let oldest = now.saturating_sub(self.burst.load(Relaxed));
        let moved = |paid: u64| Some(paid.max(oldest).saturating_add(cost));
        // Only the value of this one word matters to anybody: relaxed.
        match self.paid.fetch_update(Relaxed, Relaxed, moved) {
            Ok(paid) | Err(paid) => paid.max(oldest),
        }
    }
}

/// A queue's part in its volume's limits. Belongs to the queue's thread.
#[derive(Debug)]
pub struct QueueLimit {
    limiter: Arc<Limiter>,
    generation: u32,
    requests: Share,
    bytes: Share,
}

impl QueueLimit {
    /// Of a queue that starts.
    pub fn new(limiter: Arc<Limiter>) -> Self {
        let generation = limiter.generation.load(Relaxed);
        Self { limiter, generation, requests: Share::default(), bytes: Share::default() }
    }

    /// Whether a request of `bytes` may go at `now` (nanoseconds of a monotonic clock, the same for all queues). If not, the
    /// request is held, with those behind it, and asked for again at the time that is told, or when the limits change.
    #[inline]
    pub fn pass(&mut self, now: u64, bytes: u64) -> Result<(), NotBefore> {
        if !self.limiter.limits() {
            return Ok(());
        }
        self.pass_limited(now, bytes)
    }

    /// So many requests and bytes have passed without leave. All queues wait until they are paid for.
    #[cold]
    pub fn owe(&mut self, now: u64, requests: u64, bytes: u64) {
        if self.limiter.limits() {
            self.keep_up();
            let ticks = now.saturating_mul(TICKS);
            self.requests.owe(&self.limiter.requests, ticks, requests);
            self.bytes.owe(&self.limiter.bytes, ticks, bytes);
        }
    }

    /// Forgets what was reserved under other limits.
    fn keep_up(&mut self) {
        let generation = self.limiter.generation.load(Relaxed);
        if generation != self.generation {
            self.generation = generation;
            self.requests = Share::default();
            self.bytes = Share::default();
        }
    }

    fn pass_limited(&mut self, now: u64, bytes: u64) -> Result<(), NotBefore> {
        self.keep_up();
        let ticks = now.saturating_mul(TICKS);
        let requests = self.requests.gather(&self.limiter.requests, ticks, 1, 1);
        let data = self.bytes.gather(&self.limiter.bytes, ticks, bytes, LEAST_BYTES);
        if let Some(ready) = requests.max(data) {
            return Err(NotBefore(ready.div_ceil(TICKS)));
        }
        self.requests.credit = self.requests.credit.saturating_sub(1);
        self.bytes.credit = self.bytes.credit.saturating_sub(bytes);
        Ok(())
    }
}

/// What a queue has reserved of a limited quantity.
#[derive(Debug, Default)]
struct Share {
    /// May pass.
    credit: u64,
    /// May pass too, from then on: amount and time.
    waits: Option<(u64, u64)>,
}

impl Share {
    /// Takes `amount` out of what is reserved, which is paid for whether its time has come or not; the rest becomes debt.
    fn owe(&mut self, clock: &Clock, now: u64, amount: u64) {
        let rate = clock.rate.load(Relaxed);
        if rate == 0 {
            return;
        }
        self.credit = self.credit.saturating_add(self.waits.take().map_or(0, |(reserved, _)| reserved));
        let reserved = self.credit.min(amount);
        self.credit -= reserved;
        if amount > reserved {
            clock.reserve(now, rate, amount - reserved);
        }
    }

    /// Sees to it that `amount` may pass. `None`: it may; else when to come again.
    fn gather(&mut self, clock: &Clock, now: u64, amount: u64, least: u64) -> Option<u64> {
        let rate = clock.rate.load(Relaxed);
        if rate == 0 {
            self.credit = amount;
            return None;
        }
        let quantum = (rate / QUANTA).max(least);
        loop {
            if let Some((reserved, ready)) = self.waits {
                if ready > now {
                    return Some(ready);
                }
                self.credit += reserved;
                self.waits = None;
            }
            if self.credit >= amount {
                return None;
            }
            self.waits = Some((quantum, clock.reserve(now, rate, quantum)));
        }
    }
}

fn ticks(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(TICKS)
}

#[cfg(test)]
mod tests;
