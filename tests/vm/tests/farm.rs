//! The farm in VMs, over either kind of memory: each worker VM has its own slice, which no other VM sees.

use anyhow::{Context, Result, ensure};
use ginnel_farm::Generated;
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{HostJob, Job, TestBed, Vm};

const PROMPT: Duration = Duration::from_secs(60);
const SLICE_MIB: u64 = 16;

/// Starts an installation with these worker VMs and a slice for each.
fn slices<'b>(bed: &'b TestBed, memory: MemoryKind, workers: &[&str]) -> Result<Installation<'b>> {
    let mut plan = Plan::new(bed);
    for worker in workers {
        plan = plan.vm(worker);
    }
    plan.config(&format!(
        "[segment.job]\nsize = \"{SLICE_MIB}M\"\nmemory = \"{memory}\"\nmembers = [\"host\"]\nslices = {workers:?}"
    ))
    .start()
}

/// A VM with its guest daemon.
struct Guest {
    vm: Vm,
    _daemon: Job,
}

fn boot(ginnel: &Installation<'_>, names: &[&str]) -> Result<Vec<Guest>> {
    let mut vms = Vec::new();
    for name in names {
        vms.push(ginnel.vm(name)?.program(program("prowl")?).start()?);
    }
    let mut guests = Vec::new();
    for vm in vms {
        vm.wait_ready()?;
        let daemon = ginnel.start_guest(&vm)?;
        guests.push(Guest { vm, _daemon: daemon });
    }
    Ok(guests)
}

fn manage(bed: &TestBed, ginnel: &Installation<'_>, line: &str) -> Result<std::sync::Arc<HostJob>> {
    bed.host_spawn(&ginnel.on_host(&format!("exec ginnel farm run {line}"))?)
}

fn summary(manager: &HostJob) -> Result<Value> {
    Ok(serde_json::from_str(&manager.wait(PROMPT)?.ok()?.stdout)?)
}

