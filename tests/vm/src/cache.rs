//! The folder that keeps what is slow to make: the kernel, base images, and whether KVM works.

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Returns the cache folder, which is `$GINNEL_VM_CACHE`, or else `vm-cache` in cargo's target folder. Makes it if it does not
/// exist.
pub fn dir() -> Result<PathBuf> {
    let dir = match std::env::var_os("GINNEL_VM_CACHE") {
        Some(dir) => PathBuf::from(dir),
        None => target_dir().join("vm-cache"),
    };
    fs::create_dir_all(&dir).with_context(|| {
        format!("cannot make the cache folder {}; set GINNEL_VM_CACHE to another", dir.display())
    })?;
    Ok(dir)
}

/// Keeps other processes from filling the cache at the same time, as long as the returned file is open. Blocks until they are
/// done.
pub fn lock() -> Result<File> {
    let path = dir()?.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Returns cargo's target folder. Cargo marks the top of it with a `CACHEDIR.TAG`; the output of the build script lies below
/// it.
fn target_dir() -> &'static Path {
    let out = Path::new(env!("OUT_DIR"));
    out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()).unwrap_or(out)
}
