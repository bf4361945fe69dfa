//! Memory of a process that is killed, for tests of several crates: they include this file by its path.
//!
//! A killed process has done all its stores up to some point and none after it. So this memory takes a given number of
//! stores, and ignores all later ones. What a process does elsewhere (it saves a cursor, rings a doorbell) can be counted
//! as a store with [`Mortal::stores`].
#![allow(dead_code)] // Each test uses its part.

use ginnel_shmem::{Mapping, SharedMemory};
use std::cell::Cell;
use std::rc::Rc;

/// Memory of a process that dies.
#[derive(Clone)]
pub struct Mortal {
    memory: Mapping,
    /// Stores that the process still does.
    left: Rc<Cell<u64>>,
    /// What is called in the place of its death.
    then: Option<Rc<dyn Fn()>>,
}

impl Mortal {
    /// Memory of a process that does so many stores.
    pub fn new(memory: &Mapping, stores: u64) -> Self {
        Self { memory: memory.clone(), left: Rc::new(Cell::new(stores)), then: None }
    }

    /// Memory of a process that calls `then` before the store after so many, and lives on.
    pub fn interrupted(memory: &Mapping, stores: u64, then: impl Fn() + 'static) -> Self {
        Self { then: Some(Rc::new(then)), ..Self::new(memory, stores) }
    }

    /// Other memory of the same process.
    pub fn other(&self, memory: &Mapping) -> Self {
        Self { memory: memory.clone(), ..self.clone() }
    }

    /// A part of it, or `None` if that is not inside.
    pub fn part(&self, at: usize, len: usize) -> Option<Self> {
        self.memory.part(at, len).map(|part| self.other(&part))
    }

    /// Counts one store. Whether the process lives to do it.
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

    /// Whether the process has done its last store.
    pub fn is_dead(&self) -> bool {
        self.left.get() == 0
    }

    /// From now on it does as many stores as it wants to.
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

// What a dead process finds does not matter, as long as it does not loop for ever.
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
