//! A client of a Ginnel cache.
//!
//! The items of a cache lie in a block of a segment, which this process reads by itself: [`Cache::get`] and [`Cache::get_many`] find an item
//! in memory, without a call to the system and without a server awake. What changes items goes to the server over one connection, in
//! memcached's protocol.
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
//! # What waits
//!
//! A get of something that memory can tell waits for nobody: not for other threads, not for the server, whether it hangs or was killed.
//! Memory cannot tell if the server changes the very item all the time or was killed while it did, if the item has an end and the server's
//! clock stands, and if the cache was made anew. Then the server is asked. And while the server is short of memory and has no connection to it, a get
//! tries to open one, for a moment: if that fails, there is no other try for five seconds. Everything else waits for the server's answer, at most
//! [`Options::timeout`] for each, and for a server that is being replaced at most [`Options::patience`].
//! Requests of several threads go to the server one after the other.
//!
//! # What is certain
//!
//! When a change returns, memory has it: the next get of any reader finds that, or something newer. If the server dies before it
//! answers, the change returns [`Error::Lost`]: it may have been done or not, and is not tried again here. [`Error::NoServer`] means that it
//! was not done. The next request looks for the next server. Reads, which do no harm, are tried again once.
//!
//! A client that does not ask the server for anything notices another cache in the place of this one when the server says so in the
//! memory of the old one, with the very next get; and if the old one was just left alone, once its clock stands, a while later.
//!
//! # Threads and forks
//!
//! A [`Cache`] may be used by several threads. After `fork`, both processes may use it if no thread was in it at that moment; each has its
//! own connection then.
//!
//! ```text
//! memory    the block, and which one it is now
//! server    the connection to the server, and how it is found
//! link      a connection over a channel or a socket
//! request   what is asked
//! answer    what is answered
//! hits      what the server is told about gets
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

use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ginnel::{AttachOptions, SharedMemory as _};
use ginnel_cache_store::reader::{Append, Found, Place};
use ginnel_cache_store::store::Meta;

pub use counters::Counters;
pub use error::Error;
pub use ginnel_cache_store::store::NotACache;
pub use ginnel_cache_store::survey::{Part, Survey};
pub use place::Changes;
pub use request::MOST_KEY;

use crate::answer::{Answer, flag, number};
use crate::cache_block::{CacheBlock, Opened};
use crate::counters::CounterSet;
use crate::hits::Hits;
use crate::request::Mode;
use crate::server::{Ask, Server};

/// Keys whose memory is asked for together. Processors have some ten to twenty such requests under way.
const TOGETHER: usize = 16;
/// Requests that are sent before their answers are read: so few that the answers to changes, and the requests for values, fit into any
/// connection, and none of both sides waits for the other.
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
    /// Where changes go.
    pub changes: Changes,
    /// How long a cache that is not there, or a server that is being replaced, is waited for. Default: 3 seconds.
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

/// What is known of an item that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The client's, as they were stored.
    pub flags: u32,
    /// Its version, for [`Cache::cas`]. No other version of any item has this number.
    pub cas: u64,
    /// Bytes of its value.
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
    /// Its key: 1 to 250 bytes of any kind; up to 186 if there are blanks or control characters among them.
    pub key: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
    /// Whatever the program likes.
    pub flags: u32,
    /// In how many seconds it ends; 0: never.
    pub ttl: u32,
}

/// What has become of [`Cache::cas`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// It is stored, and has this version.
    Stored(u64),
    /// The item is another one than that of the version that was given.
    Changed,
    /// There is no such item.
    Missing,
}

/// A cache that is open. May be used by several threads.
pub struct Cache {
    memory: CacheBlock,
    server: Mutex<Server>,
    hits: Hits,
    counters: CounterSet,
}

impl Cache {
    /// Opens the cache `SEGMENT/NAME`. Attaches to the segment, for which reading it is enough.
    pub fn open(address: &str) -> Result<Self, Error> {
        Self::open_with(address, &Options::default())
    }

    /// The same, as `options` say. Waits for the daemon, and for a cache that is not there yet.
    pub fn open_with(address: &str, options: &Options) -> Result<Self, Error> {
        let Options { attach, changes, patience, timeout } = options;
        let memory = CacheBlock::open(address, attach, *patience)?;
        let server = Server::new(changes.clone(), attach.clone(), *patience, *timeout);
        Ok(Self { memory, server: Mutex::new(server), hits: Hits::new(), counters: CounterSet::default() })
    }

    /// `SEGMENT/NAME`.
    pub fn address(&self) -> &str {
        &self.memory.address
    }

    /// What tells this cache from all others; `None` if it has been removed.
    pub fn id(&self) -> Option<[u64; 2]> {
        self.memory.now().as_ref().map(|opened| opened.reader.id())
    }

    /// How the cache looks in memory; `None` if it has been removed. Needs no server, and some milliseconds for a million of items.
    pub fn survey(&self) -> Option<Survey> {
        self.memory.now().as_ref().map(|opened| opened.reader.survey())
    }

    /// Where the header of the cache says that its server can be reached. May be anything.
    pub fn contact(&self) -> String {
        self.memory.now().as_ref().map_or_else(String::new, |opened| opened.reader.contact())
    }

    /// What this client has done.
    pub fn counters(&self) -> Counters {
        self.counters.sum()
    }

    /// Looks a key up, and appends the value to `value`. `None` if there is no such item. From memory wherever that can tell.
    pub fn get(&self, key: &[u8], value: &mut Vec<u8>) -> Result<Option<Item>, Error> {
        self.get_to(key, &mut Append::to(value))
    }

