//! Talking to the daemon without being an endpoint.

use crate::connection::{Packet, protocol};
use crate::error::Error;
use crate::fork::PerProcess;
use crate::inner::{state, text};
use crate::session::{Books, Note, Session};
use ginnel_layout::wire::{self, Kind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a daemon that is being restarted is waited for, or in a VM that of the host.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A connection to the daemon of this host or VM, for those who want to know or to change something and need no
/// segment. Each request waits for its answer, at most 10 seconds.
pub struct Daemon {
    path: PathBuf,
    session: PerProcess<Session<Nothing>>,
    hello: wire::HelloOk,
}

/// Without an endpoint, the daemon says nothing unasked.
#[derive(Default)]
struct Nothing;

impl Books for Nothing {
    fn event(&mut self, _: Packet) {}
    fn answered(&mut self, _: Kind, _: &[u8], _: Packet) {}
    fn unclaimed(&mut self, _: Kind, _: &[u8], _: &Packet) {}
    fn notes(&mut self) -> Vec<Note> {
        Vec::new()
    }
    fn inherited(&self) -> Self {
        Self
    }
}

impl Daemon {
    /// Connects to `$GINNEL_SOCKET`, else [`wire::SOCKET`]. Waits a moment for a daemon that is being restarted.
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(&crate::AttachOptions::default().socket)
    }

    /// Connects to the daemon at `path`.
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        let (session, packet) = Session::open(path, None, PATIENCE)?;
        let (hello, _) = packet.into_body::<wire::HelloOk>(Kind::HELLO_OK, path)?;
        Ok(Self { path: path.to_owned(), session: PerProcess::new(session), hello })
    }

    /// Number of the member that this daemon serves; 0 is the host.
    pub fn member(&self) -> u32 {
        self.hello.member
    }

    /// Name of that member.
    pub fn member_name(&self) -> &str {
        self.hello.name.as_str()
    }

    /// What the daemon knows, as JSON: administrators of the host are shown everything, other users the segments that they may
    /// attach to, programs in a VM the segments of that VM. It comes in pages: what changes meanwhile may be seen by half.
    pub fn inspect(&mut self) -> Result<String, Error> {
        let session = self.session.get(Session::inherit)?;
        state(&self.path, |page| session.request(Kind::INSPECT, page, Instant::now() + ANSWER))
    }

    /// Changes the installation; `request` is JSON (see `docs/attach-protocol.md`). Returns what the daemon says to it,
    /// which may be nothing. For the host's administrators.
    pub fn admin(&mut self, request: &str) -> Result<String, Error> {
        if request.len() > wire::MAX_PACKET - size_of::<wire::Header>() {
            return Err(protocol(&self.path, "a request that is longer than a packet"));
        }
        let session = self.session.get(Session::inherit)?;
        text(session.request(Kind::ADMIN, request.as_bytes(), Instant::now() + ANSWER)?, &self.path)
    }
}
