//! Where items lie: log segments, in two queues.
//!
//! Items are written one after the other into the newest segment of a queue, and room is made by emptying the oldest one: what is worth
//! keeping moves to the newest segment of the main queue. So memory has no size classes and no gaps between them, and a segment becomes free
//! as a whole. It is emptied in steps of one item, ahead of need. In memory, a segment that is being emptied is like any other: a successor
//! begins with it anew.

use std::collections::VecDeque;

use ginnel_layout::cache::{LIMIT, PRESSURE, Room, Shape, State, item, log};
use ginnel_shmem::SharedMemory;

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

/// A segment that is being emptied. It takes no further items.
struct Emptying {
    queue: Queue,
    segment: usize,
    /// The next item.
    at: usize,
}

/// A step of emptying a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// What lies here goes or moves. It has so much room.
    Item(Queue, usize, usize),
    /// The segment is free now.
    Emptied,
    /// There is none to be emptied.
    Nothing,
}

/// The log segments of a cache, by its server.
pub(crate) struct Log<M> {
    memory: M,
    shape: Shape,
    /// Segments that may be used at all.
    limit: usize,
    /// Segments above the limit that may still be used, since they were used when it was set.
    above: usize,
    /// Whether the last of these that became free was given up.
    gives_up: bool,
    emptying: Option<Emptying>,
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

impl<M: SharedMemory> Log<M> {
    /// What stands in memory: of a new cache, or of one whose server has ended. What makes no sense counts as free.
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
            // Of the free ones as well: no use of a segment has the number of another.
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

    /// How many segments may still be taken.
    pub fn free(&self) -> usize {
        self.free.len().min((self.limit + self.above).saturating_sub(self.used()))
    }

    /// Whether a segment is to be emptied, so that one is free when it is needed.
    pub fn is_short(&self) -> bool {
        // The last one is for items that move while one is emptied, another one for new items. Where one more is little, it makes it seldom that a
        // whole segment has to be emptied for an item.
        let enough = 2 + (self.limit / 64).min(2);
        self.free() < enough || self.used() > self.limit
    }

    /// Uses so many segments from now on, once further ones have been emptied.
    pub fn set_limit(&mut self, segments: usize) {
        // One more than are used, for items that move.
        let until_now = (self.limit + self.above).min(self.used() + 1);
        self.limit = segments.clamp(1, self.shape.segments);
        self.above = until_now.saturating_sub(self.limit);
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
        self.small.len() + self.main.len() + usize::from(self.emptying.is_some())
    }

    /// Bytes of items that have not gone.
    pub fn live_bytes(&self) -> usize {
        let emptying = self.emptying.as_ref().map(|emptying| &emptying.segment);
        let segments = self.small.iter().chain(&self.main).chain(emptying);
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

    /// The segment that is to be emptied next. `ahead`: not one that still takes items.
    fn oldest(&self, ahead: bool) -> Option<(Queue, usize)> {
        // One of which most is dead costs little to empty, and nothing has to go.
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

    /// The next step of emptying a segment: the one that is being emptied, or the one that is next. `ahead`: not one that still takes items.
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
            // Only somebody else can have written anything else there; then all that comes behind is lost.
            let room = if is_room { room } else { left };
            *at += room;
            return Step::Item(*queue, from, room);
        }
        let segment = *segment;
        // No slot names anything in it any more.
        self.memory.store_release_u64(self.shape.log(segment) + log::STATE, State::FREE.0);
        self.emptying = None;
        self.free.push(segment);
        // While there are too many, every other one is given up, and the rest may be used again.
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
