//! Caches.

use crate::boundary::{
    Growing, Outcome, borrow, bytes, checked, close, fill, length, output, output_handle, read_options,
    require, return_handle, return_text, room as space, status, text as string,
};
use crate::handle_table::handle;
use crate::status::Status::{
    GINNEL_ERR_BUFFER_TOO_SMALL, GINNEL_ERR_CHANGED, GINNEL_ERR_NO_ITEM, GINNEL_ERR_NOT_STORED, GINNEL_OK,
};
use crate::status::{Failure, Status};
use ginnel_cache_client::{Changes, Entry, Item, Options, Swap};
use libc::{c_int, ssize_t};
use std::ffi::{c_char, c_void};
use std::fmt::Write;
use std::time::Duration;

/// A cache that is open. Any number of threads may use it at once. Made by ginnel_cache_open(), freed by ginnel_cache_close().
pub struct Cache(ginnel_cache_client::Cache);
handle!(Cache, "cache");

/// How to open a cache. Fill it with zeros, set `size`, then what you want otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheOptions {
    /// sizeof(ginnel_cache_options).
    pub size: usize,
    /// Path of the daemon's socket. NULL: $GINNEL_SOCKET, else /run/ginnel/ginnel.sock.
    pub socket: *const c_char,
    /// What this endpoint calls itself, for people. NULL: the program's name.
    pub name: *const c_char,
    /// Where changes go: "channel SEGMENT", "tcp ADDRESS:PORT" or "unix PATH". NULL: where the cache says.
    pub changes: *const c_char,
    /// How long a cache that is not there, or a server that is being replaced, is waited for, in nanoseconds. 0: 3 seconds;
    /// negative: not at all.
    pub patience_ns: i64,
    /// How long the server may take for an answer, in nanoseconds. 0: 10 seconds.
    pub timeout_ns: u64,
}
// SAFETY: as the trait asks.
unsafe impl Growing for CacheOptions {}

/// What is known of an item that was found.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheItem {
    /// sizeof(ginnel_cache_item).
    pub size: usize,
    /// Bytes of its value, also if the buffer has fewer.
    pub length: usize,
    /// Its version, for ginnel_cache_cas().
    pub cas: u64,
    /// The client's, as they were stored.
    pub flags: u32,
}
// SAFETY: as the trait asks.
unsafe impl Growing for CacheItem {}

/// A key, for ginnel_cache_get_many(). This structure does not grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheKey {
    /// Its bytes.
    pub key: *const c_void,
    /// How many.
    pub key_length: usize,
}

/// What ginnel_cache_get_many() has found for a key. This structure does not grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheFound {
    /// GINNEL_OK; GINNEL_ERR_NO_ITEM; or GINNEL_ERR_BUFFER_TOO_SMALL if there was no room left for the value.
    pub status: c_int,
    /// The client's, as they were stored.
    pub flags: u32,
    /// Its version, for ginnel_cache_cas().
    pub cas: u64,
    /// Where its value begins in the buffer.
    pub offset: usize,
    /// Bytes of its value, also if there was no room left for it.
    pub length: usize,
}

/// An item to store, for ginnel_cache_set_many(). This structure does not grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheEntry {
    /// The bytes of its key.
    pub key: *const c_void,
    /// How many.
    pub key_length: usize,
    /// The bytes of its value.
    pub value: *const c_void,
    /// How many.
    pub length: usize,
    /// Whatever the program likes.
    pub flags: u32,
    /// In how many seconds it ends; 0: never.
    pub ttl: u32,
}

/// What has become of an item of ginnel_cache_set_many(). This structure does not grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheStored {
    /// GINNEL_OK, or why it is not stored.
    pub status: c_int,
    /// Its version.
    pub cas: u64,
}

/// What a handle of a cache has done since it was opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheCounters {
    /// sizeof(ginnel_cache_counters).
    pub size: usize,
    /// Items that were found in memory.
    pub hits: u64,
    /// Keys that memory has no item of.
    pub misses: u64,
    /// Keys that the server was asked for, because memory could not tell.
    pub asked: u64,
    /// Requests whose answers were lost.
    pub lost: u64,
    /// Connections that were opened to servers.
    pub connections: u64,
    /// Keys whose hits were reported to the server.
    pub reported: u64,
}
// SAFETY: as the trait asks.
unsafe impl Growing for CacheCounters {}

