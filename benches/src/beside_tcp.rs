//! Programs that gain little from shared memory, or nothing: those whose connections are short, and those that work more than they
//! send. They must not be slower under the sockets preload library than over TCP.

use crate::report::{Better, Report};
use crate::sockets::{listens, next_port, number_after};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::{Installation, Plan, program};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many seconds a program runs that runs for a given time.
const SECONDS: u32 = 2;
/// The modes of the library, each with the least share of TCP's speed.
const MODES: [(&str, f64); 2] = [("auto", 0.95), ("eager", 0.8)];

/// A server, if the client needs one, and a client that measures. In both command lines, `{port}` is the server's port, and `{dir}` is a
/// folder for both.
struct Row {
    case: &'static str,
    unit: &'static str,
    better: Better,
    server: String,
    client: String,
    figure: fn(&str) -> Option<f64>,
}

/// Parses the output of ab.
fn requests(out: &str) -> Option<f64> {
    number_after(out, "Requests per second:")
}

/// Parses the output of `openssl s_time`.
fn connections(out: &str) -> Option<f64> {
    out.lines().find(|line| line.contains(" real seconds"))?.split_whitespace().next()?.parse().ok()
}

fn rows() -> Vec<Row> {
    let ab = |at_once: u32, page: &str| {
        format!("ab -q -t {SECONDS} -n 10000000 -c {at_once} http://127.0.0.1:{{port}}/{page}")
    };
    vec![
        Row {
            case: "lighttpd and ab, a connection per request",
            unit: "requests/s",
            better: Better::Higher,
            server: "lighttpd -D -f {dir}/lighttpd.{port}".into(),
            client: ab(20, "page"),
            figure: requests,
        },
        Row {
            case: "openssl s_time, new connections",
            unit: "connections",
            better: Better::Higher,
            server: "openssl s_server -quiet -accept {port} -www -cert {dir}/cert -key {dir}/key".into(),
            client: format!("openssl s_time -connect 127.0.0.1:{{port}} -new -time {SECONDS} -www /"),
            figure: connections,
        },
        Row {
            case: "gunicorn and ab, two sync workers",
            unit: "requests/s",
            better: Better::Higher,
            server:
                "gunicorn --preload -w 2 -b 127.0.0.1:{port} --log-level error --pythonpath {dir} app:app"
                    .into(),
            client: ab(4, ""),
            figure: requests,
        },
        Row {
            case: "gRPC for Python, unary calls",
            unit: "calls/s",
            better: Better::Higher,
            server: "/usr/bin/python3 {dir}/unary.py serve {port}".into(),
            client: format!("/usr/bin/python3 {{dir}}/unary.py call {{port}} {SECONDS}"),
            figure: |out| number_after(out, "calls"),
        },
        Row {
            case: "dask.distributed, 650 tasks",
            unit: "s",
            better: Better::Lower,
            server: String::new(),
            client: "/usr/bin/python3 {dir}/cluster.py".into(),
            figure: |out| number_after(out, "took"),
        },
    ]
}

/// Where the programs run.
struct Place<'a> {
    bed: &'a TestBed,
    ginnel: &'a Installation<'a>,
    dir: &'a str,
    library: String,
    /// The folder of gRPC for Python.
    grpc: String,
}

/// Measures all rows, or those whose names contain `only`.
pub fn beside_tcp(report: &mut Report, pairs: usize, only: Option<&str>) -> Result<()> {
    let bed = TestBed::new("bench-beside-tcp")?;
    let ginnel = Plan::new(&bed)
        .config("[segment.local]\nsize = \"256M\"\nmembers = [\"host\"]\nsockets = true")
        .start()?;
    let folder = tempfile::Builder::new().prefix("bench-beside-tcp.").tempdir()?;
    let path = folder.path();
    std::fs::write(path.join("page"), [b'x'; 600])?;
    std::fs::write(path.join("app.py"), include_str!("beside_tcp/app.py"))?;
    std::fs::write(path.join("unary.py"), include_str!("beside_tcp/unary.py"))?;
    std::fs::write(path.join("cluster.py"), include_str!("beside_tcp/cluster.py"))?;
    let dir = path.display().to_string();
    let key = format!(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout {dir}/key -out {dir}/cert -days 30 -subj /CN=localhost"
    );
    bed.host_spawn(&key)?.wait(PATIENCE)?.ok().context("making a certificate")?;
    let library = program("libginnel_preload.so")?.display().to_string();
    let mut place = Place { bed: &bed, ginnel: &ginnel, dir: &dir, library, grpc: String::new() };
    for row in rows().iter().filter(|row| only.is_none_or(|name| row.case.contains(name))) {
        if row.case.contains("gRPC") {
            match grpc() {
                Ok(folder) => place.grpc = folder,
                Err(why) => {
                    report.omit(row.case, &why.to_string());
                    continue;
                }
            }
        }
        for (mode, target) in MODES {
            let (mut figures, mut peers) = (Vec::new(), Vec::new());
            for pair in 0..pairs {
                // The order within a pair changes, in case it matters.
                for over_tcp in [pair % 2 == 0, pair % 2 != 0] {
                    let mode = (!over_tcp).then_some(mode);
                    let figure = run(&place, row, mode).with_context(|| row.case)?;
                    if over_tcp { &mut peers } else { &mut figures }.push(figure);
                }
            }
            let case = format!("{}, {mode}", row.case);
            report.pairs(case, row.unit, row.better, &figures, "TCP", &peers, Some(target), "");
        }
    }
    Ok(())
}

/// Returns the folder of gRPC for Python, which the script unpacks if necessary.
fn grpc() -> Result<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/foreign-suites");
    let output = Command::new(script).arg("grpc").output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Runs a row once: with the library in this mode, or without it.
fn run(place: &Place<'_>, row: &Row, mode: Option<&str>) -> Result<f64> {
    let port = next_port();
    let Place { bed, ginnel, dir, library, grpc } = place;
    std::fs::write(
        format!("{dir}/lighttpd.{port}"),
        format!(
            "server.document-root = \"{dir}\"\nserver.bind = \"127.0.0.1\"\nserver.port = {port}\nserver.max-keep-alive-requests = 0\n\
             mimetype.assign = (\"\" => \"text/plain\")\n"
        ),
    )?;
    let line = |text: &str| {
        let text = text.replace("{port}", &port.to_string()).replace("{dir}", dir);
        let library =
            mode.map(|mode| format!("LD_PRELOAD={library} GINNEL_SOCKETS={mode} ")).unwrap_or_default();
        let line = format!("PATH=$PATH:/usr/sbin; exec env PYTHONPATH={grpc} {library}{text}");
        ginnel.on_host(&line)
    };
    let mut server = None;
    if !row.server.is_empty() {
        let child = bed.host_spawn(&line(&row.server)?)?;
        let end = Instant::now() + PATIENCE;
        while !listens(child.pid(), port) {
            ensure!(
                Instant::now() < end && child.is_running(),
                "`{}` does not listen: {:?}",
                row.server,
                child.said()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.pid()))?;
        ensure!(
            maps.contains(library.as_str()) == mode.is_some(),
            "`{}` and the library: {mode:?}",
            row.server
        );
        server = Some(child);
    }
    let out = bed.host_spawn(&line(&row.client)?)?.wait(PATIENCE)?.ok()?.stdout;
    if let Some(server) = server {
        let _ = server.kill(15).and_then(|()| server.wait(PATIENCE));
    }
    (row.figure)(&out).with_context(|| format!("`{}` says {out:?}", row.client))
}
