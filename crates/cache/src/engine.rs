//! What requests do to the items, and what is answered.

use ginnel_cache_protocol::binary::{self, Header, status};
use ginnel_cache_protocol::key::{Key, encode};
use ginnel_cache_protocol::number::{self, append};
use ginnel_cache_protocol::text::{Meta as MetaRequest, Request, Words};
use ginnel_cache_protocol::{MOST_KEY, VERSION, Verb};
use ginnel_cache_store::store::{Meta, Store};
use ginnel_layout::cache::marks;
use ginnel_shmem::Memory;

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

impl<M: Memory> Engine<M> {
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

    // ---- text ----------------------------------------------------------------------------------------------------------------------

    /// Whether the value of a request is not worth waiting for. If so, it was answered, and the value is of no use.
    pub fn refuses_text(&mut self, request: &Request<'_>, out: &mut Vec<u8>) -> bool {
        let (key, flags, len, always, quiet) = match request {
            Request::Store(store) => {
                (store.key, store.flags, store.len, store.verb == Verb::Set, store.quiet)
            }
            Request::MetaSet(meta) => (meta.key.bytes(), meta.flags, meta.len, true, false),
            _ => return false,
        };
        if !self.is_too_large(key.len(), flags, len) {
            return false;
        }
        self.numbers.store_too_large += 1;
        if always {
            // What is there is out of date.
            self.store.delete(key);
        }
        if !quiet {
            out.extend_from_slice(b"SERVER_ERROR object too large for cache\r\n");
        }
        true
    }

