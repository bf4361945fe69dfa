//! The requests of the text protocol.

use crate::key::Key;
use crate::number::{signed, unsigned, unsigned_32};
use crate::{MOST_KEY, Verb};

/// The longest line of a request other than a `get`, in bytes.
pub const MOST_LINE: usize = 2048;
/// The highest number of bytes of a `get` that are parsed at once. If they contain no line end, the keys are parsed one by
/// one.
pub const MOST_GET: usize = 16 << 10;
/// The highest number of spaces before a long `get`.
const MOST_SPACES: usize = 100;
/// The number of words after the command that are considered. Further words are ignored.
const MOST_WORDS: usize = 23;
/// The most words of a meta request, including the command and the key.
const MOST_META: usize = 19;
/// The longest opaque word of a meta request, including its letter, in bytes.
const MOST_OPAQUE: usize = 32;

/// The longest value of `ginnel echo`, in bytes.
pub const MOST_ECHO: usize = 16 << 10;

const BAD_LINE: &str = "CLIENT_ERROR bad command line format";
const BAD_END: &str = "CLIENT_ERROR invalid exptime argument";
const BAD_TOKEN: &str = "CLIENT_ERROR bad token in command line format";

/// The result of [`parse`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // These values live only briefly, on the stack.
pub enum Parsed<'a> {
    /// The line is incomplete.
    More,
    /// A request, and the length of its line in bytes. The value, if any, follows the line ([`Request::value`]).
    Request(Request<'a>, usize),
    /// The beginning of a `get` whose line is very long. The keys follow; see [`next_key`].
    LongGet {
        /// Whether the client wants the items' versions.
        with_cas: bool,
        /// The number of bytes before the first key.
        head: usize,
    },
    /// The line is too long, so memcached would close the connection.
    TooLong,
}

