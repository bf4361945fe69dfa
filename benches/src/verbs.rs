//! RDMA programs over a segment: between two processes of the host, beside the limits of the machine, and between two VMs,
//! beside the kernel's RDMA over Ethernet.

mod floors;

use crate::report::{BESIDE_HOST, Better, ON_HOST, Report, median};
use crate::sockets::{listens, next_port};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program, verbs_libraries};
use vmtest::{Accel, Job, TestBed, Vm};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The CPUs of the server and the client on the host.
const CPUS: [usize; 2] = [0, 1];
/// The names of the segment and of its device.
const SEGMENT: &str = "rdma";
const DEVICE: &str = "ginnel_rdma";
/// The bench's folder as both VMs see it.
const FILES: &str = "/tmp/files";
/// A program that measures `ibv_reg_mr`; compiled when it is needed.
const REGISTER: &str = include_str!("verbs/register.c");
/// A program that measures waiting; compiled when it is needed.
const WAITING: &str = include_str!("verbs/waiting.c");
/// The number of bytes that the rows of large messages move in one run.
const VOLUME: usize = 4 << 30;

/// The measurements, and the report to which they add rows.
pub struct Verbs<'r> {
    /// The report to which rows are added.
    pub report: &'r mut Report,
    /// Pairs of runs of each row.
    pub pairs: usize,
    /// Only rows whose names, or whose alternatives' names, contain this.
    pub row: Option<&'r str>,
}

