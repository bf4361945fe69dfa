//! What is said on a control socket.
//!
//! A Unix stream socket. Each side writes one JSON object a line (`\n`): the client a [`Request`], the volume an
//! [`Answer`] to it. A connection may carry several, one after the other. Who may connect may do everything: the mode and
//! group of the socket decide.

use crate::{Dump, LimitChange, Limits, Stat};
use ginnel_config::Bytes;
use serde::{Deserialize, Serialize};

/// The longest line of a request, in bytes. The volume drops a client that sends a longer one.
pub const REQUEST_MAX: usize = 4096;

/// What a volume is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Counters, latencies, and what the volume is.
    Stat,
    /// Changes limits; without any change, tells them.
    Limit(LimitChange),
    /// Gives a disk another size, and tells the guest.
    Resize {
        /// Its LUN; 0 for vhost-user-blk.
        #[serde(default)]
        disk: u32,
        /// Its size from now on. Without: what the file or device has become.
        size: Option<Bytes>,
    },
    /// Accepts that a disk has lost writes: it may say again that something is durable.
    ResetErrors {
        /// Its LUN; 0 for vhost-user-blk.
        #[serde(default)]
        disk: u32,
    },
    /// Tries requests again that are held because their disk was full or had failed.
    Resume {
        /// Lets them fail instead.
        #[serde(default)]
        fail: bool,
    },
    /// The state of each queue, for a guest that is stuck.
    Dump,
}

/// What a volume answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Request::Stat`].
    Stat(Box<Stat>),
    /// To [`Request::Limit`]: the limits from now on.
    Limits(Limits),
    /// To [`Request::Resize`]: the size from now on, in bytes.
    Size(u64),
    /// To [`Request::ResetErrors`]: whether there was something to accept.
    Reset(bool),
    /// To [`Request::Resume`]: how many requests were held.
    Resumed(u64),
    /// To [`Request::Dump`].
    Dump(Dump),
    /// It was not done: what is wrong and what helps, on one line.
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
    fn what_is_no_request_is_refused() {
        for bad in
            ["", "{}", r#"{"op":"quit"}"#, r#"{"op":"limit","ipos":1}"#, r#"{"op":"resize","size":-1}"#]
        {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
