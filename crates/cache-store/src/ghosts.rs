//! Which items have gone not long ago. One that comes back soon is worth keeping.

/// The hashes of items that have gone, in a table in which a later one takes the place of an earlier one. Private to the server.
pub(crate) struct Ghosts {
    /// A part of the hash, and when it went.
    table: Vec<(u32, u32)>,
    now: u32,
}

impl Ghosts {
    /// For about so many.
    pub fn new(most: usize) -> Self {
        Self { table: vec![(0, 0); most.next_power_of_two()], now: 0 }
    }

    fn place(&self, hash: u64) -> (usize, u32) {
        (hash as usize & (self.table.len() - 1), (hash >> 32) as u32)
    }

    /// An item has gone.
    pub fn add(&mut self, hash: u64) {
        let (place, rest) = self.place(hash);
        self.now = self.now.wrapping_add(1).max(1);
        self.table[place] = (rest, self.now);
    }

    /// Whether the item is among the last `most` that have gone. It is forgotten.
    pub fn take(&mut self, hash: u64, most: usize) -> bool {
        let (place, rest) = self.place(hash);
        let (found, when) = self.table[place];
        let is_there = when != 0 && found == rest && self.now.wrapping_sub(when) as usize <= most;
        if is_there {
            self.table[place] = (0, 0);
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ghosts_are_found_once_and_not_for_ever() {
        let mut ghosts = Ghosts::new(100);
        assert!(!ghosts.take(0, 100));
        ghosts.add(7 << 32 | 7);
        assert!(!ghosts.take(8 << 32 | 7, 100), "another one at the same place");
        assert!(ghosts.take(7 << 32 | 7, 100) && !ghosts.take(7 << 32 | 7, 100));
        ghosts.add(0);
        (1..=10).for_each(|hash| ghosts.add(hash));
        assert!(!ghosts.take(0, 9) && ghosts.take(1, 9));
    }
}
