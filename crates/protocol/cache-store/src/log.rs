//! The log segments that hold the items, in two queues.
//!
//! Items are written one after the other into the newest segment of a queue. Room is made by emptying the oldest
//! segment: items worth keeping move to the newest segment of the main queue. So memory has no size classes and no
//! gaps between them, and a segment becomes free as a whole. It is emptied in steps of one item, ahead of need. In
//! memory, a segment that is being emptied looks like any other, so a successor starts emptying it again from the
//! beginning.

use ginnel_layout::cache::{LIMIT, PRESSURE, Room, Shape, State, item, log};
use ginnel_shmem::SharedMemory;
use std::collections::VecDeque;

/// A queue of log segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// The small queue, for new items.
    Small,
    /// The main queue, for items that were used again.
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

/// A segment that is being emptied. It takes no further items.
struct Emptying {
    queue: Queue,
    segment: usize,
    /// The offset of the next item.
    at: usize,
}

/// The result of one step of emptying a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// An item, with this much room, that is to be evicted or moved.
    Item(Queue, usize, usize),
    /// The segment is free now.
    Emptied,
    /// No segment is to be emptied.
    Nothing,
}

/// The log segments of a cache, as its server has them.
pub(crate) struct Log<M> {
    memory: M,
    shape: Shape,
    /// The number of segments that may be used.
    limit: usize,
    /// Segments above the limit that may still be used, because they were in use when the limit was set.
    above: usize,
    /// The last of these segments that became free was given up.
    gives_up: bool,
    emptying: Option<Emptying>,
    free: Vec<usize>,
    /// The segments of each queue, from the oldest to the newest.
    small: VecDeque<usize>,
    main: VecDeque<usize>,
    /// The bytes in use for items, by segment.
    used: Vec<usize>,
    /// The bytes of removed items, by segment, as far as this server knows.
    dead: Vec<usize>,
    sequence: u64,
}

impl<M: SharedMemory> Log<M> {
    /// Reads the state from memory, of a new cache or of one whose server has ended. Inconsistent segments count as
    /// free.
    pub fn new(memory: M, shape: Shape) -> Self {
        let limit = memory.load_relaxed_u64(LIMIT).clamp(1, shape.segments as u64) as usize;
        let mut log = Self {
            memory,
            shape,
            limit,
            above: 0,
            gives_up: false,
            emptying: None,
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
            // This includes the free segments: no two uses of a segment may have the same number.
            log.sequence = log.sequence.max(sequence);
            match state {
                State::SMALL | State::MAIN if used <= shape.segment as u64 && used.is_multiple_of(8) => {
                    found.push((sequence, segment, state));
                    log.used[segment] = used as usize;
                }
                _ => log.free.push(segment),
            }
        }
        found.sort_unstable_by_key(|(sequence, segment, _)| (*sequence, *segment));
        for (_, segment, state) in found {
            let queue = if state == State::SMALL { Queue::Small } else { Queue::Main };
            log.queue(queue).push_back(segment);
        }
        log.above = log.used().saturating_sub(limit);
        log.say_pressure();
        log
    }

    fn queue(&mut self, queue: Queue) -> &mut VecDeque<usize> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Returns how many segments may still be taken.
    pub fn free(&self) -> usize {
        self.free.len().min((self.limit + self.above).saturating_sub(self.used()))
    }

    /// Returns whether a segment must be emptied so that one is free when it is needed.
    pub fn is_short(&self) -> bool {
        // The last free segment is for items that move while one is emptied, and another one is for new items. Where
        // one more costs little, it makes it rare that storing an item has to empty a whole segment.
        let enough = 2 + (self.limit / 64).min(2);
        self.free() < enough || self.used() > self.limit
    }

    /// Sets the number of segments to use. Excess segments are given up once they have been emptied.
    pub fn set_limit(&mut self, segments: usize) {
        // One more than are used, for items that move.
        let until_now = (self.limit + self.above).min(self.used() + 1);
        self.limit = segments.clamp(1, self.shape.segments);
        self.above = until_now.saturating_sub(self.limit);
        self.memory.store_relaxed_u64(LIMIT, self.limit as u64);
        self.say_pressure();
    }

    /// Returns whether items will have to be evicted soon, so that it matters which are used: most of the allowed
    /// segments are in use.
    fn say_pressure(&self) {
        let is_pressed = self.used() * 5 >= self.limit * 4;
        self.memory.store_relaxed_u64(PRESSURE, u64::from(is_pressed));
    }

    /// Returns the most segments that may be used.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of segments in use.
    pub fn used(&self) -> usize {
        self.small.len() + self.main.len() + usize::from(self.emptying.is_some())
    }

    /// Returns the bytes of all items that have not been removed.
    pub fn live_bytes(&self) -> usize {
        let emptying = self.emptying.as_ref().map(|emptying| &emptying.segment);
        let segments = self.small.iter().chain(&self.main).chain(emptying);
        segments.map(|segment| self.used[*segment].saturating_sub(self.dead[*segment])).sum()
    }

