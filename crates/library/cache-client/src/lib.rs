//! A client of a Ginnel cache.
//!
//! The items of a cache lie in a block of a segment, which this process reads directly: [`Cache::get`] and
//! [`Cache::get_many`] find an item in memory, without a system call and without a running server. Changes go to the
//! server over one connection, in memcached's protocol.
//!
//! ```no_run
//! let cache = ginnel_cache_client::Cache::open("web/sessions")?;
//! cache.set(b"user:7", b"Ada", 0, 60)?;
//! let mut value = Vec::new();
//! if let Some(item) = cache.get(b"user:7", &mut value)? {
//!     println!("{} bytes, version {}", value.len(), item.cas);
//! }
//! # Ok::<(), ginnel_cache_client::Error>(())
//! ```
//!
//! # What blocks
//!
//! A get that memory can answer does not wait, neither for other threads nor for a server that hangs or was killed.
//! Memory cannot answer in these cases: the server changes the same item all the time, or was killed while it did so;
//! the item has an expiry time and the server's clock has stopped; or the cache was created anew. Then the client
//! asks the server. While the server is short of memory and the client has no connection to it, a get also tries
//! briefly to open one. If that fails, there is no other attempt for five seconds. All other calls wait for the
//! server's answer: at most [`Options::timeout`] for each, and at most [`Options::patience`] for a server that is
//! being replaced. Requests of several threads go to the server one after the other.
//!
//! # Guarantees
//!
//! When a change returns, it is in memory: the next get of any reader finds it, or something newer. If the server
//! dies before it answers, the change returns [`Error::Lost`]: it may have been done or not, and the client does not
//! repeat it. [`Error::NoServer`] means that it was not done. The next request looks for the next server. Reads are
//! harmless, so the client repeats them once.
//!
//! A client that sends no requests must also notice when another cache has replaced this one. If the server has
//! marked the old cache's memory, the very next get notices it. If the old cache was merely abandoned, the client
//! notices it a while after the server's clock has stopped.
//!
//! # Threads and forks
//!
//! Several threads may use a [`Cache`]. After `fork`, both processes may use it if no thread was in it at that
//! moment; each then has its own connection.
//!
//! ```text
//! cache_block  the block that holds the cache now
//! server       the connection to the server, and how it is found
//! connection   a connection over a channel or a socket
//! request      the requests
//! answer       the answers
//! hits         reports of gets to the server
//! ```

#[doc(hidden)]
pub mod answer;
mod cache_block;
mod connection;
mod counters;
mod error;
mod hits;
mod place;
mod request;
mod server;

use crate::answer::{Answer, flag, number};
use crate::cache_block::{CacheBlock, Opened};
use crate::counters::CounterSet;
use crate::hits::Hits;
use crate::request::Mode;
use crate::server::{Ask, Server};
pub use counters::Counters;
pub use error::Error;
use ginnel::{AttachOptions, SharedMemory as _};
use ginnel_cache_store::reader::{Append, Found, Place};
use ginnel_cache_store::store::Meta;
pub use ginnel_cache_store::store::NotACache;
pub use ginnel_cache_store::survey::{Part, Survey};
pub use place::Changes;
pub use request::MOST_KEY;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Keys whose memory is fetched together. Processors can have some ten to twenty such fetches under way.
const TOGETHER: usize = 16;
/// Requests that are sent before their answers are read. They are so few that the answers to changes, and the
/// requests for values, fit into any connection, so that neither side waits for the other.
const UNDER_WAY: usize = 64;
/// The most bytes of requests that are collected before they are sent.
const MOST_COLLECTED: usize = 1 << 20;
/// The most lines of statistics.
const MOST_STATS: usize = 1 << 16;

/// How to open a cache. The defaults are right for most programs.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to attach to the segment: the daemon's socket, and what this program calls itself.
    pub attach: AttachOptions,
    /// Where changes are sent.
    pub changes: Changes,
    /// How long to wait for a cache that does not exist yet, or for a server that is being replaced. Default: 3
    /// seconds.
    pub patience: Duration,
    /// How long a server may take for an answer. Default: 10 seconds.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            attach: AttachOptions::default(),
            changes: Changes::default(),
            patience: Duration::from_secs(3),
            timeout: Duration::from_secs(10),
        }
    }
}

/// The properties of an item that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The client's flags, as they were stored.
    pub flags: u32,
    /// The item's version, for [`Cache::cas`]. No other version of any item has this number.
    pub cas: u64,
    /// The length of the item's value, in bytes.
    pub len: usize,
}

