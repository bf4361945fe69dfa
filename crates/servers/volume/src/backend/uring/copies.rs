//! Memory for requests whose own memory is not aligned for direct I/O. A worker has a limited amount; a request that
//! finds none waits until another one returns it.

use super::flight::COPY;
use ginnel_shmem::Mapping;
use std::collections::VecDeque;
use std::io;

/// The number of requests of a worker that can be copied at a time. Together they have 4 MiB.
pub(super) const COPIES: usize = 64;

/// The copies of one worker.
#[derive(Default)]
pub(super) struct Copies {
    free: Vec<Mapping>,
    lent: usize,
    /// The waiting operations, the oldest first.
    waiting: VecDeque<usize>,
}

impl Copies {
    /// Returns memory for the operation of this number. `None` means that it must wait; [`Copies::give_back`] will
    /// return it. An error means that there is no memory, and that no operation will return any.
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

    /// Takes back the memory that was lent. Returns the operation that has waited longest, if one waits; it now has the
    /// memory.
    pub fn give_back(&mut self, copy: Mapping) -> Option<(usize, Mapping)> {
        if let Some(operation) = self.waiting.pop_front() {
            return Some((operation, copy));
        }
        self.lent -= 1;
        self.free.push(copy);
        if self.lent == 0 {
            // When no copies are needed, the worker keeps no memory for them.
            self.free.clear();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_bounded_and_granted_in_order() {
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
