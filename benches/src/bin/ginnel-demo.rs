//! The demo: the main functions on real VMs (`make demo`).

use anyhow::{Context, Result, ensure};
use ginnel_bench::interrupts;
use serde_json::Value;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{HOST_ADDRESS, TestBed, Vm};

const LIMIT: Duration = Duration::from_secs(60);
const COPY_MIB: u64 = 256;
/// The programs of the distribution that the demo needs.
const PROGRAMS: [&str; 4] =
    ["/usr/bin/sockperf", "/usr/bin/redis-server", "/usr/bin/redis-benchmark", "/usr/bin/memcslap"];
/// The command that runs a program of a VM over shared memory.
const RUN: &str = "GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so ginnel run --report --";

fn main() -> Result<()> {
    let begin = Instant::now();
    let bed = TestBed::new("demo")?;
    let accel = bed.accel()?;
    step("One host daemon, two stock VMs, one segment of shared memory");
    println!("kernel {}, {}", bed.kernel().release, qemu_version(&bed)?);
    println!(
        "guests run under {accel:?}{}",
        if format!("{accel:?}") == "Tcg" { " (emulation: KVM does not boot a stock guest here)" } else { "" }
    );
    let plan = Plan::new(&bed).vm("a").vm("b").segment("web", 64, &["host", "a", "b"]).with_sockets();
    let ginnel = plan.segment_with_readers("items", 64, &["host"], &["a", "b"]).start()?;
    println!(
        "$ ginnel qemu-args a\n{}",
        bed.host(&ginnel.on_host("ginnel qemu-args a")?)?.ok()?.stdout.trim()
    );
    let booting = Instant::now();
    let vm = |name| -> Result<Vm> {
        let vm = ginnel.vm(name)?.memory_mib(1024).program(program("load")?);
        let vm = vm.library(program("libginnel_preload.so")?);
        PROGRAMS.iter().fold(vm, |vm, program| vm.program(program)).start()
    };
    let (a, b) = (vm("a")?, vm("b")?);
    a.wait_ready()?;
    b.wait_ready()?;
    let _daemons = (ginnel.start_guest(&a)?, ginnel.start_guest(&b)?);
    println!("both booted, and their daemons serve, in {:.1} s", booting.elapsed().as_secs_f64());
    println!("$ ginnel status\n{}", bed.host(&ginnel.on_host("ginnel status")?)?.ok()?.stdout.trim());

    step("Ping: from VM a to VM b");
    let pong = b.spawn("exec ginnel ping --serve web/hi")?;
    pong.wait_for_line("answering", LIMIT)?;
    println!(
        "$ ginnel ping -c 5 -i 0.2 web/hi\n{}",
        a.run("ginnel ping -c 5 -i 0.2 web/hi")?.ok()?.stdout.trim()
    );

    step(
        "Perf: the same measurement over a channel, and over TCP (virtio-net, tap, bridge) in the same two VMs",
    );
    let perf = b.spawn("exec ginnel perf --serve web/perf")?;
    perf.wait_for_line("measuring", LIMIT)?;
    let address = format!("{}:5201", b.address()?);
    let tcp_perf = b.spawn(&format!("exec ginnel perf --serve --tcp {address}"))?;
    tcp_perf.wait_for_line("measuring", LIMIT)?;
    let measure = |what: &str, mode: &str, ours: bool| -> Result<Value> {
        let target = if ours { format!("web/perf --mode {mode}") } else { format!("--tcp {address}") };
        let said = a.run_within(LIMIT, &format!("ginnel perf {target} {what} --json"))?.ok()?.stdout;
        let all: Value = serde_json::from_str(&said).context("ginnel perf prints JSON")?;
        Ok(all["results"][0].clone())
    };
    let one_way = |v: &Value| v["one_way_ns"].as_f64().context("no latency in the answer");
    let rate = |v: &Value| {
        Ok::<f64, anyhow::Error>(v["bytes_per_s"].as_f64().context("no bandwidth in the answer")? / 1e9)
    };
    let mut table = Table::default();
    let polling = interrupts::missing(&bed, &ginnel, &["a", "b"])?;
    let asleep = if polling.is_some() { "no interrupts: polling" } else { "asleep, by doorbell" };
    let latency = "--test latency --kind message --size 64 --duration 1";
    let tcp = one_way(&measure("--test latency --size 64 --duration 1", "", false)?)? / 1000.0;
    for (mode, name) in [("poll", "polling"), ("adaptive", "adaptive"), ("interrupt", asleep)] {
        let ours = one_way(&measure(latency, mode, true)?)? / 1000.0;
        table.row(&format!("64-byte message, one way, {name}"), "us", ours, tcp, tcp / ours);
    }
    for (kind, size) in [("stream", "64K"), ("message-zero-copy", "64K")] {
        let ours = rate(&measure(
            &format!("--test bandwidth --kind {kind} --size {size} --duration 1"),
            "poll",
            true,
        )?)?;
        let theirs = rate(&measure(&format!("--test bandwidth --size {size} --duration 1"), "", false)?)?;
        table.row(&format!("64 KiB writes, {kind}"), "GB/s", ours, theirs, ours / theirs);
    }
    if let Some(why) = &polling {
        println!("no doorbell is measured: {why}");
    }
    println!("done; the table is at the end");

    step("Unmodified TCP programs of the distribution: the same two over TCP, then under `ginnel run`");
    unmodified(&a, &b, &mut table)?;

    step(
        "A cache on the host: an unmodified memcached client in VM a, over TCP to memcached, then under `ginnel run` to ginnel-cache",
    );
    cache(&bed, &ginnel, &a, &mut table)?;

    step("Copy: a file from the host to VM a, checksummed, beside nc over TCP");
    let file = bed.dir().join("file");
    bed.host(&format!("head -c {COPY_MIB}M /dev/urandom > {}", file.display()))?.ok()?;
    let sum = bed.host(&format!("md5sum < {}", file.display()))?.ok()?.stdout;
    let server = a.spawn("exec ginnel cp --serve --write --segment web --root /")?;
    server.wait_for_line("serving", LIMIT)?;
    let clock = Instant::now();
    let copy = format!("ginnel cp {} a:/tmp/copy", file.display());
    bed.host(&ginnel.on_host(&copy)?)?.ok()?;
    let ours = COPY_MIB as f64 / 1024.0 / clock.elapsed().as_secs_f64();
    ensure!(a.run("md5sum < /tmp/copy; rm /tmp/copy")?.ok()?.stdout == sum, "the copy differs");
    println!("$ ginnel cp file a:/tmp/copy: {COPY_MIB} MiB at {ours:.2} GiB/s, md5sum agrees");
    let sender = bed.host_spawn(&format!("exec busybox nc -l -p 5202 < {}", file.display()))?;
    let clock = Instant::now();
    a.run_within(
        LIMIT,
        &format!("mkfifo /tmp/fifo; until nc {HOST_ADDRESS} 5202 0<>/tmp/fifo > /tmp/copy && [ -s /tmp/copy ]; do usleep 20000; done"),
    )?
    .ok()?;
    let theirs = COPY_MIB as f64 / 1024.0 / clock.elapsed().as_secs_f64();
    let _ = sender.kill(9);
    ensure!(a.run("md5sum < /tmp/copy; rm /tmp/copy")?.ok()?.stdout == sum, "nc's copy differs");
    table.row(&format!("copy of {COPY_MIB} MiB, host to VM"), "GiB/s", ours, theirs, ours / theirs);
    let server_b = b.spawn("exec ginnel cp --serve --write --segment web --root /")?;
    server_b.wait_for_line("serving", LIMIT)?;
    a.run("cat /usr/local/bin/* > /tmp/x && ginnel cp /tmp/x b:/tmp/x")?.ok()?;
    ensure!(
        a.run("md5sum < /tmp/x")?.ok()?.stdout == b.run("md5sum < /tmp/x")?.ok()?.stdout,
        "the copy differs"
    );
    println!("$ ginnel cp /tmp/x b:/tmp/x   (from VM a to VM b): md5sum agrees");

    step(
        "The daemon is killed under load: kill -9, three times, while VM a and VM b exchange numbered messages",
    );
    let echo = b.spawn("exec load echo web echo")?;
    echo.wait_for_line("listening", LIMIT)?;
    let drive = a.spawn("exec load drive web echo 5")?;
    drive.wait_for_line("connected", LIMIT)?;
    for _ in 0..3 {
        ginnel.kill_daemon()?;
        let clock = Instant::now();
        ginnel.start_daemon()?;
        println!("killed; its successor serves after {:.0} ms", clock.elapsed().as_secs_f64() * 1000.0);
    }
    let said = drive.wait(LIMIT)?.ok()?.stdout;
    println!("each message came back once, in order, unharmed: {}", said.lines().last().unwrap_or_default());

    step(&format!("Ginnel beside TCP over virtio-net, in the same two VMs, under {accel:?}"));
    table.print();
    println!(
        "\n`make bench` measures more, with spread; `docs/numbers.md` explains. This took {:.0} s.",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Runs servers in VM b and clients in VM a.
fn unmodified(a: &Vm, b: &Vm, table: &mut Table) -> Result<()> {
    let at = b.address()?;
    let redis = format!("redis-server --save '' --appendonly no --protected-mode no --bind {at} --port");
    let runs = [
        (
            "sockperf, ping-pong, median one way",
            "us",
            format!("sockperf sr --tcp -i {at} -p"),
            format!("sockperf pp --tcp -i {at} -m 64 --mps 100000 -t 2 -p"),
        ),
        (
            "redis-benchmark, GET, 1 connection",
            "k/s",
            redis,
            format!("redis-benchmark --csv -t get -n 5000 -c 1 -h {at} -p"),
        ),
    ];
    for (i, (what, unit, server, client)) in runs.iter().enumerate() {
        let mut figures = Vec::new();
        for (j, prefix) in ["env", RUN].iter().enumerate() {
            let port = 5300 + 2 * i + j;
            let serving = b.spawn(&format!("exec env {prefix} {server} {port}"))?;
            b.run_within(LIMIT, &format!("until netstat -ltn | grep -q :{port}; do usleep 20000; done"))?
                .ok()?;
            let out = a.run_within(LIMIT, &format!("env {prefix} {client} {port}"))?.ok()?;
            serving.kill(15)?;
            serving.wait(LIMIT)?;
            figures.push(figure(&out.stdout).with_context(|| format!("`{client}` says {out:?}"))?);
            if j == 1 {
                println!("$ ginnel run --report -- {client} {port}\n{}", out.stderr.trim());
            }
        }
        let (theirs, ours) = (figures[0], figures[1]);
        let times = if *unit == "us" { theirs / ours } else { ours / theirs };
        table.row(what, unit, ours, theirs, times);
    }
    Ok(())
}

/// Runs both servers on the host, and their client in a VM.
fn cache(bed: &TestBed, ginnel: &Installation<'_>, vm: &Vm, table: &mut Table) -> Result<()> {
    const GETS: u32 = 5000;
    let own = "ginnel-cache --segment items --name main --memory 40M --channel none";
    let servers = [
        (11_311, "env", format!("memcached -u root -l {HOST_ADDRESS} -p 11311")),
        (11_211, RUN, format!("{own} --listen {HOST_ADDRESS}:11211")),
    ];
    let mut figures = Vec::new();
    for (port, prefix, server) in servers {
        let job = bed.host_spawn(&ginnel.on_host(&format!("exec {server}"))?)?;
        let listens = format!("until nc {HOST_ADDRESS} {port} -e true; do usleep 20000; done");
        vm.run_within(LIMIT, &listens)?.ok()?;
        let client = format!(
            "memcslap --servers={HOST_ADDRESS}:{port} --concurrency=1 --initial-load=1000 --execute-number={GETS} --test=get"
        );
        let out = vm.run_within(LIMIT, &format!("env {prefix} {client}"))?.ok()?;
        let line = out.stdout.lines().find(|line| line.contains("Time to get"));
        let seconds: Option<f64> = line.and_then(|line| line.split_whitespace().nth_back(1)?.parse().ok());
        let seconds = seconds.with_context(|| format!("memcslap says {out:?}"))?;
        figures.push(seconds * 1e6 / f64::from(GETS));
        if prefix == RUN {
            println!("$ ginnel run --report -- {client}\n{}", out.stderr.trim());
        }
        job.kill(9)?;
    }
    table.row("memcslap, GET, 1 connection", "us", figures[1], figures[0], figures[0] / figures[1]);
    Ok(())
}

/// Returns the median that sockperf prints, or the thousands of requests per second that redis-benchmark prints.
fn figure(out: &str) -> Option<f64> {
    if let Some(line) = out.lines().find(|line| line.contains("percentile 50.000 =")) {
        return line.rsplit('=').next()?.trim().parse().ok();
    }
    let rate: f64 = out.lines().last()?.split(',').nth(1)?.trim_matches('"').parse().ok()?;
    Some(rate / 1000.0)
}

fn step(what: &str) {
    println!("\n== {what}");
}

fn qemu_version(bed: &TestBed) -> Result<String> {
    let said = bed.host(&format!("{} --version", bed.qemu().display()))?.ok()?.stdout;
    Ok(said.lines().next().unwrap_or_default().to_owned())
}

#[derive(Default)]
struct Table(Vec<(String, &'static str, f64, f64, f64)>);

impl Table {
    fn row(&mut self, what: &str, unit: &'static str, ours: f64, theirs: f64, times: f64) {
        self.0.push((what.into(), unit, ours, theirs, times));
    }

    fn print(&self) {
        println!("{:<46} {:>10} {:>10}        {:>9}", "", "Ginnel", "TCP", "better by");
        for (what, unit, ours, theirs, times) in &self.0 {
            println!("{what:<46} {ours:>10.3} {theirs:>10.3} {unit:<6} {times:>8.1}x");
        }
    }
}