impl Item {
    fn of(meta: &Meta) -> Self {
        Self { flags: meta.flags, cas: meta.version, len: meta.len }
    }
}

/// An item to store.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry<'a> {
    /// The key: 1 to 250 bytes of any kind; up to 186 if there are blanks or control characters among them.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// A number for the program's own use.
    pub flags: u32,
    /// In how many seconds the item expires; 0: never.
    pub ttl: u32,
}

/// The result of [`Cache::cas`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The value is stored, and has this version.
    Stored(u64),
    /// The item no longer has the given version.
    Changed,
    /// There is no such item.
    Missing,
}

/// An open cache. Several threads may use it.
pub struct Cache {
    memory: CacheBlock,
    server: Mutex<Server>,
    hits: Hits,
    counters: CounterSet,
}

impl Cache {
    /// Opens the cache `SEGMENT/NAME`. Attaches to the segment; the right to read it is enough.
    pub fn open(address: &str) -> Result<Self, Error> {
        Self::open_with(address, &Options::default())
    }

    /// Opens a cache with `options`. Waits for the daemon, and for a cache that does not exist yet.
    pub fn open_with(address: &str, options: &Options) -> Result<Self, Error> {
        let Options { attach, changes, patience, timeout } = options;
        let memory = CacheBlock::open(address, attach, *patience)?;
        let server = Server::new(changes.clone(), attach.clone(), *patience, *timeout);
        Ok(Self { memory, server: Mutex::new(server), hits: Hits::new(), counters: CounterSet::default() })
    }

    /// Returns the cache's address, `SEGMENT/NAME`.
    pub fn address(&self) -> &str {
        &self.memory.address
    }

    /// Returns the identifier of this cache, which no other cache has. Returns `None` if the cache has been removed.
    pub fn id(&self) -> Option<[u64; 2]> {
        self.memory.now().as_ref().map(|opened| opened.reader.id())
    }

    /// Returns statistics of the cache's memory, or `None` if the cache has been removed. Needs no server. Takes some
    /// milliseconds for a million items.
    pub fn survey(&self) -> Option<Survey> {
        self.memory.now().as_ref().map(|opened| opened.reader.survey())
    }

    /// Returns where, according to the header of the cache, its server can be reached. The text is not checked.
    pub fn contact(&self) -> String {
        self.memory.now().as_ref().map_or_else(String::new, |opened| opened.reader.contact())
    }

    /// Returns the counters of this client.
    pub fn counters(&self) -> Counters {
        self.counters.sum()
    }

    /// Looks a key up, and appends the value to `value`. Returns `None` if there is no such item. Reads memory, and
    /// asks the server only if memory cannot tell.
    pub fn get(&self, key: &[u8], value: &mut Vec<u8>) -> Result<Option<Item>, Error> {
        self.get_to(key, &mut Append::to(value))
    }

    /// Looks a key up, and copies as much of the value to `value` as there is room for. [`Item::len`] is the length
    /// of the whole value.
    pub fn get_into(&self, key: &[u8], mut value: &mut [u8]) -> Result<Option<Item>, Error> {
        self.get_to(key, &mut value)
    }

    #[inline]
    fn get_to(&self, key: &[u8], value: &mut impl Place) -> Result<Option<Item>, Error> {
        request::check_key(key)?;
        if let Some(opened) = &*self.memory.now() {
            opened.reader.memory().attend();
            let hash = opened.reader.hash(key);
            match opened.reader.get_to(hash, key, value) {
                Found::Hit(meta) => {
                    self.found(opened, hash);
                    return Ok(Some(Item::of(&meta)));
                }
                Found::Miss => {
                    self.missed(opened, 1);
                    return Ok(None);
                }
                Found::Unknown => {}
            }
        }
        self.get_otherwise(key, value)
    }

    #[inline]
    fn found(&self, opened: &Opened, hash: u64) {
        let count = self.counters.hit(1);
        if count.is_multiple_of(1024) && opened.reader.is_server_late() {
            self.memory.look_again();
        }
        if opened.reader.wants_hits() && self.hits.note(hash, count) {
            self.report();
        }
    }

    #[inline]
    fn missed(&self, opened: &Opened, keys: u64) {
        self.counters.missed(keys);
        // A caller whose get has missed has more expensive work to do than reading the clock.
        if opened.reader.is_server_late() {
            self.memory.look_again();
        }
    }