    /// Takes room for an item at the end of a queue, in a new segment if necessary. Returns `None` if no segment is
    /// free.
    pub fn take(&mut self, queue: Queue, room: usize) -> Option<usize> {
        if let Some(at) = self.take_of_newest(queue, room) {
            return Some(at);
        }
        if self.free() == 0 || room > self.shape.segment {
            return None;
        }
        let segment = self.free.pop()?;
        // The value in memory cannot be trusted.
        self.sequence = self.sequence.wrapping_add(1);
        (self.used[segment], self.dead[segment]) = (0, 0);
        let at = self.shape.log(segment);
        self.memory.store_relaxed_u64(at + log::SEQUENCE, self.sequence);
        self.memory.store_relaxed_u64(at + log::USED, 0);
        // These stores are for a successor. A kill between two of them leaves a free segment, or one without items.
        self.memory.store_release_u64(at + log::STATE, queue.state().0);
        self.queue(queue).push_back(segment);
        self.say_pressure();
        Some(self.shape.segment(segment))
    }

    /// Does the same, but takes no new segment.
    pub fn take_of_newest(&mut self, queue: Queue, room: usize) -> Option<usize> {
        let segment = *self.queue(queue).back()?;
        let fits = self.used[segment] + room <= self.shape.segment;
        fits.then(|| self.shape.segment(segment) + self.used[segment])
    }

    /// Counts an item that was written to the room taken for it, together with the word that contains the size of the
    /// room.
    pub fn add(&mut self, at: usize, room: usize) {
        if let Some((segment, _)) = self.shape.place(at as u64) {
            self.used[segment] = at - self.shape.segment(segment) + room;
            self.memory.store_release_u64(self.shape.log(segment) + log::USED, self.used[segment] as u64);
        }
    }

    /// Counts a removed item.
    pub fn remove(&mut self, at: usize) {
        if let Some((segment, _)) = self.shape.place(at as u64) {
            let room = Room(self.memory.load_relaxed_u64(at + item::ROOM));
            self.dead[segment] += room.bytes().min(self.shape.segment);
        }
    }

    /// Returns the segment that is to be emptied next. With `ahead`, a segment that still takes items is left out.
    fn oldest(&self, ahead: bool) -> Option<(Queue, usize)> {
        // A segment of mostly removed items costs little to empty, and no item has to be evicted.
        let sealed = |queue: &VecDeque<usize>| queue.len().saturating_sub(1);
        let mostly_dead = |segment: &&usize| self.dead[**segment] > self.shape.segment / 4 * 3;
        for (queue, segments) in [(Queue::Small, &self.small), (Queue::Main, &self.main)] {
            if let Some(segment) = segments.iter().take(sealed(segments)).find(mostly_dead) {
                return Some((queue, *segment));
            }
        }
        let first = |queue: &VecDeque<usize>| queue.front().filter(|_| !ahead || sealed(queue) > 0).copied();
        let of_small = first(&self.small).map(|segment| (Queue::Small, segment));
        let of_main = first(&self.main).map(|segment| (Queue::Main, segment));
        // A tenth of the memory is for items that were not used again.
        let is_small_long = self.small.len() > (self.limit / 10).max(1);
        if is_small_long || sealed(&self.main) == 0 { of_small.or(of_main) } else { of_main }
    }

    /// Does the next step of emptying the segment that is being emptied, or that is next. With `ahead`, a segment
    /// that still takes items is left out.
    pub fn step(&mut self, ahead: bool) -> Step {
        if self.emptying.is_none() {
            let Some((queue, segment)) = self.oldest(ahead) else { return Step::Nothing };
            self.queue(queue).retain(|one| *one != segment);
            self.emptying = Some(Emptying { queue, segment, at: self.shape.segment(segment) });
        }
        let Some(Emptying { queue, segment, at }) = &mut self.emptying else { return Step::Nothing };
        let (from, left) = (*at, (self.shape.segment(*segment) + self.used[*segment]).saturating_sub(*at));
        if left >= item::BYTES {
            let room = Room(self.memory.load_relaxed_u64(from + item::ROOM)).bytes();
            let is_room = room >= item::BYTES && room <= left && room.is_multiple_of(8);
            // Only another member can have written anything else here. Then everything behind it is lost.
            let room = if is_room { room } else { left };
            *at += room;
            return Step::Item(*queue, from, room);
        }
        let segment = *segment;
        // No slot names anything in the segment any more.
        self.memory.store_release_u64(self.shape.log(segment) + log::STATE, State::FREE.0);
        self.emptying = None;
        self.free.push(segment);
        // While too many segments are in use, every other freed one is given up, and the rest may be used again.
        self.gives_up = !self.gives_up;
        self.above = if self.used() <= self.limit {
            0
        } else {
            self.above - usize::from(self.gives_up).min(self.above)
        };
        self.say_pressure();
        Step::Emptied
    }
}
