//! What can be seen of a cache as a whole, by somebody who only reads it.

use ginnel_layout::cache::{CLOCK, LIMIT, PRESSURE, SERVER, SLOTS, Shape, State, log};
use ginnel_shmem::SharedMemory;

/// Log segments that are for the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// How many there are.
    pub segments: usize,
    /// Bytes of them that have items, or had some.
    pub bytes: u64,
}

/// How a cache looks. It changes while it is looked at, and somebody may have written anything there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The parts of its block.
    pub shape: Shape,
    /// How many log segments the server uses at most.
    pub limit: u64,
    /// Those that have no item.
    pub free: Part,
    /// Those of items that are new.
    pub small: Part,
    /// Those of items that were used again.
    pub main: Part,
    /// Items, those included whose time has come: slots that name one.
    pub items: u64,
    /// How many servers there have been.
    pub servers: u64,
    /// Milliseconds since it was made, while a server lived.
    pub clock: u64,
    /// Whether the server is short of memory.
    pub is_pressed: bool,
}

/// Looks at all words of a cache, but not at its items.
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
