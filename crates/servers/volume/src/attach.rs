//! The connection between the two processes of an NVMe volume: the holder, which has QEMU's socket, and the engine, which serves the
//! commands. [`ginnel_layout::nvme_attach`] describes the messages and their order.
//!
//! ```text
//!  EngineEnd::connect, hello   ->   HolderEnd::receive  = FromEngine
//!  EngineEnd::receive = FromHolder   <-   HolderEnd::send(ToEngine)
//!  EngineEnd::done             ->   HolderEnd::receive  = FromEngine
//! ```
//!
//! Only a process of the same user or root can connect, since the socket has mode 0600. Nevertheless each side checks what it gets:
//! a message of an unknown kind, of another length or with another number of descriptors ends the connection.

use ginnel_config::Problem;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::nvme_attach::{
    Control, Done, Hello, Kind, MAX_LEN, MAX_QUEUES, Map, Reason, Refused, Unmap, VERSION, Vector, Welcome,
};
use ginnel_listener::{Access, Failed};
use rustix::fs::{Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Listens at the holder's path (`SOCKET.engine`), replacing a socket that a dead holder has left. Only this process's user, or `owner`,
/// and root can connect. The socket does not block. Blocks for as long as a holder that is there does not accept.
pub fn listen(path: &Path, owner: Option<(Uid, Gid)>) -> Result<OwnedFd, Problem> {
    if EngineEnd::connect(path).is_ok() {
        let what = "another holder listens there already";
        return Err(Problem::new(
            path.display(),
            what,
            "stop it first; the VM that uses it loses its device",
        ));
    }
    let problem = |failed: Failed| Problem::new(path.display(), failed, failed.fix());
    let (user, group) = owner.unzip();
    let access = Access { mode: Mode::RUSR | Mode::WUSR, user, group };
    let socket = ginnel_listener::bind(path, SocketType::SEQPACKET, access).map_err(problem)?;
    rustix::io::ioctl_fionbio(&socket, true)
        .and_then(|()| rustix::net::listen(&socket, BACKLOG))
        .map_err(|errno| problem(Failed::Bind(errno)))?;
    Ok(socket)
}

/// How many engines may wait to be accepted.
const BACKLOG: i32 = 16;

/// Why the connection to the other process ends.
#[derive(Debug, Error)]
pub enum Gone {
    /// The other process has ended, or has closed the connection.
    #[error("the other process has ended")]
    Closed,
    /// The other process sends something that is not of this protocol.
    #[error("what the other process sends is refused: {0}; run both from the same release")]
    Refused(String),
    /// A system call has failed.
    #[error("the connection between holder and engine failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for Gone {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            errno => Self::Io(errno.into()),
        }
    }
}

/// A message of the engine.
#[derive(Debug)]
pub enum FromEngine {
    /// The engine attaches, with the eventfds by which it is woken: one for the admin queue, then one for each I/O queue.
    Hello {
        /// The version of the engine's messages. If it is not [`VERSION`], nothing else about the engine is known.
        version: u32,
        /// The lock file of the engine's turn, which the engine has opened a second time; `None` if the version is another one.
        turn: Option<OwnedFd>,
        /// The eventfds.
        kicks: Vec<OwnedFd>,
    },
    /// Everything up to the message with this number, which is not zero, is in force.
    Done(u64),
}

/// A message for the engine, as [`HolderEnd::send`] takes it. The descriptors are lent.
#[derive(Clone, Copy, Debug)]
pub enum ToEngine<'a> {
    /// The engine is attached.
    Welcome {
        /// What the engine must agree with.
        terms: Terms,
        /// The file with the state.
        state: BorrowedFd<'a>,
        /// The file with the doorbells.
        doorbells: BorrowedFd<'a>,
    },
    /// The engine is refused. `have` is what the holder has instead.
    Refused {
        /// Why.
        reason: Reason,
        /// The holder's version or number of queues.
        have: u32,
    },
    /// A range of guest memory.
    Map {
        /// Where it lies.
        range: Range,
        /// Its file.
        file: BorrowedFd<'a>,
    },
    /// A range is not to be used any more.
    Unmap {
        /// The number of the answer, or zero.
        id: u64,
        /// The first address of the range.
        iova: u64,
        /// Bytes of the range.
        len: u64,
    },
    /// An interrupt vector has a new eventfd, or none.
    Vector {
        /// The number of the vector.
        number: u32,
        /// The eventfd.
        eventfd: Option<BorrowedFd<'a>>,
    },
    /// Words of the state have changed.
    Control {
        /// The number of the answer, or zero.
        id: u64,
    },
}

