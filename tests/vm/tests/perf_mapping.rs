//! `ginnel perf --mapping` in a guest: the kind of memory of a segment, and its speed.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmtest::installation::{MemoryKind, Plan};
use vmtest::{Accel, TestBed};

vmtest::test_both_memories!(a_guest_measures_its_mapping);

fn a_guest_measures_its_mapping(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("perf-mapping")?;
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm("a")
        .segment("web", 16, &["host", "a"])
        .segment_with_readers("news", 16, &["host"], &["a"])
        .start()?;
    let vm = ginnel.vm("a")?.boot()?;
    let _daemon = ginnel.start_guest(&vm)?;
    let (kind, page) = match memory {
        MemoryKind::Dax => ("dax", 2 << 20),
        MemoryKind::Bar => ("bar", 4096),
    };
    let emulated = bed.accel()? == Accel::Tcg;
    for (segment, read_only) in [("web", false), ("news", true)] {
        let said = vm.run(&format!("ginnel perf --mapping {segment} --json --duration 0.05"))?.ok()?.stdout;
        let json: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        ensure!(json["kind"] == kind && json["page"] == page && json["mapped"] == 14 << 20, "{json}");
        ensure!(json["read_only"] == read_only && json["emulated"] == emulated, "{json}");
        // Under emulation the program claims nothing; otherwise DAX memory is cached, on any processor.
        ensure!(json["cached"].is_null() == emulated, "{json}");
        ensure!(emulated || memory == MemoryKind::Bar || json["cached"] == true, "{json}");
        let results = json["results"].as_array().context("no results")?;
        let writes = results.iter().any(|result| result["test"] == "store" || result["test"] == "write");
        ensure!(results.len() >= 3 && writes != read_only, "{json}");
    }
    let page = vm.run("ginnel perf --mapping web --duration 0.05")?.ok()?.stdout;
    ensure!(page.contains("segment web in member 1: ") && page.contains("TIMES SLOWER"), "{page}");
    ensure!(page.contains("emulated (TCG)") == emulated, "{page}");
    // The measurement needs no other program, and has harmed none.
    let status = vm.run("ginnel status")?.ok()?.stdout;
    ensure!(status.contains("good") && !status.contains("BROKEN"), "{status}");
    Ok(())
}
