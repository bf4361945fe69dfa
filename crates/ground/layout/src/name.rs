//! Names of members, segments, endpoints and listeners.

use core::{fmt, str};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A name as it is stored in memory and in messages: 64 bytes, padded with zeros.
///
/// A name consists of 1 to 63 ASCII letters, digits and `- _ . @`; the first character is a letter or digit. Therefore a name
/// is also safe as a file name, a device id and a command-line word.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Name([u8; Name::SIZE]);
layout!(Name, 64 { 0: 0 });

const _: () = assert!(size_of::<Name>() == 64 && align_of::<Name>() == 1);

/// Why a text is not a [`Name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// The text is empty.
    Empty,
    /// More than [`Name::MAX`] bytes.
    TooLong(usize),
    /// A byte that a name may not contain, and its position.
    BadByte {
        /// The offending byte.
        byte: u8,
        /// The byte's position in the name.
        at: usize,
    },
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "the name is empty"),
            Self::TooLong(n) => write!(f, "the name has {n} bytes, at most {} are allowed", Name::MAX),
            Self::BadByte { byte, at } => write!(
                f,
                "byte {byte:#04x} at position {at}: names are letters, digits and - _ . @, starting with a letter or digit"
            ),
        }
    }
}

impl core::error::Error for NameError {}

impl Name {
    /// Bytes in memory.
    pub const SIZE: usize = 64;
    /// The longest name, in bytes.
    pub const MAX: usize = 63;
    /// No name: all zeros. Valid where a message says that a name is optional.
    pub const NONE: Self = Self([0; Self::SIZE]);

    /// Makes a name of `text`, if it is valid.
    pub fn new(text: &str) -> Result<Self, NameError> {
        let bytes = text.as_bytes();
        if bytes.len() > Self::MAX {
            return Err(NameError::TooLong(bytes.len()));
        }
        let mut name = Self::NONE;
        name.0[..bytes.len()].copy_from_slice(bytes);
        name.checked().map(|_| name)
    }

    /// Returns whether this is [`Name::NONE`].
    pub fn is_none(&self) -> bool {
        self.0 == Self::NONE.0
    }

    /// Returns the text, if these bytes (which may come from an untrusted source) are a valid name.
    pub fn checked(&self) -> Result<&str, NameError> {
        let len = self.0.iter().position(|&b| b == 0).ok_or(NameError::TooLong(Self::SIZE))?;
        let (text, padding) = self.0.split_at(len);
        if let Some(at) = padding.iter().position(|&b| b != 0) {
            return Err(NameError::BadByte { byte: 0, at: len + at });
        }
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        for (at, &byte) in text.iter().enumerate() {
            let good = byte.is_ascii_alphanumeric() || (at > 0 && b"-_.@".contains(&byte));
            if !good {
                return Err(NameError::BadByte { byte, at });
            }
        }
        str::from_utf8(text)
            .map_err(|e| NameError::BadByte { byte: text[e.valid_up_to()], at: e.valid_up_to() })
    }

    /// Returns the text, or `"?"` if the bytes are not a valid name. For messages to people.
    pub fn as_str(&self) -> &str {
        self.checked().unwrap_or(if self.is_none() { "" } else { "?" })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

impl str::FromStr for Name {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_the_rule_allows() {
        for good in ["a", "vm-a", "cp@vm-b", "0.x_Y", &"n".repeat(63)] {
            assert_eq!(Name::new(good).unwrap().checked().unwrap(), good);
        }
    }

    #[test]
    fn refuses_everything_else() {
        for bad in ["", "-a", ".", "@x", "a/b", "a b", "ä", "a\0b", &"n".repeat(64)] {
            assert!(Name::new(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn bytes_after_the_end_are_refused() {
        let mut raw = [0u8; 64];
        raw[0] = b'a';
        raw[5] = b'b';
        assert!(Name(raw).checked().is_err());
        assert!(Name([b'a'; 64]).checked().is_err());
    }
}
