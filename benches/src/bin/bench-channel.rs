//! Channels beside their floors and alternatives: `make bench NAME=channel`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ginnel_bench::measure::Timing;
use ginnel_bench::report::{Better, Report};
use ginnel_bench::world::{Place, Running, World};
use std::path::Path;
use std::time::{Duration, Instant};
use vmtest::{HOST_ADDRESS, TestBed, Vm};

/// Measures channels, and `ginnel cp`, beside their alternatives.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["host", "vm", "cp", "daemon"])]
    only: Option<String>,
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
    let mut bench = Bench { world: &world, report: Report::default(), pairs: cli.pairs };
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
    bench.report.finish("channel", cli.only.is_some())
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

struct Bench<'w> {
    world: &'w World<'w>,
    report: Report,
    pairs: usize,
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
fn placement(floors: &[f64]) -> String {
    let way = ginnel_bench::report::median(floors.to_vec());
    format!("CPUs {}", if way < 130.0 { "near" } else { "far" })
}

fn microseconds(t: &Timing) -> f64 {
    t.median / 1000.0
}

impl Bench<'_> {
    /// Alternates runs of two measurements.
    fn in_turns(
        &self,
        mut ours: impl FnMut() -> Result<f64>,
        mut theirs: impl FnMut() -> Result<f64>,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut pairs = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            pairs.1.push(theirs()?);
            pairs.0.push(ours()?);
        }
        Ok(pairs)
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
    fn latency(&mut self, ends: Ends<'_>, floor_name: &str, asked: &[(usize, f64)]) -> Result<()> {
        let Ends { name, rounds, .. } = ends;
        for &(size, target) in asked {
            let (ours, floors) = self.in_turns(
                || Ok(self.time(ends, &format!("message --size {size} --rounds {rounds}"))?.median),
                || Ok(self.floor(ends, &format!("bare --size {size} --rounds {rounds}"))?.median),
            )?;
            let case = format!("{name}: {size} B message, poll, one way");
            let note = placement(&floors);
            self.report.pairs(case, "ns", Better::Lower, &ours, floor_name, &floors, Some(target), &note);
        }
        let (streams, messages) = self.in_turns(
            || Ok(self.time(ends, &format!("stream-ping --size 64 --rounds {rounds}"))?.median),
            || Ok(self.time(ends, &format!("message --size 64 --rounds {rounds}"))?.median),
        )?;
        let case = format!("{name}: 64 B over a stream, poll, one way");
        let floor = "the same as a message";
        self.report.pairs(case, "ns", Better::Lower, &streams, floor, &messages, None, "");
        Ok(())
    }

    /// Compares messages that are sent one way as fast as possible with bare stores to as many lines.
    fn pipelined(&mut self, ends: Ends<'_>) -> Result<()> {
        for (size, target) in [(8, Some(1.0 / 2.5)), (64, None), (120, None)] {
            let args = format!("--size {size} --count 200000 --rounds 20");
            let (ours, floors) = self.in_turns(
                || Ok(self.time(ends, &format!("pipelined {args}"))?.median),
                || Ok(self.floor(ends, &format!("bare-stores {args}"))?.median),
            )?;
            let case = format!("{}: {size} B messages, pipelined, each", ends.name);
            self.report.pairs(case, "ns", Better::Lower, &ours, "bare stores", &floors, target, "");
        }
        Ok(())
    }

    /// Compares streams over a ring of the default size with double buffers of the size of a write, and with double buffers
    /// that take no more memory than the ring. Data that has left both second-level caches before it is read arrives faster
    /// than data that one CPU has to fetch from the other's cache, so more memory is faster.
    fn default_streams(&mut self, ends: Ends<'_>, total: usize) -> Result<()> {
        let small = DEFAULT_RING / 2;
        for chunk in [64 << 10, 1 << 20] {
            for (floor, buffer) in [("bare double buffer", chunk), ("bare, no more memory", chunk.min(small))]
            {
                let args = |size: usize| format!("--size {size} --count {} --rounds 20", total / size);
                let (ours, floors) = self.in_turns(
                    || Ok(self.time(ends, &format!("stream {}", args(chunk)))?.median),
                    || Ok(self.floor(ends, &format!("double-buffer {}", args(buffer)))?.median),
                )?;
                let case = format!("{}: stream, {} KiB writes, default ring", ends.name, chunk >> 10);
                self.report.pairs(case, "GB/s", Better::Higher, &ours, floor, &floors, Some(0.95), "");
                if buffer == chunk && chunk <= small {
                    break;
                }
            }
        }
        Ok(())
    }

    fn transfers(&mut self, ends: Ends<'_>, total: u64, rounds: u32) -> Result<()> {
        let name = ends.name;
        for chunk in [64 << 10, 1 << 20, 16 << 20] {
            let count = (total / chunk).max(2);
            let args = format!("--size {chunk} --count {count} --rounds {rounds}");
            let (ours, floors) = self.in_turns(
                || Ok(self.time(ends, &format!("stream --capacity {STREAM_RING} {args}"))?.median),
                || Ok(self.floor(ends, &format!("double-buffer {args}"))?.median),
            )?;
            let case = format!("{name}: stream, {} KiB writes", chunk >> 10);
            self.report.pairs(
                case,
                "GB/s",
                Better::Higher,
                &ours,
                "bare double buffer",
                &floors,
                Some(0.85),
                "",
            );
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
                let (ours, copies) = self.in_turns(
                    || Ok(self.time(ends, &format!("in-place {args}"))?.median),
                    || Ok(self.time(ends, &format!("copying {args}"))?.median),
                )?;
                let case = format!("{name}: {} KiB in place, {what}", size >> 10);
                self.report.pairs(
                    case,
                    "GB/s",
                    Better::Higher,
                    &ours,
                    "copying send/recv",
                    &copies,
                    target,
                    "",
                );
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
        self.latency(ends, "bare ping-pong, same lines", &[(8, 0.8), (64, 0.75), (120, 0.7)])?;
        self.pipelined(ends)?;
        self.default_streams(ends, 64 << 20)?;
        let socket = self.world.bed.dir().join("peer.sock");
        for size in [8, 64] {
            let message = format!("message --size {size} --rounds 100000");
            let unix = format!("unix --address {} --size {size} --rounds 20000", socket.display());
            let tcp = format!("tcp --address 127.0.0.1:17171 --size {size} --rounds 20000");
            let ours = |b: &Self| Ok(b.time(ends, &message)?.median);
            for (peer, args) in [("Unix socket", &unix), ("TCP loopback", &tcp)] {
                let (a, p) = self.in_turns(
                    || ours(self),
                    || {
                        let _ = std::fs::remove_file(&socket);
                        Ok(self.world.time(ends.server, ends.client, args)?.median)
                    },
                )?;
                let case = format!("host-host: {size} B message, one way");
                self.report.pairs(case, "ns", Better::Lower, &a, peer, &p, None, "");
            }
            let (a, p) = self.in_turns(
                || ours(self),
                || Ok(self.world.alone(&format!("pipe --size {size} --rounds 20000"))?.median),
            )?;
            let case = format!("host-host: {size} B message, one way");
            self.report.pairs(case, "ns", Better::Lower, &a, "pipe", &p, None, "");
        }
        self.transfers(ends, 256 << 20, 5)?;
        self.sleeping(ends, 20_000)?;
        let (a, p) = self.in_turns(|| Ok(self.time(ends, "attach")?.median / 1e6), || Ok(5.0))?;
        self.report.pairs(
            "host: attach to first message answered",
            "ms",
            Better::Lower,
            &a,
            "the limit",
            &p,
            Some(1.0),
            "",
        );
        Ok(())
    }

    /// Measures interrupt mode and adaptive mode.
    fn sleeping(&mut self, ends: Ends<'_>, rounds: u32) -> Result<()> {
        let name = ends.name;
        let (ours, floors) = self.in_turns(
            || Ok(microseconds(&self.time(ends, &format!("message --mode interrupt --rounds {rounds}"))?)),
            || Ok(microseconds(&self.time(ends, &format!("doorbell --rounds {rounds}"))?)),
        )?;
        let case = format!("{name}: 8 B message, interrupt, one way");
        let (target, note) = (Some(1.0 / 1.3), "target: at most 1.3 x the floor");
        self.report.pairs(
            case,
            "us",
            Better::Lower,
            &ours,
            "bare doorbell -> eventfd",
            &floors,
            target,
            note,
        );

        let (ours, polled) = self.in_turns(
            || Ok(self.time(ends, &format!("message --mode adaptive --rounds {}", ends.rounds))?.median),
            || Ok(self.time(ends, &format!("message --mode poll --rounds {}", ends.rounds))?.median),
        )?;
        let case = format!("{name}: 8 B message, adaptive, peer awake");
        self.report.pairs(case, "ns", Better::Lower, &ours, "poll", &polled, None, "");

        let pause = format!("--pause 20000 --rounds {}", (rounds / 40).clamp(50, 200));
        let (ours, slept) = self.in_turns(
            || Ok(microseconds(&self.time(ends, &format!("message --mode adaptive {pause}"))?)),
            || Ok(microseconds(&self.time(ends, &format!("message --mode interrupt {pause}"))?)),
        )?;
        let case = format!("{name}: 8 B message, adaptive, peer asleep");
        self.report.pairs(
            case,
            "us",
            Better::Lower,
            &ours,
            "interrupt",
            &slept,
            None,
            "a message every 20 ms",
        );
        Ok(())
    }

    fn vm(&mut self, ends: Ends<'_>, b: &Vm) -> Result<()> {
        let asked = 1.0 / 1.5;
        self.latency(ends, "bare ping-pong in the same memory", &[(8, asked), (64, asked)])?;
        let address = format!("{}:17171", b.address()?);
        for size in [8, 64] {
            let (ours, tcp) = self.in_turns(
                || Ok(microseconds(&self.time(ends, &format!("message --size {size} --rounds 100000"))?)),
                || {
                    Ok(microseconds(&self.world.time(
                        ends.server,
                        ends.client,
                        &format!("tcp --address {address} --size {size} --rounds 2000"),
                    )?))
                },
            )?;
            let case = format!("{}: {size} B message, one way", ends.name);
            self.report.pairs(
                case,
                "us",
                Better::Lower,
                &ours,
                "TCP over virtio-net",
                &tcp,
                Some(500.0),
                "tap + bridge, same two VMs",
            );
        }
        self.transfers(ends, 64 << 20, 5)?;
        let (ours, tcp) = self.in_turns(
            || {
                Ok(self
                    .time(
                        ends,
                        &format!("stream --capacity {STREAM_RING} --size 65536 --count 1024 --rounds 3"),
                    )?
                    .median)
            },
            || {
                Ok(self
                    .world
                    .time(
                        ends.server,
                        ends.client,
                        &format!("tcp-stream --address {address} --size 65536 --count 256 --rounds 3"),
                    )?
                    .median)
            },
        )?;
        self.report.pairs(
            format!("{}: stream, 64 KiB writes", ends.name),
            "GB/s",
            Better::Higher,
            &ours,
            "TCP over virtio-net",
            &tcp,
            None,
            "",
        );
        self.sleeping(ends, 4000)
    }

    /// Compares the two kinds of memory in the same two VMs.
    fn kinds(&mut self, dax: Ends<'_>, bar: Ends<'_>) -> Result<()> {
        let stream = format!("stream --capacity {STREAM_RING} --size 65536 --count 1024 --rounds 3");
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
            let (ours, theirs) =
                self.in_turns(|| Ok(self.time(dax, args)?.median), || Ok(self.time(bar, args)?.median))?;
            let case = format!("vm-vm over dax: {what}");
            let note = "emulation hides what caching is worth";
            self.report.pairs(case, unit, better, &ours, "the same over a BAR", &theirs, Some(1.0), note);
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
            let (mut ours, mut copied, mut checked) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..self.pairs.min(2) {
                let theirs = match run() {
                    Ok(theirs) => theirs,
                    // If an alternative does not run here, that is printed, and the others are measured nevertheless.
                    Err(error) => {
                        println!("not measured: {peer}: {error:#}");
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
            let case = format!("ginnel cp {mib} MiB, host -> VM, checksummed");
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
