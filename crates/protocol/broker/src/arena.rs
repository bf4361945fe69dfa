//! The allocator of a segment's memory. Its state is in the daemon's private memory, never in the segment.
//!
//! The algorithm is two-level segregated fit (Masmano and others, 2004), with the headers in a table beside the memory instead of
//! in it. Free runs of pages are in lists by size class, with 16 classes for each power of two, and two levels of bits say which
//! lists are not empty. So allocating and freeing cost the same however many blocks there are. The table has 12 bytes for each
//! page, and the system provides memory only for the parts that are used.

use crate::number_set::NumberSet;
use ginnel_layout::{PAGE, segment};

/// The number of size classes for each power of two, and its logarithm.
const SUBS: u32 = 1 << SUB_BITS;
const SUB_BITS: u32 = 4;
/// The number of powers of two. The first one stands for all lengths below [`SUBS`].
const POWERS: usize = (31 - SUB_BITS + 1) as usize;
/// The most pages of an arena, which is what a run's length can express: 8 TiB. Memory of a segment beyond that is not used.
const MOST: u64 = FREE as u64 - 1;
/// The flag in a run's length that says that the run is free.
const FREE: u32 = 1 << 31;
/// The value that stands for no run.
const NONE: u32 = u32::MAX;
/// The number of runs of uncertain size that a search looks at before it gives up.
const TRIES: u32 = 32;

// The words of a table entry, at the first page of a run.
const LEN: usize = 0;
const NEXT: usize = 1;
const BEFORE: usize = 2;

/// The pages of one segment.
#[derive(Clone, Debug)]
pub struct Arena {
    pages: u32,
    used: u32,
    /// For each run its length, and its neighbours in the list of its class if it is free.
    table: Vec<[u32; 3]>,
    /// The first pages of all runs, free or taken.
    starts: NumberSet,
    /// A bit for each power of two that has free runs, and bits for its classes.
    powers: u32,
    subs: [u32; POWERS],
    heads: [[u32; SUBS as usize]; POWERS],
}

impl PartialEq for Arena {
    /// Returns whether the same pages are free. The order in the lists depends on history and is ignored.
    fn eq(&self, other: &Self) -> bool {
        self.pages == other.pages && self.used == other.used && self.free().eq(other.free())
    }
}

impl Arena {
    /// Makes the arena of a segment of `size` bytes, all free.
    pub fn of_segment(size: u64) -> Self {
        let pages = (size.saturating_sub(segment::ARENA) / PAGE as u64).min(MOST) as u32;
        let mut arena = Self {
            pages,
            used: 0,
            table: vec![[0; 3]; pages as usize],
            starts: NumberSet::new(pages),
            powers: 0,
            subs: [0; POWERS],
            heads: [[NONE; SUBS as usize]; POWERS],
        };
        if pages > 0 {
            arena.starts.insert(0);
            arena.link(0, pages);
        }
        arena
    }

    /// Returns where a block of `len` bytes would be placed, at a multiple of `align` (a power of two) counted from the segment's
    /// start. `None` if there is no run for it. A run that is longer than needed by less than a sixteenth may be overlooked.
    pub fn find(&self, len: u64, align: u64) -> Option<u64> {
        let len = pages_of(len)?;
        let align = pages_of(align).filter(|align| align.is_power_of_two())?;
        // Every run of this class is long enough, wherever it lies.
        let sure = len.checked_add(align - 1).map(rounded_up)?;
        let sure = class(sure);
        if let Some((power, sub)) = self.class_from(sure) {
            return self.place(self.heads[power][sub], len, align);
        }
        // In the classes below, only some runs are long enough.
        let mut tries = TRIES;
        let mut next = class(len);
        while let Some((power, sub)) = self.class_from(next) {
            let mut run = self.heads[power][sub];
            while run != NONE {
                if let found @ Some(_) = self.place(run, len, align) {
                    return found;
                }
                tries = tries.checked_sub(1)?;
                run = self.table[run as usize][NEXT];
            }
            next = if sub + 1 < SUBS as usize { (power, sub + 1) } else { (power + 1, 0) };
        }
        None
    }

