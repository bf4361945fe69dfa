//! The memcached of the distribution, with its own socket.

use anyhow::{Context, Result, bail};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A memcached that ends when this value is dropped.
pub struct Memcached {
    process: Child,
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    _folder: TempDir,
}

impl Memcached {
    /// Starts memcached with this many MiB for items.
    pub fn start(mib: usize) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("socket");
        let process = Command::new("memcached")
            .args(["-u", "root", "-t", "1", "-m", &mib.to_string(), "-s"])
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()
            .context("starting memcached; `scripts/setup bench` installs it")?;
        let end = Instant::now() + Duration::from_secs(10);
        let writer = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => return Err(error).context("connecting to memcached"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let reader = BufReader::with_capacity(1 << 16, writer.try_clone()?);
        Ok(Self { process, writer, reader, _folder: folder })
    }

    /// Asks for all these keys in one request. Calls `found` with each key that is there and the length of its value.
    pub fn get(&mut self, keys: &[String], mut found: impl FnMut(&str, usize)) -> Result<()> {
        let mut request = String::from("get");
        for key in keys {
            write!(request, " {key}")?;
        }
        request.push_str("\r\n");
        self.writer.write_all(request.as_bytes())?;
        let (mut line, mut value) = (String::new(), Vec::new());
        loop {
            line.clear();
            self.reader.read_line(&mut line)?;
            let mut words = line.split_ascii_whitespace();
            match (words.next(), words.next(), words.nth(1)) {
                (Some("END"), ..) => return Ok(()),
                (Some("VALUE"), Some(key), Some(len)) => {
                    let len = len.parse()?;
                    value.resize(len + 2, 0);
                    self.reader.read_exact(&mut value)?;
                    found(key, len);
                }
                _ => bail!("memcached answers {line:?}"),
            }
        }
    }

    /// Stores these items without waiting for answers.
    pub fn set<'k>(&mut self, items: impl IntoIterator<Item = (&'k str, &'k [u8])>) -> Result<()> {
        let mut request = Vec::new();
        for (key, value) in items {
            write!(request, "set {key} 0 0 {} noreply\r\n", value.len())?;
            request.extend_from_slice(value);
            request.extend_from_slice(b"\r\n");
        }
        Ok(self.writer.write_all(&request)?)
    }

    /// Returns its resident memory in MiB.
    pub fn resident(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        let kib: f64 = line.split_ascii_whitespace().next().context("VmRSS")?.parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
