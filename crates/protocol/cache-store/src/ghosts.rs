//! The items that were evicted recently. An item that is stored again soon after its eviction is worth keeping.

/// The hashes of evicted items. A new entry overwrites an older one at the same place of the table. The table is private
/// to the server.
pub(crate) struct Ghosts {
    /// A part of the hash, and the value of `now` at the eviction; 0 = no entry.
    table: Vec<(u32, u32)>,
    now: u32,
}

impl Ghosts {
    /// Creates a table for about `most` items.
    pub fn new(most: usize) -> Self {
        Self { table: vec![(0, 0); most.next_power_of_two()], now: 0 }
    }

    fn place(&self, hash: u64) -> (usize, u32) {
        (hash as usize & (self.table.len() - 1), (hash >> 32) as u32)
    }

    /// Records that an item was evicted.
    pub fn add(&mut self, hash: u64) {
        let (place, rest) = self.place(hash);
        self.now = self.now.wrapping_add(1).max(1);
        self.table[place] = (rest, self.now);
    }

    /// Returns whether the item is among the last `most` evicted ones, and if so removes its entry.
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
