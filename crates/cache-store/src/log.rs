//! Where items lie: log segments, in two queues.
//!
//! Items are written one after the other into the newest segment of a queue, and room is made by emptying the oldest one: what is worth
//! keeping moves to the newest segment of the main queue. So memory has no size classes and no gaps between them, and a segment becomes free
//! as a whole.

use std::collections::VecDeque;

use ginnel_layout::cache::{LIMIT, PRESSURE, Room, Shape, State, item, log};
use ginnel_shmem::Memory;

/// A queue of log segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// For items that are new.
    Small,
    /// For items that were used again.
    Main,
}

impl Queue {
    fn state(self) -> State {
        match self {
            Self::Small => State::SMALL,
            Self::Main => State::MAIN,
        }
    }
}

/// The log segments of a cache, by its server.
pub(crate) struct Log<M> {
    memory: M,
    shape: Shape,
    /// Segments that may be used at all.
    limit: usize,
    free: Vec<usize>,
    /// From the oldest to the newest.
    small: VecDeque<usize>,
    main: VecDeque<usize>,
    /// Bytes that have items, by segment.
    used: Vec<usize>,
    /// Bytes whose items have gone, by segment, as far as this server knows.
    dead: Vec<usize>,
    sequence: u64,
}

impl<M: Memory> Log<M> {
    /// What stands in memory: of a new cache, or of one whose server has ended. What makes no sense counts as free.
    pub fn new(memory: M, shape: Shape) -> Self {
        let limit = memory.load_relaxed_u64(LIMIT).clamp(1, shape.segments as u64) as usize;
        let mut log = Self {
            memory,
            shape,
            limit,
            free: Vec::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            used: vec![0; shape.segments],
            dead: vec![0; shape.segments],
            sequence: 0,
        };
        let mut found = Vec::new();
        for segment in (0..shape.segments).rev() {
            let word = |word| log.memory.load_acquire_u64(shape.log(segment) + word);
            let (state, sequence, used) = (State(word(log::STATE)), word(log::SEQUENCE), word(log::USED));
            match state {
                State::SMALL | State::MAIN if used <= shape.segment as u64 => {
                    found.push((sequence, segment, state));
                    log.used[segment] = used as usize;
                }
                _ => log.free.push(segment),
            }
        }
        found.sort_unstable_by_key(|(sequence, segment, _)| (*sequence, *segment));
        log.sequence = found.last().map_or(0, |(sequence, ..)| *sequence);
        for (_, segment, state) in found {
            let queue = if state == State::SMALL { Queue::Small } else { Queue::Main };
            log.queue(queue).push_back(segment);
        }
        log.say_pressure();
        log
    }

    fn queue(&mut self, queue: Queue) -> &mut VecDeque<usize> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// How many segments may still be taken.
    pub fn free(&self) -> usize {
        self.free.len().min(self.limit.saturating_sub(self.small.len() + self.main.len()))
    }

    /// Uses so many segments from now on, once further ones have been emptied.
    pub fn set_limit(&mut self, segments: usize) {
        self.limit = segments.clamp(1, self.shape.segments);
        self.memory.store_relaxed_u64(LIMIT, self.limit as u64);
        self.say_pressure();
    }

    /// Whether items will have to go soon, so that it matters which are used: most of the segments that may be used are used.
    fn say_pressure(&self) {
        let is_pressed = self.used() * 5 >= self.limit * 4;
        self.memory.store_relaxed_u64(PRESSURE, u64::from(is_pressed));
    }

