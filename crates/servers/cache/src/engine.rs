//! Carries out requests on the items, and writes the answers.
//!
//! ```text
//! text     the text protocol
//! meta     the meta commands of the text protocol
//! binary   the binary protocol
//! stats    statistics, in both protocols
//! ```

mod binary;
mod meta;
mod stats;
mod text;

use crate::hot::Hot;
use crate::numbers::{Numbers, Settings};
use crate::peers::Peers;
use ginnel_cache_protocol::Verb;
use ginnel_cache_protocol::number::{self, append};
use ginnel_cache_store::store::{Meta, Store};
use ginnel_layout::cache::marks;
use ginnel_shmem::SharedMemory;

/// The longest relative time in seconds: a client's time up to this counts from now, and a larger one counts from 1970.
const RELATIVE: i32 = 60 * 60 * 24 * 30;
/// The expiry of an item that has already expired, in seconds of the cache's clock. The clock is never earlier than this.
const OVER: u32 = 1;
/// The bytes that memcached needs for an item in addition to its key, value and flags.
const OVERHEAD: usize = 59;
/// The bytes that memcached needs for flags other than 0.
const FLAGS: usize = 4;
/// The cost of collecting the numbers of `stats`, expressed as a number of moved bytes.
const STATS: usize = 16 << 10;
/// The smallest number of mebibytes that `cache_memlimit` accepts.
const LEAST_LIMIT: u32 = 8;
/// The largest number of mebibytes that `cache_memlimit` accepts.
const MOST_LIMIT: u32 = 1_000_000_000;

/// What happens to the connection after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The connection stays open.
    Goes,
    /// The connection is closed once the answer is sent.
    Closes,
}

/// Why a value was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unstored {
    /// The key has an item of another version than the expected one.
    Exists,
    /// The key has no item, so it has no version to compare.
    NotFound,
    /// `add` has found an item, or `replace`, `append` or `prepend` has found none or could not extend it.
    NotStored,
    /// The item would be too large.
    TooLarge,
}

/// The result of an increment or decrement.
enum Counted {
    /// The new number, the item as it was before, and the item's new version.
    Number(u64, Meta, u64),
    NotFound,
    NotANumber,
    Exists,
    NoMemory,
}

/// A value to store, with the conditions under which it is stored.
struct Update<'a> {
    verb: Verb,
    key: &'a [u8],
    value: &'a [u8],
    flags: u32,
    expiry: u32,
    marks: u8,
    /// The expected version. 0 means any version, except with [`Verb::Cas`].
    cas: u64,
    /// Whether a value for an earlier version is stored and marked as stale. Otherwise it is refused.
    may_be_stale: bool,
}

/// The items of a cache, with the server's counters and settings.
pub struct Engine<M> {
    store: Store<M>,
    /// The counters.
    pub(crate) numbers: Numbers,
    /// The settings from the command line, and those that clients change.
    pub(crate) settings: Settings,
    /// The clients that have connected over TCP.
    pub(crate) peers: Peers,
    hot: Hot,
    /// The time of the last tick, in seconds since 1970.
    unix: i64,
    /// A buffer for the value of an item that is extended or counted with.
    value: Vec<u8>,
    /// The number of bytes of values that were moved although they are in no request and in no answer.
    moved: usize,
}

impl<M: SharedMemory> Engine<M> {
    /// Creates the engine of a cache. `unix` is the time in seconds since 1970.
    pub fn new(store: Store<M>, settings: Settings, unix: i64) -> Self {
        let numbers = Numbers::new(unix);
        let (peers, hot) = (Peers::default(), Hot::default());
        Self { store, numbers, settings, peers, hot, unix, value: Vec::new(), moved: 0 }
    }

    /// Returns the store that holds the items.
    pub fn store(&mut self) -> &mut Store<M> {
        &mut self.store
    }

    /// Returns the cost that is visible neither in the requests nor in their answers, as a count of bytes that were moved.
    /// The count wraps around.
    pub(crate) fn moved(&self) -> usize {
        self.moved
    }

    /// Sets the clocks. `boot_time` is CLOCK_BOOTTIME in milliseconds, and `unix` is the time in seconds since 1970.
    pub fn tick(&mut self, boot_time: u64, unix: i64) {
        self.store.tick(boot_time);
        self.unix = unix;
    }