impl From<ginnel_cache_client::Error> for Failure {
    #[cold]
    fn from(error: ginnel_cache_client::Error) -> Self {
        Self::new(Status::of_cache(&error), error.to_string())
    }
}

/// Opens the cache at `address`, which is SEGMENT/NAME. `options` may be NULL. On success `*cache` is the caller's, to be freed with
/// ginnel_cache_close(); on failure it is NULL. It is enough that this machine may read the segment.
///
/// Blocks for the daemon's answer, and for a cache that is not there yet. Any thread. Errors: GINNEL_ERR_NO_SEGMENT,
/// GINNEL_ERR_NOT_FOUND if there is no such cache, GINNEL_ERR_KIND if it is none of this version, GINNEL_ERR_CORRUPT,
/// GINNEL_ERR_DENIED, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_open(
    address: *const c_char,
    options: *const CacheOptions,
    cache: *mut *mut Cache,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(cache));
        let address = checked!(string(address));
        let asked = checked!(read_options(options));
        let mut options = Options::default();
        let CacheOptions { socket, name, changes, .. } = asked;
        if !socket.is_null() {
            options.attach.socket = checked!(string(socket)).into();
        }
        if !name.is_null() {
            options.attach.name = Some(checked!(string(name)).into());
        }
        if !changes.is_null() {
            options.changes = checked!(string(changes)).parse::<Changes>()?;
        }
        if asked.patience_ns != 0 {
            options.patience = Duration::from_nanos(u64::try_from(asked.patience_ns).unwrap_or(0));
        }
        if asked.timeout_ns != 0 {
            options.timeout = Duration::from_nanos(asked.timeout_ns);
        }
        return_handle(place, Cache(ginnel_cache_client::Cache::open_with(address, &options)?));
        Ok(())
    })
}

/// Closes a cache. NULL is allowed. No other thread may be using the handle. May tell the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_close(cache: *mut Cache) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(cache) }
}

/// Looks a key up and copies its value to `value`, which has `room` bytes. Returns how many bytes the value has, or a negative status.
/// If it has more than there is room for, that is GINNEL_ERR_BUFFER_TOO_SMALL; its first `room` bytes are there then.
/// `*item`, whose `size` the caller has set, is filled in in both cases; `item` may be NULL.
///
/// Any thread; does not block wherever memory can tell. It cannot while the server changes that very item all the time or was killed
/// while it did, for an item with an end while the server's clock stands, and if the cache is made anew: then it blocks for the server's
/// answer. Errors: GINNEL_ERR_NO_ITEM, GINNEL_ERR_BUFFER_TOO_SMALL; of the server: GINNEL_ERR_NO_SERVER, GINNEL_ERR_LOST,
/// GINNEL_ERR_SERVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_get(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *mut c_void,
    room: usize,
    item: *mut CacheItem,
) -> ssize_t {
    length(|| {
        let Cache(cache) = checked!(borrow(cache));
        let key = checked!(bytes(key, key_length));
        let value = checked!(space(value, room));
        let found = cache.get_into(key, value)?.ok_or(GINNEL_ERR_NO_ITEM)?;
        if !item.is_null() {
            checked!(fill(item, facts(&found)));
        }
        if found.len > room { Err(GINNEL_ERR_BUFFER_TOO_SMALL.into()) } else { Ok(found.len) }
    })
}

fn facts(item: &Item) -> CacheItem {
    CacheItem { size: 0, length: item.len, cas: item.cas, flags: item.flags }
}

