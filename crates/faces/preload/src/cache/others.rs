//! Servers that are not asked, because they are not a `ginnel-cache` or did not say what they are.

use crate::process::lock::Lock;
use crate::system::clock::now;

/// How long the library does not ask a server again that did not say what it is, in microseconds.
const FORGOTTEN: u64 = 10_000_000;
/// The number of servers that are remembered. If two servers have the same places, the later one may replace the earlier.
const ENTRIES: usize = 1024;
/// The number of places that a server can have.
const PLACES: usize = 8;

#[derive(Clone, Copy)]
struct Entry {
    /// The hash of the server's address.
    server: u64,
    /// The time until which the server is not asked, in microseconds. 0 if the entry is free.
    until: u64,
    reason: &'static str,
}

static OTHERS: Lock<[Entry; ENTRIES]> = Lock::new([Entry { server: 0, until: 0, reason: "" }; ENTRIES]);

fn places(server: u64) -> impl Iterator<Item = usize> + Clone {
    let first = (server >> 32) as usize;
    (0..PLACES).map(move |place| first.wrapping_add(place) % ENTRIES)
}

/// Returns why a server is not asked, or `None` if it may be asked.
pub fn reason(server: u64) -> Option<&'static str> {
    let others = OTHERS.lock();
    let entry = places(server).map(|at| others[at]).find(|entry| entry.server == server && entry.until > 0);
    entry.filter(|entry| now() < entry.until).map(|entry| entry.reason)
}

/// Records that a server is not to be asked again, or not for a while.
pub fn note(server: u64, reason: &'static str, is_for_good: bool) {
    let now = now();
    let until = if is_for_good { u64::MAX } else { now + FORGOTTEN };
    let mut others = OTHERS.lock();
    let same = places(server).find(|at| others[*at].server == server);
    let free = || places(server).find(|at| others[*at].until <= now);
    // What is known for a while only is the first to go.
    let first_to_go = || places(server).min_by_key(|at| others[*at].until);
    if let Some(at) = same.or_else(free).or_else(first_to_go) {
        others[at] = Entry { server, until, reason };
    }
}

/// Repairs the lock in the child of a fork.
pub fn in_child() {
    OTHERS.free_in_child();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::find::hash;

    #[test]
    fn a_server_that_is_no_cache_is_remembered_for_good() {
        let server = |i: u64| hash(&i.to_le_bytes());
        for i in 0..100 {
            note(server(i), "a reason", i % 2 == 0);
        }
        for i in 0..100 {
            assert_eq!(reason(server(i)), Some("a reason"));
        }
        assert_eq!(reason(server(100)), None);
        let until = |i| {
            let others = OTHERS.lock();
            places(server(i)).map(|at| others[at]).find(|entry| entry.server == server(i)).unwrap().until
        };
        assert_eq!(until(0), u64::MAX);
        assert!(until(1) <= now() + FORGOTTEN);
        note(server(1), "another", true);
        assert_eq!((reason(server(1)), until(1)), (Some("another"), u64::MAX));
        // Any number of servers can be noted, and the last one is known.
        for i in 0..10_000 {
            note(server(i), "many", true);
            assert_eq!(reason(server(i)), Some("many"));
        }
    }
}
