//! The report of the preload library: its file and its presentation.

use crate::list::or_dash;
use crate::output::{self, Table};
use anyhow::{Context, Result, anyhow, bail};
use ginnel_report::{Event, Record, Report, Role};
use std::io::BufReader;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The file into which the library writes.
pub enum File {
    /// A file that the user has named. It stays.
    Named(PathBuf),
    /// A temporary file, which is removed when this value is dropped.
    Temporary(NamedTempFile),
}

impl File {
    /// Creates an empty file.
    pub fn new(named: Option<PathBuf>) -> Result<Self> {
        let Some(path) = named else {
            let folder = std::env::temp_dir();
            let file = NamedTempFile::with_prefix("ginnel-report-")
                .with_context(|| format!("cannot create a file for the report in {}", folder.display()))?;
            return Ok(Self::Temporary(file));
        };
        // The program may change its folder.
        let path = std::path::absolute(&path)
            .with_context(|| format!("cannot find the full path of the report {}", path.display()))?;
        std::fs::File::create(&path)
            .with_context(|| format!("cannot write a report to {}", path.display()))?;
        Ok(Self::Named(path))
    }

    /// Returns the file's absolute path.
    pub fn path(&self) -> Result<&Path> {
        let path = match self {
            Self::Named(path) => path,
            Self::Temporary(file) => file.path(),
        };
        if !path.is_absolute() || path.as_os_str().as_bytes().contains(&0) {
            bail!(
                "the report's file {} has no absolute path; set TMPDIR to an absolute path",
                path.display()
            );
        }
        Ok(path)
    }

    /// Reads everything that has been written so far.
    pub fn read(&self) -> Result<Report> {
        let path = self.path()?;
        let file = std::fs::File::open(path)
            .with_context(|| format!("cannot read the report {}", path.display()))?;
        if !file.metadata()?.is_file() {
            return Err(anyhow!(
                "the report {} is not an ordinary file, so it is not shown here",
                path.display()
            ));
        }
        Report::read(BufReader::new(file))
            .with_context(|| format!("cannot read the report {}", path.display()))
    }
}

/// Returns a table of all connections, and sums.
pub fn page(report: &Report) -> String {
    let mut table = Table::new(&[
        "PROCESS",
        "PROGRAM",
        "ROLE",
        "LOCAL",
        "REMOTE",
        "VIA",
        "AFTER",
        "TCP",
        "SHARED MEMORY",
        "WAKES",
        "RINGS",
        "GETS",
        "WHY",
    ]);
    for record in &report.connections {
        table.row([
            record.pid.to_string(),
            or_dash(plain(&record.program)),
            role(record.role).into(),
            address(record.local),
            address(record.remote),
            via(record).into(),
            pair(record.sent_after_us.map(time), record.received_after_us.map(time)),
            pair(bytes(record.tcp_sent), bytes(record.tcp_received)),
            pair(bytes(record.shared_sent), bytes(record.shared_received)),
            pair(count(record.wakes_sent), count(record.wakes_received)),
            or_dash(count(record.rings_sent).unwrap_or_default()),
            pair(count(record.gets_from_memory), count(record.gets_passed_on)),
            or_dash(why(record)),
        ]);
    }
    let mut parts = Vec::new();
    if !table.is_empty() {
        parts.push(table.to_string());
        parts.push("(pairs: sent, received; AFTER: when that way changed over; WAKES: by bytes; RINGS: by doorbells; GETS of a cache: from memory, passed on)".into());
    }
    parts.extend(report.processes.iter().filter(|process| !process.reason.is_empty()).map(|process| {
        format!("process {} ({}): {}", process.pid, plain(&process.program), plain(&process.reason))
    }));
    parts.push(sums(report));
    parts.join("\n")
}

fn sums(report: &Report) -> String {
    let all = &report.connections;
    let ways = |record: &Record| [record.sent_after_us, record.received_after_us].iter().flatten().count();
    let [none, one, both] = [0, 1, 2].map(|n| all.iter().filter(|record| ways(record) == n).count());
    let sum = |of: fn(&Record) -> u64| output::bytes(all.iter().map(of).fold(0, u64::saturating_add));
    let many = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut text = match report.processes.len() {
        0 => "ginnel: no process has loaded the library".to_owned(),
        processes => format!("ginnel: {}, {}", many(processes, "program"), many(all.len(), "connection")),
    };
    if !all.is_empty() {
        text += &format!(
            ": {both} changed over to shared memory, {one} in one direction only, {none} on TCP; sent {} over shared memory and {} over TCP, received {} and {}",
            sum(|r| r.shared_sent),
            sum(|r| r.tcp_sent),
            sum(|r| r.shared_received),
            sum(|r| r.tcp_received)
        );
    }
    let gets = |of: fn(&Record) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
    let (from_memory, passed_on) = (gets(|r| r.gets_from_memory), gets(|r| r.gets_passed_on));
    if from_memory > 0 || passed_on > 0 {
        text += &format!(
            "; of the gets of caches, {from_memory} answered from memory, and {passed_on} passed on to servers"
        );
    }
    if report.unreadable > 0 {
        text += &format!("; {} of the report not readable", many(report.unreadable, "line"));
    }
    text
}

