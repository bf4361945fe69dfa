//! Makes a DAX device through sysfs, so that the kernel does not trust the info block.
//!
//! The info block lies in memory that other members can write. If the kernel's `nd_pmem` driver finds it, the driver follows it;
//! and in mode 2 the info block tells the kernel to keep its page structures in this memory. So `nd_pmem` is kept away, and this
//! daemon fills in a *seed* instead, an empty device-dax instance that every region has: mode `ram`, and the mapping unit and the
//! uuid of the segment, which the host has sent over the control device, where no other member can interfere. When the driver
//! `dax_pmem` gets this instance, it copies the info block once into its own memory, compares it with these settings and refuses
//! any other. The info block still decides where the data begin and end, and this daemon checks that before anybody maps them.
//!
//! The region is read-only meanwhile: if the kernel found no info block with this uuid, it would write one, and the region
//! may be something else altogether. So a region can be tried with each segment of its size, and trying the wrong segment
//! changes nothing.

use super::{Kernel, children, driver, number, text};
use anyhow::{Context, Result, bail, ensure};
use ginnel_layout::relay;
use ginnel_layout::segment::RESERVED;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The driver that compares the info block with the seed.
pub const DRIVER: &str = "bus/nd/drivers/dax_pmem";

impl Kernel {
    /// Makes a DAX device of a region that has no driver, if it has the info block of this segment and the info block asks for
    /// what a segment needs. Otherwise changes nothing.
    pub(super) fn claim(&self, region: &Path, segment: &relay::Segment) -> Result<()> {
        let namespace = children(region, "namespace")?.pop().context("the region has no namespace")?;
        if let Some(driver) = driver(&namespace) {
            bail!("its namespace belongs to the driver {driver}");
        }
        // This instance is left from an attempt that was interrupted, or was refused.
        for old in children(region, "dax")? {
            if driver(&old).is_none() && text(&old, "namespace").is_ok_and(|claimed| !claimed.is_empty()) {
                reset(&old);
            }
        }
        let read_only = ReadOnly::set(region)?;
        let seed = text(region, "dax_seed")?;
        ensure!(seed.starts_with("dax") && !seed.contains('/'), "its seed is called '{seed}'");
        let seed_path = region.join(&seed);
        let done = self.fill_in(&seed_path, &seed, &namespace, segment);
        if done.is_err() {
            reset(&seed_path);
        }
        drop(read_only);
        done
    }

    fn fill_in(&self, path: &Path, seed: &str, namespace: &Path, segment: &relay::Segment) -> Result<()> {
        let namespace = namespace.file_name().and_then(|name| name.to_str()).context("no name")?;
        write(path, "mode", "ram\n")?;
        write(path, "align", &format!("{}\n", segment.page))?;
        write(path, "uuid", &format!("{}\n", uuid_text(&segment.uuid)))?;
        write(path, "namespace", &format!("{namespace}\n"))?;
        write(&self.sysfs.join(DRIVER), "bind", seed)?;
        // The settings do not say where the data begin and end.
        let region = path.parent().context("an instance without a region")?;
        let front = number(path, "resource")?.wrapping_sub(number(region, "resource")?);
        let len = number(path, "size")?;
        if (front, len) != (RESERVED, segment.size - RESERVED) {
            write(&self.sysfs.join(DRIVER), "unbind", seed)?;
            bail!("its info block says that {len} bytes of data begin at {front}");
        }
        Ok(())
    }
}

/// Releases the namespace. The instance may vanish because of that.
fn reset(instance: &Path) {
    if let Err(error) = write(instance, "namespace", "\n") {
        tracing::debug!("{error:#}");
    }
}

/// Makes a region read-only until it is dropped, so that the kernel cannot write an info block.
struct ReadOnly(Option<PathBuf>);

impl ReadOnly {
    fn set(region: &Path) -> Result<Self> {
        if text(region, "read_only")? != "0" {
            return Ok(Self(None));
        }
        write(region, "read_only", "1\n")?;
        Ok(Self(Some(region.to_owned())))
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.as_ref().map(|region| write(region, "read_only", "0\n")) {
            tracing::warn!("{error:#}");
        }
    }
}

fn write(folder: &Path, file: &str, text: &str) -> Result<()> {
    let path = folder.join(file);
    fs::write(&path, text).with_context(|| format!("cannot write '{}' to {}", text.trim(), path.display()))
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::new();
    for (n, byte) in uuid.iter().enumerate() {
        if matches!(n, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}
