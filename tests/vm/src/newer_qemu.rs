//! A newer QEMU than the distribution's, for tests of what only that can do.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache;

/// Where it is. Unpacks it into the cache if it is not there (40 MB are downloaded, and some seconds pass), as `scripts/setup test`
/// has done as a rule. An error says why there is none.
pub fn newer_qemu() -> Result<PathBuf> {
    let _lock = cache::lock()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/newer-qemu");
    let output = Command::new(&script).env("GINNEL_VM_CACHE", cache::dir()?).output();
    let output = output.with_context(|| format!("cannot run {}", script.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let program = String::from_utf8(output.stdout).context("its path is not UTF-8")?;
    Ok(program.trim().into())
}
