//! Programs of the distribution over TCP and over the sockets preload library: between two processes of the host, and between
//! two VMs.

use crate::interrupts;
use crate::report::{BESIDE_HOST, Better, ON_HOST, Report};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{Accel, TestBed, Vm};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many seconds a program runs that runs for a given time.
const SECONDS: u32 = 2;
/// The alternative of most rows.
const TCP: &str = "TCP";
/// The note of rows that measure how fast a peer is woken.
const PEER_SLEEPS: &str = "the peer sleeps between messages";
/// The path of the library in the VMs.
const LIBRARY: &str = "/usr/local/lib/libginnel_preload.so";

/// A server, a client that measures, and the figures in the client's output that count. In both command lines, `{at}` is the
/// server's address, `{port}` is its port, and `{dir}` is a folder for both.
struct Row {
    case: &'static str,
    unit: &'static str,
    better: Better,
    target: Option<f64>,
    server: String,
    client: String,
    figure: fn(&str) -> Option<f64>,
    note: &'static str,
}

impl Row {
    /// Returns whether its connections carry only one request each.
    fn is_short(&self) -> bool {
        self.client.contains("-k 0")
    }
}

fn sockperf(
    case: &'static str,
    target: f64,
    seconds: u32,
    rate: u32,
    figure: fn(&str) -> Option<f64>,
    note: &'static str,
) -> Row {
    Row {
        case,
        unit: "us",
        better: Better::Lower,
        target: Some(target),
        server: "sockperf sr --tcp -i {at} -p {port}".into(),
        client: format!("sockperf pp --tcp -i {{at}} -m 64 --mps {rate} -t {seconds} -p {{port}}"),
        figure,
        note,
    }
}

fn percentile(out: &str, which: &str) -> Option<f64> {
    let line = out.lines().find(|line| line.contains(&format!("percentile {which} =")))?;
    line.rsplit('=').next()?.trim().parse().ok()
}

fn median(out: &str) -> Option<f64> {
    percentile(out, "50.000")
}

fn p99(out: &str) -> Option<f64> {
    percentile(out, "99.000")
}

