//! Which events of an edge-triggered registration are news.
//!
//! An edge must not be lost, whatever arrives while somebody looks. So what has happened so far is read *before* the look at what is
//! ready: whatever happens in between counts as not reported yet, and is reported once more. An event that is reported twice is
//! harmless; the kernel does that too.

/// What has been reported of an edge-triggered registration. `P` says how far everything that makes news has come.
pub struct Edge<P> {
    /// True if something else has happened that was not reported yet.
    is_due: bool,
    /// How far everything had come before the last look that was reported.
    seen: P,
}

impl<P: PartialEq> Edge<P> {
    /// Makes the edge for a new registration, which reports all that is there.
    pub const fn new(seen: P) -> Self {
        Self { is_due: true, seen }
    }

    /// Makes the next look report all that is there.
    pub fn set_due(&mut self) {
        self.is_due = true;
    }

    /// Marks the edge as reported.
    pub fn clear(&mut self) {
        self.is_due = false;
    }

    pub fn is_due(&self) -> bool {
        self.is_due
    }

    /// Returns what `ready` says if there is news, else 0. `now` says how far everything has come, given what was seen; it is asked
    /// first. With `only_look`, nothing counts as reported.
    pub fn news(&mut self, only_look: bool, now: impl FnOnce(&P) -> P, ready: impl FnOnce() -> u32) -> u32 {
        let now = now(&self.seen);
        if !self.is_due && now == self.seen {
            return 0;
        }
        let ready = ready();
        if ready != 0 && !only_look {
            *self = Self { is_due: false, seen: now };
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const IN: u32 = 1;
    const OUT: u32 = 4;

    /// A program that is told of input receives all that is there. Input arrives at any of the points at which somebody else may run:
    /// before, between and after the looks. After the last look, no input may be there of which the program was not told.
    #[test]
    fn no_order_of_arrivals_and_looks_loses_an_edge() {
        const LOOKS: u32 = 3;
        // Two points in a look, one before the program receives, and one after it.
        const POINTS: u32 = LOOKS * 4;
        for arrivals in 0..1_u32 << POINTS {
            for leaves_some in [false, true] {
                let (arrived, received, point) = (Cell::new(0), Cell::new(0), Cell::new(0));
                let may_arrive = || {
                    arrived.set(arrived.get() + (arrivals >> point.get() & 1));
                    point.set(point.get() + 1);
                };
                // Input that the program has left where it is, although it was told of it, is no news.
                let known = Cell::new(0);
                let mut edge = Edge::new(0);
                let mut look = || {
                    let now = |_: &u32| {
                        may_arrive();
                        arrived.get()
                    };
                    let ready = || {
                        may_arrive();
                        OUT | if arrived.get() > received.get() { IN } else { 0 }
                    };
                    let told = edge.news(false, now, ready);
                    if told & IN != 0 {
                        may_arrive();
                        known.set(arrived.get());
                        received.set(arrived.get() - u32::from(leaves_some));
                    }
                };
                (0..LOOKS).for_each(|_| look());
                // The last look, during which nothing arrives.
                point.set(POINTS);
                look();
                assert_eq!(known.get(), arrived.get(), "{arrivals:b}");
            }
        }
    }

    #[test]
    fn what_was_reported_is_no_news() {
        let mut edge = Edge::new(0);
        assert_eq!(edge.news(false, |_| 0, || 0), 0);
        assert_eq!(edge.news(false, |_| 0, || OUT), OUT, "a new registration");
        assert_eq!(edge.news(false, |_| 0, || OUT), 0);
        assert_eq!(edge.news(true, |_| 1, || IN), IN);
        assert_eq!(edge.news(false, |_| 1, || IN), IN, "it was only looked at");
        assert_eq!(edge.news(false, |_| 1, || IN), 0);
        edge.set_due();
        assert!(edge.is_due());
        assert_eq!(edge.news(false, |_| 1, || IN), IN);
    }
}