    /// Takes exactly these bytes. Returns false, and changes nothing, if they are not all free.
    #[must_use]
    pub fn take(&mut self, at: u64, len: u64) -> bool {
        let Some((page, len)) = self.span(at, len) else { return false };
        let Some(run) = self.starts.below(page + 1) else { return false };
        let had = self.table[run as usize][LEN];
        let before = page - run;
        let Some(behind) = (had & !FREE).checked_sub(before).and_then(|left| left.checked_sub(len)) else {
            return false;
        };
        if had & FREE == 0 {
            return false;
        }
        self.unlink(run);
        if before > 0 {
            self.link(run, before);
            self.starts.insert(page);
        }
        if behind > 0 {
            self.starts.insert(page + len);
            self.link(page + len, behind);
        }
        self.table[page as usize][LEN] = len;
        self.used += len;
        true
    }

    /// Frees a block. Returns false, and changes nothing, if there is no such block.
    #[must_use]
    pub fn give(&mut self, at: u64, len: u64) -> bool {
        let Some((page, len)) = self.span(at, len).filter(|&span| self.is_taken(span)) else { return false };
        self.used -= len;
        let (mut start, mut end) = (page, page + len);
        if let Some(before) = self.starts.below(page).filter(|&run| self.begins_free(run)) {
            self.unlink(before);
            self.starts.remove(page);
            start = before;
        }
        if self.begins_free(end) {
            self.unlink(end);
            self.starts.remove(end);
            end += self.table[end as usize][LEN] & !FREE;
        }
        self.link(start, end - start);
        true
    }

    /// Makes a block longer or shorter in place. Returns false, and changes nothing, if there is no such block or no room behind
    /// it.
    #[must_use]
    pub fn resize(&mut self, at: u64, old: u64, new: u64) -> bool {
        let Some((page, old)) = self.span(at, old).filter(|&span| self.is_taken(span)) else { return false };
        let Some((_, new)) = self.span(at, new) else { return false };
        let end = page + old;
        if new > old {
            let more = new - old;
            let room = if self.begins_free(end) { self.table[end as usize][LEN] & !FREE } else { 0 };
            if room < more {
                return false;
            }
            self.unlink(end);
            self.starts.remove(end);
            if room > more {
                self.starts.insert(end + more);
                self.link(end + more, room - more);
            }
            self.table[page as usize][LEN] = new;
            self.used += more;
        } else if new < old {
            // The tail becomes a block of its own, which is then freed.
            self.table[page as usize][LEN] = new;
            self.starts.insert(page + new);
            self.table[(page + new) as usize][LEN] = old - new;
            return self.give(at + u64::from(new) * PAGE as u64, u64::from(old - new) * PAGE as u64);
        }
        true
    }

    /// Returns whether this many bytes are free right behind a block that ends here.
    pub fn is_free_behind(&self, at: u64, len: u64) -> bool {
        self.span(at, len).is_some_and(|(page, len)| {
            let begins = self.starts.below(page + 1) == Some(page) && self.begins_free(page);
            begins && self.table[page as usize][LEN] & !FREE >= len
        })
    }

    /// Returns the number of bytes that are taken.
    pub fn used(&self) -> u64 {
        u64::from(self.used) * PAGE as u64
    }

    /// Returns the length of the longest free run in bytes, rounded down by less than a sixteenth.
    pub fn longest(&self) -> u64 {
        let Some(power) = self.powers.checked_ilog2() else { return 0 };
        let sub = self.subs[power as usize].ilog2();
        let run = self.heads[power as usize][sub as usize];
        u64::from(self.table[run as usize][LEN] & !FREE) * PAGE as u64
    }