    /// Returns the most bytes of a value that the server waits for. A larger value cannot be stored.
    pub fn most_value(&self) -> usize {
        self.settings.item_size
    }

    /// Returns the second of the cache's clock that corresponds to a client's time; 0 means that an item never expires.
    fn second(&self, end: i32) -> u32 {
        let now = self.store.second();
        match end {
            0 => 0,
            ..0 => OVER,
            1..=RELATIVE => now.saturating_add(end as u32),
            _ => {
                let at = i64::from(now) + i64::from(end) - self.unix;
                at.clamp(i64::from(OVER), i64::from(u32::MAX)) as u32
            }
        }
    }

    /// Does the same for a client of the binary protocol. That protocol has no negative times: a number that looks negative
    /// is a time in the far future.
    fn second_of_binary(&self, end: i32) -> u32 {
        match end {
            // As an unsigned number in 64 bits, it is a time in the future.
            ..0 => {
                let at = i64::from(self.store.second()) + i64::from(end as u32) - self.unix;
                at.clamp(i64::from(OVER), i64::from(u32::MAX)) as u32
            }
            _ => self.second(end),
        }
    }

    /// Returns whether an item would be too large for a memcached with this item size, or for this cache.
    fn is_too_large(&self, key: usize, flags: u32, value: usize) -> bool {
        let all = OVERHEAD + key + if flags == 0 { 0 } else { FLAGS } + value;
        all > self.settings.item_size || key + value > self.store.most()
    }

    fn put(&mut self, update: Update<'_>) -> Result<u64, Unstored> {
        let Update { verb, key, value, flags, mut expiry, mut marks, cas, may_be_stale } = update;
        self.hot.see(key);
        if verb == Verb::Set {
            return self
                .store
                .set_marked(key, &[value], flags, expiry, marks)
                .map_err(|_| Unstored::TooLarge);
        }
        let before = self.store.peek(key);
        match (verb, before) {
            (Verb::Add, Some(_)) => return Err(Unstored::NotStored),
            (Verb::Cas, None) => {
                self.numbers.cas_misses += 1;
                return Err(Unstored::NotFound);
            }
            (Verb::Cas, Some(before)) if before.version == cas => self.numbers.cas_hits += 1,
            (Verb::Cas, Some(before)) if may_be_stale && (1..before.version).contains(&cas) => {
                marks |= marks::STALE | before.marks & marks::WON;
                // As in memcached, the item keeps its expiry.
                expiry = before.expiry;
            }
            (Verb::Cas, Some(_)) => {
                self.numbers.cas_badval += 1;
                return Err(Unstored::Exists);
            }
            (Verb::Replace | Verb::Append | Verb::Prepend, None) => return Err(Unstored::NotStored),
            (Verb::Append | Verb::Prepend, Some(before)) => {
                if cas != 0 && cas != before.version {
                    return Err(Unstored::Exists);
                }
                return self.extend(key, value, verb == Verb::Append, before);
            }
            _ => {}
        }
        self.store.set_marked(key, &[value], flags, expiry, marks).map_err(|_| Unstored::TooLarge)
    }

    /// Appends a value to the existing one, or prepends it.
    fn extend(&mut self, key: &[u8], more: &[u8], behind: bool, before: Meta) -> Result<u64, Unstored> {
        if self.is_too_large(key.len(), before.flags, before.len + more.len()) {
            return Err(Unstored::NotStored);
        }
        let mut value = std::mem::take(&mut self.value);
        value.clear();
        // Another process that writes to this memory may have destroyed the item.
        let found = self.store.get_behind(key, false, &mut value, |_, _| {});
        let runs = if behind { [&value[..], more] } else { [more, &value[..]] };
        self.moved = self.moved.wrapping_add(2 * value.len());
        let kept = before.marks & marks::BINARY_KEY;
        let done = match found {
            Some(_) => self.store.set_marked(key, &runs, before.flags, before.expiry, kept).map_err(|_| ()),
            None => Err(()),
        };
        self.value = value;
        self.value.shrink_to(64 << 10);
        done.map_err(|()| Unstored::NotStored)
    }

