//! Sizes, kinds, modes and accounts, as they are written in the configuration.

use super::Problem;
use ginnel_layout::segment::MappingKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A number of bytes; in text a number and `K`, `M`, `G` or `T` (powers of 1024; `KiB` and so on are the same).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("{text:?} is no size: write a number of bytes, or one with K, M, G or T (\"256M\")");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match text[digits.len()..].trim_end_matches("iB") {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(bad()),
        };
        let number: u64 = digits.trim().parse().map_err(|_| bad())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0, "");
        for next in ["K", "M", "G", "T"] {
            if number == 0 || number % 1024 != 0 {
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

/// By which kind of device a segment comes to VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// `virtio-pmem-pci`: `/dev/dax*` in the guest, always cached.
    #[default]
    Dax,
    /// `ivshmem-plain`: a PCI BAR. Can be unplugged, and needs nothing of the guest's kernel.
    Bar,
}

impl Memory {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Dax => "dax",
            Self::Bar => "bar",
        }
    }

    /// The same on the wire.
    pub fn kind(self) -> MappingKind {
        match self {
            Self::Dax => MappingKind::DAX,
            Self::Bar => MappingKind::BAR,
        }
    }
}

/// Permission bits, written in octal as `chmod` takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Serialize for Mode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:04o}", self.0))
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match u32::from_str_radix(&text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => {
                Err(de::Error::custom(format!("{text:?} is no file mode: write it in octal, like \"0660\"")))
            }
        }
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

impl Account {
    pub(super) fn user(&self, place: &str) -> Result<u32, Problem> {
        self.look_up(place, "user", |name| {
            nix::unistd::User::from_name(name).map(|u| u.map(|u| u.uid.as_raw()))
        })
    }

    pub(super) fn group(&self, place: &str) -> Result<u32, Problem> {
        self.look_up(place, "group", |name| {
            nix::unistd::Group::from_name(name).map(|g| g.map(|g| g.gid.as_raw()))
        })
    }

    fn look_up(
        &self,
        place: &str,
        kind: &str,
        find: impl Fn(&str) -> nix::Result<Option<u32>>,
    ) -> Result<u32, Problem> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => match find(name) {
                Ok(Some(number)) => Ok(number),
                Ok(None) => {
                    let fix = format!("create the {kind} or write its number");
                    Err(Problem::new(place, format!("there is no {kind} {name:?}"), fix))
                }
                Err(errno) => {
                    let fix = format!("write the {kind}'s number");
                    Err(Problem::new(place, format!("the {kind} {name:?} cannot be looked up: {errno}"), fix))
                }
            },
        }
    }
}