fn iperf(case: &'static str, target: f64, options: &str) -> Row {
    Row {
        case,
        unit: "Gbit/s",
        better: Better::Higher,
        target: Some(target),
        server: "iperf3 -s -1 -B {at} -p {port}".into(),
        client: format!("iperf3 -c {{at}} -J -t {SECONDS} {options} -p {{port}}"),
        figure: |out| {
            let out: serde_json::Value = serde_json::from_str(out).ok()?;
            Some(out["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9)
        },
        note: "",
    }
}

fn redis(case: &'static str, target: f64, options: &str) -> Row {
    Row {
        case,
        unit: "requests/s",
        better: Better::Higher,
        target: Some(target),
        server: "redis-server --save '' --appendonly no --protected-mode no --bind {at} --port {port}".into(),
        client: format!("redis-benchmark --csv -t get {options} -h {{at}} -p {{port}}"),
        figure: requests,
        note: "",
    }
}

/// Parses the output of `redis-benchmark --csv`.
fn requests(out: &str) -> Option<f64> {
    out.lines().last()?.split(',').nth(1)?.trim_matches('"').parse().ok()
}

/// Returns the number after a word.
pub(crate) fn number_after(out: &str, word: &str) -> Option<f64> {
    out.split(word).nth(1)?.split_whitespace().next()?.parse().ok()
}

fn rows_of_host() -> Vec<Row> {
    vec![
        sockperf("sockperf ping-pong, median", 20.0, SECONDS, 100_000, median, ""),
        sockperf("sockperf ping-pong, p99", 5.0, SECONDS, 100_000, p99, ""),
        iperf("iperf3, one stream", 2.5, ""),
        iperf("iperf3, one stream, server sends", 2.5, "-R"),
        iperf("iperf3, 8 streams", 0.95, "-P 8"),
        redis("redis-benchmark, 1 connection", 5.0, "-c 1 -n 20000"),
        redis("redis-benchmark, 50 connections", 2.0, "-c 50 -n 100000"),
        redis("redis-benchmark, 50 connections, 16 at once", 0.95, "-c 50 -P 16 -n 500000"),
        redis("redis-benchmark, connect + request + close", 0.95, "-c 1 -k 0 -n 5000"),
        Row {
            case: "wrk and nginx, 20 connections",
            unit: "requests/s",
            better: Better::Higher,
            target: Some(0.95),
            server: format!("{NGINX} nginx -p {{dir}} -c {{dir}}/nginx.{{port}} -e {{dir}}/error"),
            client: format!("wrk -t 1 -c 20 -d {SECONDS}s http://{{at}}:{{port}}/page"),
            figure: |out| number_after(out, "Requests/sec:"),
            note: "",
        },
        Row {
            case: "pgbench -S, 4 connections",
            unit: "transactions/s",
            better: Better::Higher,
            target: Some(0.95),
            server: "runuser -u postgres -- $(ls -d /usr/lib/postgresql/*/bin)/postgres -D {dir}/pg -k {dir}/pg -p {port} \
                     -c listen_addresses={at} -c fsync=off"
                .into(),
            client: format!("pgbench -S -n -c 4 -T {SECONDS} -h {{at}} -U postgres -p {{port}} postgres"),
            figure: |out| number_after(out, "tps = "),
            note: "",
        },
        Row {
            case: "8 pairs of processes, ping-pong",
            unit: "round trips/s",
            better: Better::Higher,
            target: Some(0.95),
            server: "python3 {dir}/pairs.py serve {port} 8".into(),
            client: format!("python3 {{dir}}/pairs.py talk {{port}} 8 {SECONDS}"),
            figure: |out| number_after(out, "turns"),
            note: "",
        },
        Row {
            case: "1,000 requests/s, median",
            unit: "us",
            better: Better::Lower,
            target: Some(1.0 / 1.2),
            server: "python3 {dir}/paced.py serve {port}".into(),
            client: "python3 {dir}/paced.py talk {port}".into(),
            figure: |out| number_after(out, "median"),
            note: PEER_SLEEPS,
        },
        Row {
            case: "1,000 requests/s, CPU time of both sides",
            unit: "us/request",
            better: Better::Lower,
            target: Some(1.0 / 1.5),
            server: "python3 {dir}/paced.py serve {port}".into(),
            client: "python3 {dir}/paced.py talk {port}".into(),
            figure: |out| number_after(out, "cpu"),
            note: "",
        },
    ]
}

fn rows_of_vms() -> Vec<Row> {
    vec![
        sockperf("VMs: sockperf ping-pong, median", 100.0, SECONDS, 100_000, median, ""),
        sockperf("VMs: sockperf ping-pong, p99", 10.0, SECONDS, 100_000, p99, ""),
        sockperf("VMs: sockperf, 500 messages/s, median", 2.0, SECONDS, 500, median, PEER_SLEEPS),
        iperf("VMs: iperf3, one stream", 6.0, ""),
        redis("VMs: redis-benchmark, 1 connection", 10.0, "-c 1 -n 10000"),
        redis("VMs: redis-benchmark, 50 connections", 1.0, "-c 50 -n 30000"),
    ]
}

/// Shell commands that write a configuration of nginx for a port.
const NGINX: &str = "u=; [ $(id -u) = 0 ] && u='user root;'; \
    echo \"$u daemon off; worker_processes 1; pid {dir}/pid.{port}; error_log {dir}/error; events {} http { access_log off; \
    client_body_temp_path {dir}/a; proxy_temp_path {dir}/b; fastcgi_temp_path {dir}/c; uwsgi_temp_path {dir}/d; scgi_temp_path {dir}/e; \
    keepalive_requests 10000000; server { listen {at}:{port}; root {dir}; } }\" > {dir}/nginx.{port}; exec env $P";

/// Pairs of processes that send 64 bytes back and forth.
const PAIRS_OF_PROCESSES: &str = include_str!("sockets/pairs.py");

/// Sends a thousand requests per second. The answers contain the server's CPU time.
const PACED: &str = include_str!("sockets/paced.py");

/// Measures one connection among many idle ones, all of which have changed over. Fails if the idle ones cost CPU time, or more
/// than a few descriptors.
const IDLE: &str = include_str!("sockets/idle.py");

/// The number of connections of that row.
const IDLE_CONNECTIONS: usize = 10_000;

/// The measurements, and the report to which they add rows.
pub struct Sockets<'r> {
    /// The report to which rows are added.
    pub report: &'r mut Report,
    /// Pairs of runs for each row: one run over TCP and one over shared memory.
    pub pairs: usize,
    /// Only rows whose names, or whose alternatives' names, contain this.
    pub row: Option<&'r str>,
}

impl Sockets<'_> {
    fn wants(&self, row: &Row, peer: &str) -> bool {
        self.row.is_none_or(|name| row.case.contains(name) || peer.contains(name))
    }

    /// Measures between two processes of the host.
    pub fn host(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-sockets")?;
        let ginnel = Plan::new(&bed)
            .config("[segment.local]\nsize = \"512M\"\nmembers = [\"host\"]\nallow_users = [\"postgres\"]\nsockets = true")
            .start()?;
        let folder = tempfile::Builder::new().prefix("bench-sockets.").tempdir()?;
        let dir = folder.path().display().to_string();
        std::fs::write(folder.path().join("page"), [b'x'; 600])?;
        std::fs::write(folder.path().join("pairs.py"), PAIRS_OF_PROCESSES)?;
        std::fs::write(folder.path().join("paced.py"), PACED)?;
        std::fs::write(folder.path().join("idle.py"), IDLE)?;
        let init = format!(
            "chmod 777 {dir}; i=$(ls -d /usr/lib/postgresql/*/bin); cd {dir}; \
         runuser -u postgres -- $i/initdb -A trust -D {dir}/pg >/dev/null; \
         runuser -u postgres -- $i/pg_ctl -D {dir}/pg -o '-k {dir}/pg -c listen_addresses= -c fsync=off' -w -s start >/dev/null 2>&1; \
         pgbench -i -q -s 5 -h {dir}/pg -U postgres postgres; runuser -u postgres -- $i/pg_ctl -D {dir}/pg -m fast -w -s stop"
        );
        bed.host_spawn(&init)?.wait(PATIENCE)?.ok().context("making a database for pgbench")?;
        let library: PathBuf = program("libginnel_preload.so")?;
        let place =
            Place::Host { bed: &bed, ginnel: &ginnel, dir: &dir, library: library.display().to_string() };
        let mut rows = rows_of_host();
        rows.retain(|row| self.wants(row, TCP));
        for row in &rows {
            self.compare(&place, row)?;
        }
        self.idle(&place)
    }

    /// Measures one busy connection among idle ones, beside one alone.
    fn idle(&mut self, place: &Place<'_>) -> Result<()> {
        let row = |connections: usize| Row {
            case: "one busy among 10,000 idle, epoll",
            unit: "round trips/s",
            better: Better::Higher,
            target: Some(1.0 / 1.2),
            server: format!("python3 {{dir}}/idle.py serve {{port}} {connections} {{dir}}"),
            client: format!("python3 {{dir}}/idle.py talk {{port}} {connections} {{dir}}"),
            figure: |out| number_after(out, "turns"),
            note: "at most 1 % CPU while all are idle, at most 9 hidden descriptors",
        };
        let (many, one) = (row(IDLE_CONNECTIONS), row(1));
        if !self.wants(&many, "one alone") {
            return Ok(());
        }
        let (mut among, mut alone) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            among.push(run(place, &many, false).context(many.case)?);
            alone.push(run(place, &one, false).context(many.case)?);
        }
        let Row { case, unit, better, target, note, .. } = many;
        self.report.pairs(case, unit, better, &among, "one alone", &alone, target, note);
        Ok(())
    }

    /// Measures between two VMs.
    pub fn vms(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-sockets-vms")?;
        let plan = Plan::new(&bed).vm("a").vm("b").segment("web", 128, &["a", "b"]);
        let ginnel = plan.segment("local", 128, &["host"]).with_sockets().start()?;
        let tools =
            ["iperf3", "sockperf", "redis-server", "redis-benchmark"].map(|tool| format!("/usr/bin/{tool}"));
        let library = program("libginnel_preload.so")?;
        let vm = |name| {
            let vm = ginnel.vm(name)?.network().memory_mib(768).library(&library);
            tools.iter().fold(vm, |vm, tool| vm.program(tool)).start()
        };
        let (a, b) = (vm("a")?, vm("b")?);
        let mut daemons = Vec::new();
        for vm in [&a, &b] {
            vm.wait_ready()?;
            daemons.push(ginnel.start_guest(vm)?);
        }
        let place = Place::Vms { client: &a, server: &b };
        if bed.accel()? == Accel::Kvm {
            let dir = bed.dir().display().to_string();
            let library = library.display().to_string();
            self.beside_host(&place, &Place::Host { bed: &bed, ginnel: &ginnel, dir: &dir, library })?;
        }
        let mut rows = rows_of_vms();
        rows.retain(|row| self.wants(row, TCP));
        if let Some(why) = interrupts::missing(&bed, &ginnel, &["a", "b"])? {
            for row in rows.extract_if(.., |row| row.note == PEER_SLEEPS) {
                self.report.omit(row.case, &why);
            }
        }
        let mut shared = Vec::new();
        for row in &rows {
            shared.push(self.compare(&place, row)?);
        }
        // The best that an emulated guest can do.
        for (row, figures) in rows.iter().zip(&shared).filter(|(row, _)| row.server.starts_with("redis")) {
            let mut peers = Vec::new();
            for _ in figures {
                let server =
                    a.spawn("exec redis-server --save '' --appendonly no --port 0 --unixsocket /tmp/redis")?;
                a.run_within(PATIENCE, "until [ -S /tmp/redis ]; do sleep 0.1; done")?.ok()?;
                let client = row.client.replace("-h {at} -p {port}", "-s /tmp/redis");
                let out = a.run_within(PATIENCE, &client)?.ok()?.stdout;
                server.kill(15)?;
                server.wait(PATIENCE)?;
                a.run("rm -f /tmp/redis")?.ok()?;
                peers.push((row.figure)(&out).with_context(|| format!("`{client}` says {out:?}"))?);
            }
            self.report.pairs(
                row.case,
                row.unit,
                row.better,
                figures,
                "Unix socket in one VM",
                &peers,
                None,
                "",
            );
        }
        Ok(())
    }

    /// Measures the latency between two VMs beside two processes of the host, both over shared memory.
    fn beside_host(&mut self, vms: &Place<'_>, host: &Place<'_>) -> Result<()> {
        for row in rows_of_vms().into_iter().filter(|row| row.case.contains("ping-pong")) {
            if !self.wants(&row, ON_HOST) {
                continue;
            }
            let (mut figures, mut peers) = (Vec::new(), Vec::new());
            for pair in 0..self.pairs {
                for on_host in [pair % 2 == 0, pair % 2 != 0] {
                    let (place, to) = if on_host { (host, &mut peers) } else { (vms, &mut figures) };
                    to.push(run(place, &row, false).context(row.case)?);
                }
            }
            self.report.pairs(row.case, row.unit, row.better, &figures, ON_HOST, &peers, BESIDE_HOST, "");
        }
        Ok(())
    }

    /// Measures a row, and returns its figures over shared memory.
    fn compare(&mut self, place: &Place<'_>, row: &Row) -> Result<Vec<f64>> {
        let (mut shared, mut tcp) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs {
            // The order within a pair changes, in case it matters.
            for over_tcp in [pair % 2 == 0, pair % 2 != 0] {
                let figure = run(place, row, over_tcp).with_context(|| row.case)?;
                if over_tcp { &mut tcp } else { &mut shared }.push(figure);
            }
        }
        self.report.pairs(row.case, row.unit, row.better, &shared, TCP, &tcp, row.target, row.note);
        Ok(shared)
    }
}