    /// How many segments are used at most.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How many are used.
    pub fn used(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Bytes of items that have not gone.
    pub fn live_bytes(&self) -> usize {
        let segments = self.small.iter().chain(&self.main);
        segments.map(|segment| self.used[*segment].saturating_sub(self.dead[*segment])).sum()
    }

    /// Room for an item at the end of a queue, in a segment that may be a new one. `None` if none is free.
    pub fn take(&mut self, queue: Queue, room: usize) -> Option<usize> {
        if let Some(at) = self.take_of_newest(queue, room) {
            return Some(at);
        }
        if self.free() == 0 || room > self.shape.segment {
            return None;
        }
        let segment = self.free.pop()?;
        // What stood in memory may be anything.
        self.sequence = self.sequence.wrapping_add(1);
        (self.used[segment], self.dead[segment]) = (0, 0);
        let at = self.shape.log(segment);
        self.memory.store_relaxed_u64(at + log::SEQUENCE, self.sequence);
        self.memory.store_relaxed_u64(at + log::USED, 0);
        // For a successor. A kill between two of these stores leaves a segment that is free, or one without items.
        self.memory.store_release_u64(at + log::STATE, queue.state().0);
        self.queue(queue).push_back(segment);
        self.say_pressure();
        Some(self.shape.segment(segment))
    }

    /// The same, but not in a new segment.
    pub fn take_of_newest(&mut self, queue: Queue, room: usize) -> Option<usize> {
        let segment = *self.queue(queue).back()?;
        let fits = self.used[segment] + room <= self.shape.segment;
        fits.then(|| self.shape.segment(segment) + self.used[segment])
    }

    /// The item that was taken room for is there, with the word that says how much room it has.
    pub fn add(&mut self, at: usize, room: usize) {
        if let Some((segment, _)) = self.shape.place(at as u64) {
            self.used[segment] = at - self.shape.segment(segment) + room;
            self.memory.store_release_u64(self.shape.log(segment) + log::USED, self.used[segment] as u64);
        }
    }

    /// An item has gone.
    pub fn remove(&mut self, at: usize) {
        if let Some((segment, _)) = self.shape.place(at as u64) {
            let room = Room(self.memory.load_relaxed_u64(at + item::ROOM));
            self.dead[segment] += room.bytes().min(self.shape.segment);
        }
    }

    /// The segment that is to be emptied next.
    pub fn oldest(&mut self) -> Option<(Queue, usize)> {
        // One of which most is dead costs little to empty, and nothing has to go.
        let sealed = |queue: &VecDeque<usize>| queue.len().saturating_sub(1);
        let mostly_dead = |segment: &&usize| self.dead[**segment] > self.shape.segment / 4 * 3;
        for (queue, segments) in [(Queue::Small, &self.small), (Queue::Main, &self.main)] {
            if let Some(segment) = segments.iter().take(sealed(segments)).find(mostly_dead) {
                return Some((queue, *segment));
            }
        }
        // A tenth of the memory is for items that were not used again.
        let is_small_long = self.small.len() > (self.limit / 10).max(1);
        let of_small = self.small.front().map(|segment| (Queue::Small, *segment));
        let of_main = self.main.front().map(|segment| (Queue::Main, *segment));
        if is_small_long || sealed(&self.main) == 0 { of_small.or(of_main) } else { of_main }
    }

    /// Where the items of a segment lie, from the first on.
    pub fn items(&self, segment: usize) -> Vec<usize> {
        let first = self.shape.segment(segment);
        let (mut at, end) = (first, first + self.used[segment]);
        let mut items = Vec::new();
        while end - at >= item::BYTES {
            items.push(at);
            let room = Room(self.memory.load_relaxed_u64(at + item::ROOM)).bytes();
            // Only somebody else can have written anything else there; then all that comes behind is lost.
            if room < item::BYTES || room > end - at || !room.is_multiple_of(8) {
                break;
            }
            at += room;
        }
        items
    }

    /// A segment is about to be emptied: it takes no further items.
    pub fn withdraw(&mut self, segment: usize) {
        self.small.retain(|one| *one != segment);
        self.main.retain(|one| *one != segment);
    }

    /// No slot names anything any more in a segment that was withdrawn.
    pub fn release(&mut self, segment: usize) {
        self.memory.store_release_u64(self.shape.log(segment) + log::STATE, State::FREE.0);
        self.free.push(segment);
    }
}