    /// Reports hits to the server. Does not wait, except for a server that has accepted a part of the report.
    #[cold]
    fn report(&self) {
        let Ok(mut server) = self.server.try_lock() else { return };
        let mut hashes = Vec::new();
        self.hits.take(&mut hashes);
        if hashes.is_empty() {
            return;
        }
        let mut bytes = Vec::with_capacity(16 + hashes.len() * 17);
        request::hits(&mut bytes, &hashes);
        if server.hint(&self.memory, &bytes) {
            self.counters.reported.fetch_add(hashes.len() as u64, Ordering::Relaxed);
        } else {
            self.hits.pause();
        }
        self.count_connections(&server);
    }

    /// Asks the server for what memory could not tell.
    #[cold]
    fn get_otherwise(&self, key: &[u8], value: &mut impl Place) -> Result<Option<Item>, Error> {
        value.undo();
        let is_current = |opened: &Opened| opened.reader.is_current();
        if !self.memory.now().as_ref().is_some_and(|opened| is_current(opened)) {
            self.memory.look_now(is_current);
            if let Some(opened) = &*self.memory.now() {
                let hash = opened.reader.hash(key);
                match opened.reader.get_to(hash, key, value) {
                    Found::Hit(meta) => {
                        self.counters.hit(1);
                        return Ok(Some(Item::of(&meta)));
                    }
                    Found::Miss => {
                        self.counters.missed(1);
                        return Ok(None);
                    }
                    Found::Unknown => value.undo(),
                }
            }
        }
        self.counters.asked.fetch_add(1, Ordering::Relaxed);
        self.fetch(key, None, value)
    }

    /// Gets an item from the server.
    fn fetch(&self, key: &[u8], ttl: Option<u32>, value: &mut impl Place) -> Result<Option<Item>, Error> {
        let (mut found, mut refused) = (None, None);
        let write = |out: &mut Vec<u8>| request::get(out, key, ttl);
        self.ask(write, ttl.is_none(), &mut |answer| {
            match answer {
                Answer::Value(bytes, flags) => {
                    let room = value.room(bytes.len());
                    room.copy_from_slice(&bytes[..room.len()]);
                    found = Some(item_of(bytes.len(), flags)?);
                }
                Answer::Short([b'E', b'N'], _) => {}
                Answer::Refused(text) => refused = Some(text.to_vec()),
                _ => return Err("something else than a value"),
            }
            Ok(())
        })?;
        self.unless_refused(refused)?;
        Ok(found)
    }