impl Verbs<'_> {
    fn wants(&self, case: &str) -> bool {
        self.row.is_none_or(|row| case.contains(row))
    }

    /// Alternates runs of two measurements, and adds a row for them. The order within a pair changes, in case it matters.
    fn compare(
        &mut self,
        row: &Row<'_>,
        mut ours: impl FnMut() -> Result<f64>,
        mut theirs: impl FnMut() -> Result<f64>,
    ) -> Result<()> {
        if !self.wants(row.case) && !self.wants(row.peer) {
            return Ok(());
        }
        let (mut figures, mut peers) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs {
            for own in [pair % 2 == 1, pair % 2 != 1] {
                match own {
                    true => figures.push(ours().context(row.case.to_owned())?),
                    false => peers.push(theirs().context(row.case.to_owned())?),
                }
            }
        }
        let Row { case, unit, better, peer, target, note } = *row;
        let note = match peer {
            // A cache line takes some 60 ns between CPUs that share a cache, and 200 ns or more between others.
            FLOOR => format!("CPUs {}", if median(peers.clone()) < 130.0 { "near" } else { "far" }),
            _ => note.into(),
        };
        self.report.pairs(case, unit, better, &figures, peer, &peers, target, &note);
        Ok(())
    }

    /// Measures between two processes of the host.
    pub fn host(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-verbs")?;
        let ginnel = Plan::new(&bed).segment(SEGMENT, 1024, &["host"]).with_verbs().start()?;
        let host = Host::new(&bed, &ginnel)?;
        for (case, tool, target) in [
            ("ib_write_lat, 8 B, one way", "ib_write_lat", Some(1.0 / 1.8)),
            ("ib_send_lat, 8 B, one way", "ib_send_lat", Some(1.0 / 3.0)),
        ] {
            let row = Row { case, unit: "ns", better: Better::Lower, peer: FLOOR, target, note: "" };
            let line = format!("{tool} -s 8 -n 100000 -U");
            self.compare(&row, || one_way(&host.pair(&line)?), || floors::one_way(CPUS, 400_000))?;
        }
        for tool in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
            for (size, words) in LARGE {
                let (case, count) = (format!("{tool}, {words}"), VOLUME / size);
                let row = Row {
                    case: &case,
                    unit: "GB/s",
                    better: Better::Higher,
                    peer: "memcpy",
                    target: Some(0.9),
                    note: "",
                };
                let line = bandwidth(tool, size);
                self.compare(
                    &row,
                    || rate(&host.pair(&line)?),
                    || floors::memcpy(CPUS[1], size, count as u32),
                )?;
            }
        }
        for (case, options, note) in [
            ("ib_write_bw, 8 B, rate", "", "128 requests under way"),
            ("ib_write_bw, 8 B, lists of 32, rate", "-l 32", "128 requests under way"),
        ] {
            let row =
                Row { case, unit: "M/s", better: Better::Higher, peer: TARGET, target: Some(1.0), note };
            let line = format!("ib_write_bw -s 8 -n 4000000 {options}");
            self.compare(&row, || last_line(&host.pair(&line)?, 4), || Ok(20.0))?;
        }
        self.registration(&host)?;
        self.waiting(&host)?;
        self.ucx(&host)?;
        self.streams(&host)
    }

    /// Measures when a process learns of its peer's death, and what waiting for a peer costs.
    fn waiting(&mut self, host: &Host<'_>) -> Result<()> {
        let rows = [
            ("the peer is killed: first error, polled", "death", "ms", 100.0, "from kill(2) on, median of 9"),
            ("the peer is killed: first error, asleep", "death-asleep", "ms", 100.0, "likewise"),
            (
                "CPU time of a sleeper",
                "idle",
                "us/s",
                100.0,
                "in ibv_get_cq_event; 100 us/s are 0.01 %, which is taken for 0 %",
            ),
        ];
        if !rows.iter().any(|(case, ..)| self.wants(case)) {
            return Ok(());
        }
        let tool = host.bed.dir().join("waiting");
        compile(WAITING, &tool)?;
        let line = host.line(1, &format!("{} {DEVICE}", tool.display()))?;
        for (case, name, unit, asked, note) in rows {
            let row = Row { case, unit, better: Better::Lower, peer: TARGET, target: Some(1.0), note };
            let ours = || named(&host.bed.host_spawn(&line)?.wait(PATIENCE)?.ok()?.stdout, name);
            self.compare(&row, ours, || Ok(asked))?;
        }
        Ok(())
    }

    /// Measures UCX over verbs beside UCX over POSIX shared memory.
    fn ucx(&mut self, host: &Host<'_>) -> Result<()> {
        for (size, words, count, target) in
            [(8, "8 B", 100_000, Some(0.5)), (64 << 10, "64 KiB", 10_000, None)]
        {
            let case = format!("ucx_perftest tag_lat, {words}, over rc_verbs");
            let row = Row {
                case: &case,
                unit: "us",
                better: Better::Lower,
                peer: "UCX over posix",
                target,
                note: "",
            };
            let run = |transports: &str| -> Result<f64> {
                let port = next_port();
                // UCX would otherwise use free huge pages of the machine for its buffers, which cannot be registered in place.
                let line = format!(
                    "env UCX_TLS={transports} UCX_IB_ALLOC=thp,md,mmap,heap UCX_LOG_LEVEL=error \
                     ucx_perftest -f -t tag_lat -s {size} -n {count} -p {port}"
                );
                let out = host.meet(&line, "127.0.0.1", |pid| Ok(listens(pid, port)))?;
                // The last line has only numbers: how many requests there were, and their median.
                let numbers = out.lines().last().map(|line| line.split_whitespace());
                let median = numbers.and_then(|mut numbers| numbers.nth(1)?.parse().ok());
                median.with_context(|| format!("no table: {out:?}"))
            };
            let devices = format!("rc_v UCX_NET_DEVICES={DEVICE}:1");
            self.compare(&row, || run(&devices), || run("posix,self"))?;
        }
        Ok(())
    }

    /// Measures rsockets beside TCP, with the same program.
    fn streams(&mut self, host: &Host<'_>) -> Result<()> {
        for (size, words, count, unit, better, column) in [
            (64, "64 B, one way", "-I 20000 -C 1", "us", Better::Lower, 7),
            (65_536, "64 KiB, one after the other", "-I 1 -C 20000", "Gb/s", Better::Higher, 6),
        ] {
            let case = format!("rstream -T b, {words}");
            let row = Row { case: &case, unit, better, peer: "TCP", target: None, note: "blocking calls" };
            let run = |kind: &str| -> Result<f64> {
                let out = host.rsockets(&format!("rstream {kind} -S {size} {count}"))?;
                let last = out.lines().last().and_then(|line| line.split_whitespace().nth(column));
                last.and_then(|word| word.parse().ok()).with_context(|| format!("no table: {out:?}"))
            };
            self.compare(&row, || run("-T b"), || run("-T b -T s"))?;
        }
        Ok(())
    }

    /// Measures how long registering memory takes.
    fn registration(&mut self, host: &Host<'_>) -> Result<()> {
        let rows = [
            ("ibv_reg_mr, 4 KiB, first time", "first", 20.0, "each in 2 MiB of addresses of its own"),
            ("ibv_reg_mr, 4 KiB, first time, beside others", "beside", 20.0, "one page after the other"),
            ("ibv_reg_mr, 4 KiB, again", "again", 1.0, "after ibv_dereg_mr"),
            ("ibv_reg_mr, 4 KiB, to send from", "sending", 0.5, "never registered before"),
            ("ibv_reg_mr, 1 MiB, first time", "mebibyte", 400.0, "each in 2 MiB of addresses of its own"),
        ];
        if !rows.iter().any(|(case, ..)| self.wants(case)) {
            return Ok(());
        }
        let tool = host.bed.dir().join("register");
        compile(REGISTER, &tool)?;
        let line = host.line(1, &format!("{} {DEVICE}", tool.display()))?;
        for (case, name, asked, note) in rows {
            let row = Row { case, unit: "us", better: Better::Lower, peer: TARGET, target: Some(1.0), note };
            let ours = || named(&host.bed.host_spawn(&line)?.wait(PATIENCE)?.ok()?.stdout, name);
            self.compare(&row, ours, || Ok(asked))?;
        }
        Ok(())
    }

    /// Measures between two VMs that have both the segment and RDMA over their network.
    pub fn vms(&mut self) -> Result<()> {
        let rows = [
            ("VMs: ib_write_lat, 8 B, one way", "ib_write_lat", Some(300.0)),
            ("VMs: ib_send_lat, 8 B, one way", "ib_send_lat", Some(200.0)),
        ];
        let over_ethernet = self.wants("rdma_rxe") || rows.iter().any(|(case, ..)| self.wants(case));
        if !over_ethernet && !self.wants(ON_HOST) {
            return Ok(());
        }
        let bed = TestBed::new("bench-verbs-vms")?;
        let plan = Plan::new(&bed).vm("a").vm("b");
        let ginnel = plan.segment(SEGMENT, 256, &["host", "a", "b"]).with_verbs().start()?;
        let vms = Vms::new(&bed, &ginnel)?;
        if bed.accel()? == Accel::Kvm {
            self.beside_host(&vms, &Host::new(&bed, &ginnel)?)?;
        }
        if over_ethernet {
            vms.add_ethernet()?;
        }
        let note = format!("guests run under {}, with one processor each", bed.accel()?);
        for (case, tool, target) in rows {
            let row = Row { case, unit: "ns", better: Better::Lower, peer: "rdma_rxe", target, note: &note };
            let line = format!("{tool} -s 8 -U");
            let (ours, theirs) = (format!("{line} -n 20000"), format!("{line} -n 1000"));
            self.compare(
                &row,
                || one_way(&vms.pair(Over::Segment, &ours)?),
                || one_way(&vms.pair(Over::Ethernet, &theirs)?),
            )?;
        }
        Ok(())
    }

    /// Measures two VMs beside two processes of the host, over the same segment.
    fn beside_host(&mut self, vms: &Vms<'_>, host: &Host<'_>) -> Result<()> {
        fn row<'a>(case: &'a str, unit: &'static str, better: Better) -> Row<'a> {
            Row { case, unit, better, peer: ON_HOST, target: BESIDE_HOST, note: "" }
        }
        for (case, tool) in [
            ("VMs: ib_write_lat, 8 B, one way", "ib_write_lat"),
            ("VMs: ib_send_lat, 8 B, one way", "ib_send_lat"),
        ] {
            let line = format!("{tool} -s 8 -n 100000 -U");
            self.compare(
                &row(case, "ns", Better::Lower),
                || one_way(&vms.pair(Over::Segment, &line)?),
                || one_way(&host.pair(&line)?),
            )?;
        }
        for (size, words) in LARGE {
            let (case, line) = (format!("VMs: ib_write_bw, {words}"), bandwidth("ib_write_bw", size));
            self.compare(
                &row(&case, "GB/s", Better::Higher),
                || rate(&vms.pair(Over::Segment, &line)?),
                || rate(&host.pair(&line)?),
            )?;
        }
        Ok(())
    }
}

