//! `SOCK_SEQPACKET` sockets: listening, whole packets in, whole packets with file descriptors out.
//!
//! A peer that never reads costs a bounded amount of memory: what the socket does not take waits in a queue, and when
//! that is full the peer is given up.
#![allow(unsafe_code)] // One socket option (SO_PEERGROUPS) that no safe crate offers.

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// The most descriptors that one packet can carry (`SCM_MAX_FD` of the kernel).
pub const MAX_FDS: usize = 253;

/// Waiting connections of a listening socket.
const BACKLOG: i32 = 256;

/// What came in.
#[derive(Debug)]
pub struct Packet {
    /// The content.
    pub bytes: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<OwnedFd>,
    /// The packet was longer than [`PacketSocket::receive`] allowed, or carried more descriptors; the rest is lost.
    pub truncated: bool,
}

/// The connection is over.
#[derive(Debug, Error)]
pub enum Gone {
    /// The peer has closed it.
    #[error("the peer has closed the connection")]
    Closed,
    /// The peer does not read what it is sent.
    #[error("the peer does not read: {0} bytes wait for it")]
    NotReading(usize),
    /// The system says so.
    #[error("{0}")]
    Io(#[from] Errno),
}

/// A connected, non-blocking socket.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    queue: VecDeque<(Vec<u8>, Vec<Arc<OwnedFd>>)>,
    queued: usize,
    limit: usize,
}

impl PacketSocket {
    /// Takes over a connected non-blocking socket. While more than `limit` bytes wait for the peer, sending fails.
    pub fn new(fd: OwnedFd, limit: usize) -> Self {
        Self { fd, queue: VecDeque::new(), queued: 0, limit }
    }

    /// The next packet of at most `max` bytes and `max_fds` descriptors; `None` if there is none now. Descriptors that
    /// nobody asked for never get into this process.
    pub fn receive(&self, max: usize, max_fds: usize) -> Result<Option<Packet>, Gone> {
        match receive(self.fd.as_fd(), max, max_fds) {
            Err(Gone::Io(Errno::AGAIN | Errno::INTR)) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Sends one packet, or queues it.
    pub fn send(&mut self, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> Result<(), Gone> {
        self.send_all([(bytes, fds)])
    }

    /// Sends several packets that belong together, or queues them: the limit is looked at once, before the first. So an
    /// answer that is longer than the limit can be given, but not a second one.
    pub fn send_all(
        &mut self,
        packets: impl IntoIterator<Item = (Vec<u8>, Vec<Arc<OwnedFd>>)>,
    ) -> Result<(), Gone> {
        if self.queued > self.limit {
            return Err(Gone::NotReading(self.queued));
        }
        for packet in packets {
            // A packet of few bytes costs the kernel and us more than that.
            self.queued += packet.0.len() + 64;
            self.queue.push_back(packet);
        }
        self.flush()
    }

    /// Sends what waits, as far as the socket takes it.
    pub fn flush(&mut self) -> Result<(), Gone> {
        while let Some((bytes, fds)) = self.queue.front() {
            match send(self.fd.as_fd(), bytes, fds) {
                Ok(()) => {
                    self.queued -= bytes.len() + 64;
                    self.queue.pop_front();
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Gone::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Bytes that wait for the peer; more than zero: call [`PacketSocket::flush`] when the socket has room.
    pub fn queued(&self) -> usize {
        self.queued
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Receives one packet. [`Gone::Io`] with `AGAIN` if there is none and the socket does not block.
pub fn receive(fd: BorrowedFd<'_>, max: usize, max_fds: usize) -> Result<Packet, Gone> {
    let mut bytes = vec![0; max];
    let mut space = match max_fds {
        0 => Vec::new(),
        n => vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(n.min(MAX_FDS)))],
    };
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let got = match got {
        Ok(got) => got,
        Err(Errno::CONNRESET) => return Err(Gone::Closed),
        Err(errno) => return Err(errno.into()),
    };
    let fds = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        })
        .collect();
    if got.bytes == 0 {
        return Err(Gone::Closed); // Or an empty packet, which nobody sends in good faith.
    }
    bytes.truncate(got.bytes);
    Ok(Packet { bytes, fds, truncated: got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) })
}

/// Sends one packet with descriptors.
pub fn send<Fd: AsFd>(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[Fd]) -> Result<(), Errno> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if fds.len() > MAX_FDS {
        return Err(Errno::INVAL);
    }
    let mut space = match fds.len() {
        0 => Vec::new(),
        n => vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(n))],
    };
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
}

/// Who has connected, as the kernel knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process; 0 if it is in a process namespace that we cannot see.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Who was at the other end of a Unix socket when it connected.
pub fn peer(fd: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and any bytes are a valid `ucred`.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let libc::ucred { pid, uid, gid } = credentials;
    Ok(Peer { pid: u32::try_from(pid).unwrap_or(0), uid, gid, groups: peer_groups(fd) })
}

/// Supplementary groups of the peer; none if the kernel does not say.
fn peer_groups(fd: BorrowedFd<'_>) -> Vec<u32> {
    const SO_PEERGROUPS: libc::c_int = 59; // since Linux 4.13
    let mut groups: Vec<u32> = vec![0; 64];
    loop {
        let mut len = (groups.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, and `groups` has them.
        let result = unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let n = len as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(n);
            return groups;
        }
        // ERANGE says how many there are; Linux allows 65536.
        if io::Error::last_os_error().raw_os_error() != Some(libc::ERANGE) || n <= groups.len() || n > 65536 {
            return Vec::new();
        }
        groups.resize(n, 0);
    }
}

/// A listening socket at `path`, in place of what an earlier daemon has left there. The caller must have made sure that
/// no other daemon lives (a lock file), because a socket in use would be replaced as well.
pub fn listen_at(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    listen_at_with(path, kind, |_| Ok(()))
}

/// The same; `prepare` gives the socket its owner and mode. Whoever connects finds the old socket, which refuses, or the
/// new one, which is ready: never none, and never one that does not let him in yet.
pub fn listen_at_with(
    path: &Path,
    kind: SocketType,
    prepare: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is no socket is there"));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Short, so that it fits wherever the daemon's own socket does.
    let new = path.with_file_name(".new.sock");
    let _ = std::fs::remove_file(&new); // Left by a daemon that was killed in here.
    SocketAddrUnix::new(path)?;
    let fd = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    bind(&fd, &SocketAddrUnix::new(&new)?)?;
    prepare(&new)?;
    listen(&fd, BACKLOG)?;
    std::fs::rename(&new, path)?;
    Ok(fd)
}

/// The next waiting connection, non-blocking; `None` if there is none.
pub fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    loop {
        return match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::AGAIN) => Ok(None),
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(errno) => Err(errno),
        };
    }
}

