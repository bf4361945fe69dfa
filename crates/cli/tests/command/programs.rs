//! Programs of the distribution, unmodified, under `ginnel run`: their connections change over, and their data are right.

use std::cell::Cell;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::world::{World, built_library, signal, wait_for};
use ginnel_report::{Record, Report};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether these programs are here. Says so if not.
fn have(programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let is_there = |program: &&&str| path.split(':').any(|folder| Path::new(folder).join(program).exists());
    match programs.iter().find(|program| !is_there(program)) {
        None => true,
        Some(missing) => {
            println!("SKIPPED {missing} is not installed: `scripts/setup test` installs it");
            false
        }
    }
}

/// A port that nobody listens at.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Whether somebody listens at a port, without a connection to it.
fn listens(port: u16) -> bool {
    let sockets =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| fs::read_to_string(file).unwrap_or_default());
    sockets.iter().flat_map(|text| text.lines()).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, state) = (words.next().unwrap_or(""), words.nth(1).unwrap_or(""));
        local.ends_with(&format!(":{port:04X}")) && state == "0A"
    })
}

/// A server and its clients, whose connections go into one report.
struct Stage {
    world: World,
    mode: &'static str,
    server: Option<Child>,
    /// Each run writes a report of its own.
    runs: Cell<u32>,
}

impl Stage {
    fn new(mode: &'static str) -> Self {
        Self { world: World::new(), mode, server: None, runs: Cell::new(0) }
    }

    fn command(&self, program: &[&str]) -> Command {
        let mut command = self.world.command("run");
        self.runs.set(self.runs.get() + 1);
        command
            .arg(format!("--report=report.{}", self.runs.get()))
            .args(["--mode", self.mode, "--"])
            .args(program)
            .env("GINNEL_PRELOAD", built_library("ginnel-preload", "libginnel_preload.so"))
            .env("PATH", std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn serve(&mut self, port: u16, program: &[&str]) {
        let mut command = self.command(program);
        // Nobody reads what a server says.
        let log = fs::File::create(self.world.files().join("server.log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.server = Some(command.spawn().unwrap());
        wait_for("that the server listens", || listens(port));
    }

    /// Runs a client to its end; what it has printed.
    fn client(&self, program: &[&str]) -> String {
        let (status, out, err) = self.client_with(program, Stdio::null());
        assert!(status, "{program:?}: {out}\n{err}\n{}", self.log());
        out
    }

    fn client_with(&self, program: &[&str], input: Stdio) -> (bool, String, String) {
        let mut child = self.command(program).stdin(input).spawn().unwrap();
        let end = Instant::now() + PATIENCE;
        // Its output fits into the pipes.
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                child.kill().unwrap();
                panic!("{program:?} hangs: {:?}\n{}", child.wait_with_output(), self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (status.success(), text(stdout), text(stderr))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.world.files().join("server.log")).unwrap_or_default()
    }

    /// Ends the server, and tells what became of the connections.
    fn end(mut self) -> Vec<Record<'static>> {
        if let Some(mut server) = self.server.take() {
            if server.try_wait().unwrap().is_none() {
                signal(&server, "TERM");
            }
            let end = Instant::now() + PATIENCE;
            while server.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "the server does not end: {}", self.log());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let file = |run| fs::read(self.world.files().join(format!("report.{run}"))).unwrap();
        (1..=self.runs.get()).flat_map(|run| Report::read(&file(run)[..]).unwrap().connections).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// The connections that have changed over both ways, of a program.
fn changed<'a>(connections: &'a [Record<'static>], program: &str) -> Vec<&'a Record<'static>> {
    let of = |record: &&Record<'_>| {
        record.program == program
            && record.sent_after_us.is_some()
            && record.received_after_us.is_some()
            && record.shared_sent + record.shared_received > 0
    };
    connections.iter().filter(of).collect()
}

const MODES: [&str; 2] = ["auto", "eager"];

#[test]
fn redis() {
    if !have(&["redis-server", "redis-benchmark", "redis-cli"]) {
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["redis-server", "--port", &at, "--save", "", "--appendonly", "no"]);
        for load in [
            &["-c", "1", "-n", "4000"][..],
            &["-c", "20", "-n", "20000"],
            &["-c", "5", "-n", "20000", "-P", "16"],
        ] {
            stage.client(&[&["redis-benchmark", "-p", &at, "-q", "-t", "set,get"], load].concat());
        }
        // A value that does not fit into the ring, and what comes back of it.
        let value: String = (0..100_000_u32)
            .map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 28) as u8))
            .collect();
        let file = stage.world.files().join("value");
        fs::write(&file, value.repeat(20)).unwrap();
        let input = fs::File::open(&file).unwrap();
        let (good, out, err) = stage.client_with(&["redis-cli", "-p", &at, "-x", "SET", "key"], input.into());
        assert!(good && out.trim() == "OK", "{out} {err}");
        let got = stage.client(&["redis-cli", "-p", &at, "STRLEN", "key"]);
        assert_eq!(got.trim(), (value.len() * 20).to_string());
        let connections = stage.end();
        // Of some fifty connections of each kind. How many end before depends on the machine.
        for program in ["redis-benchmark", "redis-server"] {
            let n = changed(&connections, program).len();
            assert!(n >= 5, "{mode}: {n} of {program}: {connections:#?}");
        }
    }
}

