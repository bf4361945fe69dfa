//! Talking to the daemon without being an endpoint.

use crate::connection::{Connection, Lost, Packet, protocol};
use crate::error::Error;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a daemon that is being restarted is waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a daemon may take for its next packet.
const ANSWER: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(20);

/// A connection to the daemon of this host or VM, for those who want to know or to change something and need no
/// segment. Each request blocks until it is answered.
pub struct Daemon {
    path: PathBuf,
    connection: Connection,
    hello: wire::HelloOk,
    requests: u32,
}

impl Daemon {
    /// Connects to `$GINNEL_SOCKET`, else [`wire::SOCKET`]. Waits a moment for a daemon that is being restarted.
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(&crate::AttachOptions::default().socket)
    }

    /// Connects to the daemon at `path`.
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Self::try_connect(path) {
                Ok(daemon) => return daemon,
                Err(Lost(Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE))
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(RETRY);
                }
                Err(Lost(errno)) => {
                    return Err(Error::NoDaemon { path: path.to_owned(), source: errno.into() });
                }
            }
        }
    }

    fn try_connect(path: &Path) -> Result<Result<Self, Error>, Lost> {
        let connection = Connection::open(path).map_err(Lost)?;
        let deadline = Some(Instant::now() + ANSWER);
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        connection.send(Kind::HELLO, 1, hello.as_bytes(), deadline)?;
        let Some(packet) = connection.receive(deadline)? else { return Err(Lost(Errno::TIMEDOUT)) };
        Ok(packet.into_body::<wire::HelloOk>(Kind::HELLO_OK, path).and_then(|(hello, _)| {
            if hello.version != wire::VERSION {
                return Err(protocol(path, "another protocol version"));
            }
            Ok(Self { path: path.to_owned(), connection, hello, requests: 1 })
        }))
    }

    /// Number of the member that this daemon serves; 0 is the host.
    pub fn member(&self) -> u32 {
        self.hello.member
    }

    /// Name of that member.
    pub fn member_name(&self) -> &str {
        self.hello.name.as_str()
    }

    /// What the daemon knows, as JSON: of everything on the host, of the segments it has a share in in a VM.
    pub fn inspect(&mut self) -> Result<String, Error> {
        self.ask(Kind::INSPECT, &[])
    }

    /// Changes the installation; `request` is JSON (see `docs/attach-protocol.md`). Returns what the daemon says to it,
    /// which may be nothing. For the host's administrators.
    pub fn admin(&mut self, request: &str) -> Result<String, Error> {
        self.ask(Kind::ADMIN, request.as_bytes())
    }

    /// Asks again while the daemon that decides cannot be reached (in a VM, while the host's is restarted).
    fn ask(&mut self, kind: Kind, body: &[u8]) -> Result<String, Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.ask_once(kind, body) {
                Err(error) if error.code() == Some(ErrorCode::UNAVAILABLE) && Instant::now() < deadline => {
                    std::thread::sleep(RETRY);
                }
                other => return other,
            }
        }
    }

    fn ask_once(&mut self, kind: Kind, body: &[u8]) -> Result<String, Error> {
        self.requests = self.requests.wrapping_add(1).max(1);
        let lost = |Lost(errno): Lost| Error::NoDaemon { path: self.path.clone(), source: errno.into() };
        let deadline = Some(Instant::now() + ANSWER);
        self.connection.send(kind, self.requests, body, deadline).map_err(lost)?;
        let mut text = Vec::new();
        loop {
            let packet: Packet = self
                .connection
                .receive(Some(Instant::now() + ANSWER))
                .map_err(lost)?
                .ok_or(Error::TimedOut)?;
            if packet.header.request != self.requests {
                continue;
            }
            match packet.header.kind {
                Kind::OK => return Ok(String::new()),
                Kind::TEXT => text.extend_from_slice(&packet.body),
                _ => return packet.into_body::<[u8; 0]>(Kind::TEXT, &self.path).map(|_| String::new()),
            }
            if packet.header.flags & Header::MORE == 0 {
                return String::from_utf8(text).map_err(|_| protocol(&self.path, "a text that is not UTF-8"));
            }
        }
    }
}
