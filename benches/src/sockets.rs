//! Programs of the distribution over TCP, and over the sockets preload, between two processes of the host.

use crate::report::{Better, Report};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmtest::Bed;
use vmtest::installation::{Installation, Plan, program};

/// Pairs of runs of each row, one over TCP and one over shared memory.
const PAIRS: usize = 5;
/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Seconds that programs run which run for a time.
const SECONDS: u32 = 2;

/// A program that serves, one that measures, and what of its output counts.
struct Row {
    case: &'static str,
    unit: &'static str,
    better: Better,
    target: Option<f64>,
    server: &'static str,
    client: String,
    figure: fn(&str) -> Option<f64>,
}

const REDIS: &str = "redis-server --save '' --appendonly no --port";
const IPERF: &str = "iperf3 -s -1 -p";
const SOCKPERF: &str = "sockperf sr --tcp -i 127.0.0.1 -p";

fn rows() -> Vec<Row> {
    let sockperf = |case, target, figure| Row {
        case,
        unit: "us",
        better: Better::Lower,
        target,
        server: SOCKPERF,
        client: format!("sockperf pp --tcp -i 127.0.0.1 -m 64 --mps 100000 -t {SECONDS} -p"),
        figure,
    };
    let iperf = |case, target, options: &str| Row {
        case,
        unit: "Gbit/s",
        better: Better::Higher,
        target,
        server: IPERF,
        client: format!("iperf3 -c 127.0.0.1 -J -t {SECONDS} {options} -p"),
        figure: |out| {
            let out: serde_json::Value = serde_json::from_str(out).ok()?;
            Some(out["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9)
        },
    };
    let redis = |case, target, options: &str| Row {
        case,
        unit: "requests/s",
        better: Better::Higher,
        target,
        server: REDIS,
        client: format!("redis-benchmark --csv -t get {options} -p"),
        figure: |out| out.lines().last()?.split(',').nth(1)?.trim_matches('"').parse().ok(),
    };
    vec![
        sockperf("sockperf ping-pong, median", Some(20.0), |out| percentile(out, "50.000")),
        sockperf("sockperf ping-pong, p99", Some(5.0), |out| percentile(out, "99.000")),
        iperf("iperf3, one stream", Some(2.5), ""),
        iperf("iperf3, one stream, server sends", Some(2.5), "-R"),
        iperf("iperf3, 8 streams", Some(0.95), "-P 8"),
        redis("redis-benchmark, 1 connection", Some(5.0), "-c 1 -n 20000"),
        redis("redis-benchmark, 50 connections", Some(2.0), "-c 50 -n 50000"),
        redis("redis-benchmark, 50 connections, 16 at once", Some(0.95), "-c 50 -P 16 -n 200000"),
    ]
}

fn percentile(out: &str, which: &str) -> Option<f64> {
    let line = out.lines().find(|line| line.contains(&format!("percentile {which} =")))?;
    line.rsplit('=').next()?.trim().parse().ok()
}

/// Measures all rows.
pub fn sockets(report: &mut Report) -> Result<()> {
    let bed = Bed::new("bench-sockets")?;
    let ginnel = Plan::new(&bed).segment("local", 256, &["host"]).start()?;
    for (i, row) in rows().iter().enumerate() {
        let (mut shared, mut tcp) = (Vec::new(), Vec::new());
        for pair in 0..PAIRS {
            // Whoever comes first changes, in case that matters.
            for over_tcp in [pair % 2 == 0, pair % 2 != 0] {
                let port = 20_000 + (i * PAIRS + pair) as u16 * 2 + u16::from(over_tcp);
                let figure = run(&bed, &ginnel, row, port, over_tcp).with_context(|| row.case)?;
                if over_tcp { &mut tcp } else { &mut shared }.push(figure);
            }
        }
        report.pairs(row.case, row.unit, row.better, &shared, "TCP", &tcp, row.target, "");
    }
    Ok(())
}

/// One run. Over shared memory only if the connections have changed over, as the report says.
fn run(bed: &Bed, ginnel: &Installation<'_>, row: &Row, port: u16, over_tcp: bool) -> Result<f64> {
    let library: PathBuf = program("libginnel_preload.so")?;
    let file = bed.dir().join(format!("report.{port}"));
    let prefix = match over_tcp {
        true => "exec".to_owned(),
        false => {
            format!("exec env LD_PRELOAD={} GINNEL_SOCKETS_REPORT={} ", library.display(), file.display())
        }
    };
    let line = |program: &str| ginnel.on_host(&format!("{prefix} {program} {port}"));
    let server = bed.host_spawn(&line(row.server)?)?;
    let end = Instant::now() + PATIENCE;
    while !listens(port) {
        ensure!(Instant::now() < end && server.is_running(), "`{} {port}` does not listen", row.server);
        std::thread::sleep(Duration::from_millis(2));
    }
    let out = bed.host_spawn(&line(&row.client)?)?.wait(PATIENCE)?.ok()?.stdout;
    let _ = server.kill(15).and_then(|()| server.wait(PATIENCE));
    if !over_tcp {
        let text = std::fs::read_to_string(&file)?;
        let changed =
            text.lines().filter(|line| line.contains("received_after_us") && line.contains("sent_after_us"));
        ensure!(changed.count() >= 2, "the connections stayed on TCP: {text}");
    }
    (row.figure)(&out).with_context(|| format!("`{}` says {out:?}", row.client))
}

/// Whether somebody listens at a port, without a connection to it.
fn listens(port: u16) -> bool {
    let sockets =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| std::fs::read_to_string(file).unwrap_or_default());
    sockets.iter().flat_map(|text| text.lines()).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, state) = (words.next().unwrap_or(""), words.nth(1).unwrap_or(""));
        local.ends_with(&format!(":{port:04X}")) && state == "0A"
    })
}
