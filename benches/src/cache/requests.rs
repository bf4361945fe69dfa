//! Requests of one client and of two clients to Ginnel's cache and to memcached: on the host, and from a VM to the host.

use super::{Cache, Figures};
use crate::report::{BESIDE_HOST, Better, ON_HOST};
use anyhow::{Context, Result, ensure};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{Accel, HOST_ADDRESS, HostJob, Job, TestBed, Vm};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(240);
/// The default number of pairs of runs for each row.
const PAIRS: usize = 5;
/// The default number of pairs of runs with a VM.
const PAIRS_OF_VM: usize = 3;
/// The ports of memcached and of the cache.
pub(super) const PORTS: [u16; 2] = [11_311, 11_211];
/// The number of items of a warm restart.
const MILLION: usize = 1_000_000;
/// An unmodified client in Python.
const PYTHON: &str = include_str!("client.py");
/// An unmodified client in C.
const C: &str = include_str!("client.c");

/// Both servers on the host, with the same items.
pub struct Servers<'b> {
    bed: &'b TestBed,
    ginnel: Installation<'b>,
    /// The address at which both listen in addition to their Unix sockets.
    at: String,
    memcached: Arc<HostJob>,
    cache: Arc<HostJob>,
}

impl<'b> Servers<'b> {
    /// Starts both servers and stores the items.
    pub fn new(bed: &'b TestBed, ginnel: Installation<'b>, at: String, threads: u32) -> Result<Self> {
        let dir = bed.dir().display();
        let memcached = bed.host_spawn(&format!(
            "exec memcached -u root -t {threads} -m 256 -s {dir}/memcached.sock & \
             exec memcached -u root -t {threads} -m 256 -l {at} -p {}",
            PORTS[0]
        ))?;
        let cache = Self::start_cache(bed, &ginnel, &at, 300)?;
        let servers = Self { bed, ginnel, at, memcached, cache };
        for peer in ["--own items/main".into(), format!("--unix {dir}/memcached.sock"), servers.tcp()] {
            servers.until(&format!("load {peer}"))?;
        }
        Ok(servers)
    }

    fn start_cache(bed: &TestBed, ginnel: &Installation<'_>, at: &str, mib: usize) -> Result<Arc<HostJob>> {
        let (dir, port) = (bed.dir().display(), PORTS[1]);
        bed.host_spawn(&ginnel.on_host(&format!(
            "exec ginnel-cache --segment items --name main --memory {mib}M --channel web --listen {at}:{port} --unix {dir}/cache.sock"
        ))?)
    }

    /// Returns the address of memcached.
    pub fn memcached_at(&self) -> String {
        format!("{}:{}", self.at, PORTS[0])
    }

    /// Runs a command on the host to its end, and returns what it prints.
    pub fn on_host(&self, command: &str, patience: Duration) -> Result<String> {
        Ok(self.bed.host_spawn(&self.ginnel.on_host(command)?)?.wait(patience)?.ok()?.stdout)
    }

    /// Returns the arguments for memcached over TCP.
    fn tcp(&self) -> String {
        format!("--tcp {}:{}", self.at, PORTS[0])
    }

    /// Returns the arguments for memcached over its Unix socket.
    fn unix(&self) -> String {
        format!("--unix {}/memcached.sock", self.bed.dir().display())
    }

    /// Starts a peer on the host.
    fn start(&self, arguments: &str) -> Result<Arc<HostJob>> {
        self.bed.host_spawn(&self.ginnel.on_host(&format!("exec bench-cache-peer {arguments}"))?)
    }

    /// Runs a peer to its end.
    fn run(&self, arguments: &str) -> Result<Figures> {
        figures(&self.start(arguments)?.wait(PATIENCE)?.ok()?.stdout)
            .with_context(|| format!("bench-cache-peer {arguments}"))
    }

    /// Runs a peer until it succeeds, because its server may still be starting.
    fn until(&self, arguments: &str) -> Result<Figures> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            match self.run(arguments) {
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
                run => return run,
            }
        }
    }
}

fn figures(said: &str) -> Result<Figures> {
    let line = said.lines().last().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("these are no figures: {said:?}"))
}

/// Returns the CPU time in seconds that a process has used.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit_once(')').context("a process without a name")?.1;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let ticks = |n: usize| fields.get(n).and_then(|field| field.parse::<f64>().ok());
    let ticks = ticks(11).zip(ticks(12)).context("a process without times")?;
    Ok((ticks.0 + ticks.1) / 100.0)
}

