//! Values that contain their key's number, a number of their own and a checksum, so that wrong, torn and old values are
//! detected.
#![allow(dead_code)] // Each test file uses only a part of this module.

use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_layout::cache::Shape;
use ginnel_shmem::{Mapping, SharedMemory};

/// Returns the layout of a small cache, with at least four log segments and few buckets.
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

/// Returns the key with a number.
pub fn key(number: u16) -> Vec<u8> {
    let mut key = format!("key-{number}-").into_bytes();
    key.resize(key.len() + usize::from(number % 40), b'k');
    key
}

/// Returns a value of `len` bytes, but at least 20. It contains the key's number, a number that distinguishes the values of
/// the key, and a checksum.
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

/// Returns the number that distinguishes this value from other values of the key. Panics if it is not a value of the key.
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
