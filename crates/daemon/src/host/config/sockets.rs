//! Which programs' TCP connections may leave TCP.

use super::{HOST, SegmentSpec};
use crate::pidwatch::Process;
use ginnel_config::{Account, Bytes, Mode};
use serde::Deserialize;

/// What the kernel keeps of a program's name, in bytes.
const COMM: usize = 15;

/// The table `[sockets]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SocketsSpec {
    /// Whether any may.
    pub enabled: bool,
    /// Names of programs that may not, as in /proc/PID/comm.
    pub exclude: Vec<String>,
    /// Users of the host each of whom has a segment in which the user's own programs meet.
    pub users: Vec<Account>,
    /// The size of such a segment.
    pub user_segment: Bytes,
}

impl Default for SocketsSpec {
    fn default() -> Self {
        // Whoever mends the daemon comes over ssh.
        let exclude = ["sshd", "sshd-session"].map(str::to_owned).into();
        Self { enabled: true, exclude, users: Vec::new(), user_segment: Bytes(64 << 20) }
    }
}

impl SocketsSpec {
    /// The segments of users, by name. Nobody but its user, and root, may attach to one.
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

    /// Whether a process of the host runs a program that may not. A process that cannot be seen has no name.
    pub fn excludes(&self, process: &Process) -> bool {
        if self.exclude.is_empty() || process.pid == 0 {
            return false;
        }
        let Ok(comm) = std::fs::read(format!("/proc/{}/comm", process.pid)) else { return false };
        self.names(comm.trim_ascii_end())
    }

    fn names(&self, comm: &[u8]) -> bool {
        self.exclude.iter().any(|name| &name.as_bytes()[..name.len().min(COMM)] == comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_known_by_what_the_kernel_keeps_of_its_name() {
        let spec =
            SocketsSpec { exclude: vec!["sshd".into(), "a-very-long-program".into()], ..Default::default() };
        assert!(spec.names(b"sshd") && spec.names(b"a-very-long-pro"));
        assert!(!spec.names(b"ssh") && !spec.names(b"sshd2") && !spec.names(b"a-very-long-program"));
    }
}
