//! The protocol of the control socket.
//!
//! The control socket is a Unix stream socket. Each side writes one JSON object per line (`
//! `): the client a [`Request`], and the volume an [`Answer`] to it. A connection can carry several requests, one after
//! another. A client that may connect may do everything, so the mode and group of the socket decide.

use crate::{Dump, LimitChange, Limits, Stat};
use ginnel_config::Bytes;
use serde::{Deserialize, Serialize};

/// The longest line of a request, in bytes. The volume disconnects a client that sends a longer one.
pub const REQUEST_MAX: usize = 4096;

/// A request to a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Returns the volume's properties, counters and latencies.
    Stat,
    /// Changes limits. Without any change, returns them.
    Limit(LimitChange),
    /// Changes the size of a disk, and tells the guest.
    Resize {
        /// The LUN; 0 for a device with one disk.
        #[serde(default)]
        disk: u32,
        /// The new size. Default: the present size of the file or device.
        size: Option<Bytes>,
    },
    /// Accepts that a disk has lost writes, so that flushes can succeed again.
    ResetErrors {
        /// The LUN; 0 for a device with one disk.
        #[serde(default)]
        disk: u32,
    },
    /// Tries requests again that are held because their disk was full or had failed.
    Resume {
        /// Whether to fail them instead.
        #[serde(default)]
        fail: bool,
    },
    /// Returns the state of each queue, for debugging a guest that is stuck.
    Dump,
}

/// The answer of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The answer to [`Request::Stat`].
    Stat(Box<Stat>),
    /// The answer to [`Request::Limit`]: the limits from now on.
    Limits(Limits),
    /// The answer to [`Request::Resize`]: the size from now on, in bytes.
    Size(u64),
    /// The answer to [`Request::ResetErrors`]: whether writes had been lost.
    Reset(bool),
    /// The answer to [`Request::Resume`]: how many requests were held.
    Resumed(u64),
    /// The answer to [`Request::Dump`].
    Dump(Dump),
    /// The request was not executed: the problem and the remedy, on one line.
    Error(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_like_this() {
        for (request, text) in [
            (Request::Stat, r#"{"op":"stat"}"#),
            (
                Request::Limit(LimitChange { iops: Some(500), ..Default::default() }),
                r#"{"op":"limit","iops":500}"#,
            ),
            (Request::Resize { disk: 1, size: Some(Bytes(4096)) }, r#"{"op":"resize","disk":1,"size":4096}"#),
            (Request::ResetErrors { disk: 1 }, r#"{"op":"reset-errors","disk":1}"#),
            (Request::Resume { fail: false }, r#"{"op":"resume","fail":false}"#),
            (Request::Dump, r#"{"op":"dump"}"#),
        ] {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        let resize: Request = serde_json::from_str(r#"{"op":"resize","size":"1G"}"#).unwrap();
        assert_eq!(resize, Request::Resize { disk: 0, size: Some(Bytes(1 << 30)) });
    }

    #[test]
    fn invalid_requests_are_refused() {
        for bad in
            ["", "{}", r#"{"op":"quit"}"#, r#"{"op":"limit","ipos":1}"#, r#"{"op":"resize","size":-1}"#]
        {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