/// A request of the text protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // These values live only briefly, on the stack.
pub enum Request<'a> {
    /// `get`, `gets`, `gat`, `gats`.
    Get(Get<'a>),
    /// `set`, `add`, `replace`, `append`, `prepend`, `cas`.
    Store(Store<'a>),
    /// `delete`.
    Delete {
        /// The key of the item.
        key: &'a [u8],
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `incr`, `decr`.
    Count {
        /// The key of the item.
        key: &'a [u8],
        /// Whether to increment.
        up: bool,
        /// The amount.
        by: u64,
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `touch`.
    Touch {
        /// The key of the item.
        key: &'a [u8],
        /// The item's new expiration time, in memcached's format.
        end: i32,
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `flush_all`.
    Flush {
        /// The time of the flush, in memcached's format.
        delay: i32,
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `verbosity`.
    Verbosity {
        /// The level of logging.
        level: u32,
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `cache_memlimit`.
    Limit {
        /// The new limit of the memory, in mebibytes.
        megabytes: u32,
        /// Whether the client wants no answer (`noreply`).
        quiet: bool,
    },
    /// `stats`, and the words after it.
    Stats(Words<'a>),
    /// `mg`.
    MetaGet(Meta<'a>),
    /// `ms`.
    MetaSet(Meta<'a>),
    /// `md`.
    MetaDelete(Meta<'a>),
    /// `ma`.
    MetaCount(Meta<'a>),
    /// `me`.
    MetaDebug(Key<'a>),
    /// `mn`.
    MetaNothing,
    /// `version`.
    Version,
    /// `quit`.
    Quit,
    /// `ginnel hits`: the hashes, in hexadecimal, of items that readers found. The server sends no answer.
    Hits(Words<'a>),
    /// `ginnel echo`: the answer is the value itself, and nothing else. A library that has answered requests in the client hands answers
    /// that the client has not received over to the connection in this way.
    Echo {
        /// The length of the value in bytes, at most [`MOST_ECHO`]. No line end follows it.
        len: usize,
    },
    /// An invalid request, or one that is not supported.
    Refused {
        /// The answer, without the line end. If it is empty, the server sends no answer.
        answer: &'static str,
        /// The number of bytes after the line that must be ignored.
        swallow: u64,
    },
}

/// A `get` of one or more keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Get<'a> {
    /// Whether the client wants the items' versions.
    pub with_cas: bool,
    /// The items' new expiration time, in memcached's format, for `gat` and `gats`.
    pub end: Option<i32>,
    /// The keys. None of them is too long.
    pub keys: Words<'a>,
}

/// A request with a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Store<'a> {
    /// The condition and the manner of storing.
    pub verb: Verb,
    /// The key of the item.
    pub key: &'a [u8],
    /// The client's flags, which are stored with the item.
    pub flags: u32,
    /// The item's expiration time, in memcached's format.
    pub end: i32,
    /// The length of the value, in bytes.
    pub len: usize,
    /// The version that the client expects, for [`Verb::Cas`].
    pub cas: u64,
    /// Whether the client wants no answer (`noreply`).
    pub quiet: bool,
}

/// A valid meta request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meta<'a> {
    /// The key of the item.
    pub key: Key<'a>,
    /// The flags in the client's order. Each letter occurs at most once.
    pub words: Words<'a>,
    /// The length of the value in bytes, for `ms`.
    pub len: usize,
    /// `v`: return the value.
    pub value: bool,
    /// `q`: send no answer in the usual case.
    pub quiet: bool,
    /// `u`: do not count the request as a use of the item.
    pub no_use: bool,
    /// `I`: invalidate; mark the item as stale.
    pub stale: bool,
    /// `N`: on a miss, create an item with this expiration time.
    pub vivify: Option<i32>,
    /// `T`: the item's new expiration time, in memcached's format.
    pub end: Option<i32>,
    /// `R`: let the client recache the item if fewer seconds than this are left until it expires.
    pub recache: Option<i32>,
    /// `F`: the client's flags, which are stored with the item.
    pub flags: u32,
    /// `C`: the version that the client expects.
    pub cas: Option<u64>,
    /// `M`: the verb of `ms`.
    pub verb: Verb,
    /// `M`: whether `ma` counts up.
    pub up: bool,
    /// `D`: the amount by which `ma` changes the number.
    pub by: u64,
    /// `J`: the value of an item that `ma` creates.
    pub initial: u64,
}

/// An iterator over the words of a line, which spaces separate.
#[derive(Clone, Copy, PartialEq)]
pub struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    /// Returns an iterator over the words of this text.
    pub const fn of(text: &'a [u8]) -> Self {
        Self(text)
    }

    /// Returns the text with the words that have not been returned yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let begin = self.0.iter().position(|byte| *byte != b' ')?;
        let text = &self.0[begin..];
        let len = text.iter().position(|byte| *byte == b' ').unwrap_or(text.len());
        self.0 = &text[len..];
        Some(&text[..len])
    }
}

impl std::fmt::Debug for Words<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.map(|word| word.escape_ascii().to_string())).finish()
    }
}

impl Request<'_> {
    /// Returns the length in bytes of the value that follows the line, including the line end after it if it has one; 0 if there is no
    /// value.
    pub fn value(&self) -> usize {
        match self {
            Self::Store(store) => store.len + 2,
            Self::MetaSet(meta) => meta.len + 2,
            Self::Echo { len } => *len,
            _ => 0,
        }
    }
}

/// Parses a request at the beginning of some bytes.
pub fn parse(bytes: &[u8]) -> Parsed<'_> {
    let look = &bytes[..bytes.len().min(MOST_GET)];
    let Some(end) = look.iter().position(|byte| *byte == b'\n') else { return without_end(bytes) };
    let cut = if end > 1 && bytes[end - 1] == b'\r' { end - 1 } else { end };
    // As in memcached, a line ends at a zero byte.
    let len = bytes[..cut].iter().position(|byte| *byte == 0).unwrap_or(cut);
    Parsed::Request(line(&bytes[..len]), end + 1)
}

fn without_end(bytes: &[u8]) -> Parsed<'_> {
    if bytes.len() <= MOST_LINE {
        return Parsed::More;
    }
    let Some(spaces) = bytes.iter().position(|byte| *byte != b' ').filter(|n| *n <= MOST_SPACES) else {
        return Parsed::TooLong;
    };
    if bytes[spaces..].starts_with(b"ginnel ") && bytes.len() < MOST_GET {
        return Parsed::More;
    }
    let with_cas = match &bytes[spaces..] {
        [b'g', b'e', b't', b' ', ..] => false,
        [b'g', b'e', b't', b's', b' ', ..] => true,
        _ => return Parsed::TooLong,
    };
    if bytes.len() < MOST_GET {
        return Parsed::More;
    }
    Parsed::LongGet { with_cas, head: spaces + if with_cas { 5 } else { 4 } }
}

/// The result of [`next_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextKey<'a> {
    /// The next key is incomplete.
    More,
    /// A key, and the number of bytes up to and including the space after it. A line end after it is not included.
    Key(&'a [u8], usize),
    /// The key is too long, so the rest of the line must be ignored.
    TooLong,
    /// The line end, and the number of bytes up to and including it.
    End(usize),
}

/// Parses the next key of a `get` whose line is very long.
pub fn next_key(bytes: &[u8]) -> NextKey<'_> {
    let Some(begin) = bytes.iter().position(|byte| *byte != b' ') else { return NextKey::More };
    let text = &bytes[begin..];
    let look = &text[..text.len().min(MOST_KEY + 3)];
    let Some(len) = look.iter().position(|byte| matches!(byte, b' ' | b'\n')) else {
        return if look.len() > MOST_KEY + 2 { NextKey::TooLong } else { NextKey::More };
    };
    let is_end = look[len] == b'\n';
    let key = match &look[..len] {
        [key @ .., b'\r'] if is_end => key,
        key => key,
    };
    match (key.len(), is_end) {
        (0, _) => NextKey::End(begin + len + 1),
        (MOST_KEY.., _) if key.len() > MOST_KEY => NextKey::TooLong,
        // The line end is not consumed.
        (_, true) => NextKey::Key(key, begin + key.len()),
        (_, false) => NextKey::Key(key, begin + len + 1),
    }
}

fn refused<'a>(answer: &'static str) -> Request<'a> {
    Request::Refused { answer, swallow: 0 }
}

