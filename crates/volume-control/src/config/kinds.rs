//! What a volume can be told to be.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// An enumeration whose values are words: in configurations, on command lines and in JSON alike.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$value_doc])* #[serde(rename = $word)] $value,)+
        }

        impl $name {
            /// All words.
            pub const WORDS: &[&str] = &[$($word),+];

            /// In a word.
            pub fn word(self) -> &'static str {
                match self { $(Self::$value => $word,)+ }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$value),)+
                    _ => Err(format!("{text:?} is none of {}", Self::WORDS.join(", "))),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// What a VM gets.
    Device {
        /// vhost-user-blk: one disk.
        #[default]
        Blk = "blk",
        /// vhost-user-scsi: a target with several LUNs.
        Scsi = "scsi",
    }
}

words! {
    /// Where the bytes of a disk are.
    BackendKind {
        /// In a file or on a block device.
        #[default]
        File = "file",
        /// In the process' memory: gone with it.
        Ram = "ram",
        /// Nowhere: reads are zeroes, writes are lost. For measuring.
        Null = "null",
        /// In a file, behind a write cache that a power cut empties. For tests.
        Volatile = "volatile",
    }
}

words! {
    /// How threads wait for requests.
    Wait {
        /// Look for some time, then sleep.
        #[default]
        Adaptive = "adaptive",
        /// Look, always: the lowest latency, a processor each.
        Poll = "poll",
        /// Sleep at once.
        Interrupt = "interrupt",
    }
}

words! {
    /// Whether the kernel's page cache is bypassed.
    Direct {
        /// Where the file system can, and said so where it cannot.
        #[default]
        Auto = "auto",
        /// Or the volume does not start.
        On = "on",
        /// Never.
        Off = "off",
    }
}

words! {
    /// Whether the process locks itself in.
    SandboxMode {
        /// With what the kernel has, and said so where something is missing.
        #[default]
        Auto = "auto",
        /// With everything, or the volume does not start.
        Require = "require",
        /// Not at all.
        Off = "off",
    }
}

words! {
    /// How the log looks.
    LogFormat {
        /// For people.
        #[default]
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}