/// A message of the holder, as [`EngineEnd::receive`] returns it.
#[derive(Debug)]
pub enum FromHolder {
    /// The engine is attached.
    Welcome {
        /// What the engine must agree with.
        terms: Terms,
        /// The file with the state.
        state: OwnedFd,
        /// The file with the doorbells.
        doorbells: OwnedFd,
    },
    /// The engine is refused. `have` is what the holder has instead.
    Refused {
        /// Why.
        reason: Reason,
        /// The holder's version or number of queues.
        have: u32,
    },
    /// A range of guest memory.
    Map {
        /// Where it lies. Neither its end nor its part of the file passes 2^64 - 1.
        range: Range,
        /// Its file. Whether the range lies inside the file is not known.
        file: OwnedFd,
    },
    /// A range is not to be used any more.
    Unmap {
        /// The number for [`EngineEnd::done`], or zero.
        id: u64,
        /// The first address of the range.
        iova: u64,
        /// Bytes of the range.
        len: u64,
    },
    /// An interrupt vector has a new eventfd, or none.
    Vector {
        /// The number of the vector.
        number: u32,
        /// The eventfd.
        eventfd: Option<OwnedFd>,
    },
    /// Words of the state have changed.
    Control {
        /// The number for [`EngineEnd::done`], or zero.
        id: u64,
    },
}

/// What both processes must agree on. The holder decides; an engine with another configuration ends with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The number of I/O queues.
    pub queues: u32,
    /// The slots of each queue in the state: a power of two.
    pub slots: u32,
    /// Whether the guest writes its doorbells in the file itself.
    pub mapped: bool,
    /// The number of interrupt vectors.
    pub vectors: u32,
}

/// A range of guest memory, and where it lies in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first address, as the device uses it.
    pub iova: u64,
    /// Bytes of the range; not zero.
    pub len: u64,
    /// The offset of the range in its file.
    pub offset: u64,
    /// Whether the device may write the range.
    pub writable: bool,
}

/// Whether a message has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sent {
    /// It has.
    Yes,
    /// It has not: the engine has not read what was sent before, or too many descriptors are on their way. Send it again later.
    Later,
}

/// The engine's end of the connection.
#[derive(Debug)]
pub struct EngineEnd(OwnedFd);

impl EngineEnd {
    /// Connects to the holder at this path (`SOCKET.engine`). Blocks while the holder's list of waiting engines is full.
    ///
    /// # Errors
    ///
    /// Those of `connect(2)`: `NotFound` or `ConnectionRefused` if there is no holder.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Says hello, with [`Turn::witness`](crate::turn::Turn::witness), and the eventfds for the admin queue and for each I/O queue,
    /// in this order.
    ///
    /// # Errors
    ///
    /// [`Gone::Refused`] without any eventfd, or with more than [`MAX_QUEUES`] + 1.
    pub fn hello<Fd: AsFd>(&self, turn: BorrowedFd<'_>, kicks: &[Fd]) -> Result<(), Gone> {
        let queues = kicks.len().checked_sub(1).and_then(|n| u32::try_from(n).ok());
        let Some(queues) = queues.filter(|queues| *queues <= MAX_QUEUES) else {
            return Err(Gone::Refused(format!("{} eventfds", kicks.len())));
        };
        let hello = Hello { kind: Kind::HELLO, version: VERSION, queues, reserved: 0 };
        let fds: Vec<_> = std::iter::once(turn).chain(kicks.iter().map(AsFd::as_fd)).collect();
        fdpass::send(self.0.as_fd(), hello.as_bytes(), &fds, SendFlags::empty())?;
        Ok(())
    }