impl Cache<'_> {
    /// Alternates runs of two measurements: the argument of `run` is `true` for our own, `false` for the peer's.
    fn turns(&self, pairs: usize, run: impl Fn(bool) -> Result<Figures>) -> Result<[Vec<Figures>; 2]> {
        let mut all = [Vec::new(), Vec::new()];
        for pair in 0..self.pairs.unwrap_or(pairs) {
            for own in [pair % 2 == 1, pair % 2 != 1] {
                all[usize::from(!own)].push(run(own)?);
            }
        }
        Ok(all)
    }

    /// Adds a row for one of their figures.
    #[expect(clippy::too_many_arguments, reason = "a row has that many columns")]
    fn row_of(
        &mut self,
        case: &str,
        unit: &'static str,
        better: Better,
        [own, peers]: &[Vec<Figures>; 2],
        peer: &str,
        figure: fn(&Figures) -> f64,
        target: Option<f64>,
        note: &str,
    ) {
        let column = |runs: &[Figures]| -> Vec<f64> { runs.iter().map(figure).collect() };
        self.report.pairs(case, unit, better, &column(own), peer, &column(peers), target, note);
    }

    /// Adds the rows of the host.
    pub fn host(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-cache")?;
        let plan = Plan::new(&bed).segment("items", 320, &["host"]).segment("web", 32, &["host"]);
        let ginnel = plan.config("[limits]\nbytes_per_endpoint = \"1G\"").start()?;
        let servers = Servers::new(&bed, ginnel, "127.0.0.1".into(), 2)?;
        let note = "bare clients of memcached: one write and one read for each request";

        for (case, peer, name) in [
            ("GET 100 B", servers.unix(), "memcached, Unix socket"),
            ("GET 100 B", servers.tcp(), "memcached, TCP"),
        ] {
            if self.wants(case) {
                let turns = self.turns(PAIRS, |own| {
                    let (whom, count) = if own { ("--own items/main", 200_000) } else { (&*peer, 20_000) };
                    servers.run(&format!("get {whom} --count {count} --cpu 0"))
                })?;
                self.row_of(case, "us", Better::Lower, &turns, name, |f| f.median, Some(40.0), note);
                let case = format!("{case}, p99");
                self.row_of(&case, "us", Better::Lower, &turns, name, |f| f.p99, Some(20.0), note);
            }
        }
        if self.wants("SET 100 B") {
            let peer = servers.tcp();
            let turns = self.turns(PAIRS, |own| {
                servers.run(&format!("set {} --cpu 0", if own { "--own items/main" } else { &peer }))
            })?;
            let name = "memcached, TCP";
            self.row_of("SET 100 B", "us", Better::Lower, &turns, name, |f| f.median, Some(3.0), note);
            self.row_of("SET 100 B, p99", "us", Better::Lower, &turns, name, |f| f.p99, None, note);
        }
        for batch in [1, 50] {
            let case = format!("GETs, 2 processes, {batch} at once");
            if self.wants(&case) {
                self.throughput(&servers, &case, batch)?;
            }
        }
        self.unmodified(&servers)?;
        if self.wants("server's CPU while readers are busy") {
            self.idle(&servers)?;
        }
        if self.wants("GET 100 B of a million items") {
            self.million(&servers)?;
        }
        let Servers { memcached, cache, ginnel, .. } = servers;
        cache.kill(9)?;
        cache.wait(PATIENCE)?;
        drop(memcached);
        if self.wants("restart with a million items") {
            self.restart(&bed, &ginnel)?;
        }
        Ok(())
    }

    /// Measures items that do not fit into the processor's caches.
    fn million(&mut self, servers: &Servers<'_>) -> Result<()> {
        let (case, own) = ("GET 100 B of a million items", "--own items/main");
        let peers = [("memcached, Unix socket", servers.unix()), ("memcached, TCP", servers.tcp())];
        for whom in [own, &peers[0].1, &peers[1].1] {
            servers.run(&format!("load {whom} --keys {MILLION}"))?;
        }
        for (name, peer) in &peers {
            let turns = self.turns(PAIRS, |is_own| {
                let (whom, count) = if is_own { (own, 200_000) } else { (&**peer, 20_000) };
                servers.run(&format!("get {whom} --keys {MILLION} --count {count} --cpu 0"))
            })?;
            self.row_of(case, "us", Better::Lower, &turns, name, |f| f.median, Some(40.0), "");
            let case = format!("{case}, p99");
            self.row_of(&case, "us", Better::Lower, &turns, name, |f| f.p99, Some(20.0), "");
        }
        Ok(())
    }

    /// Measures two processes that only read.
    fn throughput(&mut self, servers: &Servers<'_>, case: &str, batch: usize) -> Result<()> {
        let unix = servers.unix();
        let turns = self.turns(PAIRS, |own| {
            let whom = if own { "--own items/main" } else { &unix };
            let jobs = [0, 1].map(|_| servers.start(&format!("throughput {whom} --batch {batch}")));
            let mut sum = Figures::default();
            for job in jobs {
                sum.rate += figures(&job?.wait(PATIENCE)?.ok()?.stdout)?.rate / 1e6;
            }
            Ok(sum)
        })?;
        let peer = "memcached -t 2, Unix sockets";
        self.row_of(case, "M/s", Better::Higher, &turns, peer, |f| f.rate, Some(10.0), "");
        Ok(())
    }

    /// Measures unmodified clients, under `ginnel run` and over TCP.
    fn unmodified(&mut self, servers: &Servers<'_>) -> Result<()> {
        let dir = servers.bed.dir();
        std::fs::write(dir.join("client.py"), PYTHON)?;
        std::fs::write(dir.join("client.c"), C)?;
        let compile = "cc -O2 -o client client.c -lmemcached";
        servers.bed.host(compile)?.ok().context("`scripts/setup bench` installs libmemcached-dev")?;
        for (case, client, target) in [
            ("GET 100 B, pymemcache", "/usr/bin/python3 client.py", 5.0),
            ("GET 100 B, libmemcached", "./client", 10.0),
        ] {
            if !self.wants(case) {
                continue;
            }
            let report = dir.join("report");
            let turns = self.turns(PAIRS, |own| {
                let port = PORTS[usize::from(own)];
                let run = format!("ginnel run --report={} -- ", report.display());
                let run = if own { &*run } else { "" };
                let library = program("libginnel_preload.so")?;
                let command = format!(
                    "export GINNEL_PRELOAD={}; exec {run}{client} {} {port} 5000",
                    library.display(),
                    servers.at
                );
                figures(&servers.bed.host(&servers.ginnel.on_host(&command)?)?.ok()?.stdout)
            })?;
            let peer = "memcached, TCP, the same client";
            self.row_of(case, "us", Better::Lower, &turns, peer, |f| f.median, Some(target), "");
        }
        Ok(())
    }

    /// Measures the CPU time of the servers' processes while clients read.
    fn idle(&mut self, servers: &Servers<'_>) -> Result<()> {
        let unix = servers.unix();
        // The shell has become the memcached at TCP; the one at the Unix socket is its child. So each is found by its command
        // line.
        let of_unix = servers
            .bed
            .host("pgrep -a -x memcached | grep memcached.sock | tail -n 1 | cut -d ' ' -f 1")?
            .ok()?
            .stdout;
        let of_unix: u32 = of_unix.trim().parse().context("memcached's process")?;
        let turns = self.turns(PAIRS, |own| {
            let (whom, pid) = if own { ("--own items/main", servers.cache.pid()) } else { (&*unix, of_unix) };
            let (before, begun) = (cpu_of(pid)?, Instant::now());
            servers.run(&format!("throughput {whom} --ms 2000"))?;
            let cpu = (cpu_of(pid)? - before) / begun.elapsed().as_secs_f64();
            // The kernel counts in hundredths of a second, so less than one of them is not seen.
            Ok(Figures { cpu: (cpu * 100.0).max(0.5), ..Figures::default() })
        })?;
        let case = "server's CPU while readers are busy";
        let note = "0.5: less than the kernel counts";
        self.row_of(case, "%", Better::Lower, &turns, "memcached, Unix socket", |f| f.cpu, None, note);
        Ok(())
    }

    /// Measures the time from the start of a server until a client that waits for it has its first answer.
    fn restart(&mut self, bed: &TestBed, ginnel: &Installation<'_>) -> Result<()> {
        let cache = Servers::start_cache(bed, ginnel, "127.0.0.1", 300)?;
        let dir = bed.dir().display();
        let client = |arguments: &str| -> Result<Figures> {
            let command = ginnel.on_host(&format!("exec bench-cache-peer {arguments}"))?;
            figures(&bed.host_spawn(&command)?.wait(PATIENCE)?.ok()?.stdout)
        };
        let socket = bed.dir().join("cache.sock");
        wait_for(|| std::os::unix::net::UnixStream::connect(&socket).is_ok())?;
        client(&format!("load --own items/main --keys {MILLION} --size 100"))?;
        let (mut own, mut peers) = (Vec::new(), Vec::new());
        let mut running = cache;
        for _ in 0..self.pairs.unwrap_or(PAIRS) {
            running.kill(9)?;
            running.wait(PATIENCE)?;
            let begun = Instant::now();
            running = Servers::start_cache(bed, ginnel, "127.0.0.1", 300)?;
            wait_for(|| answers(&socket))?;
            own.push(Figures { median: begun.elapsed().as_secs_f64() * 1000.0, ..Figures::default() });
            client(&format!("get --own items/main --keys {MILLION} --count 10000"))?;

            let of_memcached = bed.dir().join("restarted.sock");
            let begun = Instant::now();
            let memcached =
                bed.host_spawn(&format!("exec memcached -u root -m 300 -s {dir}/restarted.sock"))?;
            wait_for(|| answers(&of_memcached))?;
            client(&format!("load --unix {dir}/restarted.sock --keys {MILLION} --size 100"))?;
            peers.push(Figures { median: begun.elapsed().as_secs_f64() * 1000.0, ..Figures::default() });
            memcached.kill(9)?;
            memcached.wait(PATIENCE)?;
        }
        let note =
            "asked: under 100 ms; memcached has lost its items, and is filled again as fast as it takes them";
        let case = "restart with a million items";
        self.row_of(case, "ms", Better::Lower, &[own, peers], "memcached", |f| f.median, None, note);
        Ok(())
    }

    /// Adds the rows of a client in a VM.
    pub fn vm(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-cache-vm")?;
        let plan = Plan::new(&bed).vm("a");
        let ginnel = plan
            .segment_with_readers("items", 320, &["host"], &["a"])
            .segment("web", 32, &["host", "a"])
            .config("[limits]\nbytes_per_endpoint = \"1G\"")
            .start()?;
        let vm = ginnel.vm("a")?.memory_mib(512).program(program("bench-cache-peer")?).start()?;
        vm.wait_ready()?;
        let daemon = ginnel.start_guest(&vm)?;
        let servers = Servers::new(&bed, ginnel, HOST_ADDRESS.to_string(), 2)?;
        let note = format!("the guest runs under {}", bed.accel()?);
        let tcp = servers.tcp();
        let on_vm = |job: &str, own: bool, count: u32| {
            let whom = if own { "--own items/main" } else { &*tcp };
            let command = format!("bench-cache-peer {job} {whom} --count {count}");
            figures(&vm.run_within(PATIENCE, &command)?.ok()?.stdout)
        };
        let peer = "memcached on the host, virtio-net";
        if self.wants("VM: GET 100 B") {
            let turns = self.turns(PAIRS_OF_VM, |own| on_vm("get", own, if own { 50_000 } else { 2000 }))?;
            let better = Better::Lower;
            self.row_of("VM: GET 100 B", "us", better, &turns, peer, |f| f.median, Some(100.0), &note);
            self.row_of("VM: GET 100 B, p99", "us", better, &turns, peer, |f| f.p99, None, &note);
        }
        if bed.accel()? == Accel::Kvm && (self.wants("VM: GET 100 B") || self.wants(ON_HOST)) {
            let (job, count) = ("get", 200_000);
            let turns = self.turns(PAIRS_OF_VM, |own| match own {
                true => on_vm(job, own, count),
                false => servers.run(&format!("{job} --own items/main --count {count} --cpu 0")),
            })?;
            let (better, target) = (Better::Lower, BESIDE_HOST);
            self.row_of("VM: GET 100 B", "us", better, &turns, ON_HOST, |f| f.median, target, "");
            self.row_of("VM: GET 100 B, p99", "us", better, &turns, ON_HOST, |f| f.p99, None, "");
        }
        if self.wants("VM: SET 100 B") {
            let turns = self.turns(PAIRS_OF_VM, |own| on_vm("set", own, 2000))?;
            let better = Better::Lower;
            self.row_of("VM: SET 100 B", "us", better, &turns, peer, |f| f.median, Some(20.0), &note);
            self.row_of("VM: SET 100 B, p99", "us", better, &turns, peer, |f| f.p99, None, &note);
        }
        end(daemon, vm);
        Ok(())
    }
}

/// Ends the guest's daemon before its VM.
fn end(daemon: Job, vm: Vm) {
    drop(daemon);
    drop(vm);
}

/// Returns whether a server answers at a Unix socket.
fn answers(socket: &std::path::Path) -> bool {
    use std::io::{Read, Write};
    let ask = || -> std::io::Result<bool> {
        let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
        stream.write_all(b"mn\r\n")?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"MN\r\n")
    };
    ask().unwrap_or(false)
}

/// Waits for a condition that soon becomes true.
fn wait_for(is_there: impl Fn() -> bool) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_there() {
        ensure!(Instant::now() < end, "a server does not start");
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}
