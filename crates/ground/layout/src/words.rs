//! Assertions about words in shared memory that belong to no structure: each is a constant with its offset.

/// Asserts at compile time that the words of an area with so many bytes lie inside it, are aligned, and do not overlap. The words are
/// in groups, and two groups never share a cache line. A group usually contains the words of one writer. Constants of a module are
/// written with its name; `tests/claims.rs` checks that no offset is left out.
macro_rules! words {
    ($len:expr; $($group:ident { $($at:path: $type:ty),+ $(,)? })+) => {
        const _: () = {
            use crate::words::{Word, fault};
            let groups: &[&[Word]] = &[$(&[$(Word::new::<$type>($at)),+]),+];
            if let Some(fault) = fault($len, groups) {
                panic!("{}", fault)
            }
        };
    };
}

/// Where a word lies in its area.
#[derive(Clone, Copy)]
pub(crate) struct Word {
    at: usize,
    len: usize,
    align: usize,
}

impl Word {
    pub(crate) const fn new<T>(at: usize) -> Self {
        Self { at, len: size_of::<T>(), align: align_of::<T>() }
    }

    const fn end(self) -> usize {
        self.at + self.len
    }

    /// Returns whether a part of both words is in the same unit of so many bytes.
    const fn shares(self, other: Self, unit: usize) -> bool {
        self.at / unit <= (other.end() - 1) / unit && other.at / unit <= (self.end() - 1) / unit
    }
}

/// Returns what is wrong with the groups of words of an area with `area` bytes.
pub(crate) const fn fault(area: usize, groups: &[&[Word]]) -> Option<&'static str> {
    let mut group = 0;
    while group < groups.len() {
        let mut word = 0;
        while word < groups[group].len() {
            let fault = fault_of(area, groups, group, word);
            if fault.is_some() {
                return fault;
            }
            word += 1;
        }
        group += 1;
    }
    None
}

/// Returns what is wrong with a word, alone and beside those in front of it.
const fn fault_of(area: usize, groups: &[&[Word]], group: usize, word: usize) -> Option<&'static str> {
    let this = groups[group][word];
    if this.end() > area {
        return Some("a word ends behind its area");
    }
    if !this.at.is_multiple_of(this.align) {
        return Some("a word is not aligned");
    }
    let mut other_group = 0;
    while other_group <= group {
        let words = if other_group == group { word } else { groups[other_group].len() };
        let mut other = 0;
        while other < words {
            let that = groups[other_group][other];
            if this.shares(that, 1) {
                return Some("two words overlap");
            }
            if other_group != group && this.shares(that, crate::CACHE_LINE) {
                return Some("words of two groups share a cache line");
            }
            other += 1;
        }
        other_group += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{Word, fault};

    fn u32_at(at: usize) -> Word {
        Word::new::<u32>(at)
    }

    fn u64_at(at: usize) -> Word {
        Word::new::<u64>(at)
    }

    #[test]
    fn words_that_do_not_meet_are_right() {
        assert_eq!(fault(128, &[&[u64_at(0), u32_at(12), u32_at(8)], &[u64_at(64), u64_at(120)]]), None);
        assert_eq!(fault(192, &[&[u64_at(0)], &[Word::new::<[u64; 16]>(64)]]), None);
    }

    #[test]
    fn each_fault_is_found() {
        let overlap = Some("two words overlap");
        assert_eq!(fault(64, &[&[u64_at(8), u32_at(8)]]), overlap);
        assert_eq!(fault(64, &[&[u32_at(12), u32_at(0), u64_at(8)]]), overlap);
        assert_eq!(fault(64, &[&[u64_at(8), u64_at(8)]]), overlap);
        assert_eq!(fault(256, &[&[u64_at(128)], &[Word::new::<[u64; 16]>(64)]]), overlap);
        assert_eq!(fault(63, &[&[u64_at(48), u64_at(56)]]), Some("a word ends behind its area"));
        assert_eq!(fault(64, &[&[u64_at(4)]]), Some("a word is not aligned"));
        let shared = Some("words of two groups share a cache line");
        assert_eq!(fault(128, &[&[u64_at(0)], &[u64_at(64), u64_at(56)]]), shared);
        assert_eq!(
            fault(256, &[&[Word::new::<[u64; 16]>(64)], &[u32_at(0), u32_at(192)], &[u64_at(200)]]),
            shared
        );
    }
}