    /// The same, and copies as much of the value to `value` as there is room for. [`Item::len`] says how long it is.
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
        // Whoever has missed has something more expensive to do than looking at the clock.
        if opened.reader.is_server_late() {
            self.memory.look_again();
        }
    }

    /// Tells the server what was found. Waits for nobody but a server that has taken a part of it.
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

    /// What memory could not tell.
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

    /// From the server.
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

    /// Looks many keys up, and says for each what was found, in any order: its number among the keys, its value, and what is known of it.
    /// While the memory of one is waited for, that of others comes, so this takes far less time than as many gets.
    /// Returns how many were found.
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

    /// Stores a value, whatever was there before. `ttl` is in how many seconds it ends; 0: never. Returns its version.
    pub fn set(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<u64, Error> {
        let stored = self.store(&Entry { key, value, flags, ttl }, Mode::Set, None)?;
        let Swap::Stored(cas) = stored else { return Err(self.nonsense("that a value is not stored")) };
        Ok(cas)
    }

    /// Stores a value unless there is one. `None` if there is.
    pub fn add(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags, ttl }, Mode::Add, None).map(version)
    }

    /// Stores a value in the place of one. `None` if there is none.
    pub fn replace(&self, key: &[u8], value: &[u8], flags: u32, ttl: u32) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags, ttl }, Mode::Replace, None).map(version)
    }

    /// Puts bytes behind a value; its flags and its end stay. `None` if there is none.
    pub fn append(&self, key: &[u8], value: &[u8]) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags: 0, ttl: 0 }, Mode::Append, None).map(version)
    }

    /// Puts bytes before a value; its flags and its end stay. `None` if there is none.
    pub fn prepend(&self, key: &[u8], value: &[u8]) -> Result<Option<u64>, Error> {
        self.store(&Entry { key, value, flags: 0, ttl: 0 }, Mode::Prepend, None).map(version)
    }

    /// Stores a value in the place of the very version that a get has returned.
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

    /// Stores many values, as [`Cache::set`] does, without waiting for the answer to one before the next is sent. One result for each: its
    /// version, or why it was not stored.
    ///
    /// Every request is answered (memcached's requests without answers would not say which of them have failed, and why).
    pub fn set_many(&self, entries: &[Entry<'_>]) -> Vec<Result<u64, Error>> {
        let mut results = Vec::with_capacity(entries.len());
        let mut rest = entries;
        while !rest.is_empty() {
            let begin = results.len();
            let mut server = self.server();
            let mut request = std::mem::take(&mut server.request);
            request.clear();
            // Which of them are sent; others have a bad key.
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

    /// Removes an item. Whether there was one.
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        self.yes_or_no(|out| request::delete(out, key), *b"NF")
    }

    /// Changes in how many seconds an item ends; 0: never. Whether there is one.
    pub fn touch(&self, key: &[u8], ttl: u32) -> Result<bool, Error> {
        self.yes_or_no(|out| request::touch(out, key, ttl), *b"EN")
    }

    /// Gets a value, which is appended to `value`, and changes in how many seconds it ends; 0: never.
    pub fn get_and_touch(&self, key: &[u8], ttl: u32, value: &mut Vec<u8>) -> Result<Option<Item>, Error> {
        self.fetch(key, Some(ttl), &mut Append::to(value))
    }

    /// Adds to a value that is a number in decimal digits. Beyond 64 bits it goes on from 0. The result, or `None` if there is no such item.
    pub fn increment(&self, key: &[u8], delta: u64) -> Result<Option<u64>, Error> {
        self.count(key, delta, false)
    }

    /// Takes from a value that is a number, but not below 0. The result, or `None` if there is no such item. A value that gets shorter keeps its
    /// length, with blanks behind the digits.
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

    /// Ends all items.
    pub fn flush(&self) -> Result<(), Error> {
        self.done(b"flush_all\r\n")
    }

    /// Sets how much memory the server uses, in units of 1 MiB. What is too much has to go with the next changes.
    pub fn set_limit(&self, mebibytes: u64) -> Result<(), Error> {
        self.done(format!("cache_memlimit {mebibytes}\r\n").as_bytes())
    }

    /// The server's statistics, of this kind (`""`: the general ones).
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
        // One line at a time: how many there are is known at the end.
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

    /// Asks the server for something that is done or refused.
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

    /// Asks for something that is done, or not because there is no such item, which is answered so.
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

    /// Sends one request, and takes its answer.
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

/// What the answer to a request to store something means: it is stored or not, or refused in these words.
fn stored_of(answer: Answer<'_>) -> Result<Result<Swap, Vec<u8>>, &'static str> {
    Ok(Ok(match answer {
        Answer::Short([b'H', b'D'], flags) => Swap::Stored(flag(flags, b'c').unwrap_or(0)),
        Answer::Short([b'E', b'X'], _) => Swap::Changed,
        Answer::Short([b'N', b'S' | b'F'], _) => Swap::Missing,
        Answer::Refused(text) => return Ok(Err(text.to_vec())),
        _ => return Err("something else than that it is stored or not"),
    }))
}

/// Gives room back that only a large value has needed.
fn tidied(request: Vec<u8>) -> Vec<u8> {
    if request.capacity() > MOST_COLLECTED { Vec::new() } else { request }
}

/// The same error for another request that was sent together with the first.
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
