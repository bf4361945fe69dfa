//! Randomness of the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns sixteen bytes that nobody can guess.
pub fn bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    loop {
        // This fails only when it is interrupted.
        if getrandom(&mut bytes, GetRandomFlags::empty()) == Ok(bytes.len()) {
            return bytes;
        }
    }
}
