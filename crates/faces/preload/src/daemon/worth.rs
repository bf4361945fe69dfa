//! Whether a connection is worth the change to shared memory.
//!
//! The change costs both processes and the daemon some two hundred system calls. A connection of one request and one answer takes
//! about twenty, and gains nothing. So a connection has to show that it lives before anything is done for it: it has lasted for a
//! while, and has carried some round trips or many bytes meanwhile. What it pays later is a small part of what it has cost by then.
//!
//! On a busy machine, a short connection lasts long too. So a process learns from its connections: as long as those that were
//! reported end soon afterwards, the next ones have to show more. This is also why `eager`, which reports connections at once, costs
//! a server of short connections little.

use crate::process::settings;
use crate::process::settings::Mode;
use crate::state::socket::Socket;
use crate::system::clock;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a connection has to show: it has reached this age, in microseconds,
const AGE: u64 = 10_000;
/// and has had this many round trips,
const TURNS: u64 = 8;
/// or has carried this many bytes in both directions together.
const BYTES: u64 = 256 << 10;
/// Or it has carried anything, and has reached this age.
const OLD: u64 = 100_000;
/// So many bytes are enough at the first age, whatever other connections were.
const MUCH: u64 = 4 << 20;

/// A report was worth it if the connection has lasted for this time afterwards, in microseconds,
const LASTS: u64 = 100_000;
/// or has carried this many bytes through rings.
const CARRIES: u64 = 1 << 20;

/// How often the requirements are doubled at most.
const MOST: u32 = 4;
/// The same for `eager`, which requires nothing before.
const MOST_EAGER: u32 = 2;

/// How much more connections have to show, because earlier ones were not worth their reports.
struct Doubt(AtomicU32);

static DOUBT: Doubt = Doubt(AtomicU32::new(0));

impl Doubt {
    /// Notes whether the report of a connection that has ended was worth it.
    fn learn(&self, was_worth_it: bool, most: u32) {
        let change = |doubt: u32| if was_worth_it { doubt.saturating_sub(1) } else { (doubt + 1).min(most) };
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |doubt| Some(change(doubt)));
    }

    fn level(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns whether a connection has done enough to be worth a report.
pub fn is_alive(socket: &Socket) -> bool {
    let (doubt, least_age) = match settings::mode() {
        // In tests, calls wait until the connection has changed over.
        _ if settings::wait().is_some() => return true,
        Mode::Eager => match DOUBT.level() {
            0 => return true,
            doubt => (doubt - 1, 0),
        },
        _ => (DOUBT.level(), AGE),
    };
    let bytes =
        socket.sending.native.load(Ordering::Relaxed) + socket.receiving.native.load(Ordering::Relaxed);
    let shows = u64::from(socket.turns.count()) >= TURNS << doubt || bytes >= BYTES << doubt;
    // The clock is read last, because that costs more than the rest.
    bytes > 0 && {
        let age = || ginnel_clock::monotonic().saturating_sub(socket.facts.lock().begun).as_micros() as u64;
        let due = match shows {
            _ if bytes >= MUCH => least_age,
            true => least_age << doubt,
            false => OLD << doubt,
        };
        due == 0 || age() >= due
    }
}

/// Notes that a connection ends that was reported at this time, in microseconds.
pub fn learn(socket: &Socket, reported: u64) {
    let carried =
        socket.sending.shared.load(Ordering::Relaxed) + socket.receiving.shared.load(Ordering::Relaxed);
    let was_worth_it = carried >= CARRIES || clock::now().saturating_sub(reported) >= LASTS;
    DOUBT.learn(was_worth_it, if settings::mode() == Mode::Eager { MOST_EAGER } else { MOST });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubt_grows_with_each_report_in_vain_and_goes_with_those_that_were_not() {
        let doubt = Doubt(AtomicU32::new(0));
        doubt.learn(true, MOST);
        assert_eq!(doubt.level(), 0);
        (0..100).for_each(|_| doubt.learn(false, MOST));
        assert_eq!(doubt.level(), MOST);
        (0..MOST).for_each(|_| doubt.learn(true, MOST));
        assert_eq!(doubt.level(), 0);
    }
}
