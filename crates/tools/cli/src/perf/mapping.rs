//! `ginnel perf --mapping`: measures how fast loads and stores are on a segment's mapping, compared with private
//! memory.
//!
//! A mapping that the processor does not cache looks like any other, and is fifty times slower. Only a measurement
//! shows the difference.

use super::Args;
use super::emulation::is_emulated;
use crate::output;
use anyhow::{Context, Result};
use ginnel::{AttachOptions, Endpoint, Mapping, MappingKind, SharedMemory};
use ginnel_layout::{CACHE_LINE, PAGE, segment};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Offset in the mapping of the spare pages between a segment's header and its arena. Nothing uses them, so stores
/// there do no harm. They fit into a processor's first caches.
const SPARE: usize = PAGE;
const SPARE_LEN: usize = (segment::ARENA - segment::RESERVED) as usize - SPARE;
/// The largest part of the segment that is read: more than most caches hold, and many pages.
const MAX_RANGE: usize = 64 << 20;
/// Number of accesses between two readings of the clock.
const BATCH: u32 = 4096;
/// Number of bytes in one copy.
const PIECE: usize = 32 << 10;
/// Number of copies between two readings of the clock.
const COPIES: u32 = 16;
/// How many times slower than private memory an uncached mapping is at least: a load from uncached memory takes
/// hundreds of nanoseconds, and one from the first caches a few.
const UNCACHED: f64 = 8.0;

/// One measurement, on the mapping and on private memory.
#[derive(Debug, Serialize)]
struct Row {
    test: &'static str,
    /// Size of the memory that is accessed, in bytes.
    bytes: usize,
    unit: &'static str,
    mapping: f64,
    private: f64,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    version: &'static str,
    segment: &'a str,
    member: u32,
    kind: &'static str,
    page: usize,
    read_only: bool,
    mapped: usize,
    /// Whether the processor is QEMU's emulation, under which all memory is alike.
    emulated: bool,
    /// Whether loads and stores use the processor's cache. `None` if that is unknown, as under emulation.
    cached: Option<bool>,
    results: Vec<Row>,
}

pub fn run(args: &Args, segment: &str) -> Result<()> {
    let options = AttachOptions { name: Some("ginnel-perf".into()), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with(segment, &options)?;
    let emulated = is_emulated();
    let results = measure(endpoint.memory(), endpoint.is_read_only(), args.duration)?;
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        segment,
        member: endpoint.member(),
        kind: match endpoint.mapping_kind() {
            MappingKind::BAR => "bar",
            MappingKind::DAX => "dax",
            MappingKind::FILE => "file",
            _ => "unknown",
        },
        page: endpoint.page(),
        read_only: endpoint.is_read_only(),
        mapped: endpoint.memory().len(),
        emulated,
        cached: (!emulated).then(|| looks_cached(&results)),
        results,
    };
    if args.json { output::json(&report) } else { output::line(report.to_string()) }
}

