//! The version of QEMU for which arguments are: its options have changed over the years.

use anyhow::{Context, Result, bail};
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

/// A version of QEMU, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    major: u32,
    minor: u32,
}

impl QemuVersion {
    /// The oldest supported version.
    pub const OLDEST: Self = Self { major: 7, minor: 2 };

    /// Returns the option of a socket's `-chardev` that makes QEMU reconnect each second. `reconnect` counts in seconds
    /// and was removed in 10.2; `reconnect-ms` exists since 9.2.
    pub fn reconnect(self) -> &'static str {
        if self >= (Self { major: 9, minor: 2 }) { "reconnect-ms=1000" } else { "reconnect=1" }
    }

    /// Returns whether this version has `reconnect`.
    pub fn takes_reconnect(self) -> bool {
        self < Self { major: 10, minor: 2 }
    }

    /// Returns whether this version has `reconnect-ms`.
    pub fn takes_reconnect_ms(self) -> bool {
        self >= Self { major: 9, minor: 2 }
    }

    /// Returns whether this version has `vfio-user-pci`.
    pub fn has_vfio_user(self) -> bool {
        self >= Self { major: 10, minor: 1 }
    }

    /// Runs a QEMU to ask for its version. Blocks until it ends.
    pub fn of(program: &Path) -> Result<Self> {
        let output = Command::new(program).arg("-version").stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot run {}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let version = said.split_once("version ").and_then(|(_, rest)| rest.split_whitespace().next());
        match version.map(str::parse) {
            Some(Ok(version)) if output.status.success() => Ok(version),
            _ => bail!("{} -version does not answer as a QEMU does", program.display()),
        }
    }
}

impl FromStr for QemuVersion {
    type Err = String;

    /// Parses a version such as 7.2, or 10.0.3.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(major), Some(minor)) => Ok(Self { major, minor }),
            _ => Err(format!("{text:?} is not a version of QEMU: write one such as 10.0")),
        }
    }
}

impl Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Options that say which QEMU the VM has.
#[derive(clap::Args)]
pub struct QemuArgs {
    /// The VM's QEMU. It is run with -version, because the arguments depend on its version. Default: the qemu-system-*
    /// of this machine's architecture.
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,

    /// The version of the VM's QEMU, such as 10.0, if that is not installed on this machine.
    #[arg(long, value_name = "VERSION", conflicts_with = "qemu")]
    qemu_version: Option<QemuVersion>,
}

impl QemuArgs {
    /// Returns the version. Runs QEMU if necessary.
    pub fn version(&self) -> Result<QemuVersion> {
        if let Some(version) = self.qemu_version {
            return Ok(version);
        }
        let usual = || format!("qemu-system-{}", std::env::consts::ARCH).into();
        let program = self.qemu.clone().unwrap_or_else(usual);
        QemuVersion::of(&program).context(
            "the version of the VM's QEMU is not known; name it by --qemu PATH or --qemu-version VERSION",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_gets_what_it_takes() {
        for (text, reconnect) in [
            ("7.2", "reconnect=1"),
            ("7.2.22", "reconnect=1"),
            ("9.1.93", "reconnect=1"),
            ("9.2", "reconnect-ms=1000"),
            ("10.0.3", "reconnect-ms=1000"),
            ("10.2", "reconnect-ms=1000"),
            ("11.0.0", "reconnect-ms=1000"),
        ] {
            let version: QemuVersion = text.parse().unwrap();
            assert_eq!(version.reconnect(), reconnect, "{text}");
            let (old, new) = (version.takes_reconnect(), version.takes_reconnect_ms());
            assert!(if reconnect == "reconnect=1" { old && !new } else { new }, "{text}");
        }
        for bad in ["", "10", "ten.two", "7,2"] {
            assert!(bad.parse::<QemuVersion>().is_err(), "{bad}");
        }
    }
}
