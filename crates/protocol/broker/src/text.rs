//! Names, identities and tokens as the journal writes them.

use ginnel_layout::Name;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// A name, written as text. May be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text(pub Name);

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(Self(Name::NONE));
        }
        Name::new(&text).map(Self).map_err(Error::custom)
    }
}

/// Sixteen bytes, written in hexadecimal.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hex16(pub [u8; 16]);

// Tokens and uuids are secrets, so they are kept out of logs.
impl fmt::Debug for Hex16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}..", self.0[0])
    }
}

impl Serialize for Hex16 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", u128::from_be_bytes(self.0)))
    }
}

impl<'de> Deserialize<'de> for Hex16 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        match u128::from_str_radix(&text, 16) {
            Ok(number) if text.len() == 32 => Ok(Self(number.to_be_bytes())),
            _ => Err(Error::custom("not 32 hexadecimal digits")),
        }
    }
}
