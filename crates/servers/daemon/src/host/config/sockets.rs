//! The configuration of TCP connections: which programs may leave TCP.

use super::HOST;
use crate::excluded::Excluded;
use ginnel_broker::declared::SegmentSpec;
use ginnel_config::{Account, Bytes, Mode};
use serde::Deserialize;

/// The table `[sockets]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SocketsSpec {
    /// Whether any program may leave TCP.
    pub enabled: bool,
    /// The programs of the host that may not.
    pub exclude: Excluded,
    /// The users of the host that each get a segment in which the user's own programs meet.
    pub users: Vec<Account>,
    /// The size of such a segment.
    pub user_segment: Bytes,
}

impl Default for SocketsSpec {
    fn default() -> Self {
        Self { enabled: true, exclude: Excluded::default(), users: Vec::new(), user_segment: Bytes(64 << 20) }
    }
}

impl SocketsSpec {
    /// Returns the names and declarations of these segments. Only its user, and root, may attach to one.
    pub(super) fn user_segments(&self) -> impl Iterator<Item = (String, SegmentSpec)> {
        self.users.iter().map(|user| {
            let name = match user {
                Account::Number(number) => format!("sockets.{number}"),
                Account::Name(name) => format!("sockets.{name}"),
            };
            let spec = SegmentSpec {
                size: Some(self.user_segment),
                members: vec![HOST.to_owned()],
                mode: Some(Mode(0o600)),
                allow_users: vec![user.clone()],
                ..SegmentSpec::default()
            };
            (name, spec)
        })
    }
}
