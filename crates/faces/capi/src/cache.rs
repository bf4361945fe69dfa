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

/// An open cache. Any number of threads may use it at once. Created by ginnel_cache_open(), freed by
/// ginnel_cache_close().
pub struct Cache(ginnel_cache_client::Cache);
handle!(Cache, "cache");

/// Options for opening a cache. Fill the structure with zeros, set `size`, then the members that should differ from the
/// default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheOptions {
    /// sizeof(ginnel_cache_options).
    pub size: usize,
    /// Path of the daemon's socket. NULL: $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock.
    pub socket: *const c_char,
    /// The name under which this endpoint appears to people and peers. NULL: the program's name.
    pub name: *const c_char,
    /// Where to send changes: "channel SEGMENT", "tcp ADDRESS:PORT" or "unix PATH". NULL: where the cache itself says.
    pub changes: *const c_char,
    /// How long to wait for a cache that does not exist yet, or for a server that is being replaced, in nanoseconds. 0:
    /// 3 seconds; negative: not at all.
    pub patience_ns: i64,
    /// How long the server may take to answer, in nanoseconds. 0: 10 seconds.
    pub timeout_ns: u64,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for CacheOptions {}

/// Properties of an item that was found.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheItem {
    /// sizeof(ginnel_cache_item).
    pub size: usize,
    /// Length of the value in bytes, even if it is longer than the buffer.
    pub length: usize,
    /// Version of the item, for ginnel_cache_cas().
    pub cas: u64,
    /// The client's flags, as they were stored.
    pub flags: u32,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for CacheItem {}

/// A key, for ginnel_cache_get_many(). This structure never grows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheKey {
    /// The bytes of the key.
    pub key: *const c_void,
    /// Length of the key in bytes.
    pub key_length: usize,
}

/// The result of ginnel_cache_get_many() for one key. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheFound {
    /// GINNEL_OK, GINNEL_ERR_NO_ITEM, or GINNEL_ERR_BUFFER_TOO_SMALL if there was no room left for the value.
    pub status: c_int,
    /// The client's flags, as they were stored.
    pub flags: u32,
    /// Version of the item, for ginnel_cache_cas().
    pub cas: u64,
    /// Offset of the value in the buffer.
    pub offset: usize,
    /// Length of the value in bytes, even if there was no room left for it.
    pub length: usize,
}

/// An item to store, for ginnel_cache_set_many(). This structure never grows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheEntry {
    /// The bytes of the key.
    pub key: *const c_void,
    /// Length of the key in bytes.
    pub key_length: usize,
    /// The bytes of the value.
    pub value: *const c_void,
    /// Length of the value in bytes.
    pub length: usize,
    /// Flags, whose meaning the program chooses.
    pub flags: u32,
    /// Time to live in seconds; 0: the item does not expire.
    pub ttl: u32,
}

/// The result of ginnel_cache_set_many() for one item. This structure never grows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheStored {
    /// GINNEL_OK, or the reason why the item was not stored.
    pub status: c_int,
    /// New version of the item.
    pub cas: u64,
}

/// Counters of a cache handle since it was opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheCounters {
    /// sizeof(ginnel_cache_counters).
    pub size: usize,
    /// Number of items that were found in memory.
    pub hits: u64,
    /// Number of keys for which memory has no item.
    pub misses: u64,
    /// Number of keys that were looked up at the server, because memory could not tell.
    pub asked: u64,
    /// Number of requests whose answers were lost.
    pub lost: u64,
    /// Number of connections that were opened to servers.
    pub connections: u64,
    /// Number of keys whose hits were reported to the server.
    pub reported: u64,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for CacheCounters {}

impl From<ginnel_cache_client::Error> for Failure {
    #[cold]
    fn from(error: ginnel_cache_client::Error) -> Self {
        Self::new(Status::of_cache(&error), error.to_string())
    }
}

/// Opens the cache at `address`, which is SEGMENT/NAME. `options` may be NULL. On success the caller must free `*cache`
/// with ginnel_cache_close(); on failure it is NULL. Read access to the segment is sufficient.
///
/// Blocks until the daemon answers, and for up to `options->patience_ns` for a cache that does not exist yet. Any
/// thread may call it. Errors: GINNEL_ERR_NO_SEGMENT, GINNEL_ERR_NOT_FOUND if there is no such cache, GINNEL_ERR_KIND
/// if it is not a cache of this version, GINNEL_ERR_CORRUPT, GINNEL_ERR_DENIED, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NAME.
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

/// Closes a cache. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
/// a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_close(cache: *mut Cache) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(cache) }
}

/// Looks up a key and copies its value to `value`, which has room for `room` bytes. Returns the length of the value in
/// bytes, or a negative status. If the value is longer than `room`, the status is GINNEL_ERR_BUFFER_TOO_SMALL, and the
/// first `room` bytes have been copied. `item` may be NULL; otherwise `*item`, whose `size` the caller has set, is
/// filled in in both cases.
///
/// Any thread may call it. It does not block if the answer can be read from memory. Otherwise it blocks until the
/// server answers: while the server keeps changing this item or was killed while it changed it, for an item that
/// expires while the server's clock is stopped, and if the cache was created anew. Errors: GINNEL_ERR_NO_ITEM,
/// GINNEL_ERR_BUFFER_TOO_SMALL; from the server: GINNEL_ERR_NO_SERVER, GINNEL_ERR_LOST, GINNEL_ERR_SERVER.
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

