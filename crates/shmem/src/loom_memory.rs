//! Memory for the loom model checker.

use crate::Memory;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// A run of 64-bit words that loom explores. 32-bit words occupy a 64-bit one (at multiples of eight); bulk copies go
/// word by word without ordering, so a missing release or acquire shows as an old value.
#[derive(Clone)]
pub struct LoomMemory(Arc<Vec<AtomicU64>>);

impl LoomMemory {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        Self(Arc::new((0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect()))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at % 8 == 0, "misaligned word");
        &self.0[at / 8]
    }
}

impl Memory for LoomMemory {
    fn len(&self) -> usize {
        self.0.len() * 8
    }
    fn load_relaxed_u32(&self, at: usize) -> u32 {
        self.load_relaxed_u64(at) as u32
    }
    fn load_acquire_u32(&self, at: usize) -> u32 {
        self.load_acquire_u64(at) as u32
    }
    fn store_relaxed_u32(&self, at: usize, value: u32) {
        self.store_relaxed_u64(at, value.into());
    }
    fn store_release_u32(&self, at: usize, value: u32) {
        self.store_release_u64(at, value.into());
    }
    fn load_relaxed_u64(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn load_acquire_u64(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }
    fn store_relaxed_u64(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn store_release_u64(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }
    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        for (i, chunk) in into.chunks_mut(8).enumerate() {
            let word = self.load_relaxed_u64(at + 8 * i).to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
    fn write(&self, at: usize, from: &[u8]) {
        for (i, chunk) in from.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.store_relaxed_u64(at + 8 * i, u64::from_ne_bytes(word));
        }
    }
}