/// Makes all measurements, each for half of `time` on either memory.
fn measure(memory: &Mapping, read_only: bool, time: Duration) -> Result<Vec<Row>> {
    let range = memory.len().min(MAX_RANGE);
    let other = Mapping::anonymous(range).context("no memory to compare with")?;
    let mut buffer = vec![0; PIECE];
    for at in (0..range).step_by(PIECE) {
        // Page faults must not be part of the measurement.
        other.write(at, &buffer[..PIECE.min(range - at)]);
        memory.read(at, &mut buffer[..PIECE.min(range - at)]);
    }
    let part = |whole: &Mapping| whole.part(SPARE, SPARE_LEN).context("a mapping without spare pages");
    let (near, other_near) = (part(memory)?, part(&other)?);
    let mut rows = Vec::new();
    let mut add =
        |test, bytes, unit, measure: &dyn Fn(&Mapping) -> f64, mapping: &Mapping, private: &Mapping| {
            rows.push(Row { test, bytes, unit, mapping: measure(mapping), private: measure(private) });
        };
    let time = time / 2;
    let speed = |seconds: f64| PIECE as f64 / seconds / 1e6;
    let load = |m: &Mapping| {
        let mut random = 1;
        best(time, BATCH, |n| random = loads(m, n, random)) * 1e9
    };
    let store = |m: &Mapping| {
        let mut random = 1;
        best(time, BATCH, |n| random = stores(m, n, random)) * 1e9
    };
    let read = |m: &Mapping| speed(best(time, COPIES, |n| (0..n).for_each(|_| copy_out(m))));
    let zeros = vec![0; PIECE];
    let write = |m: &Mapping| speed(best(time, COPIES, |n| (0..n).for_each(|_| m.write(0, &zeros))));
    add("load", SPARE_LEN, "ns", &load, &near, &other_near);
    add("load", range, "ns", &load, memory, &other);
    if !read_only {
        add("store", SPARE_LEN, "ns", &store, &near, &other_near);
    }
    add("read", PIECE, "MB/s", &read, &near, &other_near);
    if !read_only {
        add("write", PIECE, "MB/s", &write, &near, &other_near);
    }
    Ok(rows)
}

/// Returns the time of one access in seconds, in the fastest batch of `n`. Other batches were interrupted.
fn best(time: Duration, n: u32, mut batch: impl FnMut(u32)) -> f64 {
    let begun = Instant::now();
    let mut best = Duration::MAX;
    loop {
        let before = Instant::now();
        batch(n);
        best = best.min(before.elapsed());
        if begun.elapsed() >= time {
            return best.as_secs_f64().max(1e-9) / f64::from(n);
        }
    }
}

/// Loads from random cache lines. The processor can begin each load only after the previous one. The loaded values do
/// not matter. Begins with the state `random`, and returns the last state.
fn loads(memory: &Mapping, n: u32, mut random: u64) -> u64 {
    // No bit of a value is used, but the compiler must not know that.
    let none = black_box(0);
    for _ in 0..n {
        random = next(random) ^ (memory.load_relaxed_u64(line(random, memory)) & none);
    }
    random
}

/// Stores to random cache lines, and waits until all stores have arrived. Begins with the state `random`, and returns
/// the last state.
fn stores(memory: &Mapping, n: u32, mut random: u64) -> u64 {
    for _ in 0..n {
        random = next(random);
        memory.store_relaxed_u64(line(random, memory), 0);
    }
    memory.full_fence();
    random
}

fn copy_out(memory: &Mapping) {
    let mut buffer = [0; PIECE];
    memory.read(0, &mut buffer);
    black_box(&buffer);
}

/// Returns the next state of Knuth's generator. It takes three cycles, so it hides nothing.
fn next(random: u64) -> u64 {
    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407)
}

/// Returns the offset of a cache line of the mapping.
fn line(random: u64, memory: &Mapping) -> usize {
    let lines = (memory.len() / CACHE_LINE) as u64;
    // The upper half of the product is evenly distributed, without a division.
    (((random >> 32) * lines) >> 32) as usize * CACHE_LINE
}

/// Returns whether the mapping is about as fast as private memory that is in the processor's cache.
fn looks_cached(rows: &[Row]) -> bool {
    rows.iter().filter(|row| row.bytes <= SPARE_LEN).all(|row| row.slowness() < UNCACHED)
}

