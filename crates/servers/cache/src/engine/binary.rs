//! The binary protocol.

use super::{After, Counted, Engine, Unstored, Update};
use ginnel_cache_protocol::binary::{self, Header, status};
use ginnel_cache_protocol::number::append;
use ginnel_cache_protocol::{VERSION, Verb};
use ginnel_cache_store::store::Meta;
use ginnel_shmem::SharedMemory;

impl<M: SharedMemory> Engine<M> {
    /// Returns whether the value of a request is too large. If it is, this function has appended the answer, and the caller
    /// must skip the value.
    pub fn refuses_binary(&mut self, request: &binary::Request<'_>, out: &mut Vec<u8>) -> bool {
        let binary::Command::Store { flags, len, .. } = request.command else { return false };
        if !self.is_too_large(request.key.len(), flags, len) {
            return false;
        }
        // The old item goes even if the request expects another version.
        let sets = matches!(request.header.opcode, binary::opcode::SET | binary::opcode::SETQ);
        if sets {
            self.store.delete(request.key);
        }
        self.numbers.store_too_large += 1;
        fail(request, status::TOO_LARGE, out);
        true
    }

    /// Carries out a request and appends its answer, if it has one. `value` is the value of the request.
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
                    self.put(Update { verb, key, value, flags, expiry, marks: 0, cas, may_be_stale: false });
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
            Command::Echo { .. } => out.extend_from_slice(value),
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

    pub(super) fn binary_get(
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
}

/// Appends the answer of a request that succeeded, unless the request is quiet.
pub(super) fn succeed(request: &binary::Request<'_>, cas: u64, value: &[u8], out: &mut Vec<u8>) {
    if !request.quiet {
        let header = Header { magic: binary::ANSWER, key: 0, extras: 0, status: 0, cas, ..request.header };
        Header { body: value.len() as u32, ..header }.append(out);
        out.extend_from_slice(value);
    }
}

/// Appends the answer of a request that failed.
pub(super) fn fail(request: &binary::Request<'_>, status: u16, out: &mut Vec<u8>) {
    let text = status::text(status);
    let header = Header { magic: binary::ANSWER, key: 0, extras: 0, status, cas: 0, ..request.header };
    Header { body: text.len() as u32, ..header }.append(out);
    out.extend_from_slice(text.as_bytes());
}
