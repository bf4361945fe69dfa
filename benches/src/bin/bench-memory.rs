//! The memory service beside its alternatives: `make bench NAME=memory`.

use anyhow::{Context, Result};
use clap::Parser;
use ginnel_bench::interrupts;
use ginnel_bench::measure::{Handing, Timing};
use ginnel_bench::report::{BESIDE_HOST, Better, ON_HOST, Report, median};
use ginnel_bench::world::{Place, World};
use vmtest::{Accel, HOST_ADDRESS, TestBed, Vm};

/// Measures locks beside the C library's and beside the doorbell floor.
#[derive(Parser)]
struct Cli {
    /// Run only this part. `vm-locks` is a part of `vm`.
    #[arg(long, value_parser = ["locks", "blocks", "allocate", "joining", "journal", "vm", "vm-locks"])]
    only: Option<String>,
    /// Measure only blocks of this many KiB.
    #[arg(long)]
    kib: Option<u64>,
    /// The number of pairs of runs for each row.
    #[arg(long, default_value_t = 7)]
    pairs: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    let mut report = Report::default();
    if wants("allocate") {
        // This part needs its own test bed because it has its own daemon.
        ginnel_bench::allocate::allocate(&TestBed::new("allocate")?, &mut report)?;
    }
    if wants("joining") {
        ginnel_bench::joining::joining(&mut report)?;
    }
    if wants("journal") {
        ginnel_bench::allocate::journal(&TestBed::new("journal")?, &mut report)?;
    }
    let bed = TestBed::new("bench")?;
    let world = World::new(&bed)?;
    let mut bench = Bench { world: &world, report, pairs: cli.pairs, kib: cli.kib };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("one machine with {cpus} CPUs; guests run under {:?}", bed.accel()?);
    if wants("locks") {
        bench.locks()?;
    }
    if wants("blocks") {
        bench.blocks("host -> host", Place::Host(0), Place::Host(1), "127.0.0.1:17171")?;
    }
    if wants("vm") || wants("vm-locks") {
        let vms = world.boot(512, None)?;
        let [(a, _da), (b, _db)] = &vms[..] else { anyhow::bail!("two VMs were asked for") };
        if cli.kib.is_none() {
            bench.vm(a, b)?;
        }
        if wants("vm") {
            let address = format!("{}:17171", b.address()?);
            bench.blocks("VM -> VM", Place::Vm(a), Place::Vm(b), &address)?;
            bench.blocks("host -> VM", Place::Host(0), Place::Vm(b), &address)?;
            bench.blocks("VM -> host", Place::Vm(a), Place::Host(1), &format!("{HOST_ADDRESS}:17171"))?;
        }
    }
    bench.report.finish("memory", cli.only.is_some())
}

/// The number of bytes that go through a block.
const BLOCKS_TOTAL: u64 = 2 << 30;
/// The C library's lock that survives its owner.
const PTHREAD: &str = "pthread robust mutex";
const DOORBELL: &str = "bare doorbell -> eventfd";

struct Bench<'w> {
    world: &'w World<'w>,
    report: Report,
    pairs: usize,
    kib: Option<u64>,
}

