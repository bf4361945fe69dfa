//! A hostile program for a guest: it searches all memory that the VM's devices show for marks, and rings every doorbell. It
//! needs root and no daemon.

use anyhow::{Context, Result, bail};
use ginnel::{Mapping, SharedMemory};
use ginnel_shmem::Protection;
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const USAGE: &str = "prowl look MARK... | prowl ring\nA mark is a number; it is there where its word stands four times in a row.";
/// The offset of the register of the ivshmem device that rings a doorbell when it is written.
const DOORBELL: usize = 12;
/// The number of bytes that are read at a time.
const CHUNK: usize = 1 << 16;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.split_first() {
        Some((what, marks)) if what == "look" => look(marks),
        Some((what, [])) if what == "ring" => ring(),
        _ => bail!(USAGE),
    }
}

/// Returns every device whose bytes are shared memory, with its length: DAX devices, and the memory of ivshmem devices.
fn memories() -> Result<Vec<(PathBuf, usize)>> {
    let mut found = Vec::new();
    if let Ok(devices) = fs::read_dir("/sys/bus/dax/devices") {
        for device in devices.flatten() {
            let len = fs::read_to_string(device.path().join("size"))?.trim().parse()?;
            found.push((Path::new("/dev").join(device.file_name()), len));
        }
    }
    for device in ivshmem()? {
        for resource in ["resource2", "resource2_wc"] {
            let path = device.join(resource);
            if let Ok(meta) = fs::metadata(&path) {
                found.push((path, usize::try_from(meta.len())?));
            }
        }
    }
    Ok(found)
}

fn ivshmem() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for device in fs::read_dir("/sys/bus/pci/devices")?.flatten() {
        let id = |what: &str| fs::read_to_string(device.path().join(what)).unwrap_or_default();
        if (id("vendor").trim(), id("device").trim()) == ("0x1af4", "0x1110") {
            found.push(device.path());
        }
    }
    Ok(found)
}

fn map(path: &Path, len: usize) -> Result<Mapping> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.with_context(|| format!("opening {}", path.display()))?;
    let mapping = Mapping::of_file(&file, 0, len, Protection::ReadWrite);
    mapping.with_context(|| format!("mapping {}", path.display()))
}

/// Prints how often each mark was found.
fn look(marks: &[String]) -> Result<()> {
    let marks: Vec<u64> = marks.iter().map(|mark| mark.parse().context(USAGE)).collect::<Result<_>>()?;
    let mut seen = vec![0u32; marks.len()];
    let (mut bytes, mut buffer) = (0, vec![0; CHUNK]);
    let memories = memories()?;
    for (path, len) in &memories {
        let mapping = map(path, *len)?;
        bytes += len;
        for at in (0..*len).step_by(CHUNK) {
            let part = &mut buffer[..CHUNK.min(len - at)];
            mapping.read(at, part);
            // Marks are aligned to 32 bytes, so each lies in one chunk.
            for words in part.as_chunks::<8>().0.as_chunks::<4>().0 {
                let word = u64::from_le_bytes(words[0]);
                if word != 0 && words.iter().all(|other| *other == words[0]) {
                    for (mark, seen) in marks.iter().zip(&mut seen) {
                        *seen += u32::from(*mark == word);
                    }
                }
            }
        }
        println!("{}: {len} bytes", path.display());
    }
    println!("{bytes} bytes of {} memories; marks: {seen:?}", memories.len());
    Ok(())
}

/// Rings every member with each vector that a member can have, and with member numbers and vectors beyond those.
fn ring() -> Result<()> {
    let mut rings = 0u64;
    for device in ivshmem()? {
        // Devices without doorbells do nothing with this register; they are tried too.
        let Ok(registers) = map(&device.join("resource0"), 256) else { continue };
        let mut store = |member: u32, vector: u32| {
            registers.store_relaxed_u32(DOORBELL, member << 16 | vector);
            rings += 1;
        };
        for member in 0..=0xffff {
            for vector in if member < 256 { 0..64 } else { 0..1 } {
                store(member, vector);
            }
        }
        for member in 0..4 {
            for vector in 64..=0xffff {
                store(member, vector);
            }
        }
    }
    println!("{rings} rings");
    Ok(())
}
