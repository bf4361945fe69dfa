//! The meta commands: `mg`, `ms`, `md`, `ma`, `me`.

use super::{Counted, Engine, FLAGS, OVERHEAD, Unstored, Update};
use ginnel_cache_protocol::key::{Key, encode};
use ginnel_cache_protocol::number::append;
use ginnel_cache_protocol::returned::{append_key, append_number, append_word};
use ginnel_cache_protocol::text::Meta as MetaRequest;
use ginnel_cache_store::store::Meta;
use ginnel_layout::cache::marks;
use ginnel_shmem::SharedMemory;

impl<M: SharedMemory> Engine<M> {
    pub(super) fn meta_get(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
        let key = request.key.bytes();
        self.hot.see(key);
        let now = self.store.second();
        let mut found = self.store.peek(key);
        let last_use = self.store.last_use(key).unwrap_or(now);
        let is_new = found.is_none() && request.vivify.is_some();
        let binary_key = if request.key.is_decoded() { marks::BINARY_KEY } else { 0 };
        if is_new {
            // The item gets its expiry at the end of this function, after the answer is written.
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
            // The value must have the announced length, even if another process writes to the memory of the item.
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

    pub(super) fn meta_set(&mut self, request: &MetaRequest<'_>, value: &[u8], out: &mut Vec<u8>) {
        self.numbers.cmd_set += 1;
        let Some(value) = value.strip_suffix(b"\r\n") else {
            out.extend_from_slice(b"CLIENT_ERROR bad data chunk\r\n");
            return;
        };
        let key = request.key.bytes();
        let expiry = request.end.map_or(0, |end| self.second(end));
        let done = self.put(Update {
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

    pub(super) fn meta_delete(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
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

    pub(super) fn meta_count(&mut self, request: &MetaRequest<'_>, out: &mut Vec<u8>) {
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

    pub(super) fn meta_debug(&mut self, key: &Key<'_>, out: &mut Vec<u8>) {
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
}

/// Appends the seconds that an item has left, or -1 if it does not expire.
fn append_left(out: &mut Vec<u8>, expiry: u32, now: u32) {
    match expiry {
        0 => out.extend_from_slice(b" t-1"),
        // The number is memcached's, whose clock begins at 2: for an item that has expired, the difference wraps around and
        // becomes very large.
        _ if expiry <= now => append_number(out, b't', u64::from(expiry.wrapping_sub(now.max(2)))),
        _ => append_number(out, b't', u64::from(expiry - now)),
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

/// Returns the number of the slab class in which memcached would store an item of this size.
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