    /// Receives the next message. If there is none, it blocks, or returns `None` if it must not `wait`.
    pub fn receive(&self, wait: bool) -> Result<Option<FromHolder>, Gone> {
        packet(self.0.as_fd(), 2, wait)?.map(Packet::parse_from_holder).transpose()
    }

    /// Answers the [`Unmap`] or [`Control`] with this number, and everything before it. The holder always reads, so this
    /// does not block for long.
    pub fn done(&self, id: u64) -> Result<(), Gone> {
        let done = Done { kind: Kind::DONE, reserved: 0, id };
        fdpass::send::<BorrowedFd<'_>>(self.0.as_fd(), done.as_bytes(), &[], SendFlags::empty())?;
        Ok(())
    }
}

impl AsFd for EngineEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The holder's end of the connection. None of its functions blocks.
#[derive(Debug)]
pub struct HolderEnd(OwnedFd);

impl HolderEnd {
    /// Accepts an engine that has connected to `listener`, a nonblocking socket. `None` if there is none.
    pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Self(socket))),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Receives the next message, if there is one.
    pub fn receive(&self) -> Result<Option<FromEngine>, Gone> {
        packet(self.0.as_fd(), MAX_QUEUES as usize + 2, false)?.map(Packet::parse_from_engine).transpose()
    }

    /// Sends a message, if the engine has room for it.
    pub fn send(&self, message: ToEngine<'_>) -> Result<Sent, Gone> {
        match message {
            ToEngine::Welcome { terms: Terms { queues, slots, mapped, vectors }, state, doorbells } => {
                let mapped = u32::from(mapped);
                let welcome =
                    Welcome { kind: Kind::WELCOME, version: VERSION, queues, slots, mapped, vectors };
                self.packet(&welcome, &[state, doorbells])
            }
            ToEngine::Refused { reason, have } => {
                self.packet(&Refused { kind: Kind::REFUSED, reason, have, reserved: 0 }, &[])
            }
            ToEngine::Map { range: Range { iova, len, offset, writable }, file } => {
                let flags = if writable { Map::WRITABLE } else { 0 };
                self.packet(&Map { kind: Kind::MAP, flags, iova, len, offset, reserved: 0 }, &[file])
            }
            ToEngine::Unmap { id, iova, len } => {
                self.packet(&Unmap { kind: Kind::UNMAP, reserved: 0, id, iova, len }, &[])
            }
            ToEngine::Vector { number, eventfd } => {
                self.packet(&Vector { kind: Kind::VECTOR, number }, eventfd.as_slice())
            }
            ToEngine::Control { id } => self.packet(&Control { kind: Kind::CONTROL, reserved: 0, id }, &[]),
        }
    }

    fn packet(&self, message: &(impl IntoBytes + Immutable), fds: &[BorrowedFd<'_>]) -> Result<Sent, Gone> {
        match fdpass::send(self.0.as_fd(), message.as_bytes(), fds, SendFlags::DONTWAIT) {
            Ok(_) => Ok(Sent::Yes),
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS) => Ok(Sent::Later),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for HolderEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Receives one packet with at most `max_fds` descriptors.
fn packet(socket: BorrowedFd<'_>, max_fds: usize, wait: bool) -> Result<Option<Packet>, Gone> {
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let mut bytes = [0; MAX_LEN];
    let received = match fdpass::receive(socket, &mut bytes, max_fds, flags) {
        Err(Errno::AGAIN) if !wait => return Ok(None),
        other => other?,
    };
    if received.len == 0 && !received.truncated {
        return Err(Gone::Closed);
    }
    if received.truncated {
        return Err(Gone::Refused("a message is too long".to_owned()));
    }
    if received.fds_lost {
        let why = format!(
            "a message has more than {max_fds} descriptors, or this process has too many open: see RLIMIT_NOFILE"
        );
        return Err(Gone::Refused(why));
    }
    Ok(Some(Packet { bytes, len: received.len, fds: received.fds }))
}

/// A packet that has not been looked at yet.
struct Packet {
    bytes: [u8; MAX_LEN],
    len: usize,
    fds: Vec<OwnedFd>,
}

impl Packet {
    fn kind(&self) -> Kind {
        match self.bytes[..self.len].first_chunk() {
            Some(kind) => Kind(u32::from_le_bytes(*kind)),
            None => Kind(0),
        }
    }

    fn wrong(&self, why: &str) -> Gone {
        let (kind, len, fds) = (self.kind().0, self.len, self.fds.len());
        Gone::Refused(format!("a message of kind {kind} with {len} bytes and {fds} descriptors {why}"))
    }

    fn body<T: FromBytes + KnownLayout>(&self) -> Result<T, Gone> {
        T::read_from_bytes(&self.bytes[..self.len]).map_err(|_| self.wrong("has the wrong length"))
    }

    /// Returns the descriptors of a message that must have exactly so many.
    fn fds<const N: usize>(&mut self) -> Result<[OwnedFd; N], Gone> {
        match std::mem::take(&mut self.fds).try_into() {
            Ok(fds) => Ok(fds),
            Err(fds) => {
                self.fds = fds;
                Err(self.wrong(&format!("must have {N}")))
            }
        }
    }

    fn parse_from_engine(mut self) -> Result<FromEngine, Gone> {
        match self.kind() {
            Kind::HELLO => {
                let Hello { version, queues, .. } = self.body()?;
                if version != VERSION {
                    return Ok(FromEngine::Hello { version, turn: None, kicks: Vec::new() });
                }
                if self.fds.len() != queues as usize + 2 {
                    return Err(self.wrong("must have a lock, and one for each queue"));
                }
                let kicks = self.fds.split_off(1);
                Ok(FromEngine::Hello { version, turn: self.fds.pop(), kicks })
            }
            Kind::DONE => {
                let Done { id, .. } = self.body()?;
                let [] = self.fds()?;
                match id {
                    0 => Err(self.wrong("answers nothing")),
                    id => Ok(FromEngine::Done(id)),
                }
            }
            _ => Err(self.wrong("is not known")),
        }
    }

    fn parse_from_holder(mut self) -> Result<FromHolder, Gone> {
        match self.kind() {
            Kind::WELCOME => {
                let Welcome { version, queues, slots, mapped, vectors, .. } = self.body()?;
                let [state, doorbells] = self.fds()?;
                if version != VERSION || mapped > 1 || queues > MAX_QUEUES || !slots.is_power_of_two() {
                    return Err(self.wrong("has numbers that are not allowed"));
                }
                let terms = Terms { queues, slots, mapped: mapped == 1, vectors };
                Ok(FromHolder::Welcome { terms, state, doorbells })
            }
            Kind::REFUSED => {
                let Refused { reason, have, .. } = self.body()?;
                let [] = self.fds()?;
                Ok(FromHolder::Refused { reason, have })
            }
            Kind::MAP => {
                let Map { flags, iova, len, offset, .. } = self.body()?;
                let [file] = self.fds()?;
                let ends = len.checked_sub(1).is_some_and(|last| {
                    iova.checked_add(last).is_some() && offset.checked_add(last).is_some()
                });
                if !ends || flags & !Map::WRITABLE != 0 {
                    return Err(self.wrong("has a range that is not allowed"));
                }
                let range = Range { iova, len, offset, writable: flags & Map::WRITABLE != 0 };
                Ok(FromHolder::Map { range, file })
            }
            Kind::UNMAP => {
                let Unmap { id, iova, len, .. } = self.body()?;
                let [] = self.fds()?;
                Ok(FromHolder::Unmap { id, iova, len })
            }
            Kind::VECTOR => {
                let Vector { number, .. } = self.body()?;
                let eventfd = self.fds.pop();
                let [] = self.fds()?;
                Ok(FromHolder::Vector { number, eventfd })
            }
            Kind::CONTROL => {
                let Control { id, .. } = self.body()?;
                let [] = self.fds()?;
                Ok(FromHolder::Control { id })
            }
            _ => Err(self.wrong("is not known")),
        }
    }
}

#[cfg(test)]
mod tests;
