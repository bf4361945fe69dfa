//! The programs. Amounts are small because the VMs are emulated on many machines.

use anyhow::{Result, ensure};
use std::fs;

mod database;
mod login;
mod runtimes;
mod web;

use crate::stage::{PYTHON, Play, changed, ensure_changed};
use ginnel_report::Record;

pub struct Program {
    pub name: &'static str,
    /// Programs that the host must have.
    pub needs: &'static [&'static str],
    pub play: fn(&mut Play<'_, '_>) -> Result<()>,
}

pub const PROGRAMS: &[Program] = &[
    Program { name: "iperf3", needs: &["iperf3"], play: iperf3 },
    Program { name: "sockperf", needs: &["sockperf"], play: sockperf },
    Program { name: "redis", needs: &["redis-server", "redis-benchmark", "redis-cli"], play: redis },
    Program {
        name: "memcached",
        needs: &["memcached", "memcslap", "memccp", "memccat", "python3"],
        play: memcached,
    },
    Program { name: "netpipe", needs: &["NPtcp"], play: netpipe },
    Program { name: "nginx", needs: &["nginx", "curl", "wrk"], play: web::nginx },
    Program { name: "caddy", needs: &["caddy", "curl"], play: web::caddy },
    Program { name: "postgresql", needs: &[database::POSTGRES, "pgbench"], play: database::postgresql },
    Program { name: "asyncio", needs: &[PYTHON], play: runtimes::asyncio },
    Program { name: "node", needs: &["node"], play: runtimes::node },
    Program { name: "java", needs: &["java", "javac"], play: runtimes::java },
    Program { name: "ssh", needs: &["sshd", "ssh", "ssh-keygen", "rsync"], play: login::ssh },
    Program { name: "rsync", needs: &["rsync"], play: login::rsync },
];

/// Returns bytes in which a lost byte would be noticed at every later place.
fn bytes(len: u32) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Returns text in which no two parts are alike.
fn text(len: u32) -> String {
    (0..len).map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 28) as u8)).collect()
}

/// How much a run carries over shared memory in its seconds depends on the machine, so a run that carries little is
/// followed by a longer one.
fn iperf3(play: &mut Play<'_, '_>) -> Result<()> {
    for direction in ["", "-R", "-P 3"] {
        for seconds in [1, 4, 16] {
            let (host, port) = (play.host(), play.port());
            play.serve(port, &format!("iperf3 -s -1 -B {host} -p {port}"))?;
            play.client(&format!("iperf3 -c {host} -t {seconds} -p {port} {direction}"))?;
            play.end()?;
            let ends = [play.of_last_client()?, play.of_server()?];
            let over_memory = |records: &[Record<'static>]| {
                changed(records, "iperf3").iter().map(|c| c.shared_sent + c.shared_received).sum::<u64>()
            };
            let least = ends.iter().map(|records| over_memory(records)).min().unwrap_or_default();
            if least > 1 << 20 {
                break;
            }
            ensure!(seconds < 16, "{direction}: {least} bytes over shared memory: {ends:#?}");
        }
    }
    Ok(())
}

fn sockperf(play: &mut Play<'_, '_>) -> Result<()> {
    let (host, port) = (play.host(), play.port());
    play.serve(port, &format!("sockperf sr --tcp -i {host} -p {port}"))?;
    let client = format!("sockperf pp --tcp -i {host} -t 1 -p {port}");
    let out = play.client_until_changed(&client, "sockperf", 1, "sockperf")?.stdout;
    let good = "dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0";
    ensure!(out.contains(good), "{out}");
    play.end()
}

fn redis(play: &mut Play<'_, '_>) -> Result<()> {
    let (host, port) = (play.host(), play.port());
    play.serve(
        port,
        &format!("redis-server --port {port} --bind {host} --protected-mode no --save '' --appendonly no"),
    )?;
    for (load, least) in [("-c 1 -n 500", 1), ("-c 50 -n 3000", 30), ("-c 5 -n 4000 -P 16", 3)] {
        let benchmark = format!("redis-benchmark -h {host} -p {port} -q -t set,get {load}");
        play.client_until_changed(&benchmark, "redis-benchmark", least, "redis-server")?;
    }
    // A value that does not fit into the ring is set and read back.
    let value = text(1_000_000);
    fs::write(play.files().join("value"), &value)?;
    let out = play.client(&format!("redis-cli -h {host} -p {port} -x SET key < value"))?.stdout;
    ensure!(out.trim() == "OK", "{out}");
    let back = play.client(&format!("redis-cli -h {host} -p {port} GET key"))?.stdout;
    ensure!(back.trim() == value, "{} bytes come back", back.len());
    play.end()
}

/// Sets and gets values until the connection has changed over, and some more afterwards.
const PYMEMCACHE: &str = include_str!("../../../programs/sockets/unmodified/values.py");

fn memcached(play: &mut Play<'_, '_>) -> Result<()> {
    let (host, port) = (play.host(), play.port());
    play.serve(port, &format!("memcached -u root -l {host} -p {port} -U 0 -t 2"))?;
    // Each of several threads has a connection.
    let memcslap = format!("memcslap -s {host}:{port} -t get -c 3 -e 1000");
    play.client_until_changed(&memcslap, "memcslap", 3, "memcached")?;
    // A connection for one value stays on TCP or changes over, depending on timing.
    let value = text(900_000);
    fs::write(play.files().join("value"), &value)?;
    play.client(&format!("memccp -s {host}:{port} value"))?;
    play.client(&format!("memccat -s {host}:{port} --file=got value"))?;
    let back = fs::read_to_string(play.files().join("got"))?;
    ensure!(back.trim_end() == value, "{} bytes come back", back.len());
    fs::write(play.files().join("values.py"), PYMEMCACHE)?;
    play.client(&format!("{PYTHON} values.py {host} {port}"))?;
    play.end()?;
    ensure_changed(&play.of_clients()?, "python3", 1)
}

/// Messages of 1 byte to 100 kB go back and forth, and each is compared with what was sent.
fn netpipe(play: &mut Play<'_, '_>) -> Result<()> {
    let (host, port) = (play.host(), play.port());
    let options = format!("-i -n 10 -u 100000 -P {port}");
    play.serve(port, &format!("NPtcp -o /dev/null {options}"))?;
    let out = play.client(&format!("NPtcp -h {host} -o /dev/null {options}"))?.stderr;
    // It ends with an error at the first message that differs from what was sent. It prints one line for each size.
    let sizes = out.matches("Integrity check passed").count();
    ensure!(sizes >= 25, "{sizes} sizes: {out}");
    play.end()?;
    ensure_changed(&play.of_clients()?, "NPtcp", 1)?;
    ensure_changed(&play.of_server()?, "NPtcp", 1)
}
