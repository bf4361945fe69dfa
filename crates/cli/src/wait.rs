//! Names for the ways to wait.

use clap::ValueEnum;
use ginnel::WaitMode;
use serde::Serialize;

/// How to wait for the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Look until it is there: lowest latency, uses a processor.
    Poll,
    /// Sleep at once: uses no processor, each wake costs a doorbell.
    Interrupt,
    /// Look for a moment, then sleep.
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
