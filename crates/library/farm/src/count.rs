//! Counting characters and words in place, in shared memory.

use ginnel::{Mapping, SharedSlice};

/// Returns the number of characters of UTF-8 text: the number of bytes that are not continuation bytes. So the counts
/// of pieces add up to the count of the whole text, even if it is cut inside a character.
pub fn characters(text: SharedSlice<'_, Mapping>) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    /// Sets each byte to 1 if it is a continuation byte, that is, if its upper bits are 10, and otherwise to 0.
    fn continuing(word: u64) -> u64 {
        (word >> 7) & !(word >> 6) & ONES
    }
    let mut more = 0;
    // The sum of the words has at most 4 in each byte. The product's top byte is the sum of these bytes, at most 32.
    let whole =
        text.stripes(|words| more += words.map(continuing).iter().sum::<u64>().wrapping_mul(ONES) >> 56);
    let mut last = [0; 32];
    let n = text.read(whole, &mut last);
    more += last[..n].iter().filter(|byte| is_continuing(**byte)).count() as u64;
    text.len() as u64 - more
}

fn is_continuing(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

/// Returns whether the byte separates words: space, tab, line feed, vertical tab, form feed or carriage return.
pub fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | 9..=13)
}

/// Returns the number of words of a text: runs of bytes for which [`is_space`] is false. A word that is cut between two
/// pieces is counted in both. When the caller adds up the counts, it must subtract one for each cut between two bytes
/// that are not spaces.
pub fn words(text: SharedSlice<'_, Mapping>) -> u64 {
    let mut buffer = [0; 4096];
    let (mut words, mut at, mut outside) = (0, 0, true);
    loop {
        let n = text.read(at, &mut buffer);
        if n == 0 {
            return words;
        }
        at += n;
        for byte in &buffer[..n] {
            let space = is_space(*byte);
            words += u64::from(outside && !space);
            outside = space;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared<T>(bytes: &[u8], f: impl FnOnce(SharedSlice<'_, Mapping>) -> T) -> T {
        let memory = Mapping::anonymous(65536).unwrap();
        let slice = SharedSlice::new(&memory, 24, bytes.len());
        slice.write(0, bytes);
        f(slice)
    }

    #[test]
    fn characters_of_any_text_and_cut() {
        let text = "Grüße, 世界! \u{10ffff} naïve ".repeat(40);
        assert_eq!(shared(text.as_bytes(), characters), text.chars().count() as u64);
        for cut in 0..text.len() {
            let (a, b) = text.as_bytes().split_at(cut);
            assert_eq!(shared(a, characters) + shared(b, characters), text.chars().count() as u64, "{cut}");
        }
        assert_eq!(shared(&[0x80; 1000], characters), 0);
        assert_eq!(shared(&[0xff; 1000], characters), 1000);
    }

    #[test]
    fn words_are_counted_like_everybody_does() {
        for text in ["", " ", "one", " one\ttwo\n", "a b\r\nc\x0bd\x0ce  ", &"word ".repeat(3000)] {
            assert_eq!(
                shared(text.as_bytes(), words),
                text.split_ascii_whitespace().count() as u64 + u64::from(text.contains('\x0b')),
                "{text:?}"
            );
        }
    }
}