    /// Returns the first page and the length of all free runs, in order.
    fn free(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.pages {
                let (run, len) = (at, self.table[at as usize][LEN]);
                at += len & !FREE;
                if len & FREE != 0 {
                    return Some((run, len & !FREE));
                }
            }
            None
        })
    }

    /// Converts a range in bytes to its first page and number of pages, if it is whole pages of the arena.
    fn span(&self, at: u64, len: u64) -> Option<(u32, u32)> {
        let at = at.checked_sub(segment::ARENA).filter(|at| at.is_multiple_of(PAGE as u64))?;
        let (page, len) = (at / PAGE as u64, u64::from(pages_of(len)?));
        (page + len <= u64::from(self.pages)).then_some((page as u32, len as u32))
    }

    fn is_taken(&self, (page, len): (u32, u32)) -> bool {
        self.table[page as usize][LEN] == len && self.starts.below(page + 1) == Some(page)
    }

    /// Returns whether a free run begins here. `page` must be where another run ends, so a run begins here, or the arena ends.
    fn begins_free(&self, page: u32) -> bool {
        self.table.get(page as usize).is_some_and(|run| run[LEN] & FREE != 0)
    }

    /// Returns where in a free run such a block would lie.
    fn place(&self, run: u32, len: u32, align: u32) -> Option<u64> {
        let first = segment::ARENA / PAGE as u64;
        let at = (first + u64::from(run)).next_multiple_of(u64::from(align)) - first;
        let end = u64::from(run) + u64::from(self.table[run as usize][LEN] & !FREE);
        (at + u64::from(len) <= end).then_some((first + at) * PAGE as u64)
    }

    /// Returns the first class from this one on that has a run.
    fn class_from(&self, (power, sub): (usize, usize)) -> Option<(usize, usize)> {
        let subs = self.subs.get(power)? & (u32::MAX << sub);
        if subs != 0 {
            return Some((power, subs.trailing_zeros() as usize));
        }
        let powers = self.powers & u32::MAX.checked_shl(power as u32 + 1)?;
        let power = (powers != 0).then(|| powers.trailing_zeros() as usize)?;
        Some((power, self.subs[power].trailing_zeros() as usize))
    }

    /// Makes a run free by putting it in front of the list of its class.
    fn link(&mut self, run: u32, len: u32) {
        let (power, sub) = class(len);
        let next = std::mem::replace(&mut self.heads[power][sub], run);
        self.table[run as usize] = [len | FREE, next, NONE];
        if next != NONE {
            self.table[next as usize][BEFORE] = run;
        }
        self.subs[power] |= 1 << sub;
        self.powers |= 1 << power;
    }

    /// Takes a free run out of its list.
    fn unlink(&mut self, run: u32) {
        let [len, next, before] = self.table[run as usize];
        if next != NONE {
            self.table[next as usize][BEFORE] = before;
        }
        if before != NONE {
            self.table[before as usize][NEXT] = next;
            return;
        }
        let (power, sub) = class(len & !FREE);
        self.heads[power][sub] = next;
        if next == NONE {
            self.subs[power] &= !(1 << sub);
            if self.subs[power] == 0 {
                self.powers &= !(1 << power);
            }
        }
    }
}

/// Rounds up to whole pages, at least one.
fn pages_of(len: u64) -> Option<u32> {
    let pages = len.max(1).div_ceil(PAGE as u64);
    (pages <= MOST).then_some(pages as u32)
}

/// Returns the class of runs with this number of pages: the power of two, and the part of it.
fn class(len: u32) -> (usize, usize) {
    match len.checked_ilog2() {
        Some(log) if log >= SUB_BITS => {
            ((log - SUB_BITS + 1) as usize, ((len >> (log - SUB_BITS)) - SUBS) as usize)
        }
        _ => (0, len as usize),
    }
}

