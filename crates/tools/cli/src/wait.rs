//! The command-line names of the wait modes.

use clap::ValueEnum;
use ginnel::WaitMode;
use serde::Serialize;

/// How to wait for the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Poll without end: lowest latency, uses a whole CPU.
    Poll,
    /// Sleep at once: uses no CPU while waiting, but each wake-up needs a doorbell.
    Interrupt,
    /// Poll for a short time, then sleep.
    Adaptive,
}

impl From<Mode> for WaitMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Poll => Self::Poll,
            Mode::Interrupt => Self::Interrupt,
            Mode::Adaptive => Self::default(),
        }
    }
}
