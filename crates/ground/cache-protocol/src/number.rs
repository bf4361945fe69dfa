//! Numbers as the C library parses them: leading white space and a sign are allowed, and white space ends the number.

/// Returns whether a byte is white space in C.
pub const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r')
}

/// Returns whether the number is negative, and its absolute value. Returns `None` if the text is not a number, or if the
/// value does not fit in 64 bits.
fn parse(text: &[u8]) -> Option<(bool, u64)> {
    let start = text.iter().position(|byte| !is_space(*byte))?;
    let (is_negative, digits) = match &text[start..] {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    let len = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    let ends = digits.get(len).is_none_or(|byte| is_space(*byte) || *byte == 0);
    if len == 0 || !ends {
        return None;
    }
    let add = |value: u64, digit: &u8| value.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    Some((is_negative, digits[..len].iter().try_fold(0, add)?))
}

/// Parses an unsigned number of 64 bits. As in C, a minus sign negates it modulo 2^64.
pub fn unsigned(text: &[u8]) -> Option<u64> {
    let (is_negative, value) = parse(text)?;
    let value = if is_negative { value.wrapping_neg() } else { value };
    // A negative number is accepted if it wraps around to a small one.
    (!is_negative || value <= i64::MAX as u64).then_some(value)
}

/// Parses a number as [`unsigned`] does, and returns its low 32 bits.
pub fn unsigned_32(text: &[u8]) -> Option<u32> {
    unsigned(text).map(|value| value as u32)
}

/// Parses a signed number of 64 bits, and returns its low 32 bits.
pub fn signed(text: &[u8]) -> Option<i32> {
    let (is_negative, value) = parse(text)?;
    let most = i64::MAX as u64 + u64::from(is_negative);
    let value = (value <= most).then_some(value)?;
    Some(if is_negative { value.wrapping_neg() } else { value } as i32)
}

/// Appends a number in decimal digits.
pub fn append(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_c_reads_them() {
        for (text, value) in [
            ("0", Some(0)),
            ("+7", Some(7)),
            ("\t7\tx", Some(7)),
            ("7x", None),
            ("", None),
            ("-", None),
            ("-0", Some(0)),
            ("-1", None),
            ("-18446744073709551615", Some(1)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
        ] {
            assert_eq!(unsigned(text.as_bytes()), value, "{text:?}");
        }
        assert_eq!(signed(b"-5"), Some(-5));
        assert_eq!(signed(b"2147483648"), Some(i32::MIN));
        assert_eq!(signed(b"9223372036854775808"), None);
        assert_eq!(signed(b"-9223372036854775808"), Some(0));
        assert_eq!(unsigned_32(b"4294967296"), Some(0));
    }

    #[test]
    fn digits_come_back() {
        for value in [0, 9, 10, 1234567890, u64::MAX] {
            let mut out = Vec::new();
            append(&mut out, value);
            assert_eq!(out, value.to_string().into_bytes());
        }
    }
}