/// The sizes of large messages.
const LARGE: [(usize, &str); 2] = [(64 << 10, "64 KiB"), (1 << 20, "1 MiB")];

/// Returns the command line that measures how fast messages of a size are moved.
fn bandwidth(tool: &str, size: usize) -> String {
    format!("{tool} -s {size} -n {} --report_gbits", VOLUME / size)
}

/// Returns the GB/s that it has measured.
fn rate(out: &str) -> Result<f64> {
    Ok(last_line(out, 3)? / 8.0)
}

/// The name of the peer for rows that are compared with the speed of a cache line.
const FLOOR: &str = "bounced cache line";
/// The name of the peer for rows that are compared with a fixed target instead of a measurement.
const TARGET: &str = "target";

/// The name and the target of a row.
struct Row<'a> {
    case: &'a str,
    unit: &'static str,
    better: Better,
    peer: &'static str,
    target: Option<f64>,
    note: &'a str,
}

/// Returns the median in nanoseconds of all times that a latency test lists with `-U`. The test's own table has only two digits
/// after the decimal point of the microseconds.
fn one_way(out: &str) -> Result<f64> {
    let microseconds = |line: &str| {
        let (number, time) = line.split_once(", ")?;
        number.trim().parse::<u64>().ok()?;
        time.trim().parse::<f64>().ok()
    };
    let all: Vec<f64> = out.lines().filter_map(microseconds).collect();
    ensure!(all.len() >= 100, "no list of times: {out:?}");
    Ok(median(all) * 1000.0)
}

