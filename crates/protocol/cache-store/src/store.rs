//! The server's side of a cache: items, versions, and the clock.
//!
//! One thread of one process changes a cache. The block contains all that a successor needs, written in an order that
//! allows the server to be killed at any instruction: an item is complete before a slot names it, and a log segment
//! is free only once no slot names anything in it. So a successor reads the words of the log segments and continues,
//! without reading any item. An item that was being overwritten in place at that moment is lost.
//!
//! # Which items are evicted
//!
//! The algorithm is S3-FIFO (Yang and others, SOSP 2023). A new item enters a small queue, which has a tenth of the
//! memory. If the item has been used by the time it reaches the end, it moves to the main queue. Otherwise it is
//! evicted, and its hash is remembered for a while: if the item comes back, it enters the main queue at once. At the
//! end of the main queue, an item that was used enters it again, with a lower use count. A scan of items that are not
//! wanted again passes only through the small queue. Unlike an LRU list, this algorithm changes nothing when an item
//! is read. So it works with readers that cannot write, although only a sample of their hits counts as uses.

use crate::ghosts::Ghosts;
use crate::item::{Hasher, Item, Look, look, slots};
use crate::log::{Log, Queue, Step};
use crate::shape::LEAST_SEGMENTS;
use ginnel_layout::cache::{
    self, BOOT_TIME, BUCKETS, CLOCK, CONTACT, CONTACT_LEN, FLUSH_AT, FLUSHED, ID, KEY, LIMIT, Lengths, MAGIC,
    MOST_CONTACT, MOST_KEY, PRESSURE, READY, Room, SEGMENT, SEGMENTS, SERVER, Shape, Slot, VERSIONS, item,
    marks,
};
use ginnel_shmem::SharedMemory;

/// The number of versions that are given out between two records of the highest version.
const VERSIONS_AT_ONCE: u64 = 1 << 20;
/// The highest value of the clock, in milliseconds, because expiry times are seconds of 32 bits.
const MOST_CLOCK: u64 = u32::MAX as u64 / 2 * 1000;
/// The highest use count.
const MOST_USES: u8 = 3;
/// The number of items that are examined for eviction when one is stored.
const STEPS: usize = 16;
/// If an item's first bucket has this many empty slots, the second one need not be considered.
const SPARE: usize = 3;

/// Why a block contains no cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotACache {
    /// The block has no cache, or one of another version.
    #[error("there is no cache in this block, or one of another version")]
    Unknown,
    /// The cache's words are inconsistent.
    #[error("the words of this cache make no sense: somebody has written to its memory")]
    Corrupt,
}

/// Why an item was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// The key is empty or has more than 250 bytes.
    #[error("a key must have 1 to {MOST_KEY} bytes")]
    Key,
    /// The item has more bytes than an item may have.
    #[error("an item with its key must not have more than {0} bytes")]
    TooLarge(usize),
}

/// The properties of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The version, which changes with the value. No other version of any item has this number.
    pub version: u64,
    /// The client's flags.
    pub flags: u32,
    /// The second of the cache's clock at which the item expires; 0 = never.
    pub expiry: u32,
    /// The item's [`marks`].
    pub marks: u8,
    /// The length of the value, in bytes.
    pub len: usize,
}

/// The counters of a cache since its server was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Items that were evicted to make room.
    pub evictions: u64,
    /// Of these, items that were never used.
    pub unused: u64,
    /// Items that were evicted because their buckets were full.
    pub collisions: u64,
    /// Items that were moved.
    pub moves: u64,
}

/// A cache, as its server has it.
pub struct Store<M> {
    memory: M,
    shape: Shape,
    hasher: Hasher,
    log: Log<M>,
    ghosts: Ghosts,
    /// The number of slots that name an item.
    items: usize,
    version: u64,
    /// The highest version that may be given out before the next record.
    versions: u64,
    flushed: u64,
    /// The second at which all items expire; 0 = never.
    flush_at: u32,
    clock: u64,
    /// CLOCK_BOOTTIME when the clock was set.
    boot_time: u64,
    counters: Counters,
    /// Bytes that were stored while there was little free memory, less those that became free.
    behind: usize,
}

