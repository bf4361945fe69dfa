//! Programs whose TCP connections stay on TCP.

use ginnel_broker::process::Process;
use serde::Deserialize;

/// The number of bytes of a program's name that the kernel keeps.
const COMM: usize = 15;

/// Names of programs, as in /proc/PID/comm.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Excluded(Vec<String>);

impl Default for Excluded {
    fn default() -> Self {
        // An administrator who repairs the daemon may be connected through ssh.
        Self(["sshd", "sshd-session"].map(str::to_owned).into())
    }
}

impl From<Vec<String>> for Excluded {
    /// Ignores empty names.
    fn from(names: Vec<String>) -> Self {
        Self(names.into_iter().filter(|name| !name.is_empty()).collect())
    }
}

impl Excluded {
    /// Returns whether a process runs one of these programs. A process that is not visible from here has no name.
    pub fn has(&self, process: &Process) -> bool {
        if self.0.is_empty() || process.pid == 0 {
            return false;
        }
        let Ok(comm) = std::fs::read(format!("/proc/{}/comm", process.pid)) else { return false };
        self.names(comm.trim_ascii_end())
    }

    fn names(&self, comm: &[u8]) -> bool {
        self.0.iter().any(|name| &name.as_bytes()[..name.len().min(COMM)] == comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_recognised_by_the_name_that_the_kernel_keeps() {
        let excluded = Excluded::from(["sshd", "", "a-very-long-program"].map(str::to_owned).to_vec());
        assert!(excluded.names(b"sshd") && excluded.names(b"a-very-long-pro"));
        assert!(
            !excluded.names(b"ssh") && !excluded.names(b"sshd2") && !excluded.names(b"a-very-long-program")
        );
        assert!(!excluded.names(b""));
    }
}