/// Looks up `count` keys and copies their values one after another to `values`, which has room for `room` bytes.
/// `found`, which has `count` elements, receives the result for each key. Returns how many keys were found. This is
/// much faster than `count` calls of ginnel_cache_get(), because the memory of many items is fetched at once.
///
/// Any thread may call it. It blocks and fails as ginnel_cache_get() does. After an error, no result is valid.
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

/// Returns `count` structures that C has passed.
unsafe fn array<'a, T>(data: *const T, name: &str, count: usize) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    require(data, name)?;
    // SAFETY: not null, and the caller says that `count` of them are there.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// Returns room for `count` structures, which may hold anything until they are written.
unsafe fn array_of_results<'a, T>(
    data: *mut T,
    name: &str,
    count: usize,
) -> Outcome<&'a mut [std::mem::MaybeUninit<T>]> {
    if count == 0 {
        return Ok(&mut []);
    }
    require(data, name)?;
    // SAFETY: not null, and the caller says that there is room for `count` of them, used only by this call.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), count) })
}

/// Stores a version where C wants it, unless the pointer is null.
unsafe fn tell(cas: *mut u64, name: &str, version: u64) -> Outcome<()> {
    if !cas.is_null() {
        // SAFETY: the caller is responsible for it.
        unsafe { output(cas, name) }?.write(version);
    }
    Ok(())
}

/// Stores a value, whether the key has one or not. `ttl` is its time to live in seconds; 0 means that it does not
/// expire. `cas` may be NULL; otherwise `*cas` receives the item's version. Once this has returned 0, the next get of
/// any reader finds this value or a newer one.
///
/// Any thread may call it; concurrent calls are executed one after another. Blocks until the server answers. Errors:
/// GINNEL_ERR_TOO_LONG, GINNEL_ERR_SERVER; GINNEL_ERR_NO_SERVER, after which nothing was changed; GINNEL_ERR_LOST,
/// after which the value may or may not have been stored.
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

/// Stores `count` values as ginnel_cache_set() does, without waiting for an answer before sending the next. Returns how
/// many were stored. `results` may be NULL; otherwise its `count` elements receive the result for each item.
/// ginnel_last_error() describes the last item that was not stored.
///
/// Any thread may call it; concurrent calls are executed one after another. Blocks until the server answers.
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

/// Stores a value unless the key has one, which is GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
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

/// Replaces a value. If the key has none, that is GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
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

/// Appends bytes to a value, and keeps its flags and expiry time. If the key has no value, that is
/// GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
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

/// Prepends bytes to a value, and keeps its flags and expiry time. If the key has no value, that is
/// GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
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

/// Replaces a value if its version is `*cas`, which a get has returned, and stores the new version in `*cas`. If the
/// item has another version now, that is GINNEL_ERR_CHANGED; if there is no item, GINNEL_ERR_NO_ITEM. Otherwise like
/// ginnel_cache_set().
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
        // SAFETY: not null, as was just checked, and the caller says that there is a number.
        let before = unsafe { cas.read() };
        match cache.cas(key, value, flags, ttl, before)? {
            Swap::Stored(version) => checked!(tell(cas, version)),
            Swap::Changed => return Err(GINNEL_ERR_CHANGED.into()),
            Swap::Missing => return Err(GINNEL_ERR_NO_ITEM.into()),
        }
        Ok(())
    })
}

/// Removes an item. If there is none, that is GINNEL_ERR_NO_ITEM. Otherwise like ginnel_cache_set().
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

/// Adds `delta` to a value that is a decimal number; the sum wraps around at 64 bits. `result` may be NULL; otherwise
/// `*result` receives the sum. If there is no such item, that is GINNEL_ERR_NO_ITEM; if its value is not a number,
/// GINNEL_ERR_SERVER. Otherwise like ginnel_cache_set().
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

/// Subtracts `delta` from a value that is a decimal number, but not below 0. If the result has fewer digits, the value
/// keeps its length and is filled with blanks at its end. Otherwise like ginnel_cache_increment().
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

/// Changes the time to live of an item, in seconds; 0 means that it does not expire. If there is no item, that is
/// GINNEL_ERR_NO_ITEM. Otherwise like ginnel_cache_set().
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

/// Removes all items. Otherwise like ginnel_cache_set().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_cache_flush(cache: *const Cache) -> c_int {
    status(|| {
        let Cache(cache) = checked!(borrow(cache));
        Ok(cache.flush()?)
    })
}

/// Asks the server for its statistics: those named `kind`, or the general ones if `kind` is NULL. `*text` receives a
/// line for each, with its name and value. On success the caller must free `*text` with ginnel_string_free(); on
/// failure it is NULL. Otherwise like ginnel_cache_set().
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
            // Writing to a `String` never fails, and a C string cannot contain zeros.
            let _ = writeln!(lines, "{name} {}", what.replace('\0', " "));
        }
        return_text(place, lines.replace('\0', " "))
    })
}

/// Fills in `*counters`, whose `size` the caller has set. Any thread may call it; it does not block.
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