/// Refuses a request with this answer, or with no answer if the client wants none.
fn refused_unless<'a>(quiet: bool, answer: &'static str) -> Request<'a> {
    refused(if quiet { "" } else { answer })
}

const ERROR: &str = "ERROR";

/// Parses the request of a complete line.
fn line(line: &[u8]) -> Request<'_> {
    let mut rest = Words(line);
    let Some(command) = rest.next().filter(|command| command.len() >= 2) else { return refused(ERROR) };
    match command {
        b"get" | b"gets" | b"gat" | b"gats" | b"bget" => {
            return get(rest, matches!(command, b"gets" | b"gats"), command.starts_with(b"ga"));
        }
        b"stats" => return Request::Stats(rest),
        b"ginnel" => {
            return match rest.next() {
                Some(b"hits") => Request::Hits(rest),
                Some(b"echo") => echo(rest).unwrap_or_else(|| refused(ERROR)),
                _ => refused(ERROR),
            };
        }
        _ => {}
    }
    let mut words = [&b""[..]; MOST_WORDS];
    let mut count = 0;
    for (place, word) in words.iter_mut().zip(rest) {
        (*place, count) = (word, count + 1);
    }
    // The words after the command.
    let words = &words[..count];
    let verb = match command {
        b"mg" | b"ms" | b"md" | b"ma" | b"me" | b"mn" => return meta(command[1], words, rest),
        b"set" => Verb::Set,
        b"add" => Verb::Add,
        b"replace" => Verb::Replace,
        b"append" => Verb::Append,
        b"prepend" => Verb::Prepend,
        b"cas" => Verb::Cas,
        b"delete" => return delete(words),
        b"incr" | b"decr" => return count_by(words, command == b"incr"),
        b"touch" => return touch(words),
        b"flush_all" => return flush(words),
        b"verbosity" | b"cache_memlimit" => return set_up(words, command == b"verbosity"),
        b"version" => return Request::Version,
        b"quit" => return Request::Quit,
        _ => return refused(other(command, words)),
    };
    store(words, verb)
}

