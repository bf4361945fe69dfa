//! Processes, distinguished from later processes with the same number: the kernel uses a number again, but not with the same start time.

/// One particular process, identified by number and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Process {
    /// The process number; 0 for a process that is not visible from here.
    pub pid: u32,
    /// The time at which it started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

/// The place of a program's code and stack in memory. It distinguishes the program that a process runs from the one that it runs
/// after an `exec`, because both addresses are random, unless address space randomization is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// The address of the program's code (field 26 of `/proc/PID/stat`).
    pub code: u64,
    /// The address of its stack (field 28).
    pub stack: u64,
}
