//! What requests do to the items, and what is answered.
//!
//! ```text
//! text     the text protocol
//! meta     its meta commands
//! binary   the binary protocol
//! stats    statistics, in both
//! ```

mod binary;
mod meta;
mod stats;
mod text;

use ginnel_cache_protocol::Verb;
use ginnel_cache_protocol::number::{self, append};
use ginnel_cache_store::store::{Meta, Store};
use ginnel_layout::cache::marks;
use ginnel_shmem::SharedMemory;

use crate::hot::Hot;
use crate::numbers::{Numbers, Settings};

/// Times up to this are counted from now on, and others since 1970.
const RELATIVE: i32 = 60 * 60 * 24 * 30;
/// The second of the cache's clock at which an item ends that has ended already. A cache's clock never stands before it.
const OVER: u32 = 1;
/// What memcached needs for an item beside key, value and flags.
const OVERHEAD: usize = 59;
/// What it needs for flags that are not 0.
const FLAGS: usize = 4;
/// What the numbers of `stats` cost, as if so many bytes were moved.
const STATS: usize = 16 << 10;
/// The least that `cache_memlimit` takes, and the most, in mebibytes.
const LEAST_LIMIT: u32 = 8;
/// See above.
const MOST_LIMIT: u32 = 1_000_000_000;

/// What happens to the connection after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It goes on.
    Goes,
    /// It is closed once the answer is sent.
    Closes,
}

/// Why a value was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unstored {
    /// There is an item of another version.
    Exists,
    /// There is no item.
    NotFound,
    /// There is an item, or there is none.
    NotStored,
    /// It is too large.
    TooLarge,
}

/// What counting gave.
enum Counted {
    /// The number, the item before, and its new version.
    Number(u64, Meta, u64),
    NotFound,
    NotANumber,
    Exists,
    NoMemory,
}

/// A value to be stored, and under which conditions.
struct Wish<'a> {
    verb: Verb,
    key: &'a [u8],
    value: &'a [u8],
    flags: u32,
    expiry: u32,
    marks: u8,
    /// The version that is expected; 0: any, unless for [`Verb::Cas`].
    cas: u64,
    /// A value for an earlier version is stored as one that is out of date.
    may_be_stale: bool,
}

/// The items, and what is counted.
pub struct Engine<M> {
    store: Store<M>,
    /// What is counted.
    pub(crate) numbers: Numbers,
    /// What was chosen.
    pub(crate) settings: Settings,
    hot: Hot,
    /// Seconds since 1970.
    unix: i64,
    /// A value that is put together.
    value: Vec<u8>,
    /// Bytes of values that were moved though no request brought them, and no answer has them.
    moved: usize,
}

impl<M: SharedMemory> Engine<M> {
    /// Of a cache. `unix`: seconds since 1970.
    pub fn new(store: Store<M>, settings: Settings, unix: i64) -> Self {
        let numbers = Numbers::new(unix);
        Self { store, numbers, settings, hot: Hot::default(), unix, value: Vec::new(), moved: 0 }
    }

    /// The items.
    pub fn store(&mut self) -> &mut Store<M> {
        &mut self.store
    }

    /// What requests have cost that cannot be seen in them and their answers: counts bytes that were moved, and wraps around.
    pub(crate) fn moved(&self) -> usize {
        self.moved
    }

    /// Time passes. `boot_time`: CLOCK_BOOTTIME in milliseconds; `unix`: seconds since 1970.
    pub fn tick(&mut self, boot_time: u64, unix: i64) {
        self.store.tick(boot_time);
        self.unix = unix;
    }

    /// The most bytes that a value may have so that it is worth waiting for.
    pub fn most_value(&self) -> usize {
        self.settings.item_size
    }

    /// The second of the cache's clock that a client means.
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

    /// The same for a client that knows no negative numbers: they are far away.
    fn second_of_binary(&self, end: i32) -> u32 {
        match end {
            // As a number of 64 bits without a sign it is in the future.
            ..0 => {
                let at = i64::from(self.store.second()) + i64::from(end as u32) - self.unix;
                at.clamp(i64::from(OVER), i64::from(u32::MAX)) as u32
            }
            _ => self.second(end),
        }
    }

    /// Whether an item would be too large for a memcached of this item size.
    fn is_too_large(&self, key: usize, flags: u32, value: usize) -> bool {
        let all = OVERHEAD + key + if flags == 0 { 0 } else { FLAGS } + value;
        all > self.settings.item_size || key + value > self.store.most()
    }

    fn put(&mut self, wish: Wish<'_>) -> Result<u64, Unstored> {
        let Wish { verb, key, value, flags, mut expiry, mut marks, cas, may_be_stale } = wish;
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
                // As memcached, which leaves when it ends.
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

    /// Stores a value behind or in front of the one that is there.
    fn extend(&mut self, key: &[u8], more: &[u8], behind: bool, before: Meta) -> Result<u64, Unstored> {
        if self.is_too_large(key.len(), before.flags, before.len + more.len()) {
            return Err(Unstored::NotStored);
        }
        let mut value = std::mem::take(&mut self.value);
        value.clear();
        // Somebody else who writes here may have taken it away.
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

    /// Gives an item another end, which counts as a use.
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
        // A cache of that size has a little less for its items.
        let all = self.store.memory().len().div_ceil(1 << 20);
        if megabytes as usize > all {
            return "MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust";
        }
        self.store.set_limit(segments.min(shape.segments));
        "OK"
    }

    /// Counts with an item. `cas`: the version that is expected; 0: any.
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
        // As memcached, which keeps larger ones in pieces.
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
        // A shorter one gets spaces, and stays what it is.
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

    /// Of an empty cache of 32 MiB.
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