/// Returns what carries the connection, and whether it was still open.
fn via(record: &Record) -> &'static str {
    match (record.sent_after_us.is_some(), record.received_after_us.is_some(), record.event) {
        (true, true, Event::Joined) => "shared memory, open",
        (true, true, _) => "shared memory",
        (true, false, _) => "TCP, sends shared",
        (false, true, _) => "TCP, receives shared",
        (false, false, _) => "TCP",
    }
}

/// Returns why the connection is on TCP, that it was meanwhile, and why its gets are not answered from memory.
fn why(record: &Record) -> String {
    let returns = match record.returns {
        0 => String::new(),
        1 => "went back to TCP once".into(),
        n => format!("went back to TCP {n} times"),
    };
    let no_cache = if record.no_cache.is_empty() { "" } else { "no gets from memory: " };
    let all = [plain(&record.reason), returns, no_cache.to_owned() + &plain(&record.no_cache)];
    all.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
}

fn role(role: Option<Role>) -> &'static str {
    match role {
        Some(Role::Connector) => "connector",
        Some(Role::Acceptor) => "acceptor",
        Some(Role::Unknown) | None => "-",
    }
}

fn address(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "-".into(), |address| address.to_string())
}

/// Returns both directions, or one dash if there is nothing in either.
fn pair(sent: Option<String>, received: Option<String>) -> String {
    if sent.is_none() && received.is_none() {
        return "-".into();
    }
    let cell = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
    format!("{}, {}", cell(sent), cell(received))
}

fn bytes(n: u64) -> Option<String> {
    (n > 0).then(|| output::bytes(n))
}

fn count(n: u64) -> Option<String> {
    (n > 0).then(|| n.to_string())
}

fn time(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

/// Replaces control characters, which a terminal could take for commands.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_each_connection_and_sums() {
        let report = Report::read(
            concat!(
                r#"{"event":"process","pid":7,"program":"redis-server"}"#,
                "\n",
                r#"{"event":"joined","pid":7,"program":"redis-server","connection":1,"local":"10.0.0.1:6379","remote":"10.0.0.2:40000","role":"acceptor","sent_after_us":900,"received_after_us":1200,"tcp_sent":10,"shared_sent":2048,"shared_received":1024,"wakes_sent":3,"rings_sent":9}"#,
                "\n",
                r#"{"event":"stays","pid":7,"program":"redis-server","connection":2,"local":"10.0.0.1:6379","remote":"10.0.0.9:40000","role":"acceptor","tcp_sent":6,"cache":"web/main","gets_from_memory":70,"gets_passed_on":2,"no_cache":"a proxy","reason":"no\u001b report"}"#,
                "\n",
                r#"{"event":"ended","pid":7,"connection":3,"received_after_us":2500000}"#,
                "\n",
                r#"{"event":"process","pid":8,"program":"sh","reason":"no daemon"}"#,
                "\nnonsense\n",
            )
            .as_bytes(),
        )
        .unwrap();
        let page = page(&report);
        let lines: Vec<_> = page.lines().collect();
        assert_eq!(
            lines[1..]
                .iter()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>(),
            [
                "7 redis-server acceptor 10.0.0.1:6379 10.0.0.2:40000 shared memory, open 900 us, 1.2 ms 10 B, - 2 KiB, 1 KiB 3, - 9 - -",
                "7 redis-server acceptor 10.0.0.1:6379 10.0.0.9:40000 TCP - 6 B, - - - - 70, 2 no? report; no gets from memory: a proxy",
                "7 - - - - TCP, receives shared -, 2.5 s - - - - - -",
                "(pairs: sent, received; AFTER: when that way changed over; WAKES: by bytes; RINGS: by doorbells; GETS of a cache: from memory, passed on)",
                "process 8 (sh): no daemon",
                "ginnel: 2 programs, 3 connections: 1 changed over to shared memory, 1 in one direction only, 1 on TCP; sent \
                 2 KiB over shared memory and 16 B over TCP, received 1 KiB and 0 B; of the gets of caches, 70 answered from memory, and 2 passed on to servers; 1 line of the report not readable",
            ]
        );
    }

    #[test]
    fn an_empty_report_says_so() {
        assert_eq!(page(&Report::default()), "ginnel: no process has loaded the library");
    }
}
