//! Unmodified programs of the distribution in two VMs: their TCP connections change over to a segment that the VMs share.

mod programs;
mod stage;

use crate::programs::PROGRAMS;
use crate::stage::{MODES, Stage};
use anyhow::{Result, ensure};
use kit::skip::missing;
use std::time::Instant;
use vmtest::TestBed;

kit::test_that_skips_are_seen!();

#[test]
fn programs_of_the_distribution_work_between_two_vms() -> Result<()> {
    // This variable contains parts of names, if not all programs are to be tried.
    let wanted = std::env::var("GINNEL_PROGRAMS").unwrap_or_default();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.split(',').any(|part| name.contains(part));
    ensure!(
        PROGRAMS.iter().any(|program| is_wanted(program.name)),
        "GINNEL_PROGRAMS names no program of this test"
    );
    let mut programs = Vec::new();
    for program in PROGRAMS.iter().filter(|program| is_wanted(program.name)) {
        match missing(program.needs) {
            None => programs.push(program),
            Some(what) => {
                kit::skip!("{}: {what} is not installed: `scripts/setup test` installs it", program.name);
            }
        }
    }
    if programs.is_empty() {
        return Ok(());
    }
    let bed = TestBed::new("preload")?;
    // The VMs boot once for all programs.
    let mut stage = Stage::new(&bed)?;
    let mut failed = Vec::new();
    // The mode determines when the library asks the daemon, which hardly depends on VMs, and on one machine each program is
    // tried in both modes. Here each program runs in one of them, except in the soak.
    let all = std::env::var_os("GINNEL_SOAK").is_some();
    for (i, program) in programs.into_iter().enumerate() {
        for (_, mode) in MODES.into_iter().enumerate().filter(|(j, _)| all || i % MODES.len() == *j) {
            let begun = Instant::now();
            let result = stage.play(mode, program.play);
            println!("{}, {mode}: {:.1} s", program.name, begun.elapsed().as_secs_f64());
            if let Err(error) = result {
                println!("FAILED: {error:#}");
                failed.push(format!("{}, {mode}", program.name));
            }
        }
    }
    ensure!(failed.is_empty(), "failed: {failed:?}");
    Ok(())
}