impl<M: SharedMemory> Store<M> {
    /// Creates a cache without items, in memory whose bytes are all zero or are those of an earlier cache. `key` is
    /// chosen at random; `boot_time` is CLOCK_BOOTTIME of this machine in milliseconds.
    pub fn create(memory: M, shape: Shape, key: [u64; 2], boot_time: u64) -> Result<Self, NotACache> {
        if shape.len() > memory.len() || shape.segments < LEAST_SEGMENTS {
            return Err(NotACache::Corrupt);
        }
        memory.store_release_u64(MAGIC, 0);
        memory.full_fence();
        for at in (shape.log(0)..shape.bucket(shape.buckets)).step_by(8) {
            memory.store_relaxed_u64(at, 0);
        }
        let id = Hasher::new(key).id();
        let words = [
            (SEGMENTS, shape.segments as u64),
            (SEGMENT, shape.segment as u64),
            (BUCKETS, shape.buckets as u64),
            (KEY, key[0]),
            (KEY + 8, key[1]),
            (ID, id[0]),
            (ID + 8, id[1]),
            (PRESSURE, 0),
            (CONTACT_LEN, 0),
            (CLOCK, 1000),
            (BOOT_TIME, boot_time),
            (FLUSHED, 0),
            (FLUSH_AT, 0),
            (VERSIONS, 0),
            (SERVER, 0),
            (LIMIT, shape.segments as u64),
        ];
        words.iter().for_each(|(at, value)| memory.store_relaxed_u64(*at, *value));
        // ORDER cache.ready: all of it before the word that says so. Pairs with: `shape_of`.
        memory.store_release_u64(MAGIC, READY);
        Self::open(memory, boot_time)
    }

    /// Continues a cache whose server has ended. The caller ensures that there is only one server at a time.
    pub fn open(memory: M, boot_time: u64) -> Result<Self, NotACache> {
        let shape = shape_of(&memory)?;
        if shape.segments < LEAST_SEGMENTS {
            return Err(NotACache::Corrupt);
        }
        let word = |at| memory.load_acquire_u64(at);
        let version = word(VERSIONS);
        if version > u64::MAX / 2 || word(CLOCK) > MOST_CLOCK {
            return Err(NotACache::Corrupt);
        }
        let items = (0..shape.buckets * cache::SLOTS)
            .filter(|slot| memory.load_relaxed_u64(shape.bucket(0) + slot * 8) != 0)
            .count();
        memory.store_relaxed_u64(SERVER, word(SERVER).wrapping_add(1));
        let mut store = Self {
            hasher: Hasher::of(&memory),
            log: Log::new(memory.clone(), shape),
            ghosts: Ghosts::new(shape.buckets * cache::SLOTS),
            items,
            version,
            versions: version,
            flushed: word(FLUSHED),
            flush_at: u32::try_from(word(FLUSH_AT)).unwrap_or(0),
            clock: word(CLOCK),
            boot_time: word(BOOT_TIME),
            counters: Counters::default(),
            behind: 0,
            memory,
            shape,
        };
        store.tick(boot_time);
        Ok(store)
    }

    /// Advances the clock by the time that has passed on this machine's CLOCK_BOOTTIME since the last call. If that
    /// clock has gone backwards, as after a reboot of the machine, it counts as one that has stopped.
    pub fn tick(&mut self, boot_time: u64) {
        // The value in memory is for a successor. It is not read here, because another member may have written there.
        let passed = boot_time.saturating_sub(std::mem::replace(&mut self.boot_time, boot_time));
        self.clock = self.clock.saturating_add(passed).min(MOST_CLOCK);
        self.memory.store_relaxed_u64(BOOT_TIME, boot_time);
        self.memory.store_release_u64(CLOCK, self.clock);
        if self.flush_at != 0 && self.flush_at <= self.second() {
            self.flush();
            // This comes last: a successor may do it again, but must not forget it.
            self.flush_later(0);
        }
    }

    /// Returns the cache's clock, in milliseconds.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Returns the parts of the block.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the memory of the cache.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the number of items, including expired ones.
    pub fn len(&self) -> usize {
        self.items
    }

