//! Finds the keys that are requested most often, by counting a sample of the requests.

/// How many keys are counted at the same time. A key that has more than 1/`KEYS` of the sampled requests is always
/// among them.
const KEYS: usize = 64;
/// The sample: one request in this many is counted.
const SAMPLE: u32 = 8;

/// The Space-Saving algorithm (Metwally and others, ICDT 2005) over a sample of all requests.
#[derive(Debug, Default)]
pub struct Hot {
    keys: Vec<(Box<[u8]>, u64)>,
    turn: u32,
}

impl Hot {
    /// Records that a request has named a key.
    #[inline]
    pub fn see(&mut self, key: &[u8]) {
        self.turn += 1;
        if self.turn >= SAMPLE {
            self.turn = 0;
            self.count(key);
        }
    }

    #[cold]
    fn count(&mut self, key: &[u8]) {
        if let Some((_, count)) = self.keys.iter_mut().find(|(known, _)| &known[..] == key) {
            *count += 1;
        } else if self.keys.len() < KEYS {
            self.keys.push((key.into(), 1));
        } else if let Some(least) = self.keys.iter_mut().min_by_key(|(_, count)| *count) {
            // The new key inherits the count of the key that it displaces, because it may have occurred that often
            // before.
            *least = (key.into(), least.1 + 1);
        }
    }

    /// Returns the counted keys, the most frequent one first, each with an estimate of the requests that have named it.
    pub fn list(&self) -> Vec<(&[u8], u64)> {
        let mut list: Vec<_> =
            self.keys.iter().map(|(key, count)| (&key[..], count * u64::from(SAMPLE))).collect();
        list.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        list
    }

    /// Forgets all keys and their counts.
    pub fn clear(&mut self) {
        self.keys.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hot_key_is_found_among_many() {
        let mut hot = Hot::default();
        for round in 0..100_000_u32 {
            match round % 5 {
                0 => hot.see(b"hot"),
                _ => hot.see(&round.to_le_bytes()),
            }
        }
        let list = hot.list();
        assert_eq!((list.len(), list[0].0), (KEYS, &b"hot"[..]));
        assert!((15_000..25_000).contains(&list[0].1), "{}", list[0].1);
    }
}
