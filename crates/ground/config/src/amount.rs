//! Amounts: numbers with units.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes. In text it is a number and `K`, `M`, `G` or `T`: powers of 1024, and `KiB` and so on mean the same.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text);
        let shift = match unit.strip_suffix("iB").unwrap_or(unit) {
            "" if unit.is_empty() => Some(0),
            "K" | "k" => Some(10),
            "M" => Some(20),
            "G" => Some(30),
            "T" => Some(40),
            _ => None,
        };
        number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift)).map(Self).ok_or_else(
            || {
                format!(
                    "{text:?} is not a size: write a number of bytes, or one with K, M, G or T, such as 256M"
                )
            },
        )
    }
}

/// Writes the exact amount with the largest unit that leaves a whole number.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_whole(f, self.0.into(), 1024, ["", "K", "M", "G", "T"])
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

/// Accepts a number as well as text.
impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or one with K, M, G or T (\"256M\")")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Bytes, E> {
                Ok(Bytes(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Bytes, E> {
                u64::try_from(value).map(Bytes).map_err(|_| E::custom("a size is never negative"))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

/// A span of time: a number and `ns`, `us`, `ms` or `s`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text);
        let factor = match unit {
            "" if number == Some(0) => Some(1),
            "ns" => Some(1),
            "us" => Some(1_000),
            "ms" => Some(1_000_000),
            "s" => Some(1_000_000_000),
            _ => None,
        };
        let nanos = number.zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
        nanos.map(|n| Self(Duration::from_nanos(n))).ok_or_else(|| {
            format!(
                "{text:?} is not a span of time: write a number with ns, us, ms or s, such as 50us (0 needs none)"
            )
        })
    }
}

/// Writes the exact time with the largest unit that leaves a whole number.
impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_whole(f, self.0.as_nanos(), 1000, ["ns", "us", "ms", "s"])
    }
}

impl fmt::Debug for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Parses a time in seconds, whole or fractional, as command lines have it.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    seconds.ok_or_else(|| format!("{text:?} is not a number of seconds"))
}

/// Splits `text` into the number, if it is valid, and the letters behind it.
fn split(text: &str) -> (Option<u64>, &str) {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    (digits.trim().parse().ok(), &text[digits.len()..])
}

/// Writes an amount with the largest of the `units` that leaves a whole number. Each unit is `step` times the one before.
fn write_whole<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    mut number: u128,
    step: u128,
    units: [&str; N],
) -> fmt::Result {
    let mut unit = 0;
    while number > 0 && number.is_multiple_of(step) && unit + 1 < N {
        (number, unit) = (number / step, unit + 1);
    }
    write!(f, "{number}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_written_as_they_are_read() {
        for text in ["0", "1", "4K", "5M", "3328M", "2G", "1T", "2048T", "1025K"] {
            assert_eq!(text.parse::<Bytes>().unwrap().to_string(), text);
        }
        for text in ["0ns", "1ns", "50us", "10ms", "2s", "1500us", "60000s"] {
            assert_eq!(text.parse::<Period>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn units() {
        for (text, bytes) in [("12", 12), ("4K", 4096), ("4k", 4096), ("256MiB", 256 << 20), ("2 G", 2 << 30)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)));
        }
        assert_eq!("0".parse(), Ok(Period::default()));
        assert_eq!("3ms".parse(), Ok(Period(Duration::from_millis(3))));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
    }

    #[test]
    fn the_error_for_an_invalid_amount_shows_a_valid_one() {
        for bad in ["", "M", "1.5M", "-1", "1X", "1iB", "1KB", "99999999999T"] {
            assert!(bad.parse::<Bytes>().unwrap_err().contains("256M"), "{bad}");
        }
        for bad in ["", "5", "ms", "1h", "-1s", "99999999999999s"] {
            assert!(bad.parse::<Period>().unwrap_err().contains("50us"), "{bad}");
        }
        for bad in ["", "x", "-1", "NaN", "1e300"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_in_a_file_are_numbers_or_text() {
        #[derive(Debug, Deserialize)]
        struct Spec {
            size: Bytes,
        }
        let read =
            |text| toml::from_str::<Spec>(text).map(|spec| spec.size.0).map_err(|e| e.message().to_owned());
        assert_eq!(read("size = 4096"), Ok(4096));
        assert_eq!(read("size = \"4K\""), Ok(4096));
        assert_eq!(read("size = -1").unwrap_err(), "a size is never negative");
        assert!(read("size = \"4X\"").unwrap_err().contains("K, M, G or T"));
        assert!(read("size = true").unwrap_err().contains("expected a number of bytes"));
    }
}