/// Waits until a file exists in a VM.
fn wait_for_file(vm: &Vm, path: &str) -> Result<()> {
    let end = Instant::now() + PROMPT;
    while vm.run(&format!("test -e {path}"))?.code() != Some(0) {
        ensure!(Instant::now() < end, "{}: no {path}", vm.name());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn a_farm_survives_a_killed_worker_vm_and_takes_a_late_one() -> Result<()> {
    MemoryKind::of_default_run().iter().try_for_each(|memory| a_worker_is_killed_and_another_is_late(*memory))
}

fn a_worker_is_killed_and_another_is_late(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("farm")?;
    let ginnel = slices(&bed, memory, &["w1", "w2"])?;
    let mut guests = boot(&ginnel, &["w1", "w2"])?;

    // Two workers, each with its own slice, run functions.
    let workers: Vec<_> = ["w1", "w2"]
        .iter()
        .zip(&guests)
        .map(|(name, guest)| guest.vm.spawn(&format!("exec ginnel farm work job.{name}")))
        .collect::<Result<_>>()?;
    const LEN: usize = 20 << 20;
    let json = summary(&*manage(
        &bed,
        &ginnel,
        &format!("count-words job.w1 job.w2 --generate {LEN} --seed 4 --workers 2 --json"),
    )?)?;
    let mut text = vec![0; LEN];
    Generated { seed: 4 }.read(0, &mut text);
    let words = text.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).count();
    ensure!(json["count"] == words && json["workers"].as_array().is_some_and(|w| w.len() == 2), "{json:#}");
    for worker in json["workers"].as_array().context("workers")? {
        ensure!(worker["pieces"].as_u64() > Some(0), "an idle worker: {json:#}");
    }
    for worker in &workers {
        let said = worker.wait(PROMPT)?.ok()?.stdout;
        ensure!(said.contains("pieces"), "{said}");
    }
    println!("{memory}: {} MB/s with two VMs", json["bytes_per_s"].as_f64().unwrap_or(0.0) / 1e6);

    // Programs that keep their piece until they may end, so that the test can act in the middle of a piece.
    let hold = "touch /tmp/has; while [ -e /tmp/hold ]; do sleep 0.05; done; exec wc -c";
    let held = |vm: &Vm, name: &str| {
        vm.run("rm -f /tmp/has; touch /tmp/hold")?.ok()?;
        vm.spawn(&format!("exec ginnel farm work job.{name} -- sh -c '{hold}'"))
    };
    let first = held(&guests[0].vm, "w1")?;
    let second = held(&guests[1].vm, "w2")?;
    let manager = manage(
        &bed,
        &ginnel,
        "count-chars job.w1 job.w2 --generate 1M --piece 50000 --workers 2 --patience 60 --json",
    )?;
    for guest in &guests {
        wait_for_file(&guest.vm, "/tmp/has")?;
    }
    guests[0].vm.kill_qemu()?;
    drop(first);
    // The other worker keeps its pieces until the late one has some.
    let again = boot(&ginnel, &["w1"])?.pop().context("a VM")?;
    let late = again.vm.spawn("exec ginnel farm work job.w1 -- sh -c 'touch /tmp/has; exec wc -c'")?;
    wait_for_file(&again.vm, "/tmp/has")?;
    guests[1].vm.run("rm /tmp/hold")?.ok()?;
    let json = summary(&manager)?;
    let workers = json["workers"].as_array().context("workers")?;
    ensure!(json["count"] == 1 << 20 && json["deaths"] == 1 && json["reassigned"] == 2, "{json:#}");
    ensure!(workers.len() == 3 && workers[2]["joined"].as_f64() > Some(0.0), "{json:#}");
    let died: Vec<_> = workers.iter().filter(|worker| worker["departure"] == "died").collect();
    ensure!(died.len() == 1 && died[0]["lost"] == 2 && died[0]["pieces"] == 0, "{json:#}");
    ensure!(workers[2]["pieces"].as_u64() > Some(0), "the late one had nothing to do: {json:#}");
    late.wait(PROMPT)?.ok()?;
    second.wait(PROMPT)?.ok()?;
    guests[0] = again;
    Ok(())
}

/// Returns the number of interrupts of a VM's control device.
fn interrupts(vm: &Vm) -> Result<u64> {
    let text = vm.run("cat /proc/interrupts")?.ok()?.stdout;
    let lines = text.lines().filter(|line| line.contains("vfio"));
    let counts = lines.flat_map(|line| line.split_whitespace().skip(1).map_while(|n| n.parse::<u64>().ok()));
    Ok(counts.sum())
}

#[test]
fn a_worker_vm_finds_only_its_own_slice_and_disturbs_nobody() -> Result<()> {
    MemoryKind::of_default_run().iter().try_for_each(|memory| a_worker_prowls(*memory))
}

fn a_worker_prowls(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("prowl")?;
    let ginnel = slices(&bed, memory, &["w1", "w2"])?;
    let guests = boot(&ginnel, &["w1", "w2"])?;
    let (prowler, neighbour) = (&guests[0].vm, &guests[1].vm);

    // Put a mark at the end of each slice; the daemon and the channels use its beginning.
    let marks = [0x6d61_726b_0000_0001u64, 0x6d61_726b_0000_0002];
    for (name, mark) in ["job.w1", "job.w2"].iter().zip(marks) {
        let file = std::fs::File::options().write(true).open(ginnel.segment_file(name))?;
        file.write_all_at(&mark.to_le_bytes().repeat(4), (SLICE_MIB << 20) - 4096)?;
    }
    let said = prowler.run_within(PROMPT, &format!("prowl look {} {}", marks[0], marks[1]))?.ok()?.stdout;
    println!("{said}");
    ensure!(said.contains("marks: [1, 0]") || said.contains("marks: [2, 0]"), "{said}");
    let own = neighbour.run_within(PROMPT, &format!("prowl look {} {}", marks[0], marks[1]))?.ok()?.stdout;
    ensure!(own.contains("marks: [0, 1]") || own.contains("marks: [0, 2]"), "{own}");

    // Nothing wakes the neighbour, which is asleep.
    let idle = neighbour.spawn("exec ginnel farm work job.w2 --mode interrupt")?;
    let manager =
        manage(&bed, &ginnel, "count-chars job.w2 --generate 8M --workers 2 --patience 120 --json")?;
    idle.wait_for_line("working at", PROMPT)?;
    let before = interrupts(neighbour)?;
    let rung = prowler.run_within(PROMPT, "prowl ring")?.ok()?.stdout;
    let after = interrupts(neighbour)?;
    println!("{}; the neighbour had {} interrupts meanwhile", rung.trim(), after - before);
    ensure!(after - before < 10, "{} interrupts for {rung}", after - before);
    manager.kill(9)?;
    idle.wait(PROMPT)?;

    // The rings do not keep the neighbour from its work.
    let ringing = prowler.spawn("while :; do prowl ring; done")?;
    ringing.wait_for_line("rings", PROMPT)?;
    let worker = neighbour.spawn("exec ginnel farm work job.w2 --mode interrupt")?;
    let json = summary(&*manage(&bed, &ginnel, "count-chars job.w2 --generate 32M --json")?)?;
    ensure!(json["count"] == 32 << 20 && json["deaths"] == 0, "{json:#}");
    worker.wait(PROMPT)?.ok()?;
    // This counter, which did not change above, does count interrupts.
    ensure!(interrupts(neighbour)? > after, "a sleeping worker did its job without an interrupt");
    ensure!(ringing.is_running(), "the ringer ended: {:?}", ringing.said());
    ensure!(ginnel.daemon()?.is_running(), "the daemon ended");
    Ok(())
}