#[test]
fn iperf3() {
    if !have(&["iperf3"]) {
        return;
    }
    for mode in MODES {
        for direction in [&[][..], &["-R"], &["-P", "3"]] {
            let mut stage = Stage::new(mode);
            let port = free_port();
            let at = port.to_string();
            stage.serve(port, &["iperf3", "-s", "-1", "-p", &at]);
            stage.client(&[&["iperf3", "-c", "127.0.0.1", "-t", "2", "-p", &at], direction].concat());
            let connections = stage.end();
            let bytes: u64 = changed(&connections, "iperf3").iter().map(|c| c.shared_received).sum();
            assert!(
                bytes > 10 << 20,
                "{mode} {direction:?}: {bytes} bytes over shared memory: {connections:#?}"
            );
        }
    }
}

#[test]
fn sockperf() {
    if !have(&["sockperf"]) {
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["sockperf", "sr", "--tcp", "-i", "127.0.0.1", "-p", &at]);
        let out = stage.client(&["sockperf", "pp", "--tcp", "-i", "127.0.0.1", "-t", "1", "-p", &at]);
        assert!(
            out.contains("dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0"),
            "{out}"
        );
        let connections = stage.end();
        assert_eq!(changed(&connections, "sockperf").len(), 2, "{mode}: {connections:#?}");
    }
}

