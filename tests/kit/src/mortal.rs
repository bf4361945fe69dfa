//! The memory of a process that is killed.
//!
//! A killed process has done all its stores up to some point and none after it. Therefore this memory accepts a given number of stores,
//! and ignores all later ones. Other actions of the process (it saves a cursor, rings a doorbell) can be counted as stores with
//! [`Mortal::stores`].

use ginnel_shmem::{Mapping, SharedMemory};
use std::cell::Cell;
use std::rc::Rc;

/// The memory of a process that will be killed.
#[derive(Clone)]
pub struct Mortal {
    memory: Mapping,
    /// Number of stores that the process still does.
    left: Rc<Cell<u64>>,
    /// A function that is called instead of killing the process.
    then: Option<Rc<dyn Fn()>>,
}

impl Mortal {
    /// Returns the memory of a process that is killed after `stores` stores.
    pub fn new(memory: &Mapping, stores: u64) -> Self {
        Self { memory: memory.clone(), left: Rc::new(Cell::new(stores)), then: None }
    }

    /// Returns the memory of a process that calls `then` after `stores` stores, and lives on.
    pub fn interrupted(memory: &Mapping, stores: u64, then: impl Fn() + 'static) -> Self {
        Self { then: Some(Rc::new(then)), ..Self::new(memory, stores) }
    }

    /// Returns other memory of the same process.
    pub fn other(&self, memory: &Mapping) -> Self {
        Self { memory: memory.clone(), ..self.clone() }
    }

    /// Returns a part of the memory, or `None` if it is not inside.
    pub fn part(&self, at: usize, len: usize) -> Option<Self> {
        self.memory.part(at, len).map(|part| self.other(&part))
    }

    /// Counts one store. Returns whether the process lives long enough to do it.
    pub fn stores(&self) -> bool {
        let mut left = self.left.get();
        if left == 0
            && let Some(then) = &self.then
        {
            left = u64::MAX;
            then();
        }
        self.left.set(left.saturating_sub(1));
        left > 0
    }

    /// Returns whether the process has done its last store.
    pub fn is_dead(&self) -> bool {
        self.left.get() == 0
    }

    /// Lets the process do any number of stores from now on.
    pub fn live_on(&self) {
        self.left.set(u64::MAX);
    }
}

macro_rules! words {
    ($($type:ty: $load_relaxed:ident $load_acquire:ident $store_relaxed:ident $store_release:ident)*) => {$(
        fn $load_relaxed(&self, at: usize) -> $type { self.memory.$load_relaxed(at) }
        fn $load_acquire(&self, at: usize) -> $type { self.memory.$load_acquire(at) }
        fn $store_relaxed(&self, at: usize, value: $type) {
            if self.stores() { self.memory.$store_relaxed(at, value) }
        }
        fn $store_release(&self, at: usize, value: $type) {
            if self.stores() { self.memory.$store_release(at, value) }
        }
    )*};
}

// The values that a dead process loads do not matter, as long as it does not loop for ever.
impl SharedMemory for Mortal {
    fn len(&self) -> usize {
        self.memory.len()
    }
    words! {
        u16: load_relaxed_u16 load_acquire_u16 store_relaxed_u16 store_release_u16
        u32: load_relaxed_u32 load_acquire_u32 store_relaxed_u32 store_release_u32
        u64: load_relaxed_u64 load_acquire_u64 store_relaxed_u64 store_release_u64
    }
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        if self.stores() { self.memory.compare_exchange_u64(at, old, new) } else { Ok(()) }
    }
    fn swap_u64(&self, at: usize, value: u64) -> u64 {
        if self.stores() { self.memory.swap_u64(at, value) } else { 0 }
    }
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64 {
        if self.stores() { self.memory.fetch_or_u64(at, bits) } else { 0 }
    }
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64 {
        if self.stores() { self.memory.fetch_and_u64(at, bits) } else { 0 }
    }
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32 {
        if self.stores() { self.memory.fetch_add_u32(at, value) } else { 0 }
    }
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64 {
        if self.stores() { self.memory.fetch_add_u64(at, value) } else { 0 }
    }
    fn full_fence(&self) {
        self.memory.full_fence();
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        self.memory.read(at, into);
    }
    fn write(&self, at: usize, from: &[u8]) {
        if self.stores() {
            self.memory.write(at, from);
        }
    }
    fn read_acquire(&self, at: usize, into: &mut [u8]) {
        self.memory.read_acquire(at, into);
    }
    fn write_release(&self, at: usize, from: &[u8]) {
        if self.stores() {
            self.memory.write_release(at, from);
        }
    }
}
