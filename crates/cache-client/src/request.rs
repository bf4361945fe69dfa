//! What is asked of a server: requests of memcached's protocol.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::Error;

/// The longest key, in bytes.
pub const MOST_KEY: usize = 250;
/// The longest key that goes as base64: its text must not be longer than a key.
const MOST_CODED_KEY: usize = MOST_KEY / 4 * 3;
/// Times further away than these seconds, the protocol takes for a time of the clock on the wall.
const MONTH: u32 = 60 * 60 * 24 * 30;

/// More bytes than any item has. The protocol's lengths are of 32 bits, so what is much longer would be taken for a short value and further requests.
const MOST_VALUE: usize = 1 << 30;

/// What the first letters of a request say about keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Whatever was there before.
    Set,
    /// Only if there is none.
    Add,
    /// Only if there is one.
    Replace,
    /// Behind the value that is there.
    Append,
    /// Before the value that is there.
    Prepend,
}

/// A key that some item may have.
pub fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() || key.len() > MOST_KEY { Err(Error::Key(key.len())) } else { Ok(()) }
}

/// Whether some item may have a value of so many bytes.
pub fn is_value(len: usize) -> bool {
    len <= MOST_VALUE
}

/// A verb and its key. Returns what has to be among the flags then.
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

/// Bytes as text, four letters for three of them.
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

/// The protocol's word for an end in so many seconds; 0: never.
fn expiry(ttl: u32) -> u64 {
    if ttl <= MONTH {
        return u64::from(ttl);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    // Servers take 32 bits of it, with a sign.
    (now + u64::from(ttl)).min(i32::MAX as u64)
}

/// Writing to a `Vec` never fails.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => { let _ = write!($out, $($arg)*); };
}

/// Asks for a value, its flags and its version; with a time, changes when it ends.
pub fn get(out: &mut Vec<u8>, key: &[u8], ttl: Option<u32>) -> Result<(), Error> {
    let coded = begin(out, "mg", key)?;
    put!(out, "{coded} v f c");
    if let Some(ttl) = ttl {
        put!(out, " T{}", expiry(ttl));
    }
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Changes when an item ends.
pub fn touch(out: &mut Vec<u8>, key: &[u8], ttl: u32) -> Result<(), Error> {
    let coded = begin(out, "mg", key)?;
    put!(out, "{coded} T{}\r\n", expiry(ttl));
    Ok(())
}

/// Stores a value; with a version, only in the place of that one. Asks for the new version.
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

/// Removes an item.
pub fn delete(out: &mut Vec<u8>, key: &[u8]) -> Result<(), Error> {
    let coded = begin(out, "md", key)?;
    put!(out, "{coded}\r\n");
    Ok(())
}

/// Adds to a number, or takes from it, and asks for the result.
pub fn count(out: &mut Vec<u8>, key: &[u8], delta: u64, is_down: bool) -> Result<(), Error> {
    let coded = begin(out, "ma", key)?;
    put!(out, "{coded} v D{delta}{}\r\n", if is_down { " MD" } else { "" });
    Ok(())
}

/// Which keys were found in memory, by their hashes. Has no answer.
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
