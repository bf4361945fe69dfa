//! Channels beside their floors and alternatives: `make bench NAME=channel`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ginnel_bench::interrupts;
use ginnel_bench::measure::Timing;
use ginnel_bench::report::{Better, Report, median};
use ginnel_bench::world::{Place, Running, World};
use std::path::Path;
use std::time::{Duration, Instant};
use vmtest::{Accel, HOST_ADDRESS, TestBed, Vm};

/// Measures channels, and `ginnel cp`, beside their alternatives.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["host", "vm", "cp", "daemon"])]
    only: Option<String>,
    /// Measure only rows whose names, or whose alternatives' names, contain this, or one of several. Not for `cp` and `daemon`.
    #[arg(long)]
    row: Vec<String>,
    /// The number of pairs of runs for each row.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// The number of mebibytes that `ginnel cp` and its alternatives copy.
    #[arg(long, default_value_t = 1024)]
    copy_mib: u64,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    let bed = TestBed::new("bench")?;
    let world = World::new(&bed)?;
    let (report, pairs, rows) = (Report::default(), cli.pairs, &cli.row);
    let mut bench = Bench { world: &world, report, pairs, rows, polling: None };
    println!("one machine with {} CPUs; guests run under {:?}", cpus(), bed.accel()?);
    if wants("daemon") {
        bench.daemon()?;
    }
    if wants("host") {
        bench.host()?;
    }
    if wants("vm") || wants("cp") {
        let share = bed.dir().join("share");
        std::fs::create_dir_all(&share)?;
        let file = share.join("file");
        if wants("cp") {
            make_file(&file, cli.copy_mib)?;
        }
        let memory = if wants("cp") { 2 * cli.copy_mib as u32 + 768 } else { 512 };
        // The disk has room for two copies, because one may still be being removed while the next one arrives.
        let disk = bed.dir().join("disk");
        bed.host(&format!(
            "truncate -s {}M {d} && mkfs.ext4 -q {d}",
            2 * cli.copy_mib + 256,
            d = disk.display()
        ))?
        .ok()?;
        let vms = world.boot(memory, Some((&share.display().to_string(), &disk)))?;
        let [(a, _da), (b, _db)] = &vms[..] else { anyhow::bail!("two VMs were asked for") };
        if wants("vm") {
            bench.polling = interrupts::missing(&bed, &world.ginnel, &[a.name(), b.name()])?;
            let dax = Ends {
                server: Place::Vm(b),
                client: Place::Vm(a),
                name: "vm-vm over dax",
                channels: "bench",
                bare: "bare",
                rounds: 100_000,
            };
            let bar = Ends { name: "vm-vm over bar", channels: "bench-bar", bare: "bare-bar", ..dax };
            bench.vm(dax, b)?;
            bench.vm(bar, b)?;
            bench.kinds(dax, bar)?;
        }
        if wants("cp") {
            bench.cp(a, &file, cli.copy_mib)?;
        }
    }
    bench.report.finish("channel", cli.only.is_some() || !cli.row.is_empty())
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

struct Bench<'w> {
    world: &'w World<'w>,
    report: Report,
    pairs: usize,
    /// Only rows with one of these words, or all rows if there are none.
    rows: &'w [String],
    /// Why the VMs cannot sleep, if they cannot.
    polling: Option<String>,
}

/// The places of the two ends, and what is used there.
#[derive(Clone, Copy)]
struct Ends<'w> {
    server: Place<'w>,
    client: Place<'w>,
    name: &'static str,
    /// The segment for channels; `bare` is the one for floors.
    channels: &'static str,
    bare: &'static str,
    /// The number of round trips of polled measurements.
    rounds: u32,
}

/// Tells from the bare ping-pong where the two ends are: a line takes some 60 ns one way between CPUs that share a cache, and
/// 200 ns or more between others.
fn placement(floors: &[f64]) -> &'static str {
    if median(floors.to_vec()) < 130.0 { "CPUs near" } else { "CPUs far" }
}

