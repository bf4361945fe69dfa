//! Memory for requests whose own is not aligned for direct I/O. A worker has so much of it and no more: a request that finds none
//! waits until another gives it back.

use std::collections::VecDeque;
use std::io;

use ginnel_shmem::Mapping;

use super::flight::COPY;

/// Requests of a worker that are copied at a time: 4 MiB.
pub(super) const COPIES: usize = 64;

/// What a worker has of it.
#[derive(Default)]
pub(super) struct Copies {
    free: Vec<Mapping>,
    lent: usize,
    /// Those that wait, the first first.
    waiting: VecDeque<usize>,
}

impl Copies {
    /// Memory for the operation of this number. `None`: it waits, and is named by [`Copies::give_back`]. An error: there is no
    /// memory at all, and nobody who would give some back.
    pub fn lend(&mut self, operation: usize) -> io::Result<Option<Mapping>> {
        if self.lent < COPIES {
            match self.free.pop().map_or_else(|| Mapping::anonymous(COPY), Ok) {
                Ok(copy) => {
                    self.lent += 1;
                    return Ok(Some(copy));
                }
                Err(error) if self.lent == 0 => return Err(error),
                Err(_) => {}
            }
        }
        self.waiting.push_back(operation);
        Ok(None)
    }

    /// Takes back what was lent. Returns who has waited longest, and has it now.
    pub fn give_back(&mut self, copy: Mapping) -> Option<(usize, Mapping)> {
        if let Some(operation) = self.waiting.pop_front() {
            return Some((operation, copy));
        }
        self.lent -= 1;
        self.free.push(copy);
        if self.lent == 0 {
            // Whoever needs none any more has none.
            self.free.clear();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_so_much_and_who_waits_gets_it_in_turn() {
        let mut copies = Copies::default();
        let mut lent: Vec<_> = (0..COPIES).map(|n| copies.lend(n).unwrap().unwrap()).collect();
        for n in [100, 101] {
            assert!(copies.lend(n).unwrap().is_none());
        }
        for n in [100, 101] {
            let (operation, copy) = copies.give_back(lent.pop().unwrap()).unwrap();
            assert_eq!(operation, n);
            lent.push(copy);
        }
        assert_eq!(copies.lent, COPIES);
        assert!(lent.into_iter().all(|copy| copies.give_back(copy).is_none()));
        assert!(copies.lent == 0 && copies.free.is_empty() && copies.waiting.is_empty());
    }
}
