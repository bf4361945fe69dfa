//! Limits of a volume: requests and bytes per second, for all queues together, without a lock.
//!
//! This is virtual scheduling (the generic cell rate algorithm, ITU-T I.371). Each limited quantity has one shared
//! clock, which shows the time up to which the requests so far have used the limit. A request moves the clock forward
//! by its cost, and may go when the real time has reached the clock's old value. The clock never falls further behind
//! the real time than the burst, so the burst is all that idle time can save.
//!
//! A queue moves the clock by a quantum, which is half a millisecond's worth or one request. It keeps the part that it
//! does not need for its next requests, and never waits for more than one move. So queues that want more than the limit
//! take turns, each for a quantum. They get equal shares, in requests where these are limited and in bytes where those
//! are, no matter how deep the queues are and how long the requests.
//!
//! In any time span `t`, at most `rate * (t + burst)` passes, and one quantum for each queue. No allowance is lost,
//! except what a queue has reserved when it becomes idle, which is less than a quantum.
//!
//! Some requests cannot wait: stopping a queue must not take as long as a limit says, and the cost of some requests is
//! known only afterwards. They still move the clock forward, so later requests wait until it is paid.

use ginnel_volume_control::Limits;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Duration;

/// Clocks count 64ths of a nanosecond: three million requests a second are then exact to 20 ppm, and a clock can run
/// for 9 years.
const TICKS: u64 = 64;
const SECOND: u64 = 1_000_000_000 * TICKS;

/// Quanta per second.
const QUANTA: u64 = 2000;
/// The smallest quantum of bytes, which is the smallest sector.
const LEAST_BYTES: u64 = 512;

/// The request must wait until this time, in nanoseconds. The queue asks again then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBefore(pub u64);

/// The limits of a volume. Its queues share them; any thread may change them at any time.
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
    /// The limit per second; 0 means no limit.
    rate: AtomicU64,
    /// The burst, in ticks.
    burst: AtomicU64,
    /// The time up to which the requests so far have used the limit, in ticks.
    paid: AtomicU64,
}

impl Limiter {
    /// Returns a limiter with these limits.
    pub fn new(limits: Limits) -> Self {
        let limiter = Self::default();
        limiter.set(limits);
        limiter
    }

    /// Returns whether there is any limit.
    #[inline]
    pub fn limits(&self) -> bool {
        self.limited.load(Relaxed)
    }

    /// Changes the limits. The caller must wake queues that wait for an old limit.
    pub fn set(&self, limits: Limits) {
        for (clock, rate) in [(&self.requests, limits.iops), (&self.bytes, limits.bandwidth.0)] {
            let before = clock.rate.swap(rate, Relaxed);
            clock.burst.store(ticks(limits.burst.0), Relaxed);
            if before != rate {
                // Reservations under the old rate are forgotten; the next move of a queue sets the clock near the real
                // time.
                clock.paid.store(0, Relaxed);
            }
        }
        self.generation.fetch_add(1, Relaxed);
        self.limited.store(limits.iops > 0 || limits.bandwidth.0 > 0, Relaxed);
    }
}

impl Clock {
    /// Moves the clock for `amount`. Returns the time at which it may go, in ticks.
    fn reserve(&self, now: u64, rate: u64, amount: u64) -> u64 {
        let cost = u128::from(amount) * u128::from(SECOND) / u128::from(rate);
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let oldest = now.saturating_sub(self.burst.load(Relaxed));
        let moved = |paid: u64| Some(paid.max(oldest).saturating_add(cost));
        // Relaxed: no other memory depends on the value of this word.
        match self.paid.fetch_update(Relaxed, Relaxed, moved) {
            Ok(paid) | Err(paid) => paid.max(oldest),
        }
    }
}

/// A queue's share in its volume's limits. Belongs to the queue's thread.
#[derive(Debug)]
pub struct QueueLimit {
    limiter: Arc<Limiter>,
    generation: u32,
    requests: Share,
    bytes: Share,
}

impl QueueLimit {
    /// Returns the share of a queue that starts.
    pub fn new(limiter: Arc<Limiter>) -> Self {
        let generation = limiter.generation.load(Relaxed);
        Self { limiter, generation, requests: Share::default(), bytes: Share::default() }
    }

    /// Returns whether a request of `bytes` may go at `now` (nanoseconds of a monotonic clock, the same for all
    /// queues). If not, the queue holds this request and those behind it, and asks again at the returned time, or when
    /// the limits change.
    #[inline]
    pub fn pass(&mut self, now: u64, bytes: u64) -> Result<(), NotBefore> {
        if !self.limiter.limits() {
            return Ok(());
        }
        self.pass_limited(now, bytes)
    }

    /// Charges for requests and bytes that have passed without permission. All queues wait until they are paid for.
    #[cold]
    pub fn owe(&mut self, now: u64, requests: u64, bytes: u64) {
        if self.limiter.limits() {
            self.keep_up();
            let ticks = now.saturating_mul(TICKS);
            self.requests.owe(&self.limiter.requests, ticks, requests);
            self.bytes.owe(&self.limiter.bytes, ticks, bytes);
        }
    }

    /// Forgets what was reserved under earlier limits.
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

/// What a queue has reserved of one limited quantity.
#[derive(Debug, Default)]
struct Share {
    /// The amount that may pass now.
    credit: u64,
    /// A reserved amount, and the time from which it may pass.
    waits: Option<(u64, u64)>,
}

impl Share {
    /// Takes `amount` out of the reservation, even if its time has not come. What exceeds the reservation moves the
    /// clock.
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

    /// Reserves until `amount` may pass. Returns `None` if it may pass now, and otherwise the time to ask again.
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