    /// Answers a request other than a get. `value` is its value, with the end of the line.
    pub fn text(&mut self, request: &Request<'_>, value: &[u8], out: &mut Vec<u8>) -> After {
        let mut say = |quiet: bool, text: &str| {
            if !quiet {
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
        };
        match *request {
            // Its keys were answered one by one.
            Request::Get(_) => {}
            Request::Store(store) => {
                self.numbers.cmd_set += 1;
                let Some(value) = value.strip_suffix(b"\r\n") else {
                    say(store.quiet, "CLIENT_ERROR bad data chunk");
                    return After::Goes;
                };
                let expiry = self.second(store.end);
                let done = self.put(Wish {
                    verb: store.verb,
                    key: store.key,
                    value,
                    flags: store.flags,
                    expiry,
                    marks: 0,
                    cas: store.cas,
                    may_be_stale: false,
                });
                let text = match done {
                    Ok(_) => "STORED",
                    Err(Unstored::Exists) => "EXISTS",
                    Err(Unstored::NotFound) => "NOT_FOUND",
                    Err(Unstored::NotStored) => "NOT_STORED",
                    Err(Unstored::TooLarge) => "SERVER_ERROR out of memory storing object",
                };
                say(store.quiet, text);
            }
            Request::Delete { key, quiet } => {
                let text = if self.remove(key) { "DELETED" } else { "NOT_FOUND" };
                say(quiet, text);
            }
            Request::Count { key, up, by, quiet } => match self.count(key, up, by, 0) {
                Counted::Number(number, ..) if !quiet => {
                    append(out, number);
                    out.extend_from_slice(b"\r\n");
                }
                Counted::NotANumber => {
                    say(quiet, "CLIENT_ERROR cannot increment or decrement non-numeric value");
                }
                Counted::NoMemory => say(quiet, "SERVER_ERROR out of memory"),
                Counted::NotFound => {
                    self.numbers.count_missed(up);
                    say(quiet, "NOT_FOUND");
                }
                Counted::Number(..) | Counted::Exists => {}
            },
            Request::Touch { key, end, quiet } => {
                let expiry = self.second(end);
                let text = if self.touch(key, expiry).is_some() { "TOUCHED" } else { "NOT_FOUND" };
                say(quiet, text);
            }
            Request::Flush { delay, quiet } => {
                self.flush(delay);
                say(quiet, "OK");
            }
            Request::Verbosity { level, quiet } => {
                self.settings.verbosity = level.min(2);
                say(quiet, "OK");
            }
            Request::Limit { megabytes, quiet } => {
                let text = self.limit(megabytes);
                say(quiet, text);
            }
            Request::Stats(words) => self.stats_text(words, out),
            Request::MetaGet(ref meta) => self.meta_get(meta, out),
            Request::MetaSet(ref meta) => self.meta_set(meta, value, out),
            Request::MetaDelete(ref meta) => self.meta_delete(meta, out),
            Request::MetaCount(ref meta) => self.meta_count(meta, out),
            Request::MetaDebug(ref key) => self.meta_debug(key, out),
            Request::MetaNothing => say(false, "MN"),
            Request::Version => say(false, &format!("VERSION {VERSION}")),
            Request::Quit => return After::Closes,
            Request::Hits(words) => self.hits(words),
            Request::Refused { answer, .. } => say(answer.is_empty(), answer),
        }
        After::Goes
    }

    /// Answers one key of a get.
    pub fn get(&mut self, key: &[u8], with_cas: bool, end: Option<i32>, out: &mut Vec<u8>) {
        self.hot.see(key);
        let found = self.store.get_behind(key, true, out, |meta, out| {
            out.extend_from_slice(b"VALUE ");
            out.extend_from_slice(key);
            out.push(b' ');
            append(out, u64::from(meta.flags));
            out.push(b' ');
            append(out, meta.len as u64);
            if with_cas {
                out.push(b' ');
                append(out, meta.version);
            }
            out.extend_from_slice(b"\r\n");
        });
        self.numbers.got(found.is_some(), end.is_some());
        if found.is_some() {
            out.extend_from_slice(b"\r\n");
            if let Some(end) = end {
                self.store.touch(key, self.second(end));
            }
        }
    }

    fn hits(&mut self, words: Words<'_>) {
        for word in words {
            let hash = std::str::from_utf8(word).ok().and_then(|word| u64::from_str_radix(word, 16).ok());
            if let Some(hash) = hash {
                self.hit(hash);
            }
        }
    }

    /// A reader has found an item of this hash.
    fn hit(&mut self, hash: u64) {
        self.store.used_by_reader(hash);
        self.numbers.reader_hits += 1;
    }

    // ---- what they have in common --------------------------------------------------------------------------------------------------

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

    // ---- meta ----------------------------------------------------------------------------------------------------------------------

    fn meta_get(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
        let key = request.key.bytes();
        self.hot.see(key);
        let now = self.store.second();
        let mut found = self.store.peek(key);
        let last_use = self.store.last_use(key).unwrap_or(now);
        let is_new = found.is_none() && request.vivify.is_some();
        let binary_key = if request.key.is_decoded() { marks::BINARY_KEY } else { 0 };
        if is_new {
            // It ends when it should once all is answered.
            if let Ok(version) = self.store.set_marked(key, &[], 0, 0, binary_key) {
                found = Some(Meta { version, flags: 0, expiry: 0, marks: binary_key, len: 0 });
            }
        }
        let Some(meta) = found else {
            self.numbers.got(false, request.end.is_some());
            if !request.quiet {
                out.extend_from_slice(b"EN");
                append_opaque_and_key(request, key, request.key.is_decoded(), out);
                out.extend_from_slice(b"\r\n");
            }
            return;
        };
        self.numbers.got(true, request.end.is_some());
        if request.value {
            out.extend_from_slice(b"VA ");
            append(out, meta.len as u64);
        } else {
            out.extend_from_slice(b"HD");
        }
        let mut wins = false;
        let mut expiry = meta.expiry;
        let is_won = meta.marks & marks::WON != 0;
        for word in request.words {
            match word[0] {
                b'T' => expiry = request.end.map_or(expiry, |end| self.second(end)),
                b'N' if is_new => {
                    expiry = request.vivify.map_or(expiry, |end| self.second(end));
                    wins = true;
                }
                b'R' => {
                    let until = request.recache.map_or(0, |end| self.second(end));
                    wins |= !is_won && !is_new && expiry != 0 && expiry < until;
                }
                b's' => append_number(out, b's', meta.len as u64),
                b't' => append_left(out, expiry, now),
                b'c' => append_number(out, b'c', meta.version),
                b'f' => append_number(out, b'f', u64::from(meta.flags)),
                b'l' => append_number(out, b'l', u64::from(now.saturating_sub(last_use))),
                b'h' => append_number(out, b'h', u64::from(meta.marks & marks::FETCHED != 0)),
                b'O' => append_word(out, word),
                b'k' => append_key(out, key, meta.marks & marks::BINARY_KEY != 0),
                _ => {}
            }
        }
        if is_won {
            out.extend_from_slice(b" Z");
        }
        if meta.marks & marks::STALE != 0 {
            out.extend_from_slice(b" X");
            wins |= !is_won;
        }
        if wins {
            out.extend_from_slice(b" W");
        }
        out.extend_from_slice(b"\r\n");
        if request.value {
            let begin = out.len();
            self.store.get_behind(key, false, out, |_, _| {});
            // As long as was said, whatever somebody else writes there.
            out.resize(begin + meta.len, 0);
            out.extend_from_slice(b"\r\n");
        }
        if !request.no_use {
            let hash = self.store.hash(key);
            self.store.used_by_reader(hash);
        }
        if wins && let Some(now) = self.store.peek(key) {
            self.store.mark(key, now.marks | marks::WON);
        }
        if expiry != meta.expiry {
            self.store.touch(key, expiry);
        }
    }

    fn meta_set(&mut self, request: &MetaRequest<'_>, value: &[u8], out: &mut Vec<u8>) {
        self.numbers.cmd_set += 1;
        let Some(value) = value.strip_suffix(b"\r\n") else {
            out.extend_from_slice(b"CLIENT_ERROR bad data chunk\r\n");
            return;
        };
        let key = request.key.bytes();
        let expiry = request.end.map_or(0, |end| self.second(end));
        let done = self.put(Wish {
            verb: request.verb,
            key,
            value,
            flags: request.flags,
            expiry,
            marks: if request.key.is_decoded() { marks::BINARY_KEY } else { 0 },
            cas: request.cas.unwrap_or(0),
            may_be_stale: request.stale,
        });
        let (code, version) = match done {
            Ok(_) if request.quiet => return,
            Ok(version) => ("HD", version),
            Err(Unstored::Exists) => ("EX", 0),
            Err(Unstored::NotFound) => ("NF", 0),
            Err(Unstored::NotStored) => ("NS", 0),
            Err(Unstored::TooLarge) => {
                out.extend_from_slice(b"SERVER_ERROR out of memory storing object\r\n");
                return;
            }
        };
        out.extend_from_slice(code.as_bytes());
        for word in request.words {
            match word[0] {
                b'O' => append_word(out, word),
                b'k' => append_key(out, key, request.key.is_decoded()),
                b'c' => append_number(out, b'c', version),
                _ => {}
            }
        }
        out.extend_from_slice(b"\r\n");
    }

    fn meta_delete(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
        let key = request.key.bytes();
        let code = match self.store.peek(key) {
            None => {
                self.numbers.delete_misses += 1;
                "NF"
            }
            Some(meta) if request.cas.is_some_and(|cas| cas != meta.version) => {
                self.numbers.delete_misses += 1;
                "EX"
            }
            Some(meta) if request.stale => {
                let marks = (meta.marks | marks::STALE) & !marks::WON;
                self.store.renew(key, marks, request.end.map(|end| self.second(end)));
                "HD"
            }
            Some(_) => {
                self.remove(key);
                "HD"
            }
        };
        if code == "HD" && request.quiet {
            return;
        }
        out.extend_from_slice(code.as_bytes());
        append_opaque_and_key(request, key, request.key.is_decoded(), out);
        out.extend_from_slice(b"\r\n");
    }

    fn meta_count(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
        let key = request.key.bytes();
        let mut is_new = false;
        let (number, mut expiry, version) =
            match self.count(key, request.up, request.by, request.cas.unwrap_or(0)) {
                Counted::Number(number, meta, version) => (number, meta.expiry, version),
                Counted::NotANumber => {
                    let text = b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n";
                    return out.extend_from_slice(text);
                }
                Counted::NoMemory => return out.extend_from_slice(b"SERVER_ERROR out of memory\r\n"),
                Counted::NotFound if request.vivify.is_some() => {
                    let mut digits = Vec::with_capacity(20);
                    append(&mut digits, request.initial);
                    match self.store.set_marked(key, &[&digits], 0, 0, 0) {
                        Ok(version) => {
                            is_new = true;
                            (request.initial, 0, version)
                        }
                        Err(_) => {
                            let text = b"SERVER_ERROR Out of memory allocating new item\r\n";
                            return out.extend_from_slice(text);
                        }
                    }
                }
                missing @ (Counted::NotFound | Counted::Exists) => {
                    let is_missing = matches!(missing, Counted::NotFound);
                    if is_missing {
                        self.numbers.count_missed(request.up);
                    }
                    out.extend_from_slice(if is_missing { b"NF" } else { b"EX" });
                    append_opaque_and_key(request, key, request.key.is_decoded(), out);
                    return out.extend_from_slice(b"\r\n");
                }
            };
        let begin = out.len();
        let before = expiry;
        let mut digits = Vec::with_capacity(20);
        append(&mut digits, number);
        if request.value {
            out.extend_from_slice(b"VA ");
            append(out, digits.len() as u64);
        } else {
            out.extend_from_slice(b"HD");
        }
        for word in request.words {
            match word[0] {
                b'c' => append_number(out, b'c', version),
                b't' => append_left(out, expiry, self.store.second()),
                b'T' => expiry = request.end.map_or(expiry, |end| self.second(end)),
                b'N' if is_new => expiry = request.vivify.map_or(expiry, |end| self.second(end)),
                b'O' => append_word(out, word),
                b'k' => append_key(out, key, request.key.is_decoded()),
                _ => {}
            }
        }
        out.extend_from_slice(b"\r\n");
        if request.value {
            out.extend_from_slice(&digits);
            out.extend_from_slice(b"\r\n");
        }
        if expiry != before {
            self.store.touch(key, expiry);
        }
        if request.quiet && !is_new {
            out.truncate(begin);
        }
    }

    fn meta_debug(&mut self, key: &Key<'_>, out: &mut Vec<u8>) {
        self.numbers.cmd_meta += 1;
        let bytes = key.bytes();
        let now = self.store.second();
        let Some(meta) = self.store.peek(bytes) else { return out.extend_from_slice(b"EN\r\n") };
        let last_use = self.store.last_use(bytes).unwrap_or(now);
        out.extend_from_slice(b"ME ");
        match meta.marks & marks::BINARY_KEY {
            0 => out.extend_from_slice(bytes),
            _ => encode(out, bytes),
        }
        let left = if meta.expiry == 0 { -1 } else { i64::from(now) - i64::from(meta.expiry) };
        let size = OVERHEAD + bytes.len() + if meta.flags == 0 { 0 } else { FLAGS } + meta.len;
        let text = format!(
            " exp={left} la={} cas={} fetch={} cls={} size={size}\r\n",
            now.saturating_sub(last_use),
            meta.version,
            if meta.marks & marks::FETCHED != 0 { "yes" } else { "no" },
            class(size, self.settings.item_size),
        );
        out.extend_from_slice(text.as_bytes());
    }

    // ---- binary --------------------------------------------------------------------------------------------------------------------

    /// Whether the value of a request is not worth waiting for. If so, it was answered, and the value is of no use.
    pub fn refuses_binary(&mut self, request: &binary::Request<'_>, out: &mut Vec<u8>) -> bool {
        let binary::Command::Store { verb, flags, len, .. } = request.command else { return false };
        if !self.is_too_large(request.key.len(), flags, len) {
            return false;
        }
        // Whatever version is expected.
        let sets = matches!(request.header.opcode, binary::opcode::SET | binary::opcode::SETQ);
        if sets {
            self.store.delete(request.key);
        }
        let _ = verb;
        self.numbers.store_too_large += 1;
        fail(request, status::TOO_LARGE, out);
        true
    }

    /// Answers a request.
    pub fn binary(&mut self, request: &binary::Request<'_>, value: &[u8], out: &mut Vec<u8>) -> After {
        use binary::Command;
        let key = request.key;
        match request.command {
            Command::Get { with_key } => self.binary_get(request, with_key, None, true, out),
            Command::Touch { end } => self.binary_get(request, false, Some(end), false, out),
            Command::GetAndTouch { with_key, end } => {
                self.binary_get(request, with_key, Some(end), true, out);
            }
            Command::Store { verb, flags, end, .. } => {
                self.numbers.cmd_set += 1;
                let expiry = self.second_of_binary(end);
                let cas = request.header.cas;
                let done =
                    self.put(Wish { verb, key, value, flags, expiry, marks: 0, cas, may_be_stale: false });
                match done {
                    Ok(version) => succeed(request, version, &[], out),
                    Err(Unstored::Exists) => fail(request, status::EXISTS, out),
                    Err(Unstored::NotFound) => fail(request, status::NOT_FOUND, out),
                    Err(_) => {
                        let status = match verb {
                            Verb::Add => status::EXISTS,
                            Verb::Replace => status::NOT_FOUND,
                            _ => status::NOT_STORED,
                        };
                        fail(request, status, out);
                    }
                }
            }
            Command::Delete => match self.store.peek(key) {
                None => {
                    self.numbers.delete_misses += 1;
                    fail(request, status::NOT_FOUND, out);
                }
                Some(meta) if request.header.cas != 0 && request.header.cas != meta.version => {
                    fail(request, status::EXISTS, out);
                }
                Some(_) => {
                    self.remove(key);
                    succeed(request, 0, &[], out);
                }
            },
            Command::Count { up, by, initial, end } => match self.count(key, up, by, request.header.cas) {
                Counted::Number(number, _, version) => {
                    succeed(request, version, &number.to_be_bytes(), out);
                }
                Counted::NotANumber => fail(request, status::NOT_A_NUMBER, out),
                Counted::NoMemory => fail(request, status::NO_MEMORY, out),
                Counted::Exists => fail(request, status::EXISTS, out),
                Counted::NotFound if end == -1 => {
                    self.numbers.count_missed(up);
                    fail(request, status::NOT_FOUND, out);
                }
                Counted::NotFound => {
                    let mut digits = Vec::with_capacity(20);
                    append(&mut digits, initial);
                    let expiry = self.second_of_binary(end);
                    match self.store.set(key, &[&digits], 0, expiry) {
                        Ok(version) => succeed(request, version, &initial.to_be_bytes(), out),
                        Err(_) => fail(request, status::NO_MEMORY, out),
                    }
                }
            },
            Command::Flush { delay } => {
                self.flush(delay);
                succeed(request, 0, &[], out);
            }
            Command::Stats => self.stats_binary(request, out),
            Command::Nothing => succeed(request, 0, &[], out),
            Command::Hits { .. } => {
                for hash in value.chunks_exact(8) {
                    self.hit(u64::from_be_bytes(hash.try_into().unwrap_or_default()));
                }
            }
            Command::Version => succeed(request, 0, VERSION.as_bytes(), out),
            Command::Quit => {
                succeed(request, 0, &[], out);
                return After::Closes;
            }
            Command::Refused { status, closes, .. } => {
                fail(request, status, out);
                return if closes { After::Closes } else { After::Goes };
            }
        }
        After::Goes
    }

    fn binary_get(
        &mut self,
        request: &binary::Request<'_>,
        with_key: bool,
        end: Option<i32>,
        with_value: bool,
        out: &mut Vec<u8>,
    ) {
        self.hot.see(request.key);
        let key = request.key;
        let key_len = if with_key { key.len() } else { 0 };
        let begin = |meta: &Meta, out: &mut Vec<u8>| {
            let value = if with_value { meta.len } else { 0 };
            let header = Header {
                magic: binary::ANSWER,
                key: key_len as u16,
                extras: 4,
                body: (4 + key_len + value) as u32,
                cas: meta.version,
                ..request.header
            };
            Header { status: 0, ..header }.append(out);
            out.extend_from_slice(&meta.flags.to_be_bytes());
            out.extend_from_slice(&key[..key_len]);
        };
        let found = if with_value {
            self.store.get_behind(key, true, out, begin)
        } else {
            let found = self.store.peek(key);
            if let Some(meta) = &found {
                begin(meta, out);
                let hash = self.store.hash(key);
                self.store.used_by_reader(hash);
            }
            found
        };
        self.numbers.got(found.is_some(), end.is_some());
        match (found, end) {
            (Some(_), Some(end)) => {
                self.store.touch(key, self.second_of_binary(end));
            }
            (Some(_), None) => {}
            (None, _) if request.quiet => {}
            (None, _) if with_key => {
                let header = Header {
                    magic: binary::ANSWER,
                    key: key.len() as u16,
                    extras: 0,
                    status: status::NOT_FOUND,
                    body: key.len() as u32,
                    cas: 0,
                    ..request.header
                };
                header.append(out);
                out.extend_from_slice(key);
            }
            (None, _) => fail(request, status::NOT_FOUND, out),
        }
    }

    // ---- stats ---------------------------------------------------------------------------------------------------------------------

    fn stats_text(&mut self, mut words: Words<'_>, out: &mut Vec<u8>) {
        let of = words.next();
        let text: &[u8] = match of {
            Some(b"reset") => {
                self.reset();
                b"RESET\r\n"
            }
            Some(b"detail") => match words.next() {
                Some(b"on" | b"off") => b"OK\r\n",
                Some(b"dump") => b"END\r\n",
                _ => b"CLIENT_ERROR usage: stats detail on|off|dump\r\n",
            },
            Some(b"cachedump") => b"CLIENT_ERROR stats cachedump not allowed\r\n",
            of => {
                let mut list = |name: &str, value: &[u8]| {
                    out.extend_from_slice(b"STAT ");
                    out.extend_from_slice(name.as_bytes());
                    out.push(b' ');
                    out.extend_from_slice(value);
                    out.extend_from_slice(b"\r\n");
                };
                if self.list(of.unwrap_or_default(), &mut list) { b"END\r\n" } else { b"ERROR\r\n" }
            }
        };
        out.extend_from_slice(text);
    }

    fn stats_binary(&mut self, request: &binary::Request<'_>, out: &mut Vec<u8>) {
        let mut append = |name: &str, value: &[u8]| {
            let name = &name.as_bytes()[..name.len().min(MOST_KEY)];
            let header = Header {
                magic: binary::ANSWER,
                key: name.len() as u16,
                extras: 0,
                status: 0,
                body: (name.len() + value.len()) as u32,
                cas: 0,
                ..request.header
            };
            header.append(out);
            out.extend_from_slice(name);
            out.extend_from_slice(value);
        };
        let is_known = match request.key {
            key if key.starts_with(b"reset") => {
                self.reset();
                true
            }
            key if key.starts_with(b"settings") => self.list(b"settings", &mut append),
            key if key.starts_with(b"detail") => {
                matches!(key.get(6..).unwrap_or_default(), b" on" | b" off" | b" dump")
            }
            key => self.list(key, &mut append),
        };
        if is_known { append("", b"") } else { fail(request, status::NOT_FOUND, out) }
    }

    fn reset(&mut self) {
        self.numbers.reset(self.store.counters());
        self.hot.clear();
    }

    /// Lists numbers. False if there are none of that kind.
    fn list(&mut self, of: &[u8], to: &mut dyn FnMut(&str, &[u8])) -> bool {
        self.moved = self.moved.wrapping_add(STATS);
        match of {
            b"" => self.numbers.general(&self.settings, &self.store, self.unix, to),
            b"settings" => self.settings.list(&self.store, to),
            b"items" => self.numbers.items(&self.store, to),
            b"slabs" => self.numbers.slabs(&self.store, to),
            b"sizes" => to("sizes_status", b"disabled"),
            b"sizes_enable" | b"sizes_disable" => {
                to("sizes_status", b"error");
                to("sizes_error", b"sizes are not counted here");
            }
            b"conns" => self.numbers.conns(to),
            b"ginnel" => {
                let [high, low] = self.store.id();
                to("ginnel", format!("{} {high:016x}{low:016x}", self.settings.place).as_bytes());
            }
            b"hot" => {
                for (key, count) in self.hot.list() {
                    let name = key.escape_ascii().to_string().replace(' ', "\\x20");
                    to(&name, count.to_string().as_bytes());
                }
            }
            _ => return false,
        }
        true
    }
}

fn append_word(out: &mut Vec<u8>, word: &[u8]) {
    out.push(b' ');
    out.extend_from_slice(word);
}

fn append_number(out: &mut Vec<u8>, letter: u8, value: u64) {
    out.extend_from_slice(&[b' ', letter]);
    append(out, value);
}

/// How long an item has left.
fn append_left(out: &mut Vec<u8>, expiry: u32, now: u32) {
    match expiry {
        0 => out.extend_from_slice(b" t-1"),
        // As memcached, whose clock begins at 2: one that is over has very long.
        _ if expiry <= now => append_number(out, b't', u64::from(expiry.wrapping_sub(now.max(2)))),
        _ => append_number(out, b't', u64::from(expiry - now)),
    }
}

fn append_key(out: &mut Vec<u8>, key: &[u8], is_binary: bool) {
    out.extend_from_slice(b" k");
    if is_binary {
        encode(out, key);
        out.extend_from_slice(b" b");
    } else {
        out.extend_from_slice(key);
    }
}

fn append_opaque_and_key(request: &MetaRequest<'_>, key: &[u8], is_binary: bool, out: &mut Vec<u8>) {
    for word in request.words {
        match word[0] {
            b'O' => append_word(out, word),
            b'k' => append_key(out, key, is_binary),
            _ => {}
        }
    }
}

/// Answers that it was done, unless the client wants no such answer.
fn succeed(request: &binary::Request<'_>, cas: u64, value: &[u8], out: &mut Vec<u8>) {
    if !request.quiet {
        let header = Header { magic: binary::ANSWER, key: 0, extras: 0, status: 0, cas, ..request.header };
        Header { body: value.len() as u32, ..header }.append(out);
        out.extend_from_slice(value);
    }
}

/// Answers that it was not done.
fn fail(request: &binary::Request<'_>, status: u16, out: &mut Vec<u8>) {
    let text = status::text(status);
    let header = Header { magic: binary::ANSWER, key: 0, extras: 0, status, cas: 0, ..request.header };
    Header { body: text.len() as u32, ..header }.append(out);
    out.extend_from_slice(text.as_bytes());
}

/// The class of a memcached in which an item of this size would be.
fn class(size: usize, item_size: usize) -> usize {
    let (mut class, mut room) = (1, 96_usize);
    let chunk = item_size / 2;
    while class < 62 && room < size && room as f64 <= chunk as f64 / 1.25 {
        room = (room as f64 * 1.25) as usize;
        room = room.next_multiple_of(8);
        class += 1;
    }
    if room < size { class + usize::from(room < chunk) } else { class }
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
