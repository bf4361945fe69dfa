//! What the program has done with a connection, and what it was told of it. That holds for all processes that have the socket, so a
//! socket that relatives share has these facts twice: in each process, and in the memory that they share (`family`).

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// A fact about a connection. The values are bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fact {
    /// The program has shut down sending.
    ShutDownSending = 1,
    /// The program has shut down receiving. As with TCP, it can still receive what is there or comes, but does not wait for it.
    ShutDownReceiving = 2,
    /// The peer has closed its end, and the program has sent bytes afterwards. The first ones are lost without an error.
    SentInVain = 4,
    /// The peer has broken the connection, and the program has got the error (such as ECONNRESET), which the kernel tells only once.
    ToldReset = 8,
    /// Another process has the socket, or is about to get it, or the same is true of the peer's socket. See `passing`.
    Passed = 16,
}

/// What is known of a connection.
#[derive(Default)]
pub struct Known {
    facts: AtomicU8,
    /// The number of calls that do not wait and have found no room.
    pub without_room: AtomicU32,
}

impl Known {
    #[inline]
    pub fn has(&self, fact: Fact) -> bool {
        self.facts.load(Ordering::Relaxed) & fact as u8 != 0
    }

    /// Notes a fact. Returns whether it is new.
    pub fn note(&self, fact: Fact) -> bool {
        self.facts.fetch_or(fact as u8, Ordering::Relaxed) & fact as u8 == 0
    }

    /// Takes back a fact that has turned out wrong.
    pub fn forget(&self, fact: Fact) {
        self.facts.fetch_and(!(fact as u8), Ordering::Relaxed);
    }

    /// Takes over what is known elsewhere of the same connection.
    pub fn learn(&self, from: &Self) {
        self.facts.fetch_or(from.facts.load(Ordering::Relaxed), Ordering::Relaxed);
        self.without_room.fetch_max(from.without_room.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Forgets everything, for another connection.
    pub fn reset(&self) {
        self.facts.store(0, Ordering::Relaxed);
        self.without_room.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_new_once() {
        let known = Known::default();
        assert!(!known.has(Fact::ToldReset));
        assert!(known.note(Fact::ToldReset));
        assert!(!known.note(Fact::ToldReset));
        assert!(known.has(Fact::ToldReset) && !known.has(Fact::SentInVain));
        known.forget(Fact::ToldReset);
        assert!(!known.has(Fact::ToldReset));
    }

    #[test]
    fn what_one_side_knows_is_added_to_the_other() {
        let (one, other) = (Known::default(), Known::default());
        one.note(Fact::Passed);
        one.without_room.store(3, Ordering::Relaxed);
        other.note(Fact::ShutDownSending);
        other.learn(&one);
        assert!(
            other.has(Fact::Passed) && other.has(Fact::ShutDownSending) && !one.has(Fact::ShutDownSending)
        );
        assert_eq!(other.without_room.load(Ordering::Relaxed), 3);
        other.reset();
        assert!(!other.has(Fact::Passed) && other.without_room.load(Ordering::Relaxed) == 0);
    }
}
