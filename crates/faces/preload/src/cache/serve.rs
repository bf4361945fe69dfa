//! Answers one request from the cache's memory, with the bytes that the server would send.

use ginnel_cache_protocol::binary::{Header, opcode, status};
use ginnel_cache_protocol::number::append;
use ginnel_cache_protocol::returned::{append_key, append_number, append_word};
use ginnel_cache_protocol::text::{Get, Meta as MetaRequest, Request};
use ginnel_cache_protocol::{Protocol, binary, text};
use ginnel_cache_store::reader::{Found, Place, Reader};
use ginnel_cache_store::store::Meta;
use ginnel_layout::cache::marks;
use ginnel_shmem::SharedMemory;
use smallvec::SmallVec;

/// The number of keys of a get whose memory is prefetched together.
const TOGETHER: usize = 16;

/// A request that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The length of the request in bytes.
    pub len: usize,
    /// Whether the request is a quiet one, which may have no answer. If it is, the library may also answer the request that ends
    /// a series of quiet ones.
    pub is_quiet: bool,
}

/// Answers requests from a cache's memory.
pub struct Server<'a, M> {
    pub reader: &'a Reader<M>,
    /// The vector to which answers are appended.
    pub out: &'a mut Vec<u8>,
    /// The maximum length of `out`.
    pub most: usize,
}

/// The place for a value: behind what the answer has already, with room for the head that will stand before the value.
struct Behind<'a, H> {
    out: &'a mut Vec<u8>,
    /// The length of `out` before the head.
    base: usize,
    /// Returns the likely length of the head, from the length of the value.
    head: H,
    /// Where the value begins in `out`.
    begin: usize,
    /// The maximum length of `out`.
    most: usize,
    is_too_large: bool,
}

impl<H: Fn(usize) -> usize> Place for Behind<'_, H> {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        self.begin = self.base + (self.head)(len);
        let end = self.begin.saturating_add(len);
        self.is_too_large = end > self.most;
        if self.is_too_large {
            return &mut [];
        }
        self.out.resize(end, 0);
        &mut self.out[self.begin..]
    }

    #[inline]
    fn undo(&mut self) {
        self.out.truncate(self.base);
    }
}

/// Returns the number of decimal digits of a number.
#[inline]
fn digits(value: u64) -> usize {
    value.checked_ilog10().map_or(1, |log| log as usize + 1)
}

