//! The parameters of a measurement, and the message with which the client sends them to its server.

use crate::wait::Mode;
use anyhow::{Result, ensure};
use clap::ValueEnum;
use ginnel::WaitMode;
use serde::Serialize;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Test {
    /// Round trips of one message at a time.
    Latency,
    /// The largest number of bytes per second in one direction.
    Bandwidth,
}

/// The kind of channel, and how it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A message channel; each side copies.
    Message,
    /// A message channel; data is written and read in place.
    MessageZeroCopy,
    /// A stream channel; each side copies.
    Stream,
    /// A stream channel; data is written and read in place.
    StreamZeroCopy,
}

impl Kind {
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Stream | Self::StreamZeroCopy)
    }

    pub fn is_in_place(self) -> bool {
        matches!(self, Self::MessageZeroCopy | Self::StreamZeroCopy)
    }
}

/// The parameters of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    pub test: Test,
    /// Whether data is written and read in place instead of copied.
    pub in_place: bool,
    /// Whether the server sends, in a bandwidth test.
    pub reverse: bool,
    /// `None` for a socket, where the kernel decides.
    pub mode: Option<Mode>,
    pub size: usize,
    pub duration: Duration,
}

/// The largest message, write or buffer of a measurement, in bytes.
pub const MAX_SIZE: u64 = 64 << 20;
/// The longest measurement.
pub const MAX_DURATION: Duration = Duration::from_secs(3600);

/// The first bytes of a conversation: `GNLPERF1`.
const MAGIC: u64 = u64::from_le_bytes(*b"GNLPERF1");

/// The parameters in the form in which they are sent.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Wire {
    magic: u64,
    /// 1: latency, 2: bandwidth.
    test: u32,
    /// 1: in place. 2: reverse.
    flags: u32,
    /// 0: none, 1: poll, 2: interrupt, 3: adaptive.
    mode: u32,
    reserved: u32,
    size: u64,
    duration_ns: u64,
    more: [u64; 3],
}
const _: () = assert!(size_of::<Wire>() == Parameters::LEN);

impl Parameters {
    /// Length of the parameters' message, and of the server's answer to it, in bytes.
    pub const LEN: usize = 64;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let wire = Wire {
            magic: MAGIC,
            test: match self.test {
                Test::Latency => 1,
                Test::Bandwidth => 2,
            },
            flags: u32::from(self.in_place) | u32::from(self.reverse) << 1,
            mode: match self.mode {
                None => 0,
                Some(Mode::Poll) => 1,
                Some(Mode::Interrupt) => 2,
                Some(Mode::Adaptive) => 3,
            },
            size: self.size as u64,
            duration_ns: self.duration.as_nanos() as u64,
            ..Wire::new_zeroed()
        };
        zerocopy::transmute!(wire)
    }

    /// Parses the parameters, which any program may have written.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Result<Self> {
        let wire: Wire = zerocopy::transmute!(bytes);
        ensure!(wire.magic == MAGIC, "the client does not speak this version's `ginnel perf`");
        ensure!((1..=MAX_SIZE).contains(&wire.size), "a size of {} bytes", wire.size);
        let duration = Duration::from_nanos(wire.duration_ns);
        ensure!(duration <= MAX_DURATION, "a duration of {duration:?}");
        Ok(Self {
            test: match wire.test {
                1 => Test::Latency,
                2 => Test::Bandwidth,
                other => anyhow::bail!("test {other} is not known here"),
            },
            in_place: wire.flags & 1 != 0,
            reverse: wire.flags & 2 != 0,
            mode: match wire.mode {
                0 => None,
                1 => Some(Mode::Poll),
                2 => Some(Mode::Interrupt),
                3 => Some(Mode::Adaptive),
                other => anyhow::bail!("wait mode {other} is not known here"),
            },
            size: wire.size as usize,
            duration,
        })
    }

    pub fn wait_mode(&self) -> WaitMode {
        self.mode.map_or_else(WaitMode::default, Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMETERS: Parameters = Parameters {
        test: Test::Bandwidth,
        in_place: true,
        reverse: true,
        mode: Some(Mode::Interrupt),
        size: 4096,
        duration: Duration::from_millis(300),
    };

    #[test]
    fn orders_arrive_as_they_were_sent() {
        for mode in [None, Some(Mode::Poll), Some(Mode::Interrupt), Some(Mode::Adaptive)] {
            for (test, in_place) in [(Test::Latency, false), (Test::Bandwidth, true)] {
                let parameters = Parameters { test, in_place, mode, reverse: !in_place, ..PARAMETERS };
                assert_eq!(Parameters::from_bytes(parameters.to_bytes()).unwrap(), parameters);
            }
        }
    }

    #[test]
    fn impossible_orders_are_refused() {
        for (at, byte) in [(0, 0), (8, 7), (16, 9), (31, 0xff), (39, 0xff)] {
            let mut bytes = PARAMETERS.to_bytes();
            bytes[at] = byte;
            assert!(Parameters::from_bytes(bytes).is_err(), "byte {at}");
        }
        let mut empty = PARAMETERS.to_bytes();
        empty[24..32].fill(0);
        assert!(Parameters::from_bytes(empty).is_err());
    }
}