/// Returns the number in the line that begins with a name.
fn named(out: &str, name: &str) -> Result<f64> {
    let number = out.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no {name}: {out:?}"))
}

/// Returns a column of perftest's table, which has one line.
fn last_line(out: &str, column: usize) -> Result<f64> {
    let mut lines = out.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).skip(1);
    let word = lines.next().and_then(|line| line.split_whitespace().nth(column));
    word.and_then(|word| word.parse().ok()).with_context(|| format!("no table: {out:?}"))
}

fn compile(source: &str, to: &Path) -> Result<()> {
    let file = to.with_extension("c");
    std::fs::write(&file, source)?;
    let compiled =
        Command::new("cc").args(["-O2", "-Wall", "-o"]).arg(to).arg(&file).arg("-libverbs").status()?;
    ensure!(compiled.success(), "no program without libibverbs-dev: `scripts/setup bench` installs it");
    Ok(())
}

/// Two processes of the host.
struct Host<'b> {
    bed: &'b TestBed,
    ginnel: &'b Installation<'b>,
}

impl<'b> Host<'b> {
    fn new(bed: &'b TestBed, ginnel: &'b Installation<'b>) -> Result<Self> {
        verbs_libraries(&bed.dir().join("verbs"))?;
        Ok(Self { bed, ginnel })
    }

    /// Returns the command line that runs a program over the segment, on the CPU of the server or of the client.
    fn line(&self, end: usize, program: &str) -> Result<String> {
        let libraries = self.bed.dir().join("verbs");
        self.ginnel.on_host(&format!(
            "export GINNEL_VERBS={}; exec taskset -c {} ginnel run --verbs --mode off -- {program}",
            libraries.display(),
            CPUS[end]
        ))
    }

    /// Returns the output of the client of a perftest pair.
    fn pair(&self, program: &str) -> Result<String> {
        let port = next_port();
        self.meet(&format!("{program} -d {DEVICE} -F -p {port}"), "127.0.0.1", |pid| Ok(listens(pid, port)))
    }

    /// Returns the output of the client of a program for rsockets.
    fn rsockets(&self, program: &str) -> Result<String> {
        let port = next_port();
        let status = self.ginnel.on_host("ginnel status --json")?;
        let name = format!("cm.tcp.{port}.lo.");
        let listens = |pid| Ok(listens(pid, port) || self.bed.host(&status)?.ok()?.stdout.contains(&name));
        self.meet(&format!("{program} -p {port}"), "-s 127.0.0.1", listens)
    }