/// The name, the alternative and the target of a row.
struct Row<'a> {
    case: &'a str,
    unit: &'static str,
    better: Better,
    peer: &'a str,
    target: Option<f64>,
    note: &'a str,
}

/// Returns the median: nanoseconds or GB/s.
fn middle(timing: Result<Timing>) -> Result<f64> {
    Ok(timing?.median)
}

/// Returns a median time in microseconds.
fn microseconds(timing: Result<Timing>) -> Result<f64> {
    Ok(timing?.median / 1000.0)
}

impl Bench<'_> {
    fn wants(&self, case: &str, peer: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|row| case.contains(row) || peer.contains(row))
    }

    /// Alternates runs of two measurements, and adds a row for them.
    fn compare(
        &mut self,
        row: Row<'_>,
        ours: impl Fn(&Self) -> Result<f64>,
        theirs: impl Fn(&Self) -> Result<f64>,
    ) -> Result<()> {
        let Row { case, unit, better, peer, target, note } = row;
        if !self.wants(case, peer) {
            return Ok(());
        }
        let (mut figures, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            peers.push(theirs(self)?);
            figures.push(ours(self)?);
        }
        let placement = if peer.starts_with(PING_PONG) { placement(&peers) } else { "" };
        let note = if note.is_empty() { placement } else { note };
        self.report.pairs(case, unit, better, &figures, peer, &peers, target, note);
        Ok(())
    }

    /// Measures over the segment for channels.
    fn time(&self, ends: Ends<'_>, args: &str) -> Result<Timing> {
        self.world.time(ends.server, ends.client, &format!("{args} --segment {}", ends.channels))
    }

    /// Measures a floor.
    fn floor(&self, ends: Ends<'_>, args: &str) -> Result<Timing> {
        self.world.time(ends.server, ends.client, &format!("{args} --segment {}", ends.bare))
    }

    /// Compares the one-way latency of messages of these sizes with the bare ping-pong over the same number of lines, with a
    /// target ratio for each, and the latency of a stream with that of messages.
    fn latency(&mut self, ends: Ends<'_>, peer: &str, asked: &[(usize, f64)]) -> Result<()> {
        let Ends { name, rounds, .. } = ends;
        let (unit, better, note) = ("ns", Better::Lower, "");
        for &(size, target) in asked {
            let case = format!("{name}: {size} B message, poll, one way");
            let args = format!("--size {size} --rounds {rounds}");
            self.compare(
                Row { case: &case, unit, better, peer, target: Some(target), note },
                |b| middle(b.time(ends, &format!("message {args}"))),
                |b| middle(b.floor(ends, &format!("bare {args}"))),
            )?;
        }
        let case = format!("{name}: 64 B over a stream, poll, one way");
        self.compare(
            Row { case: &case, unit, better, peer: "the same as a message", target: None, note },
            |b| middle(b.time(ends, &format!("stream-ping --size 64 --rounds {rounds}"))),
            |b| middle(b.time(ends, &format!("message --size 64 --rounds {rounds}"))),
        )
    }

    /// Compares messages that are sent one way as fast as possible with bare stores to as many lines.
    fn pipelined(&mut self, ends: Ends<'_>) -> Result<()> {
        for (size, target) in [(8, Some(1.0 / 2.5)), (64, None), (120, None)] {
            let args = format!("--size {size} --count 200000 --rounds 20");
            let case = format!("{}: {size} B messages, pipelined, each", ends.name);
            let (unit, better) = ("ns", Better::Lower);
            self.compare(
                Row { case: &case, unit, better, peer: "bare stores", target, note: "" },
                |b| middle(b.time(ends, &format!("pipelined {args}"))),
                |b| middle(b.floor(ends, &format!("bare-stores {args}"))),
            )?;
        }
        Ok(())
    }

    /// Compares streams over a ring of the default size with double buffers of the size of a write, and with double buffers
    /// that take no more memory than the ring. Data that has left both second-level caches before it is read arrives faster
    /// than data that one CPU has to fetch from the other's cache, so more memory is faster.
    fn default_streams(&mut self, ends: Ends<'_>, total: usize) -> Result<()> {
        let small = DEFAULT_RING / 2;
        for chunk in [64 << 10, 1 << 20] {
            for (peer, buffer) in [("bare double buffer", chunk), ("bare, no more memory", chunk.min(small))]
            {
                let args = |size: usize| format!("--size {size} --count {} --rounds 20", total / size);
                let case = format!("{}: stream, {} KiB writes, default ring", ends.name, chunk >> 10);
                let (unit, better) = ("GB/s", Better::Higher);
                self.compare(
                    Row { case: &case, unit, better, peer, target: Some(0.95), note: "" },
                    |b| middle(b.time(ends, &format!("stream {}", args(chunk)))),
                    |b| middle(b.floor(ends, &format!("double-buffer {}", args(buffer)))),
                )?;
                if buffer == chunk && chunk <= small {
                    break;
                }
            }
        }
        Ok(())
    }

    fn transfers(&mut self, ends: Ends<'_>, total: u64, rounds: u32) -> Result<()> {
        let name = ends.name;
        let (unit, better, note) = ("GB/s", Better::Higher, "");
        for chunk in [64 << 10, 1 << 20, 16 << 20] {
            let count = (total / chunk).max(2);
            let args = format!("--size {chunk} --count {count} --rounds {rounds}");
            let case = format!("{name}: stream, {} KiB writes", chunk >> 10);
            self.compare(
                Row { case: &case, unit, better, peer: "bare double buffer", target: Some(0.85), note },
                |b| middle(b.time(ends, &format!("stream --capacity {STREAM_RING} {args}"))),
                |b| middle(b.floor(ends, &format!("double-buffer {args}"))),
            )?;
        }
        for size in [4 << 10, 64 << 10, 1 << 20] {
            // The result depends on what the ends do with a message: look at its head and pass it on, or work on all of it. In
            // the second case the cache lines move either way, and a copy moves them best.
            for (touch, what, target) in
                [(64, "head looked at", Some(1.5)), (size, "each line touched", None)]
            {
                let count = (total / size).max(2);
                let args = format!(
                    "--size {size} --touch {touch} --count {count} --rounds {rounds} --capacity {}",
                    8 << 20
                );
                let case = format!("{name}: {} KiB in place, {what}", size >> 10);
                self.compare(
                    Row { case: &case, unit, better, peer: "copying send/recv", target, note },
                    |b| middle(b.time(ends, &format!("in-place {args}"))),
                    |b| middle(b.time(ends, &format!("copying {args}"))),
                )?;
            }
        }
        Ok(())
    }

    fn host(&mut self) -> Result<()> {
        let ends = Ends {
            server: Place::Host(1),
            client: Place::Host(0),
            name: "host-host",
            channels: "bench",
            bare: "bare",
            rounds: 200_000,
        };
        let peer = format!("{PING_PONG}, same lines");
        self.latency(ends, &peer, &[(8, 0.8), (64, 0.75), (120, 0.7)])?;
        self.pipelined(ends)?;
        self.default_streams(ends, 64 << 20)?;
        let socket = self.world.bed.dir().join("peer.sock");
        for size in [8, 64] {
            let case = format!("host-host: {size} B message, one way");
            let row =
                |peer| Row { case: &case, unit: "ns", better: Better::Lower, peer, target: None, note: "" };
            let message = format!("message --size {size} --rounds 100000");
            let ours = |b: &Self| middle(b.time(ends, &message));
            let unix = format!("unix --address {} --size {size} --rounds 20000", socket.display());
            let tcp = format!("tcp --address 127.0.0.1:17171 --size {size} --rounds 20000");
            for (peer, args) in [("Unix socket", &unix), ("TCP loopback", &tcp)] {
                self.compare(row(peer), ours, |b| {
                    let _ = std::fs::remove_file(&socket);
                    middle(b.world.time(ends.server, ends.client, args))
                })?;
            }
            let pipe = format!("pipe --size {size} --rounds 20000");
            self.compare(row("pipe"), ours, |b| middle(b.world.alone(ends.client, &pipe)))?;
        }
        self.transfers(ends, 256 << 20, 5)?;
        self.awake(ends)?;
        self.sleeping(ends, 20_000)?;
        let case = "host: attach to first message answered";
        let (unit, better, peer, note) = ("ms", Better::Lower, "the limit", "");
        self.compare(
            Row { case, unit, better, peer, target: Some(1.0), note },
            |b| Ok(microseconds(b.time(ends, "attach"))? / 1000.0),
            |_| Ok(5.0),
        )
    }

    /// Measures adaptive mode when nobody has to sleep.
    fn awake(&mut self, ends: Ends<'_>) -> Result<()> {
        let case = format!("{}: 8 B message, adaptive, peer awake", ends.name);
        let message = |mode: &str| format!("message --mode {mode} --rounds {}", ends.rounds);
        let (unit, better) = ("ns", Better::Lower);
        self.compare(
            Row { case: &case, unit, better, peer: "poll", target: None, note: "" },
            |b| middle(b.time(ends, &message("adaptive"))),
            |b| middle(b.time(ends, &message("poll"))),
        )
    }

    /// Measures how long it takes to wake the other end, which needs interrupts.
    fn sleeping(&mut self, ends: Ends<'_>, rounds: u32) -> Result<()> {
        let (unit, better) = ("us", Better::Lower);
        let interrupt = format!("{}: 8 B message, interrupt, one way", ends.name);
        let asleep = format!("{}: 8 B message, adaptive, peer asleep", ends.name);
        if let Some(why) = &self.polling {
            self.report.omit(&interrupt, why);
            self.report.omit(&asleep, why);
            return Ok(());
        }
        let (target, note) = (Some(1.0 / 1.3), "target: at most 1.3 x the floor");
        self.compare(
            Row { case: &interrupt, unit, better, peer: "bare doorbell -> eventfd", target, note },
            |b| microseconds(b.time(ends, &format!("message --mode interrupt --rounds {rounds}"))),
            |b| microseconds(b.time(ends, &format!("doorbell --rounds {rounds}"))),
        )?;
        let pause = format!("--pause 20000 --rounds {}", (rounds / 40).clamp(50, 200));
        let note = "a message every 20 ms";
        self.compare(
            Row { case: &asleep, unit, better, peer: "interrupt", target: None, note },
            |b| microseconds(b.time(ends, &format!("message --mode adaptive {pause}"))),
            |b| microseconds(b.time(ends, &format!("message --mode interrupt {pause}"))),
        )
    }

    fn vm(&mut self, ends: Ends<'_>, b: &Vm) -> Result<()> {
        let asked = 1.0 / 1.5;
        let peer = format!("{PING_PONG} in the same memory");
        self.latency(ends, &peer, &[(8, asked), (64, asked), (120, asked)])?;
        self.pipelined(ends)?;
        let (peer, address) = ("TCP over virtio-net", format!("{}:17171", b.address()?));
        for size in [8, 64] {
            let case = format!("{}: {size} B message, one way", ends.name);
            let (unit, better, note) = ("us", Better::Lower, "tap + bridge, same two VMs");
            let tcp = format!("tcp --address {address} --size {size} --rounds 2000");
            self.compare(
                Row { case: &case, unit, better, peer, target: Some(500.0), note },
                |b| microseconds(b.time(ends, &format!("message --size {size} --rounds 100000"))),
                |b| microseconds(b.world.time(ends.server, ends.client, &tcp)),
            )?;
        }
        self.transfers(ends, 64 << 20, 5)?;
        let case = format!("{}: stream, 64 KiB writes", ends.name);
        let tcp = format!("tcp-stream --address {address} --size 65536 --count 256 --rounds 3");
        let stream = format!("stream --capacity {STREAM_RING} --size 65536 --count 1024 --rounds 3");
        let (unit, better) = ("GB/s", Better::Higher);
        self.compare(
            Row { case: &case, unit, better, peer, target: None, note: "" },
            |b| middle(b.time(ends, &stream)),
            |b| middle(b.world.time(ends.server, ends.client, &tcp)),
        )?;
        self.awake(ends)?;
        self.sleeping(ends, 4000)
    }

    /// Compares the two kinds of memory in the same two VMs.
    fn kinds(&mut self, dax: Ends<'_>, bar: Ends<'_>) -> Result<()> {
        let stream = format!("stream --capacity {STREAM_RING} --size 65536 --count 1024 --rounds 3");
        let is_emulated = self.world.bed.accel()? == Accel::Tcg;
        let note = if is_emulated { "emulation hides what caching is worth" } else { "" };
        for (what, args, unit, better) in [
            ("8 B message, poll, one way", "message --size 8 --rounds 100000", "ns", Better::Lower),
            ("64 B message, poll, one way", "message --size 64 --rounds 100000", "ns", Better::Lower),
            (
                "8 B message, interrupt, one way",
                "message --mode interrupt --rounds 4000",
                "ns",
                Better::Lower,
            ),
            ("stream, 64 KiB writes", stream.as_str(), "GB/s", Better::Higher),
        ] {
            let case = format!("vm-vm over dax: {what}");
            if let Some(why) = self.polling.as_ref().filter(|_| args.contains("--mode interrupt")) {
                self.report.omit(&case, why);
                continue;
            }
            self.compare(
                Row { case: &case, unit, better, peer: "the same over a BAR", target: Some(1.0), note },
                |b| middle(b.time(dax, args)),
                |b| middle(b.time(bar, args)),
            )?;
        }
        Ok(())
    }

    /// Copies a large file from the host into a VM: to memory, and to a disk.
    fn cp(&mut self, vm: &Vm, file: &Path, mib: u64) -> Result<()> {
        let server = vm.spawn("exec ginnel cp --serve --write --root / --segment bench")?;
        server.wait_for_line("serving", Duration::from_secs(20))?;
        vm.write("/tmp/key", 0o600, sshd(self.world.bed)?)?;
        vm.run("mkdir /disk && mount -t ext4 /dev/vda /disk && mkfifo /tmp/fifo")?.ok()?;
        for (note, path) in
            [("to the guest's tmpfs", "/tmp/file"), ("to ext4 on a virtio disk, synced", "/disk/file")]
        {
            self.copies(&Copies { vm, file, mib, to: path }, note)?;
        }
        Ok(())
    }

    fn copies(&mut self, copies: &Copies<'_>, note: &str) -> Result<()> {
        let Copies { file, mib, to, .. } = copies;
        let world = self.world;
        let scp = format!(
            "scp -S /usr/local/bin/ssh -q -P 17122 -i /tmp/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@{HOST_ADDRESS}:{} {to}",
            file.display()
        );
        for (peer, run) in [
            ("nc over virtio-net", &|| copies.by_nc(world) as Result<Took>),
            ("cp from a 9p mount", &|| copies.by_command(world, &format!("cp /share/file {to}"))),
            ("scp over virtio-net", &|| copies.by_command(world, &scp)),
        ] as [(_, &dyn Fn() -> Result<Took>); 3]
        {
            let case = format!("ginnel cp {mib} MiB, host -> VM, checksummed");
            let (mut ours, mut copied, mut checked) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..self.pairs.min(2) {
                let theirs = match run() {
                    Ok(theirs) => theirs,
                    // If an alternative does not run here, that is printed, and the others are measured nevertheless.
                    Err(error) => {
                        self.report.omit(&format!("{case} beside {peer}"), &format!("{error:#}"));
                        break;
                    }
                };
                let rate = |took: f64| *mib as f64 / 1024.0 / took;
                copied.push(rate(theirs.copy));
                checked.push(rate(theirs.copy + theirs.check));
                ours.push(rate(copies.by_ginnel(world)?.copy));
            }
            if ours.is_empty() {
                continue;
            }
            let with_check = format!("{peer}, then crc32");
            let higher = Better::Higher;
            self.report.pairs(&case, "GiB/s", higher, &ours, &with_check, &checked, Some(5.0), note);
            let unchecked = format!("{note}; the alternative checks nothing");
            self.report.pairs(&case, "GiB/s", higher, &ours, peer, &copied, None, &unchecked);
        }
        Ok(())
    }

    /// Measures the daemon's memory with many segments, and what idling costs.
    fn daemon(&mut self) -> Result<()> {
        for n in 0..62 {
            let command = format!("ginnel segment create many-{n} --size 4M --members host,a");
            self.world.bed.host(&self.world.ginnel.on_host(&command)?)?.ok()?;
        }
        let pid = self.world.ginnel.daemon()?.pid();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident: f64 = status
            .lines()
            .find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok())
            .context("no VmRSS in /proc")?;
        self.report.pairs(
            "daemon: resident with 64 segments",
            "MiB",
            Better::Lower,
            &[resident / 1024.0],
            "the limit",
            &[30.0],
            Some(1.0),
            "",
        );
        for n in 0..62 {
            self.world
                .bed
                .host(&self.world.ginnel.on_host(&format!("ginnel segment remove many-{n}"))?)?
                .ok()?;
        }

        let seconds = 10;
        let args = format!("idle --mode adaptive --rounds {seconds}");
        let server = Running::start(self.world, Place::Host(1), &args)?;
        let before = (cpu_of(pid)?, cpu_of(server.pid())?);
        let client = self
            .world
            .bed
            .host_spawn(&self.world.ginnel.on_host(&format!("exec bench-peer time {args} --cpu 0"))?)?;
        let said = client.wait(Duration::from_secs(30))?.ok()?.stdout;
        let timing: Timing = serde_json::from_str(said.trim())?;
        let used = |before: f64, pid: u32| {
            Ok::<_, anyhow::Error>((cpu_of(pid)? - before) / f64::from(seconds) * 100.0)
        };
        let daemon = used(before.0, pid)?;
        println!(
            "idle for {seconds} s: daemon {daemon:.2} % CPU, waiting endpoint {:.3} %",
            timing.cpu * 100.0
        );
        self.report.pairs(
            "idle 10 s: daemon",
            "% CPU",
            Better::Lower,
            &[daemon.max(0.01)],
            "one tick in 10 s",
            &[0.1],
            Some(1.0),
            "attach and connect included",
        );
        self.report.pairs(
            "idle 10 s: waiting endpoint",
            "% CPU",
            Better::Lower,
            &[(timing.cpu * 100.0).max(0.001)],
            "one tick in 10 s",
            &[0.1],
            Some(1.0),
            "",
        );
        Ok(())
    }
}

