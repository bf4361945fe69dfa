//! Values that say whose they are, so that a wrong, torn or old one is noticed.
#![allow(dead_code)] // Each test uses its part.

use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_layout::cache::Shape;
use ginnel_shmem::{Mapping, SharedMemory};

/// A small cache: four log segments or a few more, and few buckets.
pub fn shape(len: usize) -> Shape {
    let shape = plan(len, 1500, 150).unwrap();
    assert!(shape.segments >= 4, "{shape:?}");
    shape
}

pub fn create<M: SharedMemory>(memory: M, len: usize) -> Store<M> {
    Store::create(memory, shape(len), [1, 2], 1000).unwrap()
}

pub fn memory(len: usize) -> Mapping {
    Mapping::anonymous(len).unwrap()
}

/// The key of a number.
pub fn key(number: u16) -> Vec<u8> {
    let mut key = format!("key-{number}-").into_bytes();
    key.resize(key.len() + usize::from(number % 40), b'k');
    key
}

/// A value of `len` bytes, at least 20, for a key: the key's number, a number that tells values of the key apart, and a sum of all.
pub fn value(number: u16, which: u64, len: usize) -> Vec<u8> {
    let mut value = vec![0; len.max(20)];
    value[..2].copy_from_slice(&number.to_le_bytes());
    value[2..10].copy_from_slice(&which.to_le_bytes());
    for (i, byte) in value.iter_mut().enumerate().skip(18) {
        *byte = ((i as u64 * 131) ^ (which * 7) ^ u64::from(number)) as u8;
    }
    let sum = sum(&value);
    value[10..18].copy_from_slice(&sum.to_le_bytes());
    value
}

/// Which of its values a key has. Panics if it is none.
pub fn which(number: u16, value: &[u8]) -> u64 {
    assert!(value.len() >= 20, "a value of {} bytes", value.len());
    assert_eq!(value[..2], number.to_le_bytes(), "a value of another key");
    let which = u64::from_le_bytes(value[2..10].try_into().unwrap());
    assert_eq!(value[10..18], sum(value).to_le_bytes(), "a torn value");
    which
}

fn sum(value: &[u8]) -> u64 {
    let bytes = value.iter().enumerate().filter(|(i, _)| !(10..18).contains(i));
    bytes.fold(value.len() as u64, |sum, (_, byte)| sum.rotate_left(5).wrapping_mul(31) ^ u64::from(*byte))
}
