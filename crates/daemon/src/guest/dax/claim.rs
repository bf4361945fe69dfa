//! Making a DAX device by hand, so that the kernel takes nothing on trust from the info block.
//!
//! The info block lies in memory that other members write. A kernel whose `nd_pmem` driver finds it does what it says,
//! and with mode 2 it says: keep your page structures in here. So `nd_pmem` is held back, and this daemon fills in a
//! *seed* instead, an empty device-dax instance that every region has: mode `ram`, the unit of mappings and the uuid of
//! the segment as the host has told them over the private control device. When the driver `dax_pmem` gets this
//! instance, it copies the info block once into memory of its own, compares it with these settings and refuses any
//! other. What is left to the block is where the data begin and end, which is looked at here, before anybody maps them.
//!
//! The region is read-only meanwhile: where the kernel finds no block of this uuid it would write one, and the region
//! may be something else altogether. So a region can be tried with each segment of its size, and nothing comes of it if
//! it is another.

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
    /// Makes a DAX device of a region that no driver has, if the info block of this segment stands there and asks for
    /// what a segment needs. Else nothing changes.
    pub(super) fn claim(&self, region: &Path, segment: &relay::Segment) -> Result<()> {
        let namespace = children(region, "namespace")?.pop().context("the region has no namespace")?;
        if let Some(driver) = driver(&namespace) {
            bail!("its namespace belongs to the driver {driver}");
        }
        // An attempt that did not come to an end, or an instance that was refused.
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
        // The settings say nothing of where the data begin and end.
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

/// Gives the namespace back. The instance may vanish with that.
fn reset(instance: &Path) {
    if let Err(error) = write(instance, "namespace", "\n") {
        tracing::debug!("{error:#}");
    }
}

/// Keeps the kernel from writing an info block, until it is dropped.
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