/// How the names of floors begin that tell how far the CPUs are from each other.
const PING_PONG: &str = "bare ping-pong";

/// The number of data bytes of the ring that the daemon gives to a program that does not ask for another size.
const DEFAULT_RING: usize = 256 << 10;

/// The ring of the stream rows: half the size of a second-level cache.
const STREAM_RING: usize = 512 << 10;

/// How long a copy took, and how long the guest's fastest checksum of it takes, in seconds.
struct Took {
    copy: f64,
    check: f64,
}

/// Copies of one file to one place in a VM.
struct Copies<'a> {
    vm: &'a Vm,
    file: &'a Path,
    mib: u64,
    to: &'a str,
}

impl Copies<'_> {
    /// The longest time that a copy may take.
    const LIMIT: Duration = Duration::from_secs(900);

    /// Returns the time of a copy. It has ended when the file is where it should stay.
    fn took(&self, world: &World<'_>, begin: Instant) -> Result<Took> {
        let Self { vm, file, to, .. } = self;
        if to.starts_with("/disk") {
            vm.run_within(Self::LIMIT, "sync")?.ok()?;
        }
        let copy = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        vm.run_within(Self::LIMIT, &format!("crc32 < {to}"))?.ok()?;
        let check = begin.elapsed().as_secs_f64();
        let sent = world.bed.host(&format!("md5sum < {}", file.display()))?.ok()?.stdout;
        let got = vm.run_within(Self::LIMIT, &format!("md5sum < {to}; rm {to}"))?.ok()?.stdout;
        ensure!(got == sent, "the copy differs: {got} instead of {sent}");
        Ok(Took { copy, check })
    }

    fn by_ginnel(&self, world: &World<'_>) -> Result<Took> {
        let begin = Instant::now();
        let command = format!("ginnel cp {} {}:{}", self.file.display(), self.vm.name(), self.to);
        world.bed.host_spawn(&world.ginnel.on_host(&command)?)?.wait(Self::LIMIT)?.ok()?;
        self.took(world, begin)
    }

    fn by_command(&self, world: &World<'_>, command: &str) -> Result<Took> {
        let begin = Instant::now();
        self.vm.run_within(Self::LIMIT, command)?.ok()?;
        self.took(world, begin)
    }

    fn by_nc(&self, world: &World<'_>) -> Result<Took> {
        let sender =
            world.bed.host_spawn(&format!("nc -N -l {HOST_ADDRESS} 17172 < {}", self.file.display()))?;
        // Standard input is a FIFO that never ends, because at its end nc would tell the other side to stop.
        let get = format!(
            "until nc {HOST_ADDRESS} 17172 0<>/tmp/fifo > {to} && [ -s {to} ]; do usleep 20000; done",
            to = self.to
        );
        let took = self.by_command(world, &get)?;
        sender.wait(Duration::from_secs(10))?.ok()?;
        Ok(took)
    }
}

