//! How a block of a given size is divided into the parts of a cache.

use ginnel_layout::cache::{self, LEAST_SEGMENT, MOST_SEGMENT, Shape};

/// The least number of log segments with which a store works: one that is written to in each of the two queues, one to
/// which items are moved, and one more.
pub const LEAST_SEGMENTS: usize = 4;

/// Why a block cannot be a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotShaped {
    /// The block is too small: its length, and the size of the largest items, in bytes.
    #[error(
        "{0} bytes are too few for a cache whose items may have {1} bytes; give it more memory, or allow smaller items only"
    )]
    TooSmall(usize, usize),
    /// The largest items would exceed [`MOST_SEGMENT`]: their size, in bytes.
    #[error("items of {0} bytes are too large; a cache can have items of up to {max} bytes", max = MOST_SEGMENT)]
    ItemTooLarge(usize),
}

/// The highest size of a log segment, in bytes, unless items may be larger. It is limited because emptying a segment takes
/// time.
const USUAL_SEGMENT: usize = 4 << 20;

/// Divides a block of `len` bytes for items of up to `largest` bytes, which include the key and
/// [`item::BYTES`](cache::item::BYTES) of overhead. `usual` is the average length of key and value together, in bytes.
pub fn plan(len: usize, largest: usize, usual: usize) -> Result<Shape, NotShaped> {
    if largest > MOST_SEGMENT {
        return Err(NotShaped::ItemTooLarge(largest));
    }
    let too_small = NotShaped::TooSmall(len, largest);
    // Small segments are emptied sooner, and large segments waste less room at their ends.
    let segment = (len / 256).next_power_of_two() / 2;
    let segment = segment.min(USUAL_SEGMENT).max(largest.next_power_of_two()).max(LEAST_SEGMENT);
    let items = len / cache::item::room(0, usual.max(1));
    // Each item has two buckets to choose from, so three quarters of all slots can be used without evictions.
    let buckets = (items / cache::SLOTS * 4 / 3).next_power_of_two().clamp(1, cache::MOST_BUCKETS);
    let rest = len.checked_sub(cache::LOGS + buckets * cache::BUCKET).ok_or(too_small)?;
    let mut segments = (rest / (segment + cache::LOG)).min(cache::MOST_SEGMENTS);
    // Each part begins at a page boundary, so fewer segments may fit than estimated.
    while segments >= LEAST_SEGMENTS {
        if let Some(shape) = Shape::new(segments as u64, segment as u64, buckets as u64, len) {
            return Ok(shape);
        }
        segments -= 1;
    }
    Err(too_small)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_used_but_for_a_little() {
        for len in [1 << 20, 64 << 20, (64 << 20) + 12_345, 1 << 30, 64 << 30] {
            for largest in [1000, 100_000, 1 << 20] {
                let Ok(shape) = plan(len, largest, 150) else {
                    assert!(len < 8 * (largest + 1000));
                    continue;
                };
                assert!(
                    shape.len() <= len && len - shape.len() < shape.segment + 3 * 4096,
                    "{len} {largest} {shape:?}"
                );
                assert!(shape.segment >= largest);
                assert!(shape.segments >= LEAST_SEGMENTS);
            }
        }
    }

    #[test]
    fn a_size_that_is_too_small_or_too_large_is_named() {
        assert_eq!(plan(1 << 20, 1 << 20, 100), Err(NotShaped::TooSmall(1 << 20, 1 << 20)));
        assert_eq!(plan(1 << 40, (1 << 30) + 1, 100), Err(NotShaped::ItemTooLarge((1 << 30) + 1)));
        assert!(plan(0, 1, 1).is_err() && plan(usize::MAX, 1, 1).is_ok());
    }
}