impl<M: SharedMemory> Server<'_, M> {
    /// Answers the request at the beginning of these bytes. Returns `None` if the server must answer it. `was_quiet` says whether the
    /// request before was quiet. Calls `hit` with the hash of each key that is found.
    #[inline]
    pub fn answer(
        &mut self,
        protocol: Protocol,
        bytes: &[u8],
        was_quiet: bool,
        mut hit: impl FnMut(u64),
    ) -> Option<Answered> {
        let begin = self.out.len();
        let answered = match protocol {
            Protocol::Text => self.text(bytes, was_quiet, &mut hit),
            Protocol::Binary => self.binary(bytes, was_quiet, &mut hit),
        };
        let answered = answered.filter(|_| self.out.len() <= self.most);
        if answered.is_none() {
            self.out.truncate(begin);
        }
        answered
    }

    fn text(&mut self, bytes: &[u8], was_quiet: bool, hit: &mut impl FnMut(u64)) -> Option<Answered> {
        if !matches!(bytes, [b'g', b'e', b't', ..] | [b'm', b'g' | b'n', ..]) {
            return None;
        }
        let text::Parsed::Request(request, len) = text::parse(bytes) else { return None };
        let is_quiet = match request {
            Request::Get(Get { with_cas, end: None, keys }) => {
                self.get(keys, with_cas, hit)?;
                false
            }
            Request::MetaGet(meta) => {
                self.meta(&meta, hit)?;
                meta.quiet
            }
            Request::MetaNothing if was_quiet => {
                self.out.extend_from_slice(b"MN\r\n");
                false
            }
            _ => return None,
        };
        Some(Answered { len, is_quiet })
    }

    /// Finds an item, and appends its value behind room for a head. Returns `None` if only the server can answer, and `Some(None)` if
    /// there is no such item. Otherwise returns the item's metadata, and where the value begins.
    #[inline]
    fn find(
        &mut self,
        hash: u64,
        key: &[u8],
        head: impl Fn(usize) -> usize,
        hit: &mut impl FnMut(u64),
    ) -> Option<Option<(Meta, usize)>> {
        let base = self.out.len();
        let mut place =
            Behind { out: self.out, base, head, begin: base, most: self.most, is_too_large: false };
        match self.reader.get_to(hash, key, &mut place) {
            Found::Hit(meta) if !place.is_too_large => {
                let begin = place.begin;
                hit(hash);
                (self.out.len() == begin + meta.len).then_some(Some((meta, begin)))
            }
            Found::Miss => Some(None),
            _ => None,
        }
    }

    fn get(&mut self, keys: text::Words<'_>, with_cas: bool, hit: &mut impl FnMut(u64)) -> Option<()> {
        let mut rest = keys;
        loop {
            let some: SmallVec<[(&[u8], u64); TOGETHER]> =
                rest.by_ref().take(TOGETHER).map(|key| (key, self.reader.hash(key))).collect();
            if some.is_empty() {
                break;
            }
            if some.len() > 1 {
                some.iter().for_each(|(_, hash)| self.reader.prefetch_slots(*hash));
                some.iter().for_each(|(_, hash)| self.reader.prefetch_item(*hash));
            }
            for (key, hash) in some {
                self.get_one(key, hash, with_cas, hit)?;
            }
        }
        self.out.extend_from_slice(b"END\r\n");
        Some(())
    }

    fn get_one(&mut self, key: &[u8], hash: u64, with_cas: bool, hit: &mut impl FnMut(u64)) -> Option<()> {
        let base = self.out.len();
        // Most flags have one digit. The number of digits of a version is not known in advance.
        let likely = |len: usize| "VALUE  0 \r\n".len() + key.len() + digits(len as u64);
        let Some((meta, begin)) = self.find(hash, key, likely, hit)? else { return Some(()) };
        let version = if with_cas { 1 + digits(meta.version) } else { 0 };
        let len = likely(meta.len) - 1 + digits(u64::from(meta.flags)) + version;
        if base + len != begin {
            self.out.resize(base + len.max(begin - base) + meta.len, 0);
            self.out.copy_within(begin..begin + meta.len, base + len);
            self.out.truncate(base + len + meta.len);
        }
        let mut head = Head { to: &mut self.out[base..base + len], len: 0 };
        head.bytes(b"VALUE ").bytes(key).bytes(b" ").number(u64::from(meta.flags)).bytes(b" ");
        head.number(meta.len as u64);
        if with_cas {
            head.bytes(b" ").number(meta.version);
        }
        head.bytes(b"\r\n");
        self.out.extend_from_slice(b"\r\n");
        Some(())
    }

    fn meta(&mut self, request: &MetaRequest<'_>, hit: &mut impl FnMut(u64)) -> Option<()> {
        // The server must answer if a flag asks for what only the server knows, or changes the item.
        if request.words.into_iter().any(|word| !b"vqkscfObu".contains(&word[0])) {
            return None;
        }
        let key = request.key.bytes();
        let begin = self.out.len();
        let mut count_hit = |hash| {
            if !request.no_use {
                hit(hash);
            }
        };
        let found = self.find(self.reader.hash(key), key, |_| 0, &mut count_hit)?;
        let is_decoded = request.key.is_decoded();
        let Some((meta, _)) = found else {
            if !request.quiet {
                self.out.extend_from_slice(b"EN");
                for word in request.words {
                    match word[0] {
                        b'O' => append_word(self.out, word),
                        b'k' => append_key(self.out, key, is_decoded),
                        _ => {}
                    }
                }
                self.out.extend_from_slice(b"\r\n");
            }
            return Some(());
        };
        if meta.marks & (marks::STALE | marks::WON) != 0 {
            return None;
        }
        // The head is appended behind the value, and then they change places.
        let value = self.out.len() - begin;
        match request.value {
            true => {
                self.out.extend_from_slice(b"VA ");
                append(self.out, meta.len as u64);
            }
            false => self.out.extend_from_slice(b"HD"),
        }
        for word in request.words {
            match word[0] {
                b's' => append_number(self.out, b's', meta.len as u64),
                b'c' => append_number(self.out, b'c', meta.version),
                b'f' => append_number(self.out, b'f', u64::from(meta.flags)),
                b'O' => append_word(self.out, word),
                b'k' => append_key(self.out, key, meta.marks & marks::BINARY_KEY != 0),
                _ => {}
            }
        }
        self.out.extend_from_slice(b"\r\n");
        if request.value {
            self.out[begin..].rotate_left(value);
            self.out.extend_from_slice(b"\r\n");
        } else {
            self.out.drain(begin..begin + value);
        }
        Some(())
    }

    fn binary(&mut self, bytes: &[u8], was_quiet: bool, hit: &mut impl FnMut(u64)) -> Option<Answered> {
        let binary::Parsed::Request(request, len) = binary::parse(bytes) else { return None };
        let header =
            Header { magic: binary::ANSWER, key: 0, extras: 0, status: 0, body: 0, cas: 0, ..request.header };
        let with_key = match request.command {
            binary::Command::Get { with_key } => with_key,
            binary::Command::Nothing if was_quiet && request.header.opcode == opcode::NOOP => {
                header.append(self.out);
                return Some(Answered { len, is_quiet: false });
            }
            _ => return None,
        };
        let (key, begin) = (request.key, self.out.len());
        let key_len = if with_key { key.len() } else { 0 };
        let room = binary::HEADER + 4 + key_len;
        match self.find(self.reader.hash(key), key, |_| room, hit)? {
            Some((meta, _)) => {
                let body = u32::try_from(4 + key_len + meta.len).ok()?;
                let header = Header { key: key_len as u16, extras: 4, body, cas: meta.version, ..header };
                let head = &mut self.out[begin..begin + room];
                head[..binary::HEADER].copy_from_slice(&header.bytes());
                head[binary::HEADER..binary::HEADER + 4].copy_from_slice(&meta.flags.to_be_bytes());
                head[binary::HEADER + 4..].copy_from_slice(&key[..key_len]);
            }
            None => {
                let text = if with_key { key } else { status::text(status::NOT_FOUND).as_bytes() };
                if !request.quiet {
                    let (key, body) = (key_len as u16, text.len() as u32);
                    Header { key, body, status: status::NOT_FOUND, ..header }.append(self.out);
                    self.out.extend_from_slice(text);
                }
            }
        }
        Some(Answered { len, is_quiet: request.quiet })
    }
}

/// The head of an answer, which stands before the value.
struct Head<'a> {
    to: &'a mut [u8],
    len: usize,
}

impl Head<'_> {
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        if let Some(to) = self.to.get_mut(self.len..self.len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }

    #[inline]
    fn number(&mut self, mut value: u64) -> &mut Self {
        let (mut digits, mut at) = ([0; 20], 20);
        loop {
            at -= 1;
            digits[at] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                return self.bytes(&digits[at..]);
            }
        }
    }
}