    /// Looks many keys up, and calls back for each item found, in any order, with its index among the keys, its value
    /// and its properties. The memory of several items is fetched at the same time, so this takes far less time than
    /// as many gets. Returns how many were found.
    pub fn get_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        mut each: impl FnMut(usize, Option<(Item, &[u8])>),
    ) -> Result<usize, Error> {
        let mut value = Vec::new();
        keys.iter().try_for_each(|key| request::check_key(key.as_ref()))?;
        let mut hits = 0;
        let mut unknown = Vec::new();
        for (chunk, first) in keys.chunks(TOGETHER).zip((0..).step_by(TOGETHER)) {
            let now = self.memory.now();
            let Some(opened) = &*now else {
                unknown.extend(first..first + chunk.len());
                continue;
            };
            let reader = &opened.reader;
            reader.memory().attend();
            let mut hashes = [0; TOGETHER];
            for (hash, key) in hashes.iter_mut().zip(chunk) {
                *hash = reader.hash(key.as_ref());
                reader.prefetch_slots(*hash);
            }
            hashes[..chunk.len()].iter().for_each(|hash| reader.prefetch_item(*hash));
            let (mut found, mut missed) = (0, 0);
            let count = self.counters.hit(0);
            for ((key, hash), number) in chunk.iter().zip(hashes).zip(first..) {
                value.clear();
                match reader.get_hashed(hash, key.as_ref(), &mut value) {
                    Found::Hit(meta) => {
                        found += 1;
                        if reader.wants_hits() && self.hits.note(hash, count + found) {
                            self.report();
                        }
                        each(number, Some((Item::of(&meta), &value)));
                    }
                    Found::Miss => {
                        missed += 1;
                        each(number, None);
                    }
                    Found::Unknown => unknown.push(number),
                }
            }
            self.counters.hit(found);
            hits += found as usize;
            if missed > 0 {
                self.missed(opened, missed);
            } else if (count ^ (count + found)) >= 1024 && reader.is_server_late() {
                self.memory.look_again();
            }
        }
        for number in unknown {
            value.clear();
            let item = self.get_otherwise(keys[number].as_ref(), &mut Append::to(&mut value))?;
            hits += usize::from(item.is_some());
            each(number, item.map(|item| (item, &value[..])));
        }
        Ok(hits)
    }

    /// Stores a value, whether or not the item exists. The item expires in `ttl` seconds; 0: never. Returns its
    /// version.
    pub fn set(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<u64, Error> {
        let stored = self.store(&Entry { key, value, flags, ttl }, Mode::Set, None)?;
        let Swap::Stored(cas) = stored else { return Err(self.nonsense("that a value is not stored")) };
        Ok(cas)
    }

    /// Stores a value unless the item exists. Returns `None` if it does.
    pub fn add(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags, ttl }, Mode::Add, None).map(version)
    }

    /// Replaces the value of an existing item. Returns `None` if there is none.
    pub fn replace(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags, ttl }, Mode::Replace, None).map(version)
    }

    /// Appends bytes to a value. Its flags and its expiry time stay. Returns `None` if there is no such item.
    pub fn append(&self, key: &[u8], value: &[u8]) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags: 0, ttl: 0 }, Mode::Append, None).map(version)
    }

    /// Puts bytes before a value. Its flags and its expiry time stay. Returns `None` if there is no such item.
    pub fn prepend(&self, key: &[u8], value: &[u8]) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags: 0, ttl: 0 }, Mode::Prepend, None).map(version)
    }

    /// Stores a value if the item still has the version that a get has returned.
    pub fn cas(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32, cas: u64) -> Result<Swap, Error> {
        self.store(&Entry { key, value, flags, ttl }, Mode::Set, Some(cas))
    }

    fn store(&self, entry: &Entry<'_>, mode: Mode, cas: Option<u64>) -> Result<Swap, Error> {
        self.check_value(entry.value)?;
        let write =
            |out: &mut Vec<u8>| request::set(out, entry.key, entry.value, entry.flags, entry.ttl, mode, cas);
        let mut stored = None;
        self.ask(write, false, &mut |answer| {
            stored = Some(stored_of(answer)?);
            Ok(())
        })?;
        match stored {
            Some(Ok(stored)) => Ok(stored),
            Some(Err(text)) => Err(self.refused(&text, entry.value.len())),
            None => Err(self.nonsense("nothing")),
        }
    }

    /// Stores many values, as [`Cache::set`] does, and sends further requests without waiting for the earlier
    /// answers. Returns one result for each entry: its version, or why it was not stored.
    ///
    /// Every request is answered. (With memcached's requests without answers, the client would not learn which of
    /// them have failed, and why.)
    pub fn set_many(&self, entries: &[Entry<'_>]) -> Vec<Result<u64, Error>> {
        let mut results = Vec::with_capacity(entries.len());
        let mut rest = entries;
        while !rest.is_empty() {
            let begin = results.len();
            let mut server = self.server();
            let mut request = std::mem::take(&mut server.request);
            request.clear();
            // The indices of the entries that are sent. The others have an invalid key.
            let mut sent = Vec::with_capacity(UNDER_WAY);
            let mut count = 0;
            for entry in rest.iter().take(UNDER_WAY) {
                if request.len() > MOST_COLLECTED {
                    break;
                }
                let Entry { key, value, flags, ttl } = *entry;
                let mut write = || request::set(&mut request, key, value, flags, ttl, Mode::Set, None);
                match self.check_value(value).and_then(|()| write()) {
                    Ok(()) => {
                        sent.push(begin + count);
                        results.push(Err(self.nonsense("nothing")));
                    }
                    Err(error) => results.push(Err(error)),
                }
                count += 1;
            }
            let mut answered = 0;
            let ask = Ask { bytes: &request, answers: sent.len(), is_harmless: false };
            let done = server.ask(&self.memory, &ask, &mut |number, answer| {
                let at = sent[number];
                results[at] = match stored_of(answer)? {
                    Ok(Swap::Stored(cas)) => Ok(cas),
                    Ok(_) => Err(self.nonsense("that a value is not stored")),
                    Err(text) => Err(self.refused(&text, entries[at].value.len())),
                };
                answered = number + 1;
                Ok(())
            });
            self.count_connections(&server);
            server.request = tidied(request);
            drop(server);
            if let Err(error) = done {
                self.count_lost(&error);
                for &at in &sent[answered..] {
                    results[at] = Err(again(&error));
                }
            }
            rest = &rest[count..];
        }
        results
    }

    /// Removes an item. Returns whether there was one.
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        self.yes_or_no(|out| request::delete(out, key), *b"NF")
    }

    /// Sets in how many seconds an item expires; 0: never. Returns whether there is one.
    pub fn touch(&self, key: &[u8], ttl: u32) -> Result<bool, Error> {
        self.yes_or_no(|out| request::touch(out, key, ttl), *b"EN")
    }

    /// Gets a value, which is appended to `value`, and sets in how many seconds the item expires; 0: never.
    pub fn get_and_touch(&self, key: &[u8], ttl: u32, value: &mut Vec<u8>) -> Result<Option<Item>, Error> {
        self.fetch(key, Some(ttl), &mut Append::to(value))
    }

    /// Adds `delta` to a value that is a number in decimal digits. The sum wraps around at 64 bits. Returns the sum,
    /// or `None` if there is no such item.
    pub fn increment(&self, key: &[u8], delta: u64) -> Result<Option<u64>, Error> {
        self.count(key, delta, false)
    }

    /// Subtracts `delta` from a value that is a number, but not below 0. Returns the result, or `None` if there is no
    /// such item. A value that gets shorter keeps its length, with blanks behind the digits.
    pub fn decrement(&self, key: &[u8], delta: u64) -> Result<Option<u64>, Error> {
        self.count(key, delta, true)
    }

    fn count(&self, key: &[u8], delta: u64, is_down: bool) -> Result<Option<u64>, Error> {
        let (mut result, mut refused) = (None, None);
        self.ask(|out| request::count(out, key, delta, is_down), false, &mut |answer| {
            match answer {
                Answer::Value(digits, _) => {
                    result = Some(number(digits.trim_ascii_end()).ok_or("a number that is none")?);
                }
                Answer::Short([b'N', b'F'], _) => {}
                Answer::Refused(text) => refused = Some(text.to_vec()),
                _ => return Err("something else than a number"),
            }
            Ok(())
        })?;
        self.unless_refused(refused)?;
        Ok(result)
    }

    /// Invalidates all items.
    pub fn flush(&self) -> Result<(), Error> {
        self.done(b"flush_all\r\n")
    }

    /// Sets how much memory the server uses, in units of 1 MiB. If it uses more, the next changes free the excess.
    pub fn set_limit(&self, mebibytes: u64) -> Result<(), Error> {
        self.done(format!("cache_memlimit {mebibytes}\r\n").as_bytes())
    }

    /// Returns the server's statistics of this kind (`""`: the general ones).
    pub fn stats(&self, kind: &str) -> Result<Vec<(String, String)>, Error> {
        let is_word =
            kind.len() <= MOST_KEY && kind.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if !is_word {
            let what = "no kind of statistics";
            return Err(Error::Address { given: kind.into(), what });
        }
        let mut request = String::from("stats");
        if !kind.is_empty() {
            let _ = write!(request, " {kind}");
        }
        request.push_str("\r\n");
        let (mut stats, mut refused) = (Vec::new(), None);
        let mut server = self.server();
        // The lines are read one at a time, because their number is known only at the end.
        let asked = server.lines(&self.memory, request.as_bytes(), MOST_STATS, &mut |answer| {
            match answer {
                Answer::Stat(name, text) => {
                    let [name, text] = [name, text].map(|text| String::from_utf8_lossy(text).into_owned());
                    stats.push((name, text));
                    return Ok(false);
                }
                Answer::End | Answer::Done => {}
                Answer::Refused(text) => refused = Some(text.to_vec()),
                _ => return Err("something else than statistics"),
            }
            Ok(true)
        });
        self.count_connections(&server);
        drop(server);
        asked.inspect_err(|error| self.count_lost(error))?;
        self.unless_refused(refused)?;
        Ok(stats)
    }

    /// Sends a request that is either done or refused.
    fn done(&self, request: &[u8]) -> Result<(), Error> {
        let mut refused = None;
        let write = |out: &mut Vec<u8>| {
            out.extend_from_slice(request);
            Ok(())
        };
        self.ask(write, false, &mut |answer| match answer {
            Answer::Done => Ok(()),
            Answer::Refused(text) => {
                refused = Some(text.to_vec());
                Ok(())
            }
            _ => Err("something else than that it is done"),
        })?;
        self.unless_refused(refused)
    }

    /// Sends a request that is done, or that the server answers with `no`, usually because there is no such item.
    fn yes_or_no(
        &self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>,
        no: [u8; 2],
    ) -> Result<bool, Error> {
        let (mut is_done, mut refused) = (false, None);
        self.ask(write, false, &mut |answer| {
            match answer {
                Answer::Short([b'H', b'D'], _) => is_done = true,
                Answer::Short(short, _) if short == no => {}
                Answer::Refused(text) => refused = Some(text.to_vec()),
                _ => return Err("something else than yes or no"),
            }
            Ok(())
        })?;
        self.unless_refused(refused)?;
        Ok(is_done)
    }

    /// Sends one request, and handles its answer.
    fn ask(
        &self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>,
        is_harmless: bool,
        take: &mut dyn FnMut(Answer<'_>) -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        let mut server = self.server();
        let mut request = std::mem::take(&mut server.request);
        request.clear();
        let asked = write(&mut request).and_then(|()| {
            let ask = Ask { bytes: &request, answers: 1, is_harmless };
            server.ask(&self.memory, &ask, &mut |_, answer| take(answer))
        });
        server.request = tidied(request);
        self.count_connections(&server);
        asked.inspect_err(|error| self.count_lost(error))
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_connections(&self, server: &Server) {
        self.counters.connections.store(server.connections, Ordering::Relaxed);
    }

    fn count_lost(&self, error: &Error) {
        if matches!(error, Error::Lost { .. }) {
            self.counters.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn nonsense(&self, what: &'static str) -> Error {
        Error::Nonsense { cache: self.memory.address.clone(), what }
    }

    fn refused(&self, text: &[u8], len: usize) -> Error {
        let cache = self.memory.address.clone();
        if text.starts_with(b"SERVER_ERROR object too large") {
            return Error::TooLarge { cache, len };
        }
        Error::Refused { cache, text: String::from_utf8_lossy(text).into_owned() }
    }

    fn check_value(&self, value: &[u8]) -> Result<(), Error> {
        let len = value.len();
        if request::is_value(len) {
            return Ok(());
        }
        Err(Error::TooLarge { cache: self.memory.address.clone(), len })
    }

    fn unless_refused(&self, refused: Option<Vec<u8>>) -> Result<(), Error> {
        refused.map_or(Ok(()), |text| Err(self.refused(&text, 0)))
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("address", &self.memory.address).finish_non_exhaustive()
    }
}

fn version(stored: Swap) -> Option<u64> {
    match stored {
        Swap::Stored(cas) => Some(cas),
        Swap::Changed | Swap::Missing => None,
    }
}

fn item_of(len: usize, flags: &[u8]) -> Result<Item, &'static str> {
    let number = |letter| flag(flags, letter).ok_or("a value without its flags or its version");
    let client_flags = u32::try_from(number(b'f')?).map_err(|_| "flags that are too large")?;
    Ok(Item { flags: client_flags, cas: number(b'c')?, len })
}

/// Returns the meaning of an answer to a storage request: the value was stored or not, or the server refused with
/// these words.
fn stored_of(answer: Answer<'_>) -> Result<Result<Swap, Vec<u8>>, &'static str> {
    Ok(Ok(match answer {
        Answer::Short([b'H', b'D'], flags) => Swap::Stored(flag(flags, b'c').unwrap_or(0)),
        Answer::Short([b'E', b'X'], _) => Swap::Changed,
        Answer::Short([b'N', b'S' | b'F'], _) => Swap::Missing,
        Answer::Refused(text) => return Ok(Err(text.to_vec())),
        _ => return Err("something else than that it is stored or not"),
    }))
}

/// Releases the capacity that only a large value has needed.
fn tidied(request: Vec<u8>) -> Vec<u8> {
    if request.capacity() > MOST_COLLECTED { Vec::new() } else { request }
}

/// Copies an error for another request that was sent together with the first.
fn again(error: &Error) -> Error {
    match error {
        Error::NoServer { cache, tried } => Error::NoServer { cache: cache.clone(), tried: tried.clone() },
        Error::Nonsense { cache, what } => Error::Nonsense { cache: cache.clone(), what },
        other => Error::Lost {
            cache: match other {
                Error::Lost { cache, .. } => cache.clone(),
                _ => String::new(),
            },
            why: other.to_string(),
        },
    }
}
