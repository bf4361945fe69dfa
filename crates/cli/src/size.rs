//! Sizes on the command line.

/// A number of bytes, with K, M, G or T for powers of 1024.
pub fn parse(text: &str) -> Result<u64, String> {
    let bad =
        || format!("{text:?} is no size: write a number of bytes, or one with K, M, G or T, such as 256M");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_end_matches("iB") {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// A number of bytes as QEMU and [`parse`] take it: exact, with the largest unit that leaves a whole number.
pub fn exact(bytes: u64) -> String {
    let (mut number, mut unit) = (bytes, "");
    for next in ["K", "M", "G", "T"] {
        if number == 0 || !number.is_multiple_of(1024) {
            break;
        }
        (number, unit) = (number / 1024, next);
    }
    format!("{number}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["0", "1", "4K", "5M", "3328M", "2G", "1T", "1025K"] {
            assert_eq!(exact(parse(text).unwrap()), text);
        }
    }

    #[test]
    fn units() {
        assert_eq!(parse("12"), Ok(12));
        assert_eq!(parse("4K"), Ok(4096));
        assert_eq!(parse("256MiB"), Ok(256 << 20));
        for bad in ["", "M", "1.5M", "-1", "1X", "99999999999T"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
