//! Requests of memcached's meta protocol, as the client sends them to a server.

use crate::error::Error;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// The longest key, in bytes.
pub const MOST_KEY: usize = 250;
/// The longest key that can be sent in base64, in bytes: its base64 text must not be longer than a key.
const MOST_CODED_KEY: usize = MOST_KEY / 4 * 3;
/// The longest relative expiration time, in seconds. The protocol takes a larger number as an absolute Unix time.
const MONTH: u32 = 60 * 60 * 24 * 30;

/// The longest value that the client sends, in bytes; no item has this many. Lengths in the protocol have 32 bits, so a
/// server would take a much longer value for a short value and further requests.
const MOST_VALUE: usize = 1 << 30;

/// The condition and the manner in which a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Stores the value in any case.
    Set,
    /// Stores the value only if the item does not exist.
    Add,
    /// Stores the value only if the item exists.
    Replace,
    /// Appends to the existing value.
    Append,
    /// Prepends to the existing value.
    Prepend,
}

/// Checks that the length of a key is valid.
pub fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() || key.len() > MOST_KEY { Err(Error::Key(key.len())) } else { Ok(()) }
}

/// Returns whether a value of `len` bytes can be sent to a server.
pub fn is_value(len: usize) -> bool {
    len <= MOST_VALUE
}

/// Appends a verb and its key, in base64 if necessary. Returns the flag that the request must then contain, or an empty
/// string.
fn begin(out: &mut Vec<u8>, verb: &str, key: &[u8]) -> Result<&'static str, Error> {
    check_key(key)?;
    let is_plain = key.iter().all(|&byte| byte > b' ' && byte != 0x7f);
    if !is_plain && key.len() > MOST_CODED_KEY {
        return Err(Error::Key(key.len()));
    }
    out.extend_from_slice(verb.as_bytes());
    out.push(b' ');
    if is_plain {
        out.extend_from_slice(key);
        Ok("")
    } else {
        base64(key, out);
        Ok(" b")
    }
}

/// Encodes bytes in base64 and appends the text to `out`.
fn base64(bytes: &[u8], out: &mut Vec<u8>) {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for three in bytes.chunks(3) {
        let word =
            three.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        for letter in 0..4 {
            let is_there = letter <= three.len();
            let six = (word >> (18 - 6 * letter)) as usize & 63;
            out.push(if is_there { LETTERS[six] } else { b'=' });
        }
    }
}

/// Returns the protocol's expiration time for an item that expires in `ttl` seconds; 0 = never.
fn expiry(ttl: u32) -> u64 {
    if ttl <= MONTH {
        return u64::from(ttl);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    // Servers read it as a signed number of 32 bits.
    (now + u64::from(ttl)).min(i32::MAX as u64)
}

/// Appends formatted text to a `Vec`, which never fails.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => { let _ = write!($out, $($arg)*); };
}