impl Bench<'_> {
    /// Alternates runs of our measurement and the other one. The results are in nanoseconds.
    fn in_turns(&self, ours: impl Fn() -> Result<f64>, theirs: impl Fn() -> Result<f64>) -> Result<Pairs> {
        let mut pairs = Pairs::default();
        for _ in 0..self.pairs {
            pairs.theirs.push(theirs()?);
            pairs.ours.push(ours()?);
        }
        Ok(pairs)
    }

    /// Measures a lock that nobody else uses.
    fn uncontended(&mut self, place: Place<'_>, case: &str) -> Result<()> {
        let alone = |args: &str| Ok(self.world.alone(place, args)?.median);
        let pairs =
            self.in_turns(|| alone("lock --rounds 4000000"), || alone("lock --posix --rounds 4000000"))?;
        self.add(case, "ns", pairs, PTHREAD, Some(1.0 / 1.5), "target: at most 1.5 x");
        Ok(())
    }

    fn locks(&mut self) -> Result<()> {
        self.uncontended(Place::Host(0), "lock + unlock, nobody else")?;
        let both = |args: &str| Ok(self.world.time(Place::Host(1), Place::Host(0), args)?.median);
        for (kind, rounds, case, target) in [
            ("lock-turns", 20_000, "host-host: lock handed over", Some(1.0)),
            ("lock-crowd", 400_000, "host-host: both lock all the time, each", None),
            ("condvar", 20_000, "host-host: condition variable, one way", Some(1.0)),
        ] {
            for (mode, target) in [("adaptive", target), ("interrupt", None)] {
                let pairs = self.in_turns(
                    || both(&format!("{kind} --rounds {rounds} --mode {mode}")),
                    || both(&format!("{kind} --posix --rounds {rounds}")),
                )?;
                let case = format!("{case}, {mode}");
                let peer = if kind == "condvar" { "pthread condvar" } else { PTHREAD };
                self.add(&case, "ns", pairs, peer, target, "");
            }
        }
        Ok(())
    }

    /// Measures between two VMs. The C library's locks do not work between machines, so floors are the alternatives.
    fn vm(&mut self, a: &Vm, b: &Vm) -> Result<()> {
        let case = "VM-VM: condition variable asleep, one way";
        let polling = interrupts::missing(self.world.bed, &self.world.ginnel, &[a.name(), b.name()])?;
        let (a, b) = (Place::Vm(a), Place::Vm(b));
        self.uncontended(a, "VM: lock + unlock, nobody else")?;
        if self.world.bed.accel()? == Accel::Kvm {
            self.beside_host(a, b)?;
        }
        let both = |args: &str| Ok(self.world.time(b, a, args)?.median);
        match &polling {
            Some(why) => self.report.omit(case, why),
            None => {
                let pairs = self.in_turns(
                    || both("condvar --rounds 2000 --mode interrupt"),
                    || both("doorbell --rounds 2000"),
                )?;
                let note = "target: at most 1.3 x the floor";
                self.add(case, "ns", pairs, DOORBELL, Some(1.0 / 1.3), note);
            }
        }
        let pairs =
            self.in_turns(|| both("condvar --rounds 20000"), || both("bare --segment bare --rounds 20000"))?;
        self.add(
            "VM-VM: condition variable, poll, one way",
            "ns",
            pairs,
            "bare two-line ping-pong",
            None,
            "",
        );
        Ok(())
    }

    /// Measures locks that two VMs take from each other, beside two processes of the host.
    fn beside_host(&mut self, a: Place<'_>, b: Place<'_>) -> Result<()> {
        for (args, case) in [
            ("lock-turns --rounds 20000", "VM-VM: lock handed over, poll"),
            ("lock-crowd --rounds 400000", "VM-VM: both lock all the time, each, poll"),
            ("condvar --rounds 20000", "VM-VM: condition variable, poll, one way"),
        ] {
            let pairs = self.in_turns(
                || Ok(self.world.time(b, a, args)?.median),
                || Ok(self.world.time(Place::Host(1), Place::Host(0), args)?.median),
            )?;
            self.add(case, "ns", pairs, ON_HOST, BESIDE_HOST, "");
        }
        Ok(())
    }

    /// Measures a writer and a reader that share a block guarded by a lock and a condition variable, for blocks of different
    /// sizes, in turns with the same over a bare word. Some sizes have a target.
    fn blocks(&mut self, name: &str, writer: Place<'_>, reader: Place<'_>, address: &str) -> Result<()> {
        let on_host = matches!((writer, reader), (Place::Host(_), Place::Host(_)));
        let sizes = [4u64, 64, 1024, 4096, 16384, 65536];
        for kib in sizes.into_iter().filter(|kib| self.kib.is_none_or(|only| only == *kib)) {
            let size = kib << 10;
            let args = |total: u64| format!("--size {size} --count {}", (total / size).max(2));
            let time = |args: &str| self.world.time(reader, writer, args);
            let asked = kib == 4096;
            let (mut ours, mut bare) = (Vec::new(), Vec::new());
            for _ in 0..if asked { self.pairs } else { 1 } {
                bare.push(time(&format!("block --bare {}", args(BLOCKS_TOTAL)))?);
                ours.push(time(&format!("block {}", args(BLOCKS_TOTAL)))?);
            }
            let rate = |runs: &[Timing]| runs.iter().map(|run| run.median).collect::<Vec<_>>();
            let case = format!("{name}: one block of {kib} KiB, lock and condition variable");
            let mut peers = vec![(
                if on_host { "TCP loopback" } else { "TCP over virtio-net" },
                format!("tcp-stream --address {address} {} --rounds 1", args(BLOCKS_TOTAL / 8)),
            )];
            if on_host {
                let file = self.world.bed.dir().join("mapped").display().to_string();
                peers.push((
                    "mmap of a file, pthread lock",
                    format!("block --posix --address {file} {}", args(BLOCKS_TOTAL)),
                ));
            }
            let typical = median(rate(&ours));
            for (peer, args) in peers {
                let theirs = time(&args)?.median;
                self.report.pairs(&case, "GB/s", Better::Higher, &[typical], peer, &[theirs], None, "2 GiB");
            }
            let (ours, bare) = (handings(&ours)?, handings(&bare)?);
            let percent =
                |all: &[Handing]| all.iter().map(|one| (one.share * 100.0).max(0.01)).collect::<Vec<_>>();
            let case = format!("{name}: one block of {kib} KiB, time on locks");
            let target = asked.then_some(1.0);
            let limit = vec![1.0; ours.len()];
            let share = percent(&ours);
            self.report.pairs(
                &case,
                "%",
                Better::Lower,
                &share,
                "the limit",
                &limit,
                target,
                &there_and_back(&ours),
            );
            let (floor, note) = (percent(&bare), there_and_back(&bare));
            self.report.pairs(&case, "%", Better::Lower, &share, "a bare word", &floor, None, &note);
        }
        Ok(())
    }

    fn add(
        &mut self,
        case: &str,
        unit: &'static str,
        pairs: Pairs,
        peer: &str,
        target: Option<f64>,
        note: &str,
    ) {
        self.report.pairs(case, unit, Better::Lower, &pairs.ours, peer, &pairs.theirs, target, note);
    }
}

/// Returns the costs of handing over in some runs.
fn handings(runs: &[Timing]) -> Result<Vec<Handing>> {
    runs.iter().map(|run| run.handing.context("the writer tells how long nobody copied")).collect()
}

/// Returns the typical and the longest time of a block, for a note.
fn there_and_back(runs: &[Handing]) -> String {
    let middle = median(runs.iter().map(|run| run.median).collect());
    let longest = median(runs.iter().map(|run| run.longest).collect());
    format!("polling; there and back {:.1} us, the longest {:.0} us", middle / 1e3, longest / 1e3)
}

#[derive(Default)]
struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}
