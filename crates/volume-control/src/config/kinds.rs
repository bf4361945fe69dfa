//! What a volume can be told to be.

use ginnel_config::words;

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