/// Appends a request for a value, its flags and its version. With a `ttl` in seconds, the request also sets the item's
/// expiration time.
pub fn get(out: &mut Vec<u8>, key: &[u8], ttl: Option<u32>) -> Result<(), Error> {
    let coded = begin(out, "mg", key)?;
    put!(out, "{coded} v f c");
    if let Some(ttl) = ttl {
        put!(out, " T{}", expiry(ttl));
    }
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Appends a request that lets an item expire in `ttl` seconds; 0 = never.
pub fn touch(out: &mut Vec<u8>, key: &[u8], ttl: u32) -> Result<(), Error> {
    let coded = begin(out, "mg", key)?;
    put!(out, "{coded} T{}\r\n", expiry(ttl));
    Ok(())
}

/// Appends a request that stores a value and returns the item's new version. With `cas`, the server stores the value only
/// if the item has that version.
pub fn set(
    out: &mut Vec<u8>,
    key: &[u8],
    value: &[u8],
    flags: u32,
    ttl: u32,
    mode: Mode,
    cas: Option<u64>,
) -> Result<(), Error> {
    let coded = begin(out, "ms", key)?;
    put!(out, " {}{coded} c", value.len());
    match mode {
        Mode::Append => out.extend_from_slice(b" MA"),
        Mode::Prepend => out.extend_from_slice(b" MP"),
        Mode::Set => {}
        Mode::Add => out.extend_from_slice(b" ME"),
        Mode::Replace => out.extend_from_slice(b" MR"),
    }
    if flags != 0 {
        put!(out, " F{flags}");
    }
    if ttl != 0 {
        put!(out, " T{}", expiry(ttl));
    }
    if let Some(cas) = cas {
        put!(out, " C{cas}");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Appends a request that removes an item.
pub fn delete(out: &mut Vec<u8>, key: &[u8]) -> Result<(), Error> {
    let coded = begin(out, "md", key)?;
    put!(out, "{coded}\r\n");
    Ok(())
}

/// Appends a request that adds `delta` to a number, or subtracts it, and returns the result.
pub fn count(out: &mut Vec<u8>, key: &[u8], delta: u64, is_down: bool) -> Result<(), Error> {
    let coded = begin(out, "ma", key)?;
    put!(out, "{coded} v D{delta}{}\r\n", if is_down { " MD" } else { "" });
    Ok(())
}

/// Appends a report of the items that were found in shared memory, by the hashes of their keys. The server sends no answer.
pub fn hits(out: &mut Vec<u8>, hashes: &[u64]) {
    out.extend_from_slice(b"ginnel hits");
    for hash in hashes {
        put!(out, " {hash:016x}");
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn requests_are_memcacheds() {
        assert_eq!(text(|out| get(out, b"key", None)), "mg key v f c\r\n");
        assert_eq!(text(|out| get(out, b"a b", Some(7))), "mg YSBi b v f c T7\r\n");
        assert_eq!(text(|out| touch(out, b"k", 0)), "mg k T0\r\n");
        assert_eq!(text(|out| set(out, b"k", b"va", 0, 0, Mode::Set, None)), "ms k 2 c\r\nva\r\n");
        assert_eq!(
            text(|out| set(out, b"k", b"", 5, 60, Mode::Replace, Some(9))),
            "ms k 0 c MR F5 T60 C9\r\n\r\n"
        );
        assert_eq!(text(|out| delete(out, b"\x7f")), "md fw== b\r\n");
        assert_eq!(text(|out| count(out, b"n", 3, true)), "ma n v D3 MD\r\n");
        let mut out = Vec::new();
        hits(&mut out, &[1, u64::MAX]);
        assert_eq!(out, b"ginnel hits 0000000000000001 ffffffffffffffff\r\n");
    }

    #[test]
    fn a_time_far_away_is_a_time_of_the_clock() {
        assert_eq!(expiry(MONTH), u64::from(MONTH));
        assert!(expiry(MONTH + 1) > 1_700_000_000);
        assert_eq!(expiry(u32::MAX), i32::MAX as u64, "not one that has passed");
    }

    #[test]
    fn keys_are_within_their_bounds() {
        let mut out = Vec::new();
        assert!(delete(&mut out, b"").is_err() && delete(&mut out, &[b'k'; 251]).is_err());
        assert!(delete(&mut out, &[b' '; 187]).is_err());
        assert!(out.is_empty(), "nothing is asked by half");
        delete(&mut out, &[b' '; 186]).unwrap();
        delete(&mut out, &[b'k'; 250]).unwrap();
    }

    #[test]
    fn a_length_is_one_of_32_bits() {
        assert!(is_value(0) && is_value(1 << 20) && !is_value(i32::MAX as usize) && !is_value((1 << 32) + 5));
    }

    #[test]
    fn base64_is_the_usual_one() {
        for (bytes, letters) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            let mut out = Vec::new();
            base64(bytes.as_bytes(), &mut out);
            assert_eq!(out, letters.as_bytes());
        }
    }
}
