//! Keys in base64.

use crate::MOST_KEY;

/// The highest length of a decoded key, in bytes.
const MOST: usize = MOST_KEY / 4 * 3;

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The key of a request.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant)] // These values live only briefly, on the stack.
pub enum Key<'a> {
    /// A key that the client sent as plain bytes.
    Plain(&'a [u8]),
    /// A key that the client sent in base64: the decoded bytes, and their number.
    Decoded([u8; MOST], u8),
}

impl Key<'_> {
    /// Decodes base64. Returns `None` if the text is invalid or empty. As in memcached, decoding ends with the first group of
    /// four digits that contains padding, at any place in the group.
    pub fn decode(text: &[u8]) -> Option<Self> {
        if text.len() > MOST_KEY || !text.len().is_multiple_of(4) {
            return None;
        }
        let (mut bytes, mut len) = ([0; MOST], 0);
        for group in text.chunks_exact(4) {
            let padding = group.iter().filter(|digit| **digit == b'=').count();
            if padding > 2 {
                return None;
            }
            let mut word = 0;
            for digit in group {
                word = word << 6 | if *digit == b'=' { 0 } else { value(*digit)? };
            }
            let count = 3 - padding;
            bytes[len..len + count].copy_from_slice(&word.to_be_bytes()[1..1 + count]);
            len += count;
            if padding > 0 {
                break;
            }
        }
        (len > 0).then_some(Self::Decoded(bytes, len as u8))
    }

    /// Returns the bytes of the key, decoded.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Decoded(bytes, len) => &bytes[..usize::from(*len)],
        }
    }

    /// Returns whether the client sent the key in base64.
    pub fn is_decoded(&self) -> bool {
        matches!(self, Self::Decoded(..))
    }
}

impl std::fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.bytes().escape_ascii().to_string())
    }
}

impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.is_decoded() == other.is_decoded() && self.bytes() == other.bytes()
    }
}

fn value(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

/// Encodes bytes in base64 and appends the text to `out`.
pub fn encode(out: &mut Vec<u8>, bytes: &[u8]) {
    for group in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..1 + group.len()].copy_from_slice(group);
        let word = u32::from_be_bytes(word);
        for digit in 0..4 {
            let is_padding = digit > group.len();
            out.push(if is_padding { b'=' } else { DIGITS[(word >> (18 - 6 * digit)) as usize & 63] });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn invalid_base64_is_refused() {
        for text in ["", "=", "YW", "YQ=", "====", "Y!==", "Y===", "YQ==YQ="] {
            assert_eq!(Key::decode(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Key::decode(b"Y=QQ").unwrap().bytes(), [96, 4]);
        for text in ["YQ==", "YR==", "YQ==YQ=="] {
            assert_eq!(Key::decode(text.as_bytes()).unwrap().bytes(), b"a", "{text}");
        }
    }

    proptest! {
        #[test]
        fn keys_come_back(bytes in prop::collection::vec(any::<u8>(), 1..=186)) {
            let mut text = Vec::new();
            encode(&mut text, &bytes);
            let key = Key::decode(&text).unwrap();
            prop_assert_eq!(key.bytes(), &bytes[..]);
        }
    }
}
