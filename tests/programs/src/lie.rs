//! What a hostile member writes.

use kit::random::Random;

/// Returns a word as an attacker would write it: close to the current value, small, large, or random.
pub fn lie(random: &mut Random, now: u64) -> u64 {
    match random.below(7) {
        0 => 0,
        1 => u64::MAX,
        2 => now.wrapping_add(random.below(9)).wrapping_sub(4),
        3 => now.wrapping_add(random.below(8192)).wrapping_sub(4096),
        4 => random.below(4),
        5 => now ^ 1 << random.below(64),
        _ => random.next(),
    }
}