fn echo<'a>(mut words: Words<'_>) -> Option<Request<'a>> {
    let len = unsigned(words.next()?).filter(|len| *len <= MOST_ECHO as u64)?;
    words.next().is_none().then_some(Request::Echo { len: len as usize })
}

/// Returns the answer to commands for parts of memcached that do not exist here. It is the answer of a memcached that is
/// started without these parts.
fn other(command: &[u8], words: &[&[u8]]) -> &'static str {
    match (command, words) {
        (b"shutdown", _) => "ERROR: shutdown not enabled",
        (b"watch", _) => "CLIENT_ERROR watch commands not allowed",
        (b"refresh_certs", _) => "Error TLS not enabled",
        (b"slabs", [b"reassign", _, _]) => "CLIENT_ERROR slab reassignment disabled",
        (b"lru_crawler", [b"crawl" | b"metadump", _]) => "CLIENT_ERROR lru crawler disabled",
        _ => ERROR,
    }
}

fn is_quiet(words: &[&[u8]]) -> bool {
    words.last() == Some(&&b"noreply"[..])
}

fn get(mut keys: Words<'_>, with_cas: bool, touches: bool) -> Request<'_> {
    if keys.clone().next().is_none() {
        return refused(ERROR);
    }
    let mut end = None;
    if touches {
        end = keys.next().and_then(signed);
        if end.is_none() {
            return refused(BAD_END);
        }
    }
    if keys.0.len() > MOST_KEY && keys.into_iter().any(|key| key.len() > MOST_KEY) {
        return refused(BAD_LINE);
    }
    Request::Get(Get { with_cas, end, keys })
}

fn store<'a>(words: &[&'a [u8]], verb: Verb) -> Request<'a> {
    let with_cas = verb == Verb::Cas;
    let needed = 4 + usize::from(with_cas);
    if words.len() != needed && words.len() != needed + 1 {
        return refused(ERROR);
    }
    let quiet = is_quiet(words);
    let numbers = (
        unsigned_32(words[1]),
        signed(words[2]),
        signed(words[3]),
        if with_cas { unsigned(words[4]) } else { Some(0) },
    );
    match numbers {
        (Some(flags), Some(end), Some(len @ 0..=LONGEST), Some(cas)) if words[0].len() <= MOST_KEY => {
            Request::Store(Store { verb, key: words[0], flags, end, len: len as usize, cas, quiet })
        }
        _ => refused_unless(quiet, BAD_LINE),
    }
}

/// The longest value that a client may announce, in bytes.
const LONGEST: i32 = i32::MAX - 2;

fn delete<'a>(words: &[&'a [u8]]) -> Request<'a> {
    let (key, quiet) = match words {
        [key] => (*key, false),
        [key, b"0"] => (*key, false),
        [key, b"noreply"] | [key, b"0", b"noreply"] => (*key, true),
        [_, _] | [_, _, _] => {
            let answer = "CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]";
            return refused_unless(is_quiet(words), answer);
        }
        _ => return refused(ERROR),
    };
    if key.len() > MOST_KEY {
        return refused_unless(quiet, BAD_LINE);
    }
    Request::Delete { key, quiet }
}

fn count_by<'a>(words: &[&'a [u8]], up: bool) -> Request<'a> {
    let ([key, by] | [key, by, _]) = words else { return refused(ERROR) };
    let quiet = is_quiet(words);
    if key.len() > MOST_KEY {
        return refused_unless(quiet, BAD_LINE);
    }
    match unsigned(by) {
        Some(by) => Request::Count { key, up, by, quiet },
        None => refused_unless(quiet, "CLIENT_ERROR invalid numeric delta argument"),
    }
}