/// Where server and client run.
enum Place<'a> {
    Host { bed: &'a TestBed, ginnel: &'a Installation<'a>, dir: &'a str, library: String },
    Vms { client: &'a Vm, server: &'a Vm },
}

/// Runs a row once. A run over shared memory fails unless its report shows that the connections have changed over.
fn run(place: &Place<'_>, row: &Row, over_tcp: bool) -> Result<f64> {
    let port = next_port();
    let prefix = |library: &str, dir: &str| match over_tcp {
        true => String::new(),
        // These connections end before they change over, and a report would cost as much as they do.
        false if row.is_short() => format!("LD_PRELOAD={library}"),
        false => format!("LD_PRELOAD={library} GINNEL_SOCKETS_REPORT={dir}/report.{port}"),
    };
    let line = |text: &str, prefix: &str, at: &str, dir: &str| {
        let text = text.replace("{at}", at).replace("{port}", &port.to_string()).replace("{dir}", dir);
        let exec = if text.contains("exec env $P") { "" } else { "exec env $P " };
        format!("P='{prefix}'; {exec}{text}")
    };
    let (out, text) = match place {
        Place::Host { bed, ginnel, dir, library } => {
            let line = |text| ginnel.on_host(&line(text, &prefix(library, dir), "127.0.0.1", dir));
            let server = bed.host_spawn(&line(&row.server)?)?;
            let end = Instant::now() + PATIENCE;
            while !listens(server.pid(), port) {
                ensure!(
                    Instant::now() < end && server.is_running(),
                    "`{}` does not listen: {:?}",
                    row.server,
                    server.said()
                );
                std::thread::sleep(Duration::from_millis(2));
            }
            let out = bed.host_spawn(&line(&row.client)?)?.wait(PATIENCE)?.ok()?.stdout;
            let _ = server.kill(15).and_then(|()| server.wait(PATIENCE));
            (out, std::fs::read_to_string(format!("{dir}/report.{port}")))
        }
        Place::Vms { client, server } => {
            let at = server.address()?.to_string();
            let line = |text| line(text, &prefix(LIBRARY, "/tmp"), &at, "/tmp");
            let serving = server.spawn(&line(&row.server))?;
            let listens = format!("until netstat -ltn | grep -q :{port}; do sleep 0.1; done");
            server.run_within(PATIENCE, &listens)?.ok()?;
            let out = client.run_within(PATIENCE, &line(&row.client))?.ok()?.stdout;
            serving.kill(15)?;
            serving.wait(PATIENCE)?;
            // The client's report counts twice, because it has only one of the two ends.
            let text = client.run(&format!("cat /tmp/report.{port} /tmp/report.{port}"))?.stdout;
            (out, Ok(text))
        }
    };
    if !over_tcp && !row.is_short() {
        let text = text.context("no report")?;
        let changed =
            text.lines().filter(|line| line.contains("received_after_us") && line.contains("sent_after_us"));
        let count = changed.count();
        let other = match place {
            Place::Vms { server, .. } if count < 2 => server.run(&format!("cat /tmp/report.{port}"))?.stdout,
            _ => String::new(),
        };
        ensure!(count >= 2, "the connections stayed on TCP: {text}\n{other}");
    }
    (row.figure)(&out).with_context(|| format!("`{}` says {out:?}", row.client))
}

/// Returns a port that no earlier run has used.
pub(crate) fn next_port() -> u16 {
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(21_000);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Returns whether somebody listens at a port in the network of a process, without connecting to it.
pub(crate) fn listens(process: u32, port: u16) -> bool {
    let sockets = ["tcp", "tcp6"]
        .map(|file| std::fs::read_to_string(format!("/proc/{process}/net/{file}")).unwrap_or_default());
    sockets.iter().flat_map(|text| text.lines()).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, state) = (words.next().unwrap_or(""), words.nth(1).unwrap_or(""));
        local.ends_with(&format!(":{port:04X}")) && state == "0A"
    })
}
