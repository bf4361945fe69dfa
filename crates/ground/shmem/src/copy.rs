//! Copies whose last word is ordered with the rest.
//!
//! A program that waits for an RDMA write polls the last byte of its buffer: when that byte has changed, all bytes before it
//! must have changed too. An ordinary copy does not guarantee this (this crate's stores the last of a few words first, and
//! libc's may store the tail early). Therefore the copies in this file treat the last word separately: [`store_release`]
//! stores it after everything else, with release; [`load_acquire`] loads it before everything else, with acquire.
//!
//! The last word is the largest naturally aligned word, of at most eight bytes, that ends where the copy ends and lies within
//! it. No byte outside of the copy is accessed. A copy that is no longer than this word is a single store or load.

use crate::WORDWISE;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Returns whether a copy of `len` bytes at offset `at` of shared memory is made word by word.
#[inline]
pub(crate) fn wordwise(at: usize, len: usize) -> bool {
    ((at | len) & 7) | (WORDWISE.wrapping_sub(len) >> (usize::BITS - 1)) == 0
}

/// Returns the size of the last word of a copy of `len` bytes (at least one) that ends at the address `end`.
#[inline]
fn last_word(end: usize, len: usize) -> usize {
    let aligned = 1 << end.trailing_zeros().min(3);
    let fits = 1 << len.ilog2().min(3);
    usize::min(aligned, fits)
}

/// Copies `len` bytes to shared memory, the last word last, with release.
///
/// # Safety
///
/// `from` must be valid for loads and `to` for stores of `len` bytes. The bytes at `to` must be accessed as shared memory
/// only. Others may store to both during the copy (see the assumption in the crate's documentation). The two may overlap.
#[inline]
pub(crate) unsafe fn store_release(to: *mut u8, from: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    let size = last_word(to as usize + len, len);
    let before = len - size;
    // The last word is loaded first because, if the two overlap, the stores before it may overwrite it.
    macro_rules! with {
        ($word:ty, $atomic:ty) => {{
            // SAFETY: these are the last `size` bytes at `from` and at `to`, which are valid as the caller guarantees;
            // `last_word` ensures that the word at `to` is aligned.
            unsafe {
                let value = from.add(before).cast::<$word>().read_unaligned();
                store(to, from, before);
                // ORDER copy.last: the bytes before the last word are visible before it. Pairs with: `load_acquire`, and with
                // programs that poll the last byte.
                <$atomic>::from_ptr(to.add(before).cast()).store(value, Ordering::Release);
            }
        }};
    }
    match size {
        8 => with!(u64, AtomicU64),
        4 => with!(u32, AtomicU32),
        2 => with!(u16, AtomicU16),
        _ => with!(u8, AtomicU8),
    }
}

/// Copies `len` bytes from shared memory, the last word first, with acquire.
///
/// # Safety
///
/// As [`store_release`], with the roles of `from` and `to` exchanged.
#[inline]
pub(crate) unsafe fn load_acquire(to: *mut u8, from: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    let size = last_word(from as usize + len, len);
    let before = len - size;
    macro_rules! with {
        ($word:ty, $atomic:ty) => {{
            // SAFETY: these are the last `size` bytes at `from` and at `to`, which are valid as the caller guarantees;
            // `last_word` ensures that the word at `from` is aligned.
            unsafe {
                // ORDER copy.last: the last word is loaded before the bytes before it. Pairs with: `store_release`.
                let value = <$atomic>::from_ptr(from.add(before).cast()).load(Ordering::Acquire);
                load(to, from, before);
                to.add(before).cast::<$word>().write_unaligned(value);
            }
        }};
    }
    match size {
        8 => with!(u64, AtomicU64),
        4 => with!(u32, AtomicU32),
        2 => with!(u16, AtomicU16),
        _ => with!(u8, AtomicU8),
    }
}

/// Copies to shared memory without order.
///
/// # Safety
///
/// As [`store_release`].
#[inline]
unsafe fn store(to: *mut u8, from: *const u8, len: usize) {
    if !wordwise(to as usize, len) {
        // SAFETY: `from` is valid for loads and `to` for stores of `len` bytes, as the caller guarantees. The two may overlap.
        unsafe { ptr::copy(from, to, len) };
        return;
    }
    // All words are loaded before the first is stored, because the two ranges may overlap.
    let mut words = [0; WORDWISE / 8];
    for (i, word) in words.iter_mut().enumerate().take(len / 8) {
        // SAFETY: inside the range at `from`, as the caller guarantees.
        *word = unsafe { from.cast::<u64>().add(i).read_unaligned() };
    }
    for (i, word) in words.iter().enumerate().take(len / 8) {
        // SAFETY: inside the range at `to`, as the caller guarantees, and aligned, as `wordwise` has checked.
        unsafe { AtomicU64::from_ptr(to.cast::<u64>().add(i)).store(*word, Ordering::Relaxed) };
    }
}