impl Row {
    /// Returns how many times slower than private memory the mapping is.
    fn slowness(&self) -> f64 {
        if self.unit == "ns" { self.mapping / self.private } else { self.private / self.mapping }
    }
}

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            "bar" => "a BAR (ivshmem-plain)",
            "dax" => "DAX (virtio-pmem)",
            "file" => "the file itself, on the host",
            other => other,
        };
        let access = if self.read_only { "read-only" } else { "read-write" };
        writeln!(
            f,
            "segment {} in member {}: {kind}, {} mapped in units of {}, {access}\n",
            self.segment,
            self.member,
            output::bytes(self.mapped as u64),
            output::bytes(self.page as u64),
        )?;
        let mut table = output::Table::new(&["TEST", "OVER", "MAPPING", "PRIVATE", "TIMES SLOWER"]);
        for row in &self.results {
            table.row([
                row.test.into(),
                output::bytes(row.bytes as u64),
                format!("{:.1} {}", row.mapping, row.unit),
                format!("{:.1} {}", row.private, row.unit),
                format!("{:.1}", row.slowness()),
            ]);
        }
        writeln!(f, "{table}\n")?;
        f.write_str(match (self.cached, self.kind) {
            (Some(true), _) => "The mapping is cached.",
            (Some(false), "bar") => {
                "The mapping is NOT cached: each access goes to memory. KVM on AMD processors does this to BARs, and so \
                 does KVM on Intel to a VM with some passthrough devices; use memory = \"dax\" for this segment."
            }
            (Some(false), _) => {
                "The mapping is much slower than private memory, as if it were not cached. Check for other load on this \
                 machine, then measure again."
            }
            (None, _) => {
                "This processor is emulated (TCG), and treats all memory alike: whether the mapping is cached on a real \
                 one cannot be determined here."
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(4);

    fn names(rows: &[Row]) -> Vec<(&str, usize)> {
        rows.iter().map(|row| (row.test, row.bytes)).collect()
    }

    #[test]
    fn private_memory_is_as_fast_as_itself() {
        let memory = Mapping::anonymous(2 << 20).unwrap();
        let rows = measure(&memory, false, TIME).unwrap();
        let expected =
            [("load", SPARE_LEN), ("load", 2 << 20), ("store", SPARE_LEN), ("read", PIECE), ("write", PIECE)];
        assert_eq!(names(&rows), expected);
        assert!(rows.iter().all(|row| row.mapping > 0.0 && row.private > 0.0), "{rows:?}");
    }

    #[test]
    fn read_only_mappings_are_not_written() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 << 20).unwrap();
        let memory = Mapping::of_file(&file, 0, 2 << 20, ginnel_shmem::Protection::Read).unwrap();
        let rows = measure(&memory, true, TIME).unwrap();
        assert_eq!(names(&rows), [("load", SPARE_LEN), ("load", 2 << 20), ("read", PIECE)]);
    }

    #[test]
    fn nothing_is_written_outside_the_spare_pages() {
        let memory = Mapping::anonymous(2 << 20).unwrap();
        memory.write(0, &vec![0x5a; 2 << 20]);
        measure(&memory, false, TIME).unwrap();
        let mut bytes = vec![0; 2 << 20];
        memory.read(0, &mut bytes);
        let touched: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 0x5a).collect();
        let (first, last) = (touched.first().unwrap(), touched.last().unwrap());
        assert!((SPARE..SPARE + SPARE_LEN).contains(first) && *last < SPARE + SPARE_LEN, "{first} to {last}");
    }

    #[test]
    fn every_line_is_reached_and_none_outside() {
        let memory = Mapping::anonymous(SPARE_LEN).unwrap();
        let mut random = 1;
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..100_000 {
            random = next(random);
            let at = line(random, &memory);
            assert!(at.is_multiple_of(CACHE_LINE) && at < SPARE_LEN);
            seen.insert(at);
        }
        assert_eq!(seen.len(), SPARE_LEN / CACHE_LINE);
    }

    #[test]
    fn slow_is_slow_compared_with_private_memory() {
        let row = |bytes, unit, mapping, private| Row { test: "load", bytes, unit, mapping, private };
        let near = SPARE_LEN;
        assert!(looks_cached(&[row(near, "ns", 6.0, 5.0), row(MAX_RANGE, "ns", 900.0, 100.0)]));
        assert!(looks_cached(&[row(near, "MB/s", 9000.0, 20_000.0)]));
        assert!(!looks_cached(&[row(near, "ns", 300.0, 5.0)]));
        assert!(!looks_cached(&[row(near, "ns", 6.0, 5.0), row(PIECE, "MB/s", 90.0, 20_000.0)]));
    }
}
