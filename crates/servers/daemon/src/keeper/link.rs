//! The daemon's connection to a keeper process, and the requests that the keeper has not answered yet.
//!
//! A keeper answers at once, unless it is stopped (SIGSTOP) or the machine is very busy. Others wait for the daemon, so the daemon waits
//! only a moment, and once. A request that has been sent is as good as done: the keeper executes all of them before it answers the next
//! daemon.

use super::{MAX_PACKET, PATIENCE};
use anyhow::{Context, bail};
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// How long [`Link::ask`] waits for an answer.
const MOMENT: Duration = Duration::from_millis(200);

/// The connection.
#[derive(Debug)]
pub struct Link {
    connection: OwnedFd,
    /// The names in the requests that have no answer yet, in order.
    unanswered: VecDeque<String>,
}

impl Link {
    pub fn new(connection: OwnedFd) -> Self {
        Self { connection, unanswered: VecDeque::new() }
    }

    /// Sends a request, and waits a moment for its answer; not at all while earlier requests have none. Fails if the keeper refuses
    /// within this moment, or if no more requests fit into its socket.
    pub fn ask<Fd: AsFd>(&mut self, what: u8, name: &str, fds: &[Fd]) -> anyhow::Result<()> {
        let waits = self.unanswered.is_empty();
        self.send(what, name, fds)?;
        let refusals = self.hear(if waits { MOMENT } else { Duration::ZERO })?;
        if waits && !self.unanswered.is_empty() {
            warn!(
                "the keeper does not answer: it will do what the daemon asks when it goes on; if its process is stopped, let it continue (SIGCONT)"
            );
        }
        self.outcome(name, refusals)
    }

    /// Sends a request, and waits until it and all earlier ones are answered.
    pub fn insist(&mut self, what: u8) -> anyhow::Result<()> {
        self.send::<OwnedFd>(what, "", &[])?;
        let refusals = self.hear(PATIENCE)?;
        if !self.unanswered.is_empty() {
            bail!("the keeper does not answer: is its process stopped?");
        }
        self.outcome("", refusals)
    }

    /// Returns what the last request, with this name, has come to. Logs the refusals of earlier ones.
    fn outcome(&self, name: &str, mut refusals: Vec<Refusal>) -> anyhow::Result<()> {
        // The answer to the last request is the last one.
        let own = refusals.pop_if(|refusal| self.unanswered.is_empty() && refusal.name == name);
        refusals.iter().for_each(Refusal::log);
        own.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    fn send<Fd: AsFd>(&mut self, what: u8, name: &str, fds: &[Fd]) -> anyhow::Result<()> {
        let request = [&[what], name.as_bytes()].concat();
        match fdpass::send(self.connection.as_fd(), &request, fds, SendFlags::DONTWAIT) {
            Ok(_) => self.unanswered.push_back(name.to_owned()),
            Err(Errno::AGAIN | Errno::TOOMANYREFS) => {
                bail!(
                    "the keeper does not answer, and its socket is full: if its process is stopped, let it continue (SIGCONT)"
                )
            }
            Err(errno) => return Err(errno).context("asking the keeper"),
        }
        Ok(())
    }

    /// Receives answers until there is one for each request, at most this long. Returns the refusals. Fails if the keeper has ended.
    pub fn hear(&mut self, at_most: Duration) -> anyhow::Result<Vec<Refusal>> {
        let deadline = Instant::now() + at_most;
        let mut refusals = Vec::new();
        loop {
            let mut bytes = [0; MAX_PACKET];
            match fdpass::receive(self.connection.as_fd(), &mut bytes, 0, RecvFlags::DONTWAIT) {
                Ok(got) if got.len == 0 => bail!("the keeper has ended"),
                Ok(got) => {
                    let name = self.unanswered.pop_front().context("the keeper answers what nobody asked")?;
                    match bytes[..got.len.min(MAX_PACKET)].split_first() {
                        Some((b'K', _)) => {}
                        Some((b'N', why)) => {
                            refusals.push(Refusal { name, why: String::from_utf8_lossy(why).into_owned() });
                        }
                        _ => bail!("the keeper has sent an unknown answer"),
                    }
                }
                Err(Errno::AGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || self.unanswered.is_empty() {
                        return Ok(refusals);
                    }
                    self.wait(left)?;
                }
                Err(errno) => return Err(errno).context("the keeper's answer"),
            }
        }
    }

    fn wait(&self, at_most: Duration) -> anyhow::Result<()> {
        let timeout = Timespec::try_from(at_most)?;
        match poll(&mut [PollFd::new(&self.connection, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno).context("waiting for the keeper"),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// What a keeper does not do, and why.
#[derive(Debug, thiserror::Error)]
#[error("the keeper refuses: {why}")]
pub struct Refusal {
    name: String,
    why: String,
}

impl Refusal {
    /// Logs a refusal that comes too late for an error.
    pub fn log(&self) {
        error!(name = self.name, "{self}; when this daemon ends, running VMs may lose their doorbells");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn link() -> (Link, OwnedFd) {
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Link::new(one), other)
    }

    fn ask(link: &mut Link, name: &str) -> anyhow::Result<()> {
        link.ask::<OwnedFd>(b'D', name, &[])
    }

    fn answer(keeper: &OwnedFd, text: &str) {
        packet::send::<OwnedFd>(keeper.as_fd(), text.as_bytes(), &[]).unwrap();
    }

    #[test]
    fn a_silent_keeper_is_waited_for_once() {
        let (mut link, keeper) = link();
        let begin = Instant::now();
        for n in 0..20 {
            ask(&mut link, &format!("n{n}")).unwrap();
        }
        let waited = begin.elapsed();
        assert!(waited >= MOMENT && waited < 15 * MOMENT, "{waited:?}");
        // It goes on, and refuses something.
        for n in 0..20 {
            assert_eq!(packet::receive(keeper.as_fd(), 64, 0).unwrap().bytes, format!("Dn{n}").as_bytes());
            answer(&keeper, if n == 7 { "Nit is full" } else { "K" });
        }
        let refusals = link.hear(Duration::ZERO).unwrap();
        assert_eq!((refusals.len(), refusals[0].name.as_str()), (1, "n7"));
        assert!(link.unanswered.is_empty());
        // From now on its answers count again.
        answer(&keeper, "Nit is full");
        assert!(ask(&mut link, "x").unwrap_err().to_string().contains("refuses: it is full"));
        answer(&keeper, "K");
        ask(&mut link, "x").unwrap();
        drop(keeper);
        assert!(link.hear(Duration::ZERO).is_err() && ask(&mut link, "x").is_err());
    }

    #[test]
    fn a_keeper_whose_socket_is_full_is_an_error() {
        let (mut link, _keeper) = link();
        let error = (0..100_000).find_map(|_| ask(&mut link, "n").err()).unwrap().to_string();
        assert!(error.contains("socket is full") && error.contains("SIGCONT"), "{error}");
    }
}