    fn remove(&mut self, key: &[u8]) -> bool {
        let found = self.store.delete(key);
        *(if found { &mut self.numbers.delete_hits } else { &mut self.numbers.delete_misses }) += 1;
        found
    }

    /// Sets the expiry of an item, which counts as a use of the item. Returns the item as it was before.
    fn touch(&mut self, key: &[u8], expiry: u32) -> Option<Meta> {
        let found = self.store.peek(key);
        self.numbers.got(found.is_some(), true);
        if found.is_some() {
            let hash = self.store.hash(key);
            self.store.used_by_reader(hash);
            self.store.touch(key, expiry);
        }
        found
    }

    fn flush(&mut self, delay: i32) {
        self.numbers.cmd_flush += 1;
        self.store.flush_later(0);
        let at = self.second(delay);
        if delay <= 0 || at <= self.store.second() + 1 {
            self.store.flush();
        } else {
            self.store.flush_later(at - 1);
        }
    }

    fn limit(&mut self, megabytes: u32) -> &'static str {
        if megabytes < LEAST_LIMIT {
            return "MEMLIMIT_TOO_SMALL cannot set maxbytes to less than 8m";
        }
        if megabytes > MOST_LIMIT {
            return "MEMLIMIT_ADJUST_FAILED input value is megabytes not bytes";
        }
        let shape = self.store.shape();
        let segments = ((megabytes as usize) << 20) / shape.segment;
        // A limit as large as the whole memory is allowed, although the items have slightly less than that.
        let all = self.store.memory().len().div_ceil(1 << 20);
        if megabytes as usize > all {
            return "MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust";
        }
        self.store.set_limit(segments.min(shape.segments));
        "OK"
    }

    /// Increments or decrements the number in an item. `cas` is the expected version; 0 means any version.
    fn count(&mut self, key: &[u8], up: bool, by: u64, cas: u64) -> Counted {
        self.hot.see(key);
        let mut old = std::mem::take(&mut self.value);
        old.clear();
        let found = self.store.get_behind(key, false, &mut old, |_, _| {});
        self.moved = self.moved.wrapping_add(old.len());
        let counted = self.count_with(key, up, by, cas, found, &old);
        self.value = old;
        self.value.shrink_to(64 << 10);
        counted
    }

    fn count_with(
        &mut self,
        key: &[u8],
        up: bool,
        by: u64,
        cas: u64,
        found: Option<Meta>,
        old: &[u8],
    ) -> Counted {
        let Some(meta) = found else { return Counted::NotFound };
        // The answer is memcached's, which keeps larger items in pieces and does not count with them.
        if old.is_empty() || OVERHEAD + key.len() + old.len() > self.settings.item_size / 2 {
            return Counted::NotANumber;
        }
        if cas != 0 && cas != meta.version {
            return Counted::Exists;
        }
        let Some(number) = number::unsigned(old) else { return Counted::NotANumber };
        let number = if up { number.wrapping_add(by) } else { number.saturating_sub(by) };
        let mut digits = Vec::with_capacity(20);
        append(&mut digits, number);
        // If the number does not get longer, spaces fill the rest of the value, and the item keeps all its marks.
        let (spaces, kept) = match old.len().checked_sub(digits.len()) {
            Some(spaces) => (spaces, meta.marks),
            None => (0, meta.marks & marks::BINARY_KEY),
        };
        digits.resize(digits.len() + spaces, b' ');
        match self.store.set_marked(key, &[&digits], meta.flags, meta.expiry, kept) {
            Ok(version) => {
                self.numbers.counted(up);
                Counted::Number(number, meta, version)
            }
            Err(_) => Counted::NoMemory,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ginnel_cache_store::shape::plan;
    use ginnel_shmem::Mapping;

    /// Returns the engine of an empty cache of 32 MiB.
    pub fn engine() -> Engine<Mapping> {
        let memory = Mapping::anonymous(32 << 20).unwrap();
        let shape = plan(32 << 20, 1 << 20, 200).unwrap();
        let store = Store::create(memory, shape, [1, 2], 1000).unwrap();
        let settings = Settings {
            place: "s/main".into(),
            item_size: 1 << 20,
            connections: 100,
            verbosity: 0,
            listens: Vec::new(),
            unix: None,
        };
        Engine::new(store, settings, 0)
    }
}