    /// Returns whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.items == 0
    }

    /// Returns the bytes of all items, except those that this server knows to be removed.
    pub fn live_bytes(&self) -> usize {
        self.log.live_bytes()
    }

    /// Returns how many servers there have been, including this one.
    pub fn server(&self) -> u64 {
        self.memory.load_relaxed_u64(SERVER)
    }

    /// Returns the identifier of this cache, which no other cache has. Its successors have it too.
    pub fn id(&self) -> [u64; 2] {
        [0, 8].map(|word| self.memory.load_relaxed_u64(ID + word))
    }

    /// Publishes for readers where the server can be reached, one place on each line; see [`CONTACT`]. Lines that do
    /// not fit are left out.
    pub fn set_contact(&mut self, text: &str) {
        let lines = text.lines().scan(0, |len, line| {
            *len += line.len() + 1;
            (*len <= MOST_CONTACT).then_some(line)
        });
        let text: String = lines.flat_map(|line| [line, "\n"]).collect();
        self.memory.store_relaxed_u64(CONTACT_LEN, 0);
        self.memory.full_fence();
        self.memory.write_release(CONTACT, text.as_bytes());
        // ORDER cache.contact: the text before its length. Pairs with: `Reader::contact`.
        self.memory.store_release_u64(CONTACT_LEN, text.len() as u64);
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns how many log segments are used, and how many may be.
    pub fn segments(&self) -> (usize, usize) {
        (self.log.used(), self.log.limit())
    }

    /// Sets how many log segments to use. If there are more, items are evicted: a few with each item that is stored,
    /// and with each [`Store::tidy`].
    pub fn set_limit(&mut self, segments: usize) {
        self.log.set_limit(segments.max(LEAST_SEGMENTS));
    }

    /// Makes room ahead of need, for a server that has nothing else to do. Examines a few items. Returns whether
    /// there is more to do.
    pub fn tidy(&mut self) -> bool {
        (0..STEPS).all(|_| self.log.is_short() && self.step(true, false).is_some())
    }

    /// Returns the most bytes that key and value of an item may have together.
    pub fn most(&self) -> usize {
        self.shape.segment - item::BYTES
    }

    /// Returns the hash of a key.
    pub fn hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash(key)
    }

    /// Returns the offset of an item's slot, and the item. An expired item is removed.
    fn find(&mut self, hash: u64, key: &[u8]) -> Option<(usize, Item)> {
        for at in slots(&self.shape, hash) {
            let slot = Slot(self.memory.load_relaxed_u64(at));
            if !slot.may_be(hash) {
                continue;
            }
            match look(&self.memory, &self.shape, slot, hash, key) {
                Look::Item(item) if item.has_ended(self.flushed, self.clock) => self.clear(at),
                Look::Item(item) => return Some((at, item)),
                Look::Other if self.shape.place(slot.at()).is_some() => {}
                // The previous server was killed while it overwrote the item, or another member has written here.
                Look::Changing | Look::Other => self.clear(at),
            }
        }
        None
    }

    /// Empties a slot.
    fn clear(&mut self, at: usize) {
        let slot = Slot(self.memory.swap_u64(at, Slot::EMPTY.0));
        if slot != Slot::EMPTY {
            self.items = self.items.saturating_sub(1);
            if self.shape.place(slot.at()).is_some() {
                self.log.remove(slot.at() as usize);
            }
        }
    }

    /// Appends the value of a key to `value`. Counts as a use.
    pub fn get(&mut self, key: &[u8], value: &mut Vec<u8>) -> Option<Meta> {
        self.get_behind(key, true, value, |_, _| {})
    }

    /// Does the same, behind what `begin` appends. Counts as a use only if `is_use` is set.
    pub fn get_behind(
        &mut self,
        key: &[u8],
        is_use: bool,
        value: &mut Vec<u8>,
        begin: impl FnOnce(&Meta, &mut Vec<u8>),
    ) -> Option<Meta> {
        let hash = self.hasher.hash(key);
        let (_, item) = self.find(hash, key)?;
        let meta = meta(&item);
        begin(&meta, value);
        if is_use {
            self.used(&item);
        }
        let begin = value.len();
        value.resize(begin + item.lengths.value(), 0);
        self.memory.read_acquire(item.value_at(), &mut value[begin..]);
        Some(meta)
    }

    /// Returns the item's properties without its value. Does not count as a use.
    pub fn peek(&mut self, key: &[u8]) -> Option<Meta> {
        let hash = self.hasher.hash(key);
        self.find(hash, key).map(|(_, item)| meta(&item))
    }

    fn used(&mut self, item: &Item) {
        let uses = item.lengths.uses();
        let lengths = item.lengths.with_marks(item.lengths.marks() | marks::FETCHED);
        let lengths = lengths.with_uses(uses.saturating_add(1).min(MOST_USES));
        if lengths != item.lengths {
            self.memory.store_relaxed_u64(item.at + item::LENGTHS, lengths.0);
        }
        let room = Room(self.memory.load_relaxed_u64(item.at + item::ROOM));
        if room.used() != self.second() {
            self.memory.store_relaxed_u64(item.at + item::ROOM, Room::new(room.bytes(), self.second()).0);
        }
    }

    /// Returns the time of the cache's clock, in seconds.
    pub fn second(&self) -> u32 {
        (self.clock / 1000) as u32
    }

    /// Returns the second of the cache's clock at which an item was last used, as far as this server knows.
    pub fn last_use(&mut self, key: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash(key);
        let (_, item) = self.find(hash, key)?;
        Some(Room(self.memory.load_relaxed_u64(item.at + item::ROOM)).used())
    }

    /// Counts a use for an item of this hash, which a reader has found.
    pub fn used_by_reader(&mut self, hash: u64) {
        for at in slots(&self.shape, hash) {
            let slot = Slot(self.memory.load_relaxed_u64(at));
            if slot.may_be(hash) && self.shape.place(slot.at()).is_some() {
                let at = slot.at() as usize;
                if self.memory.load_relaxed_u64(at + item::HASH) == hash {
                    let lengths = Lengths(self.memory.load_relaxed_u64(at + item::LENGTHS));
                    let uses = lengths.uses().saturating_add(1).min(MOST_USES);
                    let lengths = lengths.with_uses(uses).with_marks(lengths.marks() | marks::FETCHED);
                    self.memory.store_relaxed_u64(at + item::LENGTHS, lengths.0);
                    let room = Room(self.memory.load_relaxed_u64(at + item::ROOM)).bytes();
                    self.memory.store_relaxed_u64(at + item::ROOM, Room::new(room, self.second()).0);
                    return;
                }
            }
        }
    }

    /// Stores an item whose value is the concatenation of these runs of bytes. Other items may be evicted to make room.
    /// `expiry` is the second of the cache's clock at which the item expires; 0 = never. Returns the item's new version.
    pub fn set(&mut self, key: &[u8], value: &[&[u8]], flags: u32, expiry: u32) -> Result<u64, NotStored> {
        self.set_marked(key, value, flags, expiry, 0)
    }

    /// Stores an item as [`set`](Self::set) does, with these [`marks`].
    pub fn set_marked(
        &mut self,
        key: &[u8],
        value: &[&[u8]],
        flags: u32,
        expiry: u32,
        marks: u8,
    ) -> Result<u64, NotStored> {
        if key.is_empty() || key.len() > MOST_KEY {
            return Err(NotStored::Key);
        }
        let len = value.iter().try_fold(0_usize, |len, run| len.checked_add(run.len()));
        let len =
            len.filter(|len| *len <= self.most() - key.len()).ok_or(NotStored::TooLarge(self.most()))?;
        let (hash, room) = (self.hasher.hash(key), item::room(key.len(), len));
        let version = self.next_version();
        let found = self.find(hash, key);
        if let Some((_, item)) = found {
            let end = self.shape.place(item.at as u64).map_or(item.at, |(_, end)| end);
            // A hostile VM that can write to this block must not make the server write past the end of the segment.
            let has = Room(self.memory.load_relaxed_u64(item.at + item::ROOM)).bytes().min(end - item.at);
            // The item is overwritten in place, unless too much of its room would be wasted.
            if room <= has && has - room <= has / 4 + 16 {
                let uses = item.lengths.uses().saturating_add(1).min(MOST_USES);
                let lengths = Lengths::new(key.len(), len, uses).with_marks(marks);
                self.write(item.at, version, |store| {
                    store.fill(&item, lengths, value, flags, expiry);
                    let room = Room::new(has, store.second());
                    store.memory.store_relaxed_u64(item.at + item::ROOM, room.0);
                });
                return Ok(version);
            }
        }
        let uses = found.map_or(0, |(_, item)| item.lengths.uses());
        let is_wanted = uses > 0 || self.ghosts.take(hash, self.items);
        let queue = if is_wanted { Queue::Main } else { Queue::Small };
        let at = self.make_room(queue, room).ok_or(NotStored::TooLarge(self.most()))?;
        let lengths = Lengths::new(key.len(), len, uses).with_marks(marks);
        let item = Item { at, version, lengths, expiry, flags };
        self.write(at, version, |store| {
            store.memory.store_relaxed_u64(at + item::HASH, hash);
            store.memory.store_relaxed_u64(at + item::ROOM, Room::new(room, store.second()).0);
            store.memory.write_release(at + item::BYTES, key);
            store.fill(&item, item.lengths, value, flags, expiry);
            store.log.add(at, room);
        });
        // The earlier item may have been evicted to make room.
        match self.find(hash, key) {
            Some((slot, _)) => {
                let before = Slot(self.memory.load_relaxed_u64(slot));
                self.log.remove(before.at() as usize);
                self.name(slot, hash, at);
            }
            None => {
                let slot = self.empty_slot(hash);
                self.name(slot, hash, at);
                self.items += 1;
            }
        }
        Ok(version)
    }

    /// Changes an item. Readers discard what they read of it in the meantime.
    fn write(&mut self, at: usize, version: u64, change: impl FnOnce(&mut Self)) {
        self.memory.store_relaxed_u64(at + item::VERSION, 0);
        // ORDER cache.changing: the zero version before the changes. Pairs with: `Reader::try_get`.
        self.memory.full_fence();
        change(self);
        // ORDER cache.version: the changes before the version. Pairs with: `look`.
        self.memory.store_release_u64(at + item::VERSION, version);
    }

    fn fill(&self, item: &Item, lengths: Lengths, value: &[&[u8]], flags: u32, expiry: u32) {
        self.memory.store_relaxed_u64(item.at + item::EXPIRY, u64::from(flags) << 32 | u64::from(expiry));
        self.memory.store_relaxed_u64(item.at + item::LENGTHS, lengths.0);
        let mut at = item.at + item::BYTES + lengths.key();
        for run in value {
            self.memory.write_release(at, run);
            at += run.len();
        }
    }

    /// Makes a slot name an item.
    fn name(&self, slot: usize, hash: u64, at: usize) {
        // ORDER cache.slot: the item before the slot. Pairs with: `Reader::try_get`.
        self.memory.store_release_u64(slot, Slot::new(hash, at).0);
    }

    /// Returns an empty slot for a hash. If there is none, evicts the least used of the items in the hash's slots.
    fn empty_slot(&mut self, hash: u64) -> usize {
        let (mut empty, mut least) = ([(0, 0); 2], (u8::MAX, 0));
        for (which, at) in slots(&self.shape, hash).enumerate() {
            let slot = Slot(self.memory.load_relaxed_u64(at));
            if self.shape.place(slot.at()).is_none() {
                let (count, first) = &mut empty[which / cache::SLOTS];
                *count += 1;
                *first = at;
                continue;
            }
            // The items' use counts matter only if no slot is empty.
            if empty == [(0, 0); 2] {
                let uses = Lengths(self.memory.load_relaxed_u64(slot.at() as usize + item::LENGTHS)).uses();
                if uses < least.0 || least.1 == 0 {
                    least = (uses, at);
                }
            }
        }
        // Readers look into the first bucket first, so it is preferred unless it is nearly full.
        let [first, second] = empty;
        let at = match if first.0 >= SPARE || first.0 >= second.0 { first } else { second } {
            (0, _) => {
                self.counters.collisions += 1;
                least.1
            }
            (_, at) => at,
        };
        self.clear(at);
        at
    }

    /// Removes an item. Returns whether the item existed.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let hash = self.hasher.hash(key);
        let found = self.find(hash, key);
        if let Some((slot, _)) = found {
            self.clear(slot);
        }
        found.is_some()
    }

    /// Changes the expiry time of an item, but not its version. Returns whether the item exists.
    pub fn touch(&mut self, key: &[u8], expiry: u32) -> bool {
        let hash = self.hasher.hash(key);
        let Some((_, item)) = self.find(hash, key) else { return false };
        let word = u64::from(item.flags) << 32 | u64::from(expiry);
        self.memory.store_relaxed_u64(item.at + item::EXPIRY, word);
        true
    }

    /// Replaces the [`marks`] of an item, but does not change its version. Returns whether the item exists.
    pub fn mark(&mut self, key: &[u8], marks: u8) -> bool {
        let hash = self.hasher.hash(key);
        let Some((_, item)) = self.find(hash, key) else { return false };
        self.memory.store_relaxed_u64(item.at + item::LENGTHS, item.lengths.with_marks(marks).0);
        true
    }

    /// Gives an item a new version, these marks and, if given, this expiry time, but does not change its value. Returns the
    /// new version, or `None` if the item does not exist.
    pub fn renew(&mut self, key: &[u8], marks: u8, expiry: Option<u32>) -> Option<u64> {
        let hash = self.hasher.hash(key);
        let (_, item) = self.find(hash, key)?;
        let version = self.next_version();
        self.write(item.at, version, |store| {
            store.memory.store_relaxed_u64(item.at + item::LENGTHS, item.lengths.with_marks(marks).0);
            let word = u64::from(item.flags) << 32 | u64::from(expiry.unwrap_or(item.expiry));
            store.memory.store_relaxed_u64(item.at + item::EXPIRY, word);
        });
        Some(version)
    }

    /// Makes all existing items expire at once.
    pub fn flush(&mut self) {
        self.flushed = self.version;
        self.memory.store_release_u64(FLUSHED, self.flushed);
    }

    /// Makes all items that exist at this second of the cache's clock expire then. This replaces an earlier second; 0 =
    /// never. The second is kept in the cache, so it also holds for a successor.
    pub fn flush_later(&mut self, second: u32) {
        self.flush_at = second;
        self.memory.store_release_u64(FLUSH_AT, u64::from(second));
    }

    fn next_version(&mut self) -> u64 {
        if self.version == self.versions {
            self.versions += VERSIONS_AT_ONCE;
            // The highest version is recorded before any of these is given out, because a successor must not give one out again.
            self.memory.store_release_u64(VERSIONS, self.versions);
        }
        self.version += 1;
        self.version
    }

    /// Takes room for an item in a queue. Other items may be evicted. Returns `None` if there is no room.
    fn make_room(&mut self, queue: Queue, room: usize) -> Option<usize> {
        self.make_room_ahead(room);
        // A large item, or an item after a decrease of the limit, may need more room than that has freed.
        let (mut rounds, mut steps) = (self.shape.segments + LEAST_SEGMENTS, 0);
        loop {
            // The last free segment is reserved for the items that move while another segment is emptied.
            if self.log.free() > 1 || rounds == 0 {
                return self.log.take(queue, room);
            }
            if let Some(at) = self.log.take_of_newest(queue, room) {
                return Some(at);
            }
            match self.log.step(false) {
                Step::Item(queue, at, room) => drop(self.empty(queue, at, room, steps >= STEPS)),
                Step::Emptied => rounds -= 1,
                Step::Nothing => rounds = 0,
            }
            steps += 1;
        }
    }

    /// Frees room in advance, so that a log segment is free when one is needed: each stored item frees twice its own room, if
    /// that takes few steps. If it has taken too many steps for long, used items are evicted as well, so the work is bounded.
    fn make_room_ahead(&mut self, room: usize) {
        self.behind = if self.log.is_short() { self.behind + room } else { 0 };
        let (mut freed, mut steps) = (0, 0);
        while self.log.is_short() && freed < 2 * room {
            let hurry = steps >= STEPS;
            if hurry && self.behind <= self.shape.segment / 2 {
                return;
            }
            let Some(more) = self.step(true, hurry) else { return };
            (freed, steps) = (freed + more, steps + 1);
            self.behind = self.behind.saturating_sub(more);
        }
    }

    /// Takes one step of emptying a log segment. Returns the number of bytes that became free, or `None` if there is nothing
    /// to do.
    fn step(&mut self, ahead: bool, hurry: bool) -> Option<usize> {
        match self.log.step(ahead) {
            Step::Item(queue, at, room) => Some(self.empty(queue, at, room, hurry)),
            Step::Emptied => Some(0),
            Step::Nothing => None,
        }
    }

    /// Moves the item at this place to the main queue if it was used. Evicts it if it was not used, or in a `hurry`. Returns
    /// the number of bytes that became free.
    fn empty(&mut self, queue: Queue, at: usize, room: usize, hurry: bool) -> usize {
        let hash = self.memory.load_relaxed_u64(at + item::HASH);
        let Some(slot) = self.slot_of(hash, at) else { return room };
        let lengths = Lengths(self.memory.load_relaxed_u64(at + item::LENGTHS));
        let expiry = self.memory.load_relaxed_u64(at + item::EXPIRY);
        let version = self.memory.load_relaxed_u64(at + item::VERSION);
        let item = Item { at, version, lengths, expiry: expiry as u32, flags: (expiry >> 32) as u32 };
        let is_over = version == 0 || item.has_ended(self.flushed, self.clock);
        let left = match queue {
            Queue::Small => lengths.uses().checked_sub(1).map(|_| 0),
            Queue::Main => lengths.uses().checked_sub(1),
        };
        if let Some(uses) = left.filter(|_| !is_over && !hurry)
            && self.move_item(&item, slot, hash, uses)
        {
            self.counters.moves += 1;
            return 0;
        }
        self.clear(slot);
        if !is_over {
            self.counters.evictions += 1;
            self.counters.unused += u64::from(queue == Queue::Small);
            if queue == Queue::Small {
                self.ghosts.add(hash);
            }
        }
        room
    }

    /// Returns the slot that names the item at a place.
    fn slot_of(&self, hash: u64, at: usize) -> Option<usize> {
        let wanted = Slot::new(hash, at).0;
        slots(&self.shape, hash).find(|slot| self.memory.load_relaxed_u64(*slot) == wanted)
    }

    /// Moves an item to the end of the main queue. Returns false if there is no room.
    fn move_item(&mut self, item: &Item, slot: usize, hash: u64, uses: u8) -> bool {
        let (key, value) = (item.lengths.key(), item.lengths.value());
        let room = item::room(key, value);
        let end = self.shape.place(item.at as u64).map_or(0, |(_, end)| end);
        if item.at + room > end {
            return false;
        }
        let used = Room(self.memory.load_relaxed_u64(item.at + item::ROOM)).used();
        let Some(at) = self.log.take(Queue::Main, room) else { return false };
        self.write(at, item.version, |store| {
            let lengths = item.lengths.with_uses(uses);
            store.memory.store_relaxed_u64(at + item::HASH, hash);
            store.memory.store_relaxed_u64(at + item::ROOM, Room::new(room, used).0);
            store.memory.store_relaxed_u64(at + item::LENGTHS, lengths.0);
            let expiry = u64::from(item.flags) << 32 | u64::from(item.expiry);
            store.memory.store_relaxed_u64(at + item::EXPIRY, expiry);
            store.memory.copy_into(item.at + item::BYTES, &store.memory, at + item::BYTES, key + value);
            store.log.add(at, room);
        });
        self.log.remove(item.at);
        self.name(slot, hash, at);
        true
    }
}

pub(crate) fn meta(item: &Item) -> Meta {
    Meta {
        version: item.version,
        flags: item.flags,
        expiry: item.expiry,
        marks: item.lengths.marks(),
        len: item.lengths.value(),
    }
}

/// Returns the layout of an existing cache.
pub(crate) fn shape_of(memory: &impl SharedMemory) -> Result<Shape, NotACache> {
    // ORDER cache.ready: the magic word before everything else. Pairs with: `Store::create`.
    if memory.len() < ginnel_layout::cache::LOGS || memory.load_acquire_u64(MAGIC) != READY {
        return Err(NotACache::Unknown);
    }
    let [segments, segment, buckets] = [SEGMENTS, SEGMENT, BUCKETS].map(|at| memory.load_relaxed_u64(at));
    Shape::new(segments, segment, buckets, memory.len()).ok_or(NotACache::Corrupt)
}
