//! Measures making and freeing a block, with few and with many live blocks, as requests to the daemon over its socket.

use crate::report::{Better, Report, median};
use anyhow::{Result, ensure};
use ginnel::{AttachOptions, Block, BlockOptions, Endpoint};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::Plan;

/// The numbers of live blocks while one more is made and freed.
const LIVE: [usize; 4] = [1, 1_000, 100_000, 1_000_000];
/// The number of pairs in a sample, and the number of samples for each number of live blocks.
const PAIRS: usize = 2_000;
const SAMPLES: usize = 9;
/// Within this time, the journal must grow by the records of a million blocks.
const WATCHDOG: Duration = Duration::from_secs(120);
/// The greatest permitted ratio of the medians with a million live blocks and with one.
const FLAT: f64 = 1.2;

const SEGMENT: &str = "[segment.many]\nsize = \"5G\"\npage = \"4K\"\nmembers = [\"host\"]\n[limits]\n\
    handles_per_endpoint = 2000000\nhandles_per_member = 2000000\nblocks_per_endpoint = 2000000\nblocks_per_member = 2000000\n";

/// Adds a row for each number of blocks. Needs 5 GiB of tmpfs.
pub fn allocate(bed: &TestBed, report: &mut Report) -> Result<()> {
    let ginnel = Plan::new(bed).config(SEGMENT).start()?;
    let socket = AttachOptions { socket: ginnel.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("many", &socket)?;
    let mut live = Vec::new();
    let mut first = Vec::new();
    for count in LIVE {
        while live.len() < count {
            live.push(make(&endpoint)?);
        }
        let samples = (0..SAMPLES).map(|_| sample(&endpoint)).collect::<Result<Vec<_>>>()?;
        if count == LIVE[0] {
            first = samples;
            continue;
        }
        let case = format!("make and free a block of 4 KiB beside {count} others");
        let target = (count == LIVE[3]).then_some(1.0 / FLAT);
        report.pairs(
            &case,
            "us",
            Better::Lower,
            &samples,
            "beside 1 other",
            &first,
            target,
            "ratio of medians",
        );
    }
    // Free any of the live blocks, not always the newest one.
    let mut at = 0usize;
    let begin = Instant::now();
    for _ in 0..PAIRS * SAMPLES {
        at = (at.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1_442_695_040_888_963_407);
        let number = (at >> 33) % live.len();
        drop(live.swap_remove(number));
        live.push(make(&endpoint)?);
    }
    let any = begin.elapsed().as_secs_f64() * 1e6 / (PAIRS * SAMPLES) as f64;
    let case = format!("free any of {} blocks and make another", LIVE[3]);
    report.pairs(&case, "us", Better::Lower, &[any], "beside 1 other", &[median(first)], None, "mean");
    Ok(())
}

/// Adds a row for the longest wait while the journal is rewritten. Needs 5 GiB of tmpfs.
pub fn journal(bed: &TestBed, report: &mut Report) -> Result<()> {
    let ginnel = Plan::new(bed).config(SEGMENT).start()?;
    let socket = AttachOptions { socket: ginnel.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("many", &socket)?;
    let journal = ginnel.config().with_file_name("state").join("journal");
    let few = longest(&endpoint, &journal)?;
    let _live = (0..LIVE[3]).map(|_| make(&endpoint)).collect::<Result<Vec<_>>>()?;
    let many = longest(&endpoint, &journal)?;
    let case = format!("longest wait for a block while the journal is rewritten, beside {} others", LIVE[3]);
    report.pairs(&case, "ms", Better::Lower, &[many], "beside none", &[few], None, "maximum");
    Ok(())
}

/// Returns the longest time in milliseconds that making or freeing a block takes from now until the journal has been rewritten.
fn longest(endpoint: &Endpoint, journal: &Path) -> Result<f64> {
    let (mut longest, mut rewritten, file) = (Duration::ZERO, false, journal.metadata()?.ino());
    let begin = Instant::now();
    while !rewritten {
        for _ in 0..PAIRS {
            let begin = Instant::now();
            let block = make(endpoint)?;
            let made = Instant::now();
            block.close()?;
            longest = longest.max(made - begin).max(made.elapsed());
        }
        let now = journal.metadata()?.ino();
        rewritten = now != file;
        ensure!(begin.elapsed() < WATCHDOG, "the journal is not rewritten");
    }
    Ok(longest.as_secs_f64() * 1e3)
}

fn make(endpoint: &Endpoint) -> Result<Block> {
    Ok(endpoint.create_block("", 4096, &BlockOptions { zero: false, ..BlockOptions::default() })?)
}

/// Returns the median of the pairs, in microseconds.
fn sample(endpoint: &Endpoint) -> Result<f64> {
    let mut times = Vec::with_capacity(PAIRS);
    for _ in 0..PAIRS {
        let begin = Instant::now();
        make(endpoint)?.close()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(times))
}