/// Copies from shared memory without order.
///
/// # Safety
///
/// As [`load_acquire`].
#[inline]
unsafe fn load(to: *mut u8, from: *mut u8, len: usize) {
    if !wordwise(from as usize, len) {
        // SAFETY: `from` is valid for loads and `to` for stores of `len` bytes, as the caller guarantees. The two may overlap.
        unsafe { ptr::copy(from, to, len) };
        return;
    }
    let mut words = [0; WORDWISE / 8];
    for (i, word) in words.iter_mut().enumerate().take(len / 8) {
        // SAFETY: inside the range at `from`, as the caller guarantees, and aligned, as `wordwise` has checked.
        *word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(i)).load(Ordering::Relaxed) };
    }
    for (i, word) in words.iter().enumerate().take(len / 8) {
        // SAFETY: inside the range at `to`, as the caller guarantees.
        unsafe { to.cast::<u64>().add(i).write_unaligned(*word) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, SharedMemory};
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn the_last_word_is_aligned_and_within_the_copy() {
        for end in 1..100 {
            for len in 1..=end {
                let size = last_word(end, len);
                assert!(end % size == 0 && size <= len && size <= 8, "{size} of {len} up to {end}");
                let larger = 2 * size;
                assert!(end % larger != 0 || larger > len || larger > 8, "{size} of {len} up to {end}");
            }
        }
    }

    /// Copies every length around words and cache lines, at every alignment of both sides. Bytes beside the copy must not
    /// change.
    #[test]
    fn all_lengths_and_alignments_are_copied_and_nothing_else() {
        let m = Mapping::anonymous(4096).unwrap();
        for len in (0..=80).chain([127, 128, 129, 1000]) {
            for at in 64..72 {
                for skew in 0..8 {
                    let bytes: Vec<u8> = (0..skew + len).map(|i| (i * 7 + len) as u8 | 1).collect();
                    m.zero(0, 4096);
                    m.write_release(at, &bytes[skew..]);
                    let mut all = vec![0xff; 4096];
                    m.read(0, &mut all);
                    assert_eq!(&all[at..at + len], &bytes[skew..], "{len} bytes to {at}");
                    let beside = all[..at].iter().chain(&all[at + len..]);
                    assert!(beside.copied().all(|byte| byte == 0), "{len} bytes to {at}");

                    let mut back = vec![0xee; skew + len + 1];
                    m.read_acquire(at, &mut back[skew..skew + len]);
                    assert_eq!(&back[skew..skew + len], &bytes[skew..], "{len} bytes from {at}");
                    assert!(back[..skew].iter().chain(&back[skew + len..]).all(|byte| *byte == 0xee));
                }
            }
        }
    }

    #[test]
    fn overlapping_runs_are_copied_as_they_were() {
        let m = Mapping::anonymous(4096).unwrap();
        let bytes: Vec<u8> = (0..255).collect();
        for len in (1..=80).chain([150]) {
            for (from, to) in (0..20).flat_map(|a| (0..20).map(move |b| (a, b))) {
                m.write(0, &bytes);
                // SAFETY: both runs are inside the mapping.
                unsafe { m.write_release_from(to, m.pointer(from, len), len) };
                let mut back = vec![0; len];
                m.read(to, &mut back);
                assert_eq!(back, &bytes[from..from + len], "{len} bytes from {from} to {to}");

                m.write(0, &bytes);
                // SAFETY: both runs are inside the mapping, and there is no reference to the bytes that are stored to.
                unsafe { m.read_acquire_to(from, m.pointer(to, len), len) };
                m.read(to, &mut back);
                assert_eq!(back, &bytes[from..from + len], "{len} bytes from {from} to {to}");
            }
        }
    }

    /// A reader that polls the last byte finds the other bytes in their places.
    #[test]
    fn the_last_byte_comes_last() {
        for len in [2, 3, 8, 16, 24, 63, 64, 65, 72, 100, 4097] {
            for at in [64, 65, 68] {
                let m = Mapping::anonymous(16 << 10).unwrap();
                let poller = m.clone();
                let poll = thread::spawn(move || {
                    let mut bytes = vec![0; len];
                    for round in 1..=200u8 {
                        loop {
                            poller.read(at + len - 1, &mut bytes[..1]);
                            if bytes[0] == round {
                                break;
                            }
                            thread::yield_now();
                        }
                        std::sync::atomic::fence(Ordering::Acquire);
                        poller.read(at, &mut bytes);
                        assert!(bytes.iter().all(|byte| *byte == round), "{len} bytes at {at}: {bytes:?}");
                        poller.store_release_u64(0, round.into());
                    }
                });
                for round in 1..=200u8 {
                    m.write_release(at, &vec![round; len]);
                    while m.load_acquire_u64(0) != u64::from(round) && !poll.is_finished() {
                        thread::yield_now();
                    }
                }
                poll.join().unwrap();
            }
        }
    }

    /// A copy that contains the new last word contains all the new bytes.
    #[test]
    fn a_copy_with_the_new_last_word_is_complete() {
        let m = Arc::new(Mapping::anonymous(4096).unwrap());
        let writer = m.clone();
        let len = 72;
        let writes = thread::spawn(move || {
            for round in 1..=20_000u64 {
                writer.write_release(64, &round.to_ne_bytes().repeat(len / 8));
            }
        });
        let mut bytes = vec![0; len];
        let mut last = 0;
        while last < 20_000 {
            m.read_acquire(64, &mut bytes);
            let word = |i: usize| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
            last = word(len / 8 - 1);
            assert!(
                (0..len / 8).all(|i| word(i) >= last),
                "an older word beside a newer last one: {bytes:?}"
            );
        }
        writes.join().unwrap();
    }

    #[test]
    fn a_copy_outside_of_the_mapping_panics() {
        let m = Mapping::anonymous(4096).unwrap();
        assert!(std::panic::catch_unwind(|| m.write_release(4090, &[1; 7])).is_err());
        assert!(std::panic::catch_unwind(|| m.read_acquire(4090, &mut [1; 7])).is_err());
        assert!(std::panic::catch_unwind(|| m.write_release(usize::MAX, &[1; 7])).is_err());
        m.write_release(4096, &[]);
    }
}
