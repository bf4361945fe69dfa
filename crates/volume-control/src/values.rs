//! Sizes, periods, modes and accounts, as they are written in a configuration and on a command line.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes; in text a number and `K`, `M`, `G` or `T` (powers of 1024; `KiB` and so on are the same).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!("{text:?} is no size: write a number of bytes, or one with K, M, G or T, such as 256M")
        };
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
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0, "");
        for next in ["K", "M", "G", "T"] {
            if number == 0 || !number.is_multiple_of(1024) {
                break;
            }
            (number, unit) = (number / 1024, next);
        }
        write!(f, "{number}{unit}")
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

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberOrText(Self, PhantomData))
    }
}

/// A span of time: a number with `ns`, `us`, `ms` or `s`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "{text:?} is no span of time: write a number with ns, us, ms or s, such as 50us (0 needs none)"
            )
        };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let number: u64 = digits.parse().map_err(|_| bad())?;
        let factor = match &text[digits.len()..] {
            "" if number == 0 => 1,
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            _ => return Err(bad()),
        };
        number.checked_mul(factor).map(|n| Self(Duration::from_nanos(n))).ok_or_else(bad)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0.as_nanos(), "ns");
        for next in ["us", "ms", "s"] {
            if number == 0 || !number.is_multiple_of(1000) {
                break;
            }
            (number, unit) = (number / 1000, next);
        }
        write!(f, "{number}{unit}")
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

/// Permission bits, written in octal as `chmod` takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err(format!("{text:?} is no file mode: write it in octal, like 0660")),
        }
    }
}

impl Serialize for Mode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:04o}", self.0))
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A user or group, by name or number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Account {
    /// Its number.
    Number(u32),
    /// Its name.
    Name(String),
}

impl FromStr for Account {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Self::Name(text.into()), Self::Number))
    }
}

/// Reads a value that is a number, or text with a unit.
struct NumberOrText<T>(fn(u64) -> T, PhantomData<T>);

impl<T: FromStr<Err = String>> de::Visitor<'_> for NumberOrText<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or text with a unit (\"256M\")")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        Ok(self.0(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        u64::try_from(value).map(self.0).map_err(|_| E::custom("it is never negative"))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_they_are_read() {
        for text in ["0", "4K", "5M", "2G", "1T", "1025K"] {
            assert_eq!(text.parse::<Bytes>().unwrap().to_string(), text);
        }
        for text in ["0ns", "1ns", "50us", "10ms", "2s", "1500us"] {
            assert_eq!(text.parse::<Period>().unwrap().to_string(), text);
        }
        assert_eq!("0".parse::<Period>().unwrap(), Period::default());
        assert_eq!("7".parse(), Ok(Account::Number(7)));
        assert_eq!("disk".parse(), Ok(Account::Name("disk".into())));
    }

    #[test]
    fn what_is_no_value_says_how_one_looks() {
        for bad in ["", "M", "1.5M", "-1", "1X", "99999999999T"] {
            assert!(bad.parse::<Bytes>().unwrap_err().contains("256M"), "{bad}");
        }
        for bad in ["", "5", "ms", "1h", "-1s", "99999999999999s"] {
            assert!(bad.parse::<Period>().unwrap_err().contains("50us"), "{bad}");
        }
        for bad in ["", "8", "1777", "rw"] {
            assert!(bad.parse::<Mode>().unwrap_err().contains("0660"), "{bad}");
        }
    }
}
