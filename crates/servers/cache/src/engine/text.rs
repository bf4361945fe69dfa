//! The text protocol, except the meta commands.

use super::{After, Counted, Engine, Unstored, Update};
use ginnel_cache_protocol::number::append;
use ginnel_cache_protocol::text::{Request, Words};
use ginnel_cache_protocol::{VERSION, Verb};
use ginnel_shmem::SharedMemory;

impl<M: SharedMemory> Engine<M> {
    /// Returns whether the value of a request is too large. If it is, this function has appended the answer, and the caller
    /// must skip the value.
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
            // The old item is out of date.
            self.store.delete(key);
        }
        if !quiet {
            out.extend_from_slice(b"SERVER_ERROR object too large for cache\r\n");
        }
        true
    }

    /// Carries out a request other than a `get`, and appends its answer. `value` is the value of the request, including the
    /// end of its line.
    pub fn text(&mut self, request: &Request<'_>, value: &[u8], out: &mut Vec<u8>) -> After {
        let mut say = |quiet: bool, text: &str| {
            if !quiet {
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
        };
        match *request {
            // The keys of a `get` are answered one by one, in `get`.
            Request::Get(_) => {}
            Request::Store(store) => {
                self.numbers.cmd_set += 1;
                let Some(value) = value.strip_suffix(b"\r\n") else {
                    say(store.quiet, "CLIENT_ERROR bad data chunk");
                    return After::Goes;
                };
                let expiry = self.second(store.end);
                let done = self.put(Update {
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
            Request::Echo { .. } => out.extend_from_slice(value),
            Request::Refused { answer, .. } => say(answer.is_empty(), answer),
        }
        After::Goes
    }

    /// Appends the answer for one key of a `get`. With `end`, the item also gets this expiry.
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

    pub(super) fn hits(&mut self, words: Words<'_>) {
        for word in words {
            let hash = std::str::from_utf8(word).ok().and_then(|word| u64::from_str_radix(word, 16).ok());
            if let Some(hash) = hash {
                self.hit(hash);
            }
        }
    }

    /// Counts that a reader has found an item with this hash.
    pub(super) fn hit(&mut self, hash: u64) {
        self.store.used_by_reader(hash);
        self.numbers.reader_hits += 1;
    }
}
