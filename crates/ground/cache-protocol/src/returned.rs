//! The words after `VA`, `HD` or `EN` in the answers to meta requests. Each is a letter and the value it stands for.

use crate::key::encode;
use crate::number::append;

/// Appends a word of the request, unchanged.
pub fn append_word(out: &mut Vec<u8>, word: &[u8]) {
    out.push(b' ');
    out.extend_from_slice(word);
}

/// Appends a letter and a number.
pub fn append_number(out: &mut Vec<u8>, letter: u8, value: u64) {
    out.extend_from_slice(&[b' ', letter]);
    append(out, value);
}

/// Appends the key. `in_base64` says that the client sent it in base64; then it is returned in base64, too.
pub fn append_key(out: &mut Vec<u8>, key: &[u8], in_base64: bool) {
    out.extend_from_slice(b" k");
    if in_base64 {
        encode(out, key);
        out.extend_from_slice(b" b");
    } else {
        out.extend_from_slice(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_follow_each_other() {
        let mut out = b"HD".to_vec();
        append_word(&mut out, b"Oabc");
        append_number(&mut out, b'c', 7);
        append_key(&mut out, b"foo", false);
        append_key(&mut out, b"foo", true);
        assert_eq!(out, b"HD Oabc c7 kfoo kZm9v b");
    }
}