/// Looks `count` keys up, copies their values one after the other to `values`, which has `room` bytes, and says in `found`, which has
/// `count` elements, what has become of each. Returns how many were found. This takes far less time than as many calls of
/// ginnel_cache_get(): the memory of many is fetched at once.
///
/// Any thread; blocks and fails as ginnel_cache_get() does. After an error nothing is known of any key.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_get_many(
    cache: *const Cache,
    keys: *const CacheKey,
    count: usize,
    values: *mut c_void,
    room: usize,
    found: *mut CacheFound,
) -> ssize_t {
    length(|| {
        let Cache(cache) = checked!(borrow(cache));
        let keys = checked!(array(keys, count));
        let values = checked!(space(values, room));
        let found = checked!(array_of_results(found, count));
        let mut slices: Vec<&[u8]> = Vec::with_capacity(keys.len());
        for &CacheKey { key, key_length } in keys {
            slices.push(checked!(bytes(key, key_length)));
        }
        let mut used = 0;
        let hits = cache.get_many(&slices, |number, item| {
            let missed =
                CacheFound { status: GINNEL_ERR_NO_ITEM as c_int, flags: 0, cas: 0, offset: 0, length: 0 };
            let Some((item, value)) = item else {
                found[number].write(missed);
                return;
            };
            let to = values.get_mut(used..).and_then(|rest| rest.get_mut(..value.len()));
            let is_there = to.is_some();
            if let Some(to) = to {
                to.copy_from_slice(value);
            }
            let status = if is_there { GINNEL_OK } else { GINNEL_ERR_BUFFER_TOO_SMALL };
            found[number].write(CacheFound {
                status: status as c_int,
                flags: item.flags,
                cas: item.cas,
                offset: used,
                length: value.len(),
            });
            used += if is_there { value.len() } else { 0 };
        })?;
        Ok(hits)
    })
}

/// `count` structures.
unsafe fn array<'a, T>(data: *const T, name: &str, count: usize) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    require(data, name)?;
    // SAFETY: not null, and the caller says that `count` of them are there.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// Room for `count` structures, which may hold anything until they are written.
unsafe fn array_of_results<'a, T>(
    data: *mut T,
    name: &str,
    count: usize,
) -> Outcome<&'a mut [std::mem::MaybeUninit<T>]> {
    if count == 0 {
        return Ok(&mut []);
    }
    require(data, name)?;
    // SAFETY: not null, and the caller says that there is room for `count` of them, for this call alone.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), count) })
}

/// Stores a version where C wants it; null means that it does not.
unsafe fn tell(cas: *mut u64, name: &str, version: u64) -> Outcome<()> {
    if !cas.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { output(cas, name) }?.write(version);
    }
    Ok(())
}

/// Stores a value, whatever was there before. `ttl` is in how many seconds it ends; 0: never. `*cas` is its version; `cas` may be NULL.
/// Once this has returned 0, the next get of any reader finds it, or something newer.
///
/// Any thread; threads come one after the other. Blocks for the server's answer. Errors: GINNEL_ERR_TOO_LONG, GINNEL_ERR_SERVER,
/// GINNEL_ERR_NO_SERVER, after which nothing was changed, GINNEL_ERR_LOST, after which it was changed or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_set(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    flags: u32,
    ttl: u32,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        let version = cache.set(key, value, flags, ttl)?;
        checked!(tell(cas, version));
        Ok(())
    })
}

/// Stores many values as ginnel_cache_set() does, without waiting for one before the next is sent. Returns how many were stored.
/// `results`, which has `count` elements or is NULL, says what has become of each; ginnel_last_error() says why the last one of those failed
/// that did.
///
/// Any thread; threads come one after the other. Blocks for the server's answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_set_many(
    cache: *const Cache,
    entries: *const CacheEntry,
    count: usize,
    results: *mut CacheStored,
) -> ssize_t {
    length(|| {
        let Cache(cache) = checked!(borrow(cache));
        let entries = checked!(array(entries, count));
        let results = if results.is_null() { &mut [] } else { checked!(array_of_results(results, count)) };
        let mut items = Vec::with_capacity(entries.len());
        for &CacheEntry { key, key_length, value, length, flags, ttl } in entries {
            items.push(Entry {
                key: checked!(bytes(key, key_length)),
                value: checked!(bytes(value, length)),
                flags,
                ttl,
            });
        }
        let mut places = results.iter_mut();
        let mut stored = 0;
        for result in cache.set_many(&items) {
            let result = match result {
                Ok(cas) => {
                    stored += 1;
                    CacheStored { status: GINNEL_OK as c_int, cas }
                }
                Err(error) => CacheStored { status: Failure::from(error).record(), cas: 0 },
            };
            if let Some(place) = places.next() {
                place.write(result);
            }
        }
        Ok(stored)
    })
}

/// Stores a value unless there is one: then GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_add(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    flags: u32,
    ttl: u32,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        let version = cache.add(key, value, flags, ttl)?.ok_or(GINNEL_ERR_NOT_STORED)?;
        checked!(tell(cas, version));
        Ok(())
    })
}

