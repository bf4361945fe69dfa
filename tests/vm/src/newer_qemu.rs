//! Provides a newer QEMU than the distribution's, for tests of what only a newer one can do.

use crate::cache;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of the newer QEMU. Unpacks it into the cache if it is not there, which downloads 40 MB and takes some
/// seconds; usually `scripts/setup test` has done so before. The error says why it is not available.
pub fn newer_qemu() -> Result<PathBuf> {
    let _lock = cache::lock()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/newer-qemu");
    let output = Command::new(&script).env("GINNEL_VM_CACHE", cache::dir()?).output();
    let output = output.with_context(|| format!("cannot run {}", script.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let program = String::from_utf8(output.stdout).context("its path is not UTF-8")?;
    Ok(program.trim().into())
}