#[test]
fn nginx_and_curl() {
    if !have(&["nginx", "curl"]) {
        return;
    }
    for sendfile in ["on", "off"] {
        let mut stage = Stage::new("auto");
        let folder = stage.world.files();
        let at = folder.display().to_string();
        let port = free_port();
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        let configuration = format!(
            "{user} daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error; events {{}} http {{ access_log off; \
             client_body_temp_path {at}/a; proxy_temp_path {at}/b; fastcgi_temp_path {at}/c; uwsgi_temp_path {at}/d; \
             scgi_temp_path {at}/e; sendfile {sendfile}; tcp_nopush on; server {{ listen 127.0.0.1:{port}; root {at}; }} }}"
        );
        fs::write(folder.join("nginx.conf"), configuration).unwrap();
        let bytes: Vec<u8> = (0..16_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(folder.join("large"), &bytes).unwrap();
        stage.serve(
            port,
            &["nginx", "-p", &at, "-c", &format!("{at}/nginx.conf"), "-e", &format!("{at}/error")],
        );
        let url = format!("http://127.0.0.1:{port}/large");
        // Three times over one connection.
        let out = ["one", "two", "three"].map(|name| format!("{at}/{name}"));
        stage.client(&[
            "curl",
            "-sS",
            "--limit-rate",
            "24M",
            "-o",
            &out[0],
            &url,
            "-o",
            &out[1],
            &url,
            "-o",
            &out[2],
            &url,
        ]);
        for file in &out {
            assert!(fs::read(file).unwrap() == bytes, "{file} is not what nginx was to send");
        }
        let connections = stage.end();
        let curl = changed(&connections, "curl");
        assert!(
            curl.len() == 1 && curl[0].shared_received > 16 << 20,
            "sendfile {sendfile}: {connections:#?}"
        );
    }
}

/// Many connections at once, with random pieces of data.
const ECHO: &str = r#"
import asyncio, random, sys
port = int(sys.argv[2])
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def talk(seed):
    r = random.Random(seed)
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    for turn in range(30):
        data = r.randbytes(r.choice([1, 10, 1000, 10000, 400000]) if turn % 9 == 0 else r.randint(1, 3000))
        writer.write(data)
        await writer.drain()
        assert await reader.readexactly(len(data)) == data, (seed, turn)
    writer.write_eof()
    assert await reader.read() == b''
    writer.close()
    await writer.wait_closed()
async def main():
    if sys.argv[1] == 'serve':
        server = await asyncio.start_server(serve, '127.0.0.1', port, backlog=500)
        await server.serve_forever()
    await asyncio.gather(*[talk(seed) for seed in range(100)])
asyncio.run(main())
"#;

#[test]
fn python_asyncio_with_many_connections() {
    if !Path::new("/usr/bin/python3").exists() {
        println!("SKIPPED /usr/bin/python3 is not installed: `scripts/setup test` installs it");
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["/usr/bin/python3", "-c", ECHO, "serve", &at]);
        stage.client(&["/usr/bin/python3", "-c", ECHO, "talk", &at]);
        let connections = stage.end();
        let n = changed(&connections, "python3").len();
        assert!(n >= 10, "{mode}: {n} ends of 200 have changed over");
    }
}

/// A server whose child goes on with a connection that has changed over, after programs were executed beside it.
const FORK: &str = r#"
import os, socket, subprocess, sys
port = int(sys.argv[2])
def receive(c, n):
    data = b''
    while len(data) < n:
        more = c.recv(n - len(data))
        assert more, 'the end came too early'
        data += more
    return data
def echo(c):
    for _ in range(300):
        c.sendall(receive(c, 100))
def has_changed():
    own = '"pid":%d,' % os.getpid()
    words = [own, '"sent_after_us"', '"received_after_us"']
    return any(all(word in line for word in words) for line in open(os.environ['GINNEL_SOCKETS_REPORT']))
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    c, _ = s.accept()
    # Until the connection has changed over.
    while True:
        changed = has_changed()
        receive(c, 100)
        c.sendall((b'!' if changed else b'?') * 100)
        if changed:
            break
    subprocess.run(['true'], check=True)
    assert os.system('true') == 0
    echo(c)
    if os.fork() == 0:
        s.close()
        echo(c)
        c.close()
        os._exit(0)
    c.close()
    assert os.wait()[1] == 0
else:
    c = socket.create_connection(('127.0.0.1', port))
    while True:
        c.sendall(b'.' * 100)
        if receive(c, 100) == b'!' * 100:
            break
    for turn in range(600):
        data = os.urandom(100)
        c.sendall(data)
        assert receive(c, 100) == data, turn
    assert c.recv(1) == b''
"#;

#[test]
fn trap_1_a_child_goes_on_with_a_connection_of_its_parent() {
    if !Path::new("/usr/bin/python3").exists() {
        println!("SKIPPED /usr/bin/python3 is not installed: `scripts/setup test` installs it");
        return;
    }
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["/usr/bin/python3", "-c", FORK, "serve", &at]);
        stage.client(&["/usr/bin/python3", "-c", FORK, "talk", &at]);
        let log = stage.log();
        let connections = stage.end();
        // Both ends, and the child's.
        assert_eq!(changed(&connections, "python3").len(), 3, "{mode}: {connections:#?} {log}");
    }
}