fn touch<'a>(words: &[&'a [u8]]) -> Request<'a> {
    let ([key, end] | [key, end, _]) = words else { return refused(ERROR) };
    let quiet = is_quiet(words);
    if key.len() > MOST_KEY {
        return refused_unless(quiet, BAD_LINE);
    }
    match signed(end) {
        Some(end) => Request::Touch { key, end, quiet },
        None => refused_unless(quiet, BAD_END),
    }
}

fn flush<'a>(words: &[&'a [u8]]) -> Request<'a> {
    if words.len() > 2 {
        return refused(ERROR);
    }
    let quiet = is_quiet(words);
    let delay = match words {
        [] | [b"noreply"] => Some(0),
        [delay, ..] => signed(delay),
    };
    match delay {
        Some(delay) => Request::Flush { delay, quiet },
        None => refused_unless(quiet, BAD_END),
    }
}

fn set_up<'a>(words: &[&'a [u8]], is_verbosity: bool) -> Request<'a> {
    let ([value] | [value, _]) = words else { return refused(ERROR) };
    let quiet = is_quiet(words);
    match (unsigned_32(value), is_verbosity) {
        (Some(level), true) => Request::Verbosity { level, quiet },
        (Some(megabytes), false) => Request::Limit { megabytes, quiet },
        (None, true) => refused_unless(quiet, BAD_LINE),
        (None, false) => refused_unless(quiet, ERROR),
    }
}

/// Parses a meta request. `rest` is the part of its line after the command.
fn meta<'a>(command: u8, words: &[&'a [u8]], rest: Words<'a>) -> Request<'a> {
    if command == b'n' {
        return Request::MetaNothing;
    }
    let Some(key) = words.first() else {
        return refused(if command == b'e' { BAD_LINE } else { ERROR });
    };
    if key.len() > MOST_KEY {
        return refused(BAD_LINE);
    }
    if command == b'e' {
        let key = if words.get(1) == Some(&&b"b"[..]) { Key::decode(key) } else { Some(Key::Plain(key)) };
        return key.map_or_else(|| refused(BAD_LINE), Request::MetaDebug);
    }
    if command == b's' && words.len() == 1 {
        return refused(BAD_LINE);
    }
    if words.len() + 2 > MOST_META + 1 {
        return refused(match command {
            b'g' => "CLIENT_ERROR options flags are too long",
            _ => "CLIENT_ERROR options flags too long",
        });
    }
    let mut behind = rest;
    behind.next();
    let mut swallow = 0;
    let mut len = 0;
    if command == b's' {
        let Some(found @ 0..=LONGEST) = words.get(1).and_then(|word| signed(word)) else {
            return refused(BAD_LINE);
        };
        behind.next();
        (len, swallow) = (found as usize, found as u64 + 2);
    }
    let answer = |answer| Request::Refused { answer, swallow };
    let mut meta = match flags(Key::Plain(key), behind, len) {
        Ok(meta) => meta,
        Err(_) if matches!(command, b'd' | b'a') => {
            return refused("CLIENT_ERROR invalid or duplicate flag");
        }
        Err(error) => return answer(error),
    };
    let mode = behind.into_iter().find(|word| word[0] == b'M').map(|word| word[1]);
    match (command, mode) {
        (b's', None | Some(b'S')) => {}
        (b's', Some(b'E')) => meta.verb = Verb::Add,
        (b's', Some(b'A')) => meta.verb = Verb::Append,
        (b's', Some(b'P')) => meta.verb = Verb::Prepend,
        (b's', Some(b'R')) => meta.verb = Verb::Replace,
        (b's', _) => return answer("CLIENT_ERROR invalid mode for ms M token"),
        (b'a', None | Some(b'I' | b'+')) => {}
        (b'a', Some(b'D' | b'-')) => meta.up = false,
        (b'a', _) => return answer("CLIENT_ERROR invalid mode for ma M token"),
        _ => {}
    }
    if meta.cas.is_some() && matches!(meta.verb, Verb::Set | Verb::Replace) {
        meta.verb = Verb::Cas;
    }
    if behind.into_iter().any(|word| word[0] == b'O' && word.len() > MOST_OPAQUE) {
        return answer("CLIENT_ERROR opaque token too long");
    }
    match command {
        b'g' => Request::MetaGet(meta),
        b's' => Request::MetaSet(meta),
        b'd' => Request::MetaDelete(meta),
        _ => Request::MetaCount(meta),
    }
}

