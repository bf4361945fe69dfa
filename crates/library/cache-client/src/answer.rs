//! Parsing a server's answers. They are not trusted, and they may arrive in pieces of any size.

/// The longest line, in bytes.
const MOST_LINE: usize = 8 << 10;
/// The longest value, in bytes: no item is larger.
const MOST_VALUE: usize = 1 << 30;

/// One answer, or one line of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// Two letters, and the flags after them.
    Short([u8; 2], &'a [u8]),
    /// A value, and its flags.
    Value(&'a [u8], &'a [u8]),
    /// The name and the text of a statistic.
    Stat(&'a [u8], &'a [u8]),
    /// The end of the statistics.
    End,
    /// Success (`OK` or `RESET`).
    Done,
    /// The request is refused, with this text.
    Refused(&'a [u8]),
    /// Any other line.
    Line(&'a [u8]),
}

/// An answer that violates the protocol, with a description of the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense(pub &'static str);

/// Parses the first answer in `bytes`. Returns it and its length in bytes, or `None` if it is incomplete.
pub fn parse(bytes: &[u8]) -> Result<Option<(Answer<'_>, usize)>, Nonsense> {
    let Some(end) = bytes.iter().take(MOST_LINE).position(|&byte| byte == b'\n') else {
        let is_too_long = bytes.len() >= MOST_LINE;
        return if is_too_long { Err(Nonsense("a line without an end")) } else { Ok(None) };
    };
    let used = end + 1;
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let (first, rest) = word(line);
    let answer = match first {
        b"VA" => {
            let (len, flags) = word(rest);
            let len = number(len).filter(|&len| len <= MOST_VALUE as u64);
            let len = len.ok_or(Nonsense("a value without a length"))? as usize;
            let Some(behind) = bytes.get(used + len..used + len + 2) else { return Ok(None) };
            if behind != b"\r\n" {
                return Err(Nonsense("a value that is longer than said"));
            }
            return Ok(Some((Answer::Value(&bytes[used..used + len], flags), used + len + 2)));
        }
        b"STAT" => {
            let (name, text) = word(rest);
            Answer::Stat(name, text)
        }
        b"END" if rest.is_empty() => Answer::End,
        b"OK" | b"RESET" if rest.is_empty() => Answer::Done,
        b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR" => Answer::Refused(line),
        // These answer requests to change the limit.
        b"MEMLIMIT_TOO_SMALL" | b"MEMLIMIT_ADJUST_FAILED" => Answer::Refused(line),
        &[one, two] => Answer::Short([one, two], rest),
        _ => Answer::Line(line),
    };
    Ok(Some((answer, used)))
}

/// Returns the first word, and the text after it.
fn word(line: &[u8]) -> (&[u8], &[u8]) {
    match line.iter().position(|&byte| byte == b' ') {
        Some(end) => (&line[..end], &line[end + 1..]),
        None => (line, &[]),
    }
}

/// Parses a number that consists of digits only.
pub fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, &digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// Returns the number of the flag with this letter.
pub fn flag(flags: &[u8], letter: u8) -> Option<u64> {
    flags.split(|&byte| byte == b' ').find_map(|flag| match flag {
        [first, rest @ ..] if *first == letter => number(rest),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_are_told_apart() {
        for (bytes, answer) in [
            ("HD c12\r\n", Answer::Short(*b"HD", b"c12")),
            ("EN\r\n", Answer::Short(*b"EN", b"")),
            ("VA 2 f3 c4\r\nab\r\n", Answer::Value(b"ab", b"f3 c4")),
            ("VA 0\r\n\r\n", Answer::Value(b"", b"")),
            ("STAT a b c\r\n", Answer::Stat(b"a", b"b c")),
            ("END\r\n", Answer::End),
            ("OK\r\n", Answer::Done),
            ("SERVER_ERROR no\r\n", Answer::Refused(b"SERVER_ERROR no")),
            ("MEMLIMIT_TOO_SMALL no\r\n", Answer::Refused(b"MEMLIMIT_TOO_SMALL no")),
            ("VERSION 1\n", Answer::Line(b"VERSION 1")),
        ] {
            let whole = [bytes.as_bytes(), b"EN\r\n"].concat();
            assert_eq!(parse(&whole), Ok(Some((answer, bytes.len()))), "{bytes}");
            for end in 0..bytes.len() {
                assert_eq!(parse(&bytes.as_bytes()[..end]), Ok(None), "{bytes} up to {end}");
            }
        }
    }

    #[test]
    fn nonsense_has_a_bound() {
        assert!(parse(&[b'a'; MOST_LINE]).is_err() && parse(&[b'a'; MOST_LINE - 1]) == Ok(None));
        for bad in ["VA \r\n", "VA -1\r\n", "VA 1073741825\r\n", "VA 99999999999999999999\r\n", "VA 1\r\nabc"]
        {
            assert!(parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn flags_are_numbers() {
        assert_eq!(flag(b"f3 c45", b'c'), Some(45));
        assert_eq!(flag(b"f3 c45", b'f'), Some(3));
        assert!(flag(b"f3", b'c').is_none() && flag(b"cx", b'c').is_none() && flag(b"c", b'c').is_none());
    }

    proptest! {
        /// An incomplete answer is never taken for a complete one.
        #[test]
        fn pieces_change_nothing(bytes in proptest::collection::vec(
            prop_oneof![Just(b'V'), Just(b'A'), Just(b' '), Just(b'2'), Just(b'\r'), Just(b'\n'), any::<u8>()], 0..40)) {
            if let Ok(Some((answer, used))) = parse(&bytes) {
                prop_assert!(used <= bytes.len());
                prop_assert_eq!(parse(&bytes[..used]), Ok(Some((answer, used))));
                for end in 0..used {
                    prop_assert_eq!(parse(&bytes[..end]), Ok(None));
                }
            }
        }
    }
}
