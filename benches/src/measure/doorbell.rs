//! The floor of waking: a bare doorbell and a bare eventfd, without a ring and without the library.
//!
//! The two ends attach by hand, tell each other through two words of the segment how to ring them, and then take turns: ring,
//! sleep on the eventfd, ring.

use super::pingpong::Echo;
use anyhow::{Context, Result, bail};
use ginnel_fdpass::{RecvFlags, SendFlags};
use ginnel_layout::wire::{self, Fds, Kind};
use ginnel_layout::{Name, channel};
use ginnel_shmem::device::Registers;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use zerocopy::{FromZeros, IntoBytes};

/// The way to wake the other end.
enum Bell {
    Register(Registers, u32),
    Event(OwnedFd),
}

/// One end of the measurement.
pub struct Doorbell {
    _socket: OwnedFd,
    event: OwnedFd,
    bell: Bell,
}

impl Doorbell {
    /// Attaches to `segment` through the daemon at `path` and opens a channel to (or from) the other end. Only the doorbell of
    /// the channel is used.
    pub fn open(path: &Path, segment: &str, initiator: bool) -> Result<Self> {
        let mut raw = Raw::open(path)?;
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        raw.ask(Kind::HELLO, hello.as_bytes())?;
        let attach = wire::Attach {
            segment: Name::new(segment)?,
            name: Name::new("doorbell")?,
            ..FromZeros::new_zeroed()
        };
        let (body, fds) = raw.ask(Kind::ATTACH, attach.as_bytes())?;
        let attached: wire::Attached = wire::body(&body).context("a strange answer to ATTACH")?;
        let mut fds = fds.into_iter();
        let mut take = |bit| if attached.fds.0 & bit != 0 { fds.next() } else { None };
        let (_memory, event, registers) = (take(Fds::MEMORY), take(Fds::EVENT), take(Fds::REGISTERS));
        let event = event.context("this machine has no interrupts, so there is no doorbell to measure")?;
        let name = Name::new("doorbell")?;
        let (body, mut fds) = if initiator {
            let connect = wire::Connect {
                name,
                kind: channel::ChannelKind::MESSAGE.0,
                reserved: 0,
                capacity: 0,
                input_capacity: 0,
                nonce: 1,
            };
            raw.ask(Kind::CONNECT, connect.as_bytes())?
        } else {
            let listen = wire::Listen {
                name,
                kind: channel::ChannelKind::MESSAGE.0,
                backlog: 0,
                capacity: 0,
                input_capacity: 0,
            };
            raw.ask(Kind::LISTEN, listen.as_bytes())?;
            println!("listening");
            raw.receive()?
        };
        let found: wire::Channel = wire::body(&body).context("a strange channel")?;
        let bell = match registers {
            Some(registers) => Bell::Register(Registers::map(&registers)?, found.bell),
            None => Bell::Event(fds.pop().context("a channel without a doorbell")?),
        };
        Ok(Self { _socket: raw.0, event, bell })
    }

    fn ring(&self) -> Result<()> {
        match &self.bell {
            Bell::Register(registers, value) => registers.ring(*value),
            Bell::Event(event) => drop(rustix::io::write(event, &1u64.to_ne_bytes())?),
        }
        Ok(())
    }

    fn sleep(&self) -> Result<()> {
        loop {
            match rustix::io::read(&self.event, &mut [0; 8]) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::AGAIN) => {
                    let mut fds = [PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN)];
                    poll(&mut fds, None)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Answers without end.
    pub fn serve(&self) -> Result<()> {
        loop {
            self.sleep()?;
            self.ring()?;
        }
    }
}

impl Echo for Doorbell {
    fn exchange(&mut self, _message: &mut [u8]) -> Result<()> {
        self.ring()?;
        self.sleep()
    }
}

/// A connection that speaks the attach protocol by hand.
struct Raw(OwnedFd);

impl Raw {
    fn open(path: &Path) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
            .with_context(|| format!("connecting to {}", path.display()))?;
        Ok(Self(socket))
    }

    fn ask(&mut self, kind: Kind, body: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut packet = wire::Header { kind, flags: 0, request: 1 }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        rustix::net::send(&self.0, &packet, SendFlags::NOSIGNAL)?;
        self.receive()
    }

    fn receive(&mut self) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = vec![0; wire::MAX_PACKET];
        let got = ginnel_fdpass::receive(self.0.as_fd(), &mut bytes, 4, RecvFlags::empty())?;
        let (header, body) = wire::split(&bytes[..got.len]).context("the daemon has gone")?;
        if header.kind == Kind::ERROR {
            bail!("{}", String::from_utf8_lossy(body.get(8..).unwrap_or_default()));
        }
        Ok((body.to_vec(), got.fds))
    }
}
