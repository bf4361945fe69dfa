//! A guest program that maps a memory device without the library. It maps the 2 MiB of FILE from START on, and prints lines
//! that tests wait for.

use anyhow::{Context, Result, bail};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::env;
use std::fs::File;
use std::io::Write;

const USAGE: &str = "by-hand poke|spin FILE START";
/// An offset in the part of a segment that the daemon allocates, far from what it allocates first.
const AT: usize = 1 << 20;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [role, path, start] = args.as_slice() else { bail!(USAGE) };
    let file =
        File::options().read(true).write(true).open(path).with_context(|| format!("opening {path}"))?;
    let start = start.parse().context(USAGE)?;
    let memory = Mapping::of_file(&file, start, 2 << 20, Protection::ReadWrite).context("mapping it")?;
    let mut out = std::io::stdout().lock();
    match role.as_str() {
        "poke" => {
            let before = memory.load_relaxed_u64(AT);
            memory.store_relaxed_u64(AT, before + 1);
            writeln!(out, "was {before}, is {}", memory.load_relaxed_u64(AT))?;
        }
        "spin" => {
            memory.load_relaxed_u64(AT);
            writeln!(out, "spinning")?;
            out.flush()?;
            loop {
                std::hint::black_box(memory.load_relaxed_u64(AT));
            }
        }
        _ => bail!(USAGE),
    }
    Ok(())
}
