//! Numbers of endpoints, and their epochs.
//!
//! A number is used again when its endpoint has ended, each time with a later epoch, so that nobody confuses an endpoint with one
//! that had its number before. Each number counts its own epochs. A number whose epochs are used up is not given out any more,
//! and the next number takes its place, so endpoints never run out.

use std::collections::{BTreeMap, BTreeSet};

/// The value in place of the next epoch of a number whose epochs are used up.
const USED_UP: u32 = u32::MAX;

/// The numbers that were used, and how often.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    /// The epoch that the next endpoint of each number gets.
    next: BTreeMap<u32, u32>,
    /// The numbers in `next` that no endpoint has now and that are not used up.
    free: BTreeSet<u32>,
}

impl Numbers {
    /// Restores the numbers from a journal. Endpoints have the `taken` ones.
    pub fn restore(next: &[(u32, u32)], taken: impl Iterator<Item = u32>) -> Self {
        let next: BTreeMap<u32, u32> = next.iter().copied().collect();
        let usable = next.iter().filter(|(_, epoch)| **epoch != USED_UP);
        let mut free: BTreeSet<u32> = usable.map(|(number, _)| *number).collect();
        for number in taken {
            free.remove(&number);
        }
        Self { next, free }
    }

    /// Returns what [`Numbers::restore`] needs.
    pub fn dump(&self) -> Vec<(u32, u32)> {
        self.next.iter().map(|(number, epoch)| (*number, *epoch)).collect()
    }

    /// Returns a number and epoch that no endpoint has had; `None` if there are none at all.
    pub fn vacant(&self) -> Option<(u32, u32)> {
        let Some(&number) = self.free.first() else {
            let highest = self.next.last_key_value().map_or(0, |(number, _)| *number);
            return highest.checked_add(1).map(|number| (number, 1));
        };
        Some((number, self.next.get(&number).copied().unwrap_or(1)))
    }

    /// Notes that an endpoint has this number and epoch.
    pub fn take(&mut self, number: u32, epoch: u32) {
        self.raise(number, epoch);
        self.free.remove(&number);
    }

    /// Notes that the endpoint with this number has ended.
    pub fn give(&mut self, number: u32) {
        if self.next.get(&number).is_some_and(|&epoch| epoch != USED_UP) {
            self.free.insert(number);
        }
    }

    /// Notes that something refers to an endpoint, perhaps one that has ended, so that no other endpoint gets its number and
    /// epoch. In journals from before each number had its own epochs, such references are all that is known about numbers.
    pub fn refer(&mut self, number: u32, epoch: u32) {
        if number != 0 && !self.next.contains_key(&number) {
            self.next.insert(number, 1);
            self.free.insert(number);
        }
        if self.free.contains(&number) {
            self.raise(number, epoch);
        }
    }

    fn raise(&mut self, number: u32, epoch: u32) {
        let next = self.next.entry(number).or_insert(1);
        *next = (*next).max(epoch.saturating_add(1));
        if *next == USED_UP {
            self.free.remove(&number);
        }
    }

    /// Returns an epoch that no endpoint has had yet, for older releases, which have one counter for all numbers.
    pub fn latest(&self) -> u32 {
        self.next.values().copied().max().unwrap_or(1)
    }
}

/// Returns the listener number after this one. Numbers wrap around, and none is 0.
pub fn following_listener(number: u32) -> u32 {
    number.checked_add(1).unwrap_or(1)
}

/// Returns whether a listener number is `next`, the next one to be given out, or later. Numbers wrap around, so a number is later
/// if it is ahead by less than half of all numbers.
pub fn is_ahead(number: u32, next: u32) -> bool {
    number.wrapping_sub(next) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_has_an_epoch_twice() {
        let mut numbers =
            Numbers::restore(&[(1, USED_UP - 3), (2, USED_UP - 1), (3, USED_UP)], [].into_iter());
        let mut seen = BTreeSet::new();
        let mut held = Vec::new();
        for turn in 0..200 {
            let (number, epoch) = numbers.vacant().unwrap();
            assert!((1..USED_UP).contains(&epoch) && number != 0 && number != 3);
            assert!(seen.insert((number, epoch)), "({number}, {epoch}) comes twice");
            numbers.take(number, epoch);
            assert!(!held.contains(&number));
            held.push(number);
            if turn % 3 != 0 {
                numbers.give(held.swap_remove(turn % held.len()));
            }
            let living = held.iter().copied();
            assert_eq!(Numbers::restore(&numbers.dump(), living), numbers);
        }
        assert!(seen.contains(&(1, USED_UP - 1)), "the last epoch of a number is used");
    }

    #[test]
    fn a_number_and_epoch_in_use_by_a_reference_is_not_given_out_again() {
        let mut numbers = Numbers::default();
        numbers.refer(1, 70);
        numbers.refer(2, USED_UP - 1);
        assert_eq!(numbers.vacant(), Some((1, 71)));
        numbers.take(1, 71);
        numbers.refer(1, 5);
        assert_eq!(numbers.vacant(), Some((3, 1)), "2 is used up");
        numbers.give(1);
        assert_eq!(numbers.vacant(), Some((1, 72)));
    }

    #[test]
    fn listener_numbers_wrap_around() {
        assert_eq!((following_listener(1), following_listener(u32::MAX)), (2, 1));
        assert!(
            is_ahead(7, 7)
                && is_ahead(9, 7)
                && is_ahead(3, u32::MAX)
                && !is_ahead(6, 7)
                && !is_ahead(u32::MAX, 3)
        );
    }
}
