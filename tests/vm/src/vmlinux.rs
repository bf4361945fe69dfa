//! Unpacks a kernel image once on the host, so that no guest has to.
//!
//! A bzImage unpacks itself at each boot, which takes longer under TCG than the rest of booting. QEMU can also start the
//! unpacked kernel, an ELF file, by its PVH entry point; it is the same kernel.

use crate::cache;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

/// Returns the path of the unpacked kernel, from the cache if it is there. Returns the image itself if it cannot be unpacked.
pub fn unpacked(image: &Path) -> Result<PathBuf> {
    let meta = fs::metadata(image).with_context(|| format!("cannot look at {}", image.display()))?;
    let mut hasher = DefaultHasher::new();
    (image, meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    let _lock = cache::lock()?;
    let path = cache::dir()?.join(format!("vmlinux-{:016x}", hasher.finish()));
    if !path.exists() {
        // An image in another format boots too, only slower.
        let Ok(kernel) = unpack(image) else { return Ok(image.to_owned()) };
        let mut file =
            tempfile::NamedTempFile::new_in(cache::dir()?).context("cannot write to the cache folder")?;
        file.write_all(&kernel)?;
        file.persist(&path)?;
    }
    Ok(path)
}

fn unpack(image: &Path) -> Result<Vec<u8>> {
    let (start, len) = payload(image)?;
    let mut file = File::open(image)?;
    file.seek(SeekFrom::Start(start))?;
    let mut packed = vec![0; len];
    file.read_exact(&mut packed)?;
    let program: &[&str] = match &packed[..4] {
        [0xfd, b'7', b'z', b'X'] => &["xz", "-dc", "--single-stream"],
        [0x28, 0xb5, 0x2f, 0xfd] => &["zstd", "-dcq"],
        [0x1f, 0x8b, ..] => &["gzip", "-dcq"],
        [0x02, 0x21, 0x4c, 0x18] => &["lz4", "-dcq"],
        other => bail!("unknown compression {other:x?}"),
    };
    // The exit status says nothing: to most of these programs, the size that follows the data is garbage.
    let kernel = filter(program, packed)?;
    ensure!(
        kernel.starts_with(b"\x7fELF") && has_pvh_entry(&kernel),
        "no kernel with a PVH entry point inside"
    );
    Ok(kernel)
}

/// Returns offset and length of the compressed kernel, from the image's setup header (Linux boot protocol 2.08).
fn payload(image: &Path) -> Result<(u64, usize)> {
    let mut header = [0; 0x260];
    File::open(image)?.read_exact(&mut header)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    ensure!(&header[0x202..0x206] == b"HdrS", "not a bzImage");
    let setup_sectors = match header[0x1f1] {
        0 => 4,
        n => u64::from(n),
    };
    let (start, len) = ((setup_sectors + 1) * 512 + u64::from(word(0x248)), word(0x24c) as usize);
    let fits =
        start.checked_add(len as u64).is_some_and(|end| end <= fs::metadata(image).map_or(0, |m| m.len()));
    ensure!(fits && len >= 4, "the image is cut short");
    Ok((start, len))
}

/// Returns whether a note contains the PVH entry point: type 18 (`XEN_ELFNOTE_PHYS32_ENTRY`), 4 or 8 bytes, of "Xen".
fn has_pvh_entry(kernel: &[u8]) -> bool {
    let note = |size: u8| [4, 0, 0, 0, size, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0];
    kernel.windows(16).any(|window| window == note(4) || window == note(8))
}

fn filter(program: &[&str], input: Vec<u8>) -> Result<Vec<u8>> {
    let mut child = Command::new(program[0])
        .args(&program[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {}", program[0]))?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    let feeder = thread::spawn(move || {
        let _ = stdin.write_all(&input); // The program may stop reading before the end.
    });
    let output = child.wait_with_output()?;
    let _ = feeder.join();
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(setup_sectors: u8, start: u32, len: u32, total: usize) -> tempfile::NamedTempFile {
        let mut bytes = vec![0; total];
        bytes[0x1f1] = setup_sectors;
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x248..0x24c].copy_from_slice(&start.to_le_bytes());
        bytes[0x24c..0x250].copy_from_slice(&len.to_le_bytes());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn the_header_says_where_the_kernel_is() {
        assert_eq!(payload(image(3, 100, 50, 4096).path()).unwrap(), (4 * 512 + 100, 50));
        assert_eq!(payload(image(0, 0, 4, 4096).path()).unwrap(), (5 * 512, 4));
    }

    #[test]
    fn an_image_that_is_none_is_refused() {
        assert!(payload(image(3, 100, 5000, 4096).path()).is_err(), "cut short");
        assert!(payload(image(3, u32::MAX, u32::MAX, 4096).path()).is_err(), "far beyond");
        let mut text = tempfile::NamedTempFile::new().unwrap();
        text.write_all(&[b'x'; 4096]).unwrap();
        assert!(payload(text.path()).is_err(), "no bzImage");
        assert!(unpack(image(3, 100, 50, 4096).path()).is_err(), "no compression");
    }
}