    /// Starts a program as a server and, when this process listens, as its client with further arguments. Returns the client's
    /// output.
    fn meet(&self, line: &str, client: &str, listens: impl Fn(u32) -> Result<bool>) -> Result<String> {
        let server = self.bed.host_spawn(&self.line(0, line)?)?;
        let end = Instant::now() + PATIENCE;
        while !listens(server.pid())? {
            let may_come = Instant::now() < end && server.is_running();
            ensure!(may_come, "`{line}` does not listen: {:?}", server.said());
            std::thread::sleep(Duration::from_millis(2));
        }
        let client = self.bed.host_spawn(&self.line(1, &format!("{line} {client}"))?)?.wait(PATIENCE)?;
        if client.code() != Some(0) {
            let _ = server.kill(9);
        }
        let ended = server.wait(PATIENCE)?;
        let client = client.ok().with_context(|| format!("the server has said {ended:?}"))?;
        ended.ok()?;
        Ok(client.stdout)
    }
}

/// The connection between two VMs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    /// Memory that the VMs share.
    Segment,
    /// The virtual network between the VMs.
    Ethernet,
}

/// Two VMs that run the host's programs.
struct Vms<'b> {
    client: Vm,
    server: Vm,
    bed: &'b TestBed,
    _daemons: [Job; 2],
}

impl<'b> Vms<'b> {
    fn new(bed: &'b TestBed, ginnel: &Installation<'_>) -> Result<Self> {
        let files = bed.dir().join("files");
        verbs_libraries(&files.join("verbs"))?;
        let start = |name| {
            let vm = ginnel.vm(name)?.memory_mib(768).host_files().share(&files, FILES);
            let vm = ["virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe"]
                .iter()
                .fold(vm, |vm, name| vm.module(name));
            vm.library(program("libginnel_preload.so")?).start()
        };
        let (client, server) = (start("a")?, start("b")?);
        for vm in [&client, &server] {
            vm.wait_ready()?;
        }
        let daemons = [ginnel.start_guest(&client)?, ginnel.start_guest(&server)?];
        Ok(Self { client, server, bed, _daemons: daemons })
    }

    /// Makes the network cards of the VMs RDMA devices.
    fn add_ethernet(&self) -> Result<()> {
        for vm in [&self.client, &self.server] {
            let link = "chroot /host rdma link add rxe0 type rxe netdev eth0 && chroot /host rdma link";
            let said = vm.run(link)?.ok().context("no RDMA over the VM's network")?.stdout;
            ensure!(said.contains("rxe0"), "no RDMA over the VM's network: {said}");
        }
        Ok(())
    }

    /// Returns the command line that runs a program of the host.
    fn line(&self, end: &str, over: Over, program: &str) -> Result<String> {
        let (program, arguments) = program.split_once(' ').unwrap_or((program, ""));
        let (prefix, device) = match over {
            Over::Segment => ("ginnel run --verbs --mode off --", DEVICE),
            Over::Ethernet => ("", "rxe0"),
        };
        let script = format!(
            "cd {FILES} && export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so GINNEL_VERBS={FILES}/verbs\n\
             exec {prefix} {program} -d {device} -F {arguments}\n"
        );
        std::fs::write(self.bed.dir().join("files").join(end), script)?;
        Ok(format!("exec chroot /host sh {FILES}/{end}"))
    }

    /// Returns the output of the client of a pair.
    fn pair(&self, over: Over, program: &str) -> Result<String> {
        let port = next_port();
        let program = format!("{program} -p {port}");
        let server = self.server.spawn(&self.line("server", over, &program)?)?;
        let listens = format!(
            "until netstat -ltn | grep -q :{port}; do [ -d /proc/{} ] || exit 1; sleep 0.1; done",
            server.pid()
        );
        let output = self.server.run_within(PATIENCE, &listens)?;
        ensure!(output.code() == Some(0), "{program} does not listen: {:?}", server.said());
        let client = self.line("client", over, &format!("{program} {}", self.server.address()?))?;
        let client = self.client.run_within(PATIENCE, &client)?;
        if client.code() != Some(0) {
            let _ = server.kill(9);
        }
        let ended = server.wait(PATIENCE)?;
        let client = client.ok().with_context(|| format!("the server has said {ended:?}"))?;
        ended.ok()?;
        Ok(client.stdout)
    }
}