/// Returns the smallest length of at least `len` that begins a class, so that every run of that class has at least `len` pages.
fn rounded_up(len: u32) -> u32 {
    match len.checked_ilog2() {
        Some(log) if log >= SUB_BITS => len.saturating_add((1 << (log - SUB_BITS)) - 1).min(MOST as u32),
        _ => len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const SIZE: u64 = 16 << 20;
    const P: u64 = PAGE as u64;

    /// A simple model of the arena: the blocks that are taken.
    #[derive(Default)]
    struct Model(BTreeMap<u64, u64>);

    impl Model {
        fn is_free(&self, at: u64, len: u64) -> bool {
            let before = self.0.range(..at + len).next_back();
            at >= segment::ARENA && at + len <= SIZE && before.is_none_or(|(&a, &l)| a + l <= at)
        }

        /// Returns the start and length of every free run.
        fn free(&self) -> Vec<(u64, u64)> {
            let mut at = segment::ARENA;
            let ends = self.0.iter().map(|(&a, &l)| (a, a + l)).chain([(SIZE, SIZE)]);
            let runs = ends.map(|(start, end)| (std::mem::replace(&mut at, end), start));
            runs.filter(|(from, to)| to > from).map(|(from, to)| (from, to - from)).collect()
        }
    }

    fn check(arena: &Arena, model: &Model) -> Result<(), TestCaseError> {
        prop_assert_eq!(arena.used(), model.0.values().sum::<u64>());
        let free: Vec<_> =
            arena.free().map(|(at, len)| (segment::ARENA + u64::from(at) * P, u64::from(len) * P)).collect();
        prop_assert_eq!(&free, &model.free());
        // The lists contain all free runs, each in its class.
        let mut listed: Vec<u32> = Vec::new();
        for (power, heads) in arena.heads.iter().enumerate() {
            for (sub, &head) in heads.iter().enumerate() {
                prop_assert_eq!(head != NONE, arena.subs[power] & 1 << sub != 0);
                let mut run = head;
                while run != NONE {
                    listed.push(run);
                    prop_assert_eq!(class(arena.table[run as usize][LEN] & !FREE), (power, sub));
                    run = arena.table[run as usize][NEXT];
                }
            }
            prop_assert_eq!(arena.subs[power] != 0, arena.powers & 1 << power != 0);
        }
        listed.sort_unstable();
        prop_assert_eq!(listed, arena.free().map(|(at, _)| at).collect::<Vec<_>>());
        let longest = model.free().iter().map(|f| f.1).max().unwrap_or(0);
        prop_assert!(arena.longest() <= longest && arena.longest() + arena.longest() / 16 >= longest);
        Ok(())
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take { len: u64, align: u32 },
        TakeAt { page: u64, pages: u64 },
        Give(prop::sample::Index),
        Resize(prop::sample::Index, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let len = prop_oneof![1u64..20_000, 1u64..3_000_000];
        prop_oneof![
            3 => (len.clone(), 12u32..22).prop_map(|(len, align)| Step::Take { len, align }),
            1 => (0u64..4096, 1u64..64).prop_map(|(page, pages)| Step::TakeAt { page, pages }),
            3 => any::<prop::sample::Index>().prop_map(Step::Give),
            1 => (any::<prop::sample::Index>(), len).prop_map(|(index, len)| Step::Resize(index, len)),
        ]
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_nothing_leaks(steps in prop::collection::vec(step(), 1..200)) {
            let (mut arena, mut model) = (Arena::of_segment(SIZE), Model::default());
            for step in steps {
                let some = |index: prop::sample::Index| {
                    (!model.0.is_empty()).then(|| model.0.iter().nth(index.index(model.0.len())).map(|(&a, &l)| (a, l))).flatten()
                };
                match step {
                    Step::Take { len, align } => {
                        let (len, align) = (len.next_multiple_of(P), 1u64 << align);
                        match arena.find(len, align) {
                            Some(at) => {
                                prop_assert!(at.is_multiple_of(align) && model.is_free(at, len), "{at:#x} {len:#x}");
                                prop_assert!(arena.take(at, len));
                                prop_assert!(!arena.take(at, 1), "taken twice");
                                model.0.insert(at, len);
                            }
                            None => {
                                let enough = len + align - P;
                                prop_assert!(model.free().iter().all(|f| f.1 < enough + enough / 16 + P), "overlooked");
                            }
                        }
                    }
                    Step::TakeAt { page, pages } => {
                        let (at, len) = (segment::ARENA + page * P, pages * P);
                        prop_assert_eq!(arena.take(at, len), model.is_free(at, len));
                        if model.is_free(at, len) {
                            model.0.insert(at, len);
                        }
                    }
                    Step::Give(index) => {
                        let Some((at, len)) = some(index) else { continue };
                        prop_assert!(model.0.get(&(at + P)) == Some(&len) || !arena.give(at + P, len));
                        prop_assert!(!arena.give(at, len + P));
                        prop_assert!(arena.give(at, len));
                        prop_assert!(!arena.give(at, len), "given twice");
                        model.0.remove(&at);
                    }
                    Step::Resize(index, new) => {
                        let Some((at, old)) = some(index) else { continue };
                        let new = new.next_multiple_of(P);
                        let fits = new <= old || model.is_free(at + old, new - old);
                        if new > old {
                            prop_assert_eq!(arena.is_free_behind(at + old, new - old), fits);
                        }
                        prop_assert_eq!(arena.resize(at, old, new), fits);
                        if fits {
                            model.0.insert(at, new);
                        }
                    }
                }
                check(&arena, &model)?;
            }
            // The same blocks, taken in another order, give the same arena, as a replay of the journal requires.
            let mut replayed = Arena::of_segment(SIZE);
            for (&at, &len) in model.0.iter().rev() {
                prop_assert!(replayed.take(at, len));
            }
            prop_assert_eq!(&replayed, &arena);
            check(&replayed, &model)?;
            for (at, len) in std::mem::take(&mut model.0) {
                prop_assert!(arena.give(at, len));
            }
            prop_assert_eq!(arena, Arena::of_segment(SIZE));
        }

        #[test]
        fn wild_arguments_change_nothing(at in any::<u64>(), len in any::<u64>(), align in any::<u64>()) {
            let mut arena = Arena::of_segment(SIZE);
            prop_assert!(!arena.give(at, len) && !arena.resize(at, len, align));
            let _ = arena.find(len, align);
            let took = arena.take(at, len);
            let fits = (segment::ARENA..SIZE).contains(&at) && len <= SIZE && at + len.max(1) <= SIZE;
            prop_assert_eq!(took, fits && at.is_multiple_of(P));
        }
    }

    #[test]
    fn all_of_an_arena_can_be_one_block() {
        for size in [4 << 20, 6 << 20, 1 << 30] {
            let mut arena = Arena::of_segment(size);
            let len = size - segment::ARENA;
            assert_eq!(arena.find(len, P), Some(segment::ARENA));
            assert!(arena.find(len + 1, P).is_none() && arena.take(segment::ARENA, len));
            assert_eq!((arena.find(1, P), arena.longest()), (None, 0));
        }
    }

    #[test]
    fn freed_huge_pages_can_be_allocated_again() {
        const HUGE: u64 = 2 << 20;
        let mut arena = Arena::of_segment(64 << 20);
        let mut blocks = Vec::new();
        while let Some(at) = arena.find(HUGE, HUGE) {
            assert!(arena.take(at, HUGE));
            blocks.push(at);
        }
        assert_eq!(blocks.len(), 30, "all but the reserved one and the one that the header is in");
        assert!(arena.give(blocks[7], HUGE));
        assert_eq!(arena.find(HUGE, HUGE), Some(blocks[7]));
    }

    #[test]
    fn a_segment_without_an_arena_has_no_room() {
        assert_eq!(Arena::of_segment(0).find(1, P), None);
        assert_eq!(Arena::of_segment(segment::ARENA).find(1, P), None);
    }
}