/// Stores a value in the place of one; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_replace(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    flags: u32,
    ttl: u32,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        let version = cache.replace(key, value, flags, ttl)?.ok_or(GINNEL_ERR_NOT_STORED)?;
        checked!(tell(cas, version));
        Ok(())
    })
}

/// Puts bytes behind a value, whose flags and end stay; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_append(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        let version = cache.append(key, value)?.ok_or(GINNEL_ERR_NOT_STORED)?;
        checked!(tell(cas, version));
        Ok(())
    })
}

/// Puts bytes before a value, whose flags and end stay; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_prepend(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        let version = cache.prepend(key, value)?.ok_or(GINNEL_ERR_NOT_STORED)?;
        checked!(tell(cas, version));
        Ok(())
    })
}

/// Stores a value in the place of the version `*cas`, which a get has returned; `*cas` is the new version then. If the item has another
/// version now, GINNEL_ERR_CHANGED; if there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_cas(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    len: usize,
    flags: u32,
    ttl: u32,
    cas: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let (key, value) = (checked!(bytes(key, key_length)), checked!(bytes(value, len)));
        require(cas, "cas")?;
        // SAFETY: not null, as just seen, and the caller says that a number is there.
        let before = unsafe { cas.read() };
        match cache.cas(key, value, flags, ttl, before)? {
            Swap::Stored(version) => checked!(tell(cas, version)),
            Swap::Changed => return Err(GINNEL_ERR_CHANGED.into()),
            Swap::Missing => return Err(GINNEL_ERR_NO_ITEM.into()),
        }
        Ok(())
    })
}

/// Removes an item; if there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_delete(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        if cache.delete(checked!(bytes(key, key_length)))? { Ok(()) } else { Err(GINNEL_ERR_NO_ITEM.into()) }
    })
}

/// Adds to a value that is a number in decimal digits; beyond 64 bits it goes on from 0. `*result` is the sum; `result` may be NULL. If there
/// is no such item, GINNEL_ERR_NO_ITEM; if it is no number, GINNEL_ERR_SERVER. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_increment(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    delta: u64,
    result: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let sum = cache.increment(checked!(bytes(key, key_length)), delta)?.ok_or(GINNEL_ERR_NO_ITEM)?;
        checked!(tell(result, sum));
        Ok(())
    })
}

/// Takes from a value that is a number, but not below 0. A value that gets shorter keeps its length, with blanks behind the digits.
/// Otherwise as ginnel_cache_increment().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_decrement(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    delta: u64,
    result: *mut u64,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let rest = cache.decrement(checked!(bytes(key, key_length)), delta)?.ok_or(GINNEL_ERR_NO_ITEM)?;
        checked!(tell(result, rest));
        Ok(())
    })
}

/// Changes in how many seconds an item ends; 0: never. If there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_touch(
    cache: *const Cache,
    key: *const c_void,
    key_length: usize,
    ttl: u32,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        if cache.touch(checked!(bytes(key, key_length)), ttl)? {
            Ok(())
        } else {
            Err(GINNEL_ERR_NO_ITEM.into())
        }
    })
}

/// Ends all items. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_flush(cache: *const Cache) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        Ok(cache.flush()?)
    })
}

/// Asks the server for its statistics: of `kind`, or the general ones if that is NULL. `*text` has a line for each, its name and what it is,
/// and is the caller's, to be freed with ginnel_string_free(); on failure it is NULL. Otherwise as ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_stats(
    cache: *const Cache,
    kind: *const c_char,
    text: *mut *mut c_char,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(text));
        let Cache(cache) = checked!(borrow(cache));
        let kind = if kind.is_null() { "" } else { checked!(string(kind)) };
        let mut lines = String::new();
        for (name, what) in cache.stats(kind)? {
            // Writing to a `String` never fails, and C has no zeros in its texts.
            let _ = writeln!(lines, "{name} {}", what.replace('\0', " "));
        }
        return_text(place, lines.replace('\0', " "))
    })
}

/// Fills in `*counters`, whose `size` the caller has set. Any thread; does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_get_counters(
    cache: *const Cache,
    counters: *mut CacheCounters,
) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        let counted = cache.counters();
        let facts = CacheCounters {
            size: 0,
            hits: counted.hits,
            misses: counted.misses,
            asked: counted.asked,
            lost: counted.lost,
            connections: counted.connections,
            reported: counted.reported,
        };
        checked!(fill(counters, facts));
        Ok(())
    })
}
