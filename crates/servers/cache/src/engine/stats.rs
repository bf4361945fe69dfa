//! The `stats` commands of both protocols.

use super::binary::fail;
use super::{Engine, STATS};
use crate::peers::Peers;
use ginnel_cache_protocol::MOST_KEY;
use ginnel_cache_protocol::binary::{self, Header, status};
use ginnel_cache_protocol::text::Words;
use ginnel_shmem::SharedMemory;

impl<M: SharedMemory> Engine<M> {
    pub(super) fn stats_text(&mut self, mut words: Words<'_>, out: &mut Vec<u8>) {
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
                let is_known = self.list(of.unwrap_or_default(), &mut list);
                // Whether the server itself has the connection that a client asks about, or a proxy, which may do with requests what it
                // wants.
                if of == Some(b"ginnel")
                    && let Some(client) = words.next()
                {
                    let has = Peers::parse(client).is_some_and(|client| self.peers.has(client));
                    list("ginnel_client", if has { b"yes" } else { b"no" });
                }
                if is_known { b"END\r\n" } else { b"ERROR\r\n" }
            }
        };
        out.extend_from_slice(text);
    }

    pub(super) fn stats_binary(&mut self, request: &binary::Request<'_>, out: &mut Vec<u8>) {
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

    pub(super) fn reset(&mut self) {
        self.numbers.reset(self.store.counters());
        self.hot.clear();
    }

    /// Passes the name and the value of each statistic of the kind `of` to `to`. Returns false if there is no such kind.
    pub(super) fn list(&mut self, of: &[u8], to: &mut dyn FnMut(&str, &[u8])) -> bool {
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