/// Returns the CPU time in seconds that a process has used.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |n: usize| fields.get(n).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((ticks(11) + ticks(12)) / 100.0)
}

/// Makes a file that does not compress.
fn make_file(path: &Path, mib: u64) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut block = vec![0u8; 1 << 20];
    for _ in 0..mib {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        std::io::Write::write_all(&mut file, &block)?;
    }
    Ok(())
}

/// Starts an ssh server at the host's side of the VMs' bridge that accepts one key. Returns the private key.
fn sshd(bed: &TestBed) -> Result<Vec<u8>> {
    let dir = bed.dir().join("ssh");
    std::fs::create_dir_all(&dir)?;
    let d = dir.display();
    bed.host_in_net(&format!(
        "mkdir -p /run/sshd && ssh-keygen -q -t ed25519 -N '' -f {d}/host && ssh-keygen -q -t ed25519 -N '' -f {d}/key \
         && cp {d}/key.pub {d}/authorized && chmod 600 {d}/authorized && chmod 700 {d}"
    ))?
    .ok()?;
    // It runs in the foreground, so that it ends together with the test bed.
    let server = bed.host_spawn(&format!(
        "exec /usr/sbin/sshd -D -e -f /dev/null -o ListenAddress={HOST_ADDRESS}:17122 -o HostKey={d}/host -o StrictModes=no \
         -o AuthorizedKeysFile={d}/authorized -o PermitRootLogin=yes -o UsePAM=no -o PidFile=none \
         -o Subsystem='sftp internal-sftp'"
    ))?;
    server.wait_for_line("istening on", Duration::from_secs(10))?;
    Ok(std::fs::read(dir.join("key"))?)
}
