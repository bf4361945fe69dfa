//! The doorbells of which a QEMU was told.

use std::collections::BTreeMap;

/// The doorbells that a QEMU may ring: for each peer the vectors, in the order in which they were announced to the QEMU.
pub type Told = BTreeMap<u32, Vec<u32>>;