fn flags<'a>(key: Key<'a>, words: Words<'a>, len: usize) -> Result<Meta<'a>, &'static str> {
    let mut meta = Meta {
        key,
        words,
        len,
        value: false,
        quiet: false,
        no_use: false,
        stale: false,
        vivify: None,
        end: None,
        recache: None,
        flags: 0,
        cas: None,
        verb: Verb::Set,
        up: true,
        by: 1,
        initial: 0,
    };
    let mut seen = 0_u128;
    // The last error is reported, unless a flag is unknown or a duplicate.
    let mut error = None;
    // An error in `F` has no text of its own, as in memcached.
    let mut has_failed = false;
    let mut text = BAD_LINE;
    for word in words {
        let (letter, rest) = (word[0], &word[1..]);
        if letter >= 127 || seen >> letter & 1 != 0 {
            return Err("CLIENT_ERROR duplicate flag");
        }
        seen |= 1 << letter;
        match letter {
            b'b' => match Key::decode(meta.key.bytes()) {
                Some(key) => meta.key = key,
                None => error = Some("CLIENT_ERROR error decoding key"),
            },
            b'N' | b'T' | b'R' => match signed(rest) {
                None => error = Some(BAD_TOKEN),
                end if letter == b'N' => meta.vivify = end,
                end if letter == b'T' => meta.end = end,
                end => meta.recache = end,
            },
            b'C' => match unsigned(rest) {
                None => error = Some(BAD_TOKEN),
                cas => meta.cas = cas,
            },
            b'F' => match unsigned_32(rest) {
                None => has_failed = true,
                Some(flags) => meta.flags = flags,
            },
            b'J' => match unsigned(rest) {
                None => error = Some("CLIENT_ERROR invalid numeric initial value"),
                Some(initial) => meta.initial = initial,
            },
            b'D' => match unsigned(rest) {
                None => error = Some("CLIENT_ERROR invalid numeric delta value"),
                Some(by) => meta.by = by,
            },
            b'M' if rest.len() != 1 => error = Some("CLIENT_ERROR incorrect length for M token"),
            b'v' => meta.value = true,
            b'q' => meta.quiet = true,
            b'u' => meta.no_use = true,
            b'I' => meta.stale = true,
            b'M' | b'O' | b'P' | b'L' | b'k' | b's' | b't' | b'c' | b'f' | b'l' | b'h' => {}
            _ => return Err("CLIENT_ERROR invalid flag"),
        }
        if let Some(error) = error.take() {
            (has_failed, text) = (true, error);
        }
    }
    if has_failed { Err(text) } else { Ok(meta) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(line: &str) -> Request<'_> {
        match parse(line.as_bytes()) {
            Parsed::Request(request, len) => {
                assert_eq!(len, line.len());
                request
            }
            other => panic!("{line:?}: {other:?}"),
        }
    }

    fn answer(line: &str) -> (&'static str, u64) {
        match request(line) {
            Request::Refused { answer, swallow } => (answer, swallow),
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn requests_are_what_they_say() {
        let Request::Store(store) = request("set a 1 -2 3 noreply\r\n") else { panic!() };
        assert_eq!((store.key, store.flags, store.end, store.len, store.quiet), (&b"a"[..], 1, -2, 3, true));
        let Request::Get(get) = request(" gats  5 a  b \n") else { panic!() };
        assert_eq!((get.with_cas, get.end), (true, Some(5)));
        assert_eq!(get.keys.collect::<Vec<_>>(), [b"a", b"b"]);
        let Request::MetaSet(meta) = request("ms YWI= 2 b C5 MR F7 T-1 q\r\n") else { panic!() };
        assert_eq!((meta.key.bytes(), meta.len, meta.verb), (&b"ab"[..], 2, Verb::Cas));
        assert_eq!((meta.cas, meta.flags, meta.end, meta.quiet), (Some(5), 7, Some(-1), true));
        assert_eq!(request("delete a 0 noreply\r\n"), Request::Delete { key: b"a", quiet: true });
        assert_eq!(request("flush_all noreply\r\n"), Request::Flush { delay: 0, quiet: true });
        assert!(matches!(request("ginnel hits 1f 2\r\n"), Request::Hits(_)));
        assert_eq!(request("ginnel echo 7\r\n"), Request::Echo { len: 7 });
    }

    #[test]
    fn invalid_requests_are_refused_as_memcached_does() {
        for (line, expected) in [
            ("\r\n", ("ERROR", 0)),
            ("get\r\n", ("ERROR", 0)),
            ("gat x a\r\n", (BAD_END, 0)),
            ("set a 0 0\r\n", ("ERROR", 0)),
            ("set a -1 0 1\r\n", (BAD_LINE, 0)),
            ("set a 0 0 2147483646 noreply\r\n", ("", 0)),
            ("incr a x\r\n", ("CLIENT_ERROR invalid numeric delta argument", 0)),
            ("incr a noreply\r\n", ("", 0)),
            ("ms a 1 MX\r\n", ("CLIENT_ERROR invalid mode for ms M token", 3)),
            ("ms a 1 v v\r\n", ("CLIENT_ERROR duplicate flag", 3)),
            ("ma a v v\r\n", ("CLIENT_ERROR invalid or duplicate flag", 0)),
            ("mg a F\r\n", (BAD_LINE, 0)),
            ("mg YQ b N\r\n", (BAD_TOKEN, 0)),
            ("mg YQ b N E\r\n", ("CLIENT_ERROR invalid flag", 0)),
            ("me\r\n", (BAD_LINE, 0)),
            ("ginnel echo\r\n", ("ERROR", 0)),
            ("ginnel echo 16385\r\n", ("ERROR", 0)),
        ] {
            assert_eq!(answer(line), expected, "{line:?}");
        }
    }

    #[test]
    fn a_line_is_bounded() {
        assert_eq!(parse(b"get a"), Parsed::More);
        assert_eq!(parse(&[b'x'; MOST_LINE]), Parsed::More);
        assert_eq!(parse(&[b'x'; MOST_LINE + 1]), Parsed::TooLong);
        assert_eq!(parse(&[b' '; MOST_LINE + 1]), Parsed::TooLong);
        let long = [&b" gets "[..], &b"k ".repeat(MOST_GET)].concat();
        assert_eq!(parse(&long[..MOST_GET - 1]), Parsed::More);
        assert_eq!(parse(&long), Parsed::LongGet { with_cas: true, head: 6 });
    }

    #[test]
    fn keys_of_a_long_get_come_one_by_one() {
        assert_eq!(next_key(b"  ab c"), NextKey::Key(b"ab", 5));
        assert_eq!(next_key(b"ab"), NextKey::More);
        assert_eq!(next_key(b"ab\r"), NextKey::More);
        assert_eq!(next_key(b"ab\r\n"), NextKey::Key(b"ab", 2));
        assert_eq!(next_key(b"\r\nx"), NextKey::End(2));
        assert_eq!(next_key(b" \nx"), NextKey::End(2));
        assert_eq!(next_key(&[b'k'; 300]), NextKey::TooLong);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Parsed::Request(request, len) = parse(&bytes) {
                prop_assert!(len <= bytes.len() && len > 0);
                let _ = (request.value(), crate::answer::of_text(&request));
            }
            let _ = (next_key(&bytes), crate::binary::parse(&bytes));
        }

        #[test]
        fn any_words_are_parsed(line in "(get|set|ms|mg|ma|md|cas|touch|incr|flush_all|delete) [ a-zA-Z0-9=-]{0,60}\n") {
            let _ = parse(line.as_bytes());
        }
    }
}
