//! The rings of a direction: the ring that carries, and beside it a ring that is to take over or that was left.
//!
//! A thread that finds the lock held by itself goes on, so the ring that carries is changed with a single store.

/// Two places for rings.
pub struct Rings<R> {
    rings: [Option<R>; 2],
    /// The index of the ring that carries, and [`AHEAD`] if the other ring is to take over. Both are in one word because they
    /// change at once.
    state: usize,
    /// True if no ring takes over from the one that carries now.
    is_last: bool,
    /// The number of bytes that rings before this one have carried.
    before: u64,
    /// How often the direction has left a ring.
    steps: u32,
}

const AHEAD: usize = 2;

impl<R> Rings<R> {
    pub const fn new() -> Self {
        Self { rings: [None, None], state: 0, is_last: false, before: 0, steps: 0 }
    }

    /// Sets the first ring of a connection.
    pub fn begin(&mut self, ring: R) {
        *self = Self { rings: [Some(ring), None], ..Self::new() };
    }

    /// Returns the ring that carries.
    #[inline]
    pub fn as_ref(&self) -> Option<&R> {
        self.rings[self.state & 1].as_ref()
    }

    /// Returns the ring that carries.
    #[inline]
    pub fn as_mut(&mut self) -> Option<&mut R> {
        self.rings[self.state & 1].as_mut()
    }

    /// Adds a ring that is to take over. Gives the ring back as an error if no ring carries, if no other ring may take over any
    /// more, or if the place is occupied.
    pub fn offer(&mut self, ring: R) -> Result<(), R> {
        let is_closed = self.as_ref().is_none();
        let place = &mut self.rings[!self.state & 1];
        if is_closed || self.is_last || place.is_some() {
            return Err(ring);
        }
        *place = Some(ring);
        self.state |= AHEAD;
        Ok(())
    }

    /// Returns whether a ring is to take over.
    #[inline]
    pub fn is_ahead(&self) -> bool {
        self.state & AHEAD != 0
    }

    /// Returns the ring that is to take over.
    pub fn next(&self) -> Option<&R> {
        self.rings[!self.state & 1].as_ref().filter(|_| self.is_ahead())
    }

    /// Returns the ring that is to take over.
    pub fn next_mut(&mut self) -> Option<&mut R> {
        if self.is_ahead() { self.rings[!self.state & 1].as_mut() } else { None }
    }

    /// Lets the next ring take over. `carried` is the number of bytes that the ring before it has carried.
    pub fn step(&mut self, carried: u64) {
        if self.is_ahead() {
            self.before += carried;
            self.steps = self.steps.wrapping_add(1);
            self.state = !self.state & 1;
        }
    }

    /// Returns how often the direction has left a ring, for the next one or for the kernel.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Returns how many bytes the rings before the one that carries have carried.
    pub fn before(&self) -> u64 {
        self.before
    }

    /// Lets the kernel carry the direction again, and returns the ring that has carried it until now. `carried` is the number of bytes
    /// that this ring has carried. A ring that was to take over is kept for the time when the kernel stops carrying.
    pub fn give_back(&mut self, carried: u64) -> Option<R> {
        let left = self.rings[self.state & 1].take();
        self.before += carried;
        self.steps = self.steps.wrapping_add(1);
        self.is_last = false;
        if self.is_ahead() {
            self.state = !self.state & 1;
        }
        left
    }

    /// Sets the ring for the time when the kernel stops carrying. Gives the ring back as an error if there is one already.
    pub fn begin_again(&mut self, ring: R) -> Result<(), R> {
        if self.as_ref().is_some() {
            return Err(ring);
        }
        self.rings[self.state & 1] = Some(ring);
        Ok(())
    }

    /// Lets no ring take over any more. Returns the ring that was to take over.
    pub fn stay(&mut self) -> Option<R> {
        self.is_last = true;
        if !self.is_ahead() {
            return None;
        }
        self.state &= 1;
        self.rings[!self.state & 1].take()
    }

    /// Takes a ring that was left.
    pub fn take_left(&mut self) -> Option<R> {
        if self.is_ahead() { None } else { self.rings[!self.state & 1].take() }
    }

    /// Returns all rings.
    pub fn all(&self) -> impl Iterator<Item = &R> {
        self.rings.iter().flatten()
    }

    /// Returns all rings.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.rings.iter_mut().flatten()
    }

    /// Takes all rings; the one that carries comes first.
    pub fn take(&mut self) -> impl Iterator<Item = R> + use<R> {
        let Self { mut rings, state, .. } = std::mem::replace(self, Self::new());
        rings.rotate_left(state & 1);
        rings.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::Rings;

    #[test]
    fn one_ring_follows_the_other() {
        let mut rings = Rings::new();
        assert_eq!(rings.offer("small"), Err("small"));
        rings.begin("small");
        assert_eq!((rings.as_ref(), rings.next(), rings.is_ahead()), (Some(&"small"), None, false));
        assert_eq!(rings.offer("larger"), Ok(()));
        assert_eq!(rings.take_left(), None);
        assert_eq!((rings.as_ref(), rings.next()), (Some(&"small"), Some(&"larger")));
        rings.step(10);
        assert_eq!(rings.as_mut(), Some(&mut "larger"));
        assert_eq!((rings.next(), rings.before(), rings.steps()), (None, 10, 1));
        // The place is free only after the ring that was left has been taken.
        assert_eq!(rings.offer("largest"), Err("largest"));
        assert_eq!(rings.take_left(), Some("small"));
        assert_eq!(rings.offer("largest"), Ok(()));
        assert_eq!(rings.take().collect::<Vec<_>>(), ["larger", "largest"]);
        assert_eq!((rings.as_ref(), rings.before()), (None, 0));
    }

    #[test]
    fn the_kernel_carries_in_between() {
        let mut rings = Rings::new();
        rings.begin("small");
        assert_eq!(rings.offer("larger"), Ok(()));
        assert_eq!(rings.give_back(3), Some("small"));
        assert_eq!((rings.as_ref(), rings.is_ahead(), rings.before()), (Some(&"larger"), false, 3));
        assert_eq!(rings.steps(), 1);
        assert_eq!(rings.begin_again("other"), Err("other"));
        assert_eq!(rings.give_back(4), Some("larger"));
        assert_eq!(rings.take_left(), None);
        assert_eq!((rings.as_ref(), rings.before()), (None, 7));
        assert_eq!(rings.offer("other"), Err("other"));
        assert_eq!(rings.begin_again("other"), Ok(()));
        assert_eq!(rings.take().collect::<Vec<_>>(), ["other"]);
    }

    #[test]
    fn nothing_follows_the_last() {
        let mut rings = Rings::new();
        rings.begin("small");
        assert_eq!(rings.offer("larger"), Ok(()));
        assert_eq!(rings.stay(), Some("larger"));
        assert_eq!((rings.is_ahead(), rings.next(), rings.as_ref()), (false, None, Some(&"small")));
        assert_eq!(rings.offer("larger"), Err("larger"));
        // A new connection begins.
        rings.begin("small");
        assert_eq!(rings.offer("larger"), Ok(()));
    }
}
