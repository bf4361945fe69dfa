//! Statistics of a cache as a whole, for processes that only read it.

use ginnel_layout::cache::{CLOCK, LIMIT, PRESSURE, SERVER, SLOTS, Shape, State, log};
use ginnel_shmem::SharedMemory;

/// Log segments with the same purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The number of segments.
    pub segments: usize,
    /// The bytes in them that have, or had, items.
    pub bytes: u64,
}

/// Statistics of a cache. The cache changes while they are read, and a hostile member may have written any values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The parts of the cache's block.
    pub shape: Shape,
    /// The most log segments that the server uses.
    pub limit: u64,
    /// Segments without items.
    pub free: Part,
    /// Segments of new items.
    pub small: Part,
    /// Segments of items that were used again.
    pub main: Part,
    /// The number of items, including expired ones: slots that name an item.
    pub items: u64,
    /// The number of servers so far.
    pub servers: u64,
    /// The milliseconds since the cache was created during which a server was alive.
    pub clock: u64,
    /// The server is short of memory.
    pub is_pressed: bool,
}

/// Reads all words of a cache, but not its items.
pub(crate) fn survey(memory: &impl SharedMemory, shape: Shape) -> Survey {
    let word = |at| memory.load_relaxed_u64(at);
    let (mut free, mut small, mut main) = (Part::default(), Part::default(), Part::default());
    for segment in 0..shape.segments {
        let at = shape.log(segment);
        let part = match State(word(at + log::STATE)) {
            State::SMALL => &mut small,
            State::MAIN => &mut main,
            _ => &mut free,
        };
        part.segments += 1;
        part.bytes += word(at + log::USED).min(shape.segment as u64);
    }
    free.bytes = 0;
    let slots = 0..shape.buckets * SLOTS;
    Survey {
        shape,
        limit: word(LIMIT),
        free,
        small,
        main,
        items: slots.filter(|slot| word(shape.bucket(0) + slot * 8) != 0).count() as u64,
        servers: word(SERVER),
        clock: word(CLOCK),
        is_pressed: word(PRESSURE) != 0,
    }
}
