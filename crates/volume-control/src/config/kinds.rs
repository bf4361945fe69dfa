//! What a volume can be told to be.

use ginnel_config::words;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

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
    /// What becomes of requests that fail because the disk is full or has an error.
    OnError {
        /// The guest gets the error.
        #[default]
        Report = "report",
        /// They wait for an operator.
        Hold = "hold",
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

/// Whether an image is locked against other volumes and QEMUs, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BoolOrWord", into = "BoolOrWord")]
pub enum Lock {
    /// Not at all.
    Off,
    /// From the start of the volume to its end, but while its VM runs elsewhere.
    #[default]
    Volume,
    /// While a VM runs on it.
    Vm,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged, expecting = "expected true, false or \"vm\"")]
enum BoolOrWord {
    Bool(bool),
    Word(String),
}

impl FromStr for Lock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "false" => Ok(Self::Off),
            "true" => Ok(Self::Volume),
            "vm" => Ok(Self::Vm),
            _ => Err(format!("{text:?} is none of true, false, vm")),
        }
    }
}

impl TryFrom<BoolOrWord> for Lock {
    type Error = String;

    fn try_from(value: BoolOrWord) -> Result<Self, String> {
        match value {
            BoolOrWord::Bool(on) => Ok(if on { Self::Volume } else { Self::Off }),
            BoolOrWord::Word(word) => word.parse(),
        }
    }
}

impl From<Lock> for BoolOrWord {
    fn from(lock: Lock) -> Self {
        match lock {
            Lock::Off => Self::Bool(false),
            Lock::Volume => Self::Bool(true),
            Lock::Vm => Self::Word("vm".to_owned()),
        }
    }
}
