//! The values of keys that choose one of several kinds.

use ginnel_config::words;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

words! {
    /// The kind of device that the VM gets.
    Device {
        /// vhost-user-blk: one disk.
        #[default]
        Blk = "blk",
        /// vhost-user-scsi: a target with several LUNs.
        Scsi = "scsi",
        /// NVMe over vfio-user: one disk, a namespace of a controller.
        Nvme = "nvme",
    }
}

words! {
    /// Where the data of a disk is stored.
    BackendKind {
        /// In a file or on a block device.
        #[default]
        File = "file",
        /// In a namespace of an NVMe device, past the kernel's block layer: NVMe commands through io_uring.
        UringCmd = "uring-cmd",
        /// On an NVMe device that the volume drives itself, past the kernel, through VFIO.
        Vfio = "vfio",
        /// In the memory of the process; it is lost with the process.
        Ram = "ram",
        /// Nowhere: reads leave the guest's buffer as it is, and writes are lost. For measurements.
        Null = "null",
        /// In a file behind a write cache that a power cut empties. For tests.
        Volatile = "volatile",
    }
}

words! {
    /// How threads wait for requests.
    Wait {
        /// Poll for some time, then sleep.
        #[default]
        Adaptive = "adaptive",
        /// Poll always: the lowest latency, but each thread uses a whole CPU.
        Poll = "poll",
        /// Sleep at once.
        Interrupt = "interrupt",
    }
}

words! {
    /// Whether the kernel's page cache is bypassed.
    Direct {
        /// Where the file system supports it; otherwise the volume logs a warning.
        #[default]
        Auto = "auto",
        /// Always; otherwise the volume does not start.
        On = "on",
        /// Never.
        Off = "off",
    }
}

words! {
    /// What happens to requests that fail because the disk is full or has an error.
    OnError {
        /// The guest gets the error.
        #[default]
        Report = "report",
        /// They wait for an operator.
        Hold = "hold",
    }
}

words! {
    /// Whether the process enters a sandbox.
    SandboxMode {
        /// With what the kernel supports; the volume logs a warning if something is missing.
        #[default]
        Auto = "auto",
        /// With everything; otherwise the volume does not start.
        Require = "require",
        /// No sandbox.
        Off = "off",
    }
}

/// Whether an image is locked against other volumes and QEMUs, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BoolOrWord", into = "BoolOrWord")]
pub enum Lock {
    /// Not locked.
    Off,
    /// From the start of the volume to its end, except while its VM runs elsewhere.
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
            _ => Err(format!("{text:?} is not true, false or vm")),
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
