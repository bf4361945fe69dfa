//! Those who have connected and have not said yet which version of vfio-user they speak.
//!
//! Whoever wants to know whether the socket is served connects and goes away. Such a stranger must neither be taken for a VM nor keep
//! one out that connects at the same time, so the first one who negotiates has the device.

use crate::hush::Hush;
use ginnel_layout::vfio_user::Command;
use ginnel_vfio_user::{Gone, Request, Server};
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long a stranger may take to say a version.
const NEGOTIATION: Duration = Duration::from_secs(10);

/// Most strangers at a time. More wait in the queue of the listener.
const MOST: usize = 16;

/// The connection to a QEMU that has negotiated.
#[derive(Debug)]
pub struct Client {
    /// The connection.
    pub server: Server,
    /// Its process, or 0.
    pub pid: u32,
}

/// The strangers.
#[derive(Debug, Default)]
pub struct Door {
    strangers: Vec<(Client, Instant)>,
    strange: Hush,
    refused: Hush,
}

impl Door {
    /// Returns whether there is room for another stranger.
    pub fn has_room(&self) -> bool {
        self.strangers.len() < MOST
    }

    /// Returns whether there is no stranger.
    pub fn is_empty(&self) -> bool {
        self.strangers.is_empty()
    }

    /// Returns the sockets of the strangers.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.strangers.iter().map(|(client, _)| client.server.as_fd())
    }

    /// Accepts a stranger, if one has connected. An error has been logged.
    pub fn accept(&mut self, listener: &UnixListener, now: Instant) -> io::Result<()> {
        let server = match listener.accept() {
            Ok((stream, _)) => Server::new(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => Err(error),
        };
        match server {
            Ok(server) => {
                self.add(server, now);
                Ok(())
            }
            // The process is out of descriptors or memory.
            Err(error) => {
                if let Some(suppressed) = self.strange.allows(now) {
                    warn!(suppressed, "a client cannot be accepted: {error}");
                }
                Err(error)
            }
        }
    }

    /// Adds a stranger.
    pub fn add(&mut self, server: Server, now: Instant) {
        let pid = socket_peercred(&server).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        self.strangers.push((Client { server, pid }, now));
    }

    /// Gives the strangers as much time as if they had just come.
    pub fn forget_time(&mut self, now: Instant) {
        self.strangers.iter_mut().for_each(|(_, since)| *since = now);
    }

    /// Reads what the strangers say, and returns the first one that negotiates. `served` is the process that has the device already:
    /// then whoever negotiates is refused. `version` is the answer to those who are not.
    pub fn greet(&mut self, served: Option<u32>, version: &[u8], now: Instant) -> Option<Client> {
        let mut found: Option<Client> = None;
        for (mut client, since) in std::mem::take(&mut self.strangers) {
            let served = found.as_ref().map(|found| found.pid).or(served);
            match negotiate(&mut client.server, served.is_none().then_some(version)) {
                Ok(true) => match served {
                    Some(other) => {
                        if let Some(suppressed) = self.refused.allows(now) {
                            let pid = client.pid;
                            warn!(
                                pid,
                                other, suppressed, "a second VM is refused: another one has the device"
                            );
                        }
                    }
                    None => {
                        info!(pid = client.pid, "a VM has connected");
                        found = Some(client);
                    }
                },
                Ok(false) if now.duration_since(since) < NEGOTIATION => self.strangers.push((client, since)),
                Ok(false) => self.give_up(&client, "it does not say which version it speaks", now),
                Err(Gone::Closed) => {}
                Err(gone) => self.give_up(&client, &gone.to_string(), now),
            }
        }
        found
    }

    fn give_up(&mut self, client: &Client, why: &str, now: Instant) {
        if let Some(suppressed) = self.strange.allows(now) {
            warn!(pid = client.pid, suppressed, "a client is given up: {why}");
        }
    }
}

/// Returns whether a stranger says its version, and answers it.
fn negotiate(server: &mut Server, version: Option<&[u8]>) -> Result<bool, Gone> {
    let Some(mut message) = server.receive()? else { return Ok(false) };
    if message.command() != Command::VERSION {
        return Err(Gone::Refused(format!("{:?} before VERSION", message.command())));
    }
    let to = message.reply_to();
    let known = match message.request() {
        Ok(Request::Version { .. }) => true,
        Ok(_) => false,
        // It may try another version.
        Err(errno) => {
            server.fail(to, errno);
            false
        }
    };
    if known && let Some(version) = version {
        server.reply(to, version, None);
    }
    server.flush()?;
    Ok(known)
}