/// Connects to a seqpacket socket. The socket blocks.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::socketpair;

    fn pair(limit: usize) -> (PacketSocket, PacketSocket) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (PacketSocket::new(a, limit), PacketSocket::new(b, limit))
    }

    #[test]
    fn packets_and_descriptors_arrive_whole_and_in_order() {
        let (mut a, b) = pair(1 << 20);
        let (read, write) = rustix::pipe::pipe().unwrap();
        a.send(b"one".to_vec(), vec![Arc::new(write)]).unwrap();
        a.send(b"two".to_vec(), vec![]).unwrap();
        let one = b.receive(10, 1).unwrap().unwrap();
        assert_eq!((one.bytes.as_slice(), one.fds.len(), one.truncated), (&b"one"[..], 1, false));
        rustix::io::write(&one.fds[0], b"x").unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0u8; 4]), Ok(1));
        assert_eq!(b.receive(10, 0).unwrap().unwrap().bytes, b"two");
        assert!(b.receive(10, 0).unwrap().is_none());
        drop(a);
        assert!(matches!(b.receive(10, 0), Err(Gone::Closed)));
    }

    #[test]
    fn what_was_not_asked_for_is_cut_off_and_said() {
        let (mut a, b) = pair(1 << 20);
        let (read, write) = rustix::pipe::pipe().unwrap();
        a.send(b"x".to_vec(), vec![Arc::new(write)]).unwrap();
        a.send(b"too long".to_vec(), vec![]).unwrap();
        let got = b.receive(10, 0).unwrap().unwrap();
        assert!(got.truncated && got.fds.is_empty());
        drop(a);
        // The descriptor is open nowhere: the pipe has no writer.
        assert_eq!(rustix::io::read(&read, &mut [0u8; 4]), Ok(0));
        assert!(b.receive(3, 0).unwrap().unwrap().truncated);
    }

    #[test]
    fn a_peer_that_never_reads_is_given_up() {
        let (mut a, b) = pair(10_000);
        let result = (0..100_000).find_map(|_| a.send(vec![7; 1000], vec![]).err());
        assert!(matches!(result, Some(Gone::NotReading(n)) if n < 20_000), "{result:?}");
        // What was queued is not lost if the peer does read.
        let mut got = 0;
        while b.receive(2000, 0).unwrap().is_some() {
            got += 1;
            a.flush().unwrap();
        }
        assert!(got > 10 && a.queued() == 0);
    }

    #[test]
    fn the_peer_is_who_it_is() {
        let (a, _b) = pair(1);
        let peer = peer(a.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
    }
}
