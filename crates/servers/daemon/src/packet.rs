//! `SOCK_SEQPACKET` sockets: listening, receiving whole packets, and sending whole packets with file descriptors.
//!
//! A peer that never reads costs a bounded amount of memory: packets that the socket does not take wait in a queue, and when
//! the queue is full, the connection fails.
#![allow(unsafe_code)] // For socket options and credentials that no safe crate offers, or not soundly.

use crate::closer::{Closer, Connected};
pub use ginnel_fdpass::MAX_FDS;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use rustix::fs::{FsWord, fstat, fstatfs};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// The number of connections that may wait at a listening socket.
pub const BACKLOG: i32 = 256;

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// The content.
    pub bytes: Vec<u8>,
    /// The descriptors that came with the packet.
    pub fds: Vec<OwnedFd>,
    /// Part of the packet is lost. It was longer than the receiver allowed; or it carried more descriptors than the receiver
    /// allowed or than this process may open, and then `fds` is empty.
    pub truncated: bool,
}

/// A packet of a program.
#[derive(Debug)]
pub struct Heard {
    /// The content.
    pub bytes: Vec<u8>,
    /// The packet carries descriptors, and is still in the socket's queue.
    pub carries_fds: bool,
    /// The packet was longer than the receiver allowed, and the rest is lost.
    pub truncated: bool,
    /// The process that sent the packet, according to the kernel. `None` if the process is in a process namespace that is not
    /// visible from here.
    pub sender: Option<u32>,
}

/// The reason why a connection is over.
#[derive(Debug, Error)]
pub enum Gone {
    /// The peer has closed it.
    #[error("the peer has closed the connection")]
    Closed,
    /// The peer does not read the packets that are sent to it.
    #[error("the peer does not read: {0} bytes wait for it")]
    NotReading(usize),
    /// A system call failed.
    #[error("{0}")]
    Io(#[from] Errno),
}

/// A connected, non-blocking socket.
#[derive(Debug)]
pub struct PacketSocket {
    fd: Connected,
    queue: VecDeque<(Vec<u8>, Vec<Arc<OwnedFd>>)>,
    queued: usize,
    limit: usize,
    /// The peer has closed its end. Packets that it sent before that can still be received.
    peer_closed: bool,
}

impl PacketSocket {
    /// Takes over a connected non-blocking socket. Sending fails while more than `limit` bytes wait for the peer.
    pub fn new(fd: OwnedFd, limit: usize) -> Self {
        Self::with(Connected::trusted(fd), limit)
    }

    /// Does the same as `new` for a connection to a program, which a [`Closer`] must close.
    pub fn to_program(fd: OwnedFd, limit: usize, closer: &Closer) -> Self {
        Self::with(Connected::new(fd, closer), limit)
    }

    fn with(fd: Connected, limit: usize) -> Self {
        Self { fd, queue: VecDeque::new(), queued: 0, limit, peer_closed: false }
    }

    /// Returns the next packet, with at most `max` bytes and `max_fds` descriptors; `None` if there is none now. Descriptors
    /// beyond `max_fds` never get into this process.
    pub fn receive(&self, max: usize, max_fds: usize) -> Result<Option<Packet>, Gone> {
        match receive(self.fd.as_fd(), max, max_fds) {
            Err(Gone::Io(Errno::AGAIN)) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Returns the next packet of a program, in the caller's buffer, which must be as long as the longest packet; `None` if there
    /// is none now. A packet that carries descriptors stays in the queue until a helper takes it ([`crate::strangers`]).
    pub fn hear(&self, buffer: &mut [u8]) -> Result<Option<Heard>, Gone> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let got = match fdpass::receive_from(self.fd.as_fd(), buffer, 0, flags) {
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Err(Gone::Closed),
            other => other?,
        };
        if got.len == 0 {
            return Err(Gone::Closed); // An empty packet looks the same, but no honest program sends one.
        }
        let carries_fds = got.fds_lost;
        if !carries_fds {
            // Nobody else takes packets from this socket now, so this is the same one.
            fdpass::receive(self.fd.as_fd(), &mut [], 0, RecvFlags::DONTWAIT)?;
        }
        let bytes = buffer[..got.len.min(buffer.len())].to_vec();
        Ok(Some(Heard { bytes, carries_fds, truncated: got.truncated, sender: got.sender }))
    }

    /// Sends one packet, or queues it.
    pub fn send(&mut self, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> Result<(), Gone> {
        self.send_all([(bytes, fds)])
    }

    /// Sends several packets that belong together, or queues them. The limit is checked once, before the first packet. So one
    /// answer that is longer than the limit can be sent, but not a second one.
    pub fn send_all(
        &mut self,
        packets: impl IntoIterator<Item = (Vec<u8>, Vec<Arc<OwnedFd>>)>,
    ) -> Result<(), Gone> {
        if self.queued > self.limit {
            return Err(Gone::NotReading(self.queued));
        }
        for packet in packets {
            // A short packet costs the kernel and this process more memory than its bytes.
            self.queued += packet.0.len() + 64;
            self.queue.push_back(packet);
        }
        self.flush()
    }

    /// Sends the queued packets as far as the socket takes them. If the peer has closed its end, this drops them and returns no
    /// error: [`PacketSocket::receive`] reports the end after the last packet that the peer has sent.
    pub fn flush(&mut self) -> Result<(), Gone> {
        if self.peer_closed {
            self.queue.clear();
            self.queued = 0;
        }
        while let Some((bytes, fds)) = self.queue.front() {
            match send(self.fd.as_fd(), bytes, fds) {
                Ok(()) => {
                    self.queued -= bytes.len() + 64;
                    self.queue.pop_front();
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.peer_closed = true;
                    return self.flush();
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Returns whether the peer has not received everything yet that was sent to it.
    pub fn has_unread(&self) -> bool {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one `int`.
        let result = unsafe { libc::ioctl(self.fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        self.queued > 0 || (result == 0 && bytes > 0)
    }

    /// Returns the number of bytes that wait for the peer. If it is more than zero, call [`PacketSocket::flush`] when the socket
    /// has room.
    pub fn queued(&self) -> usize {
        self.queued
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Receives one packet. Returns [`Gone::Io`] with `AGAIN` if there is none and the socket does not block.
pub fn receive(fd: BorrowedFd<'_>, max: usize, max_fds: usize) -> Result<Packet, Gone> {
    let mut bytes = vec![0; max];
    let got = fdpass::receive(fd, &mut bytes, max_fds, RecvFlags::empty()).map_err(|errno| match errno {
        Errno::CONNRESET => Gone::Closed,
        errno => errno.into(),
    })?;
    if got.len == 0 {
        return Err(Gone::Closed); // An empty packet looks the same, but nobody sends one.
    }
    bytes.truncate(got.len);
    Ok(Packet { bytes, fds: got.fds, truncated: got.truncated || got.fds_lost })
}

/// Sends one packet with descriptors.
pub fn send<Fd: AsFd>(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[Fd]) -> Result<(), Errno> {
    fdpass::send(fd, bytes, fds, SendFlags::empty()).map(drop)
}

/// The process at the other end of a connection, according to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process number; 0 if the process is in a process namespace that is not visible from here.
    pub pid: u32,
    /// The user number.
    pub uid: u32,
    /// The group number.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Returns the process that was at the other end of a Unix socket when it connected.
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

/// Returns a descriptor of the process that was at the other end of a Unix socket when it connected. Fails with `ENOPROTOOPT` on
/// kernels before Linux 6.5. Other errors may mean that the process has ended.
pub fn peer_pidfd(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut pidfd: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and any bytes are a valid number.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has made this descriptor for the caller of the system call.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Returns whether the same process was at the other ends of two connections when they were made, also if its number is not visible from
/// here. `None` if the kernel does not tell, as before Linux 6.9.
pub fn have_same_peer(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Option<bool> {
    Some(peer_identity(one)? == peer_identity(other)?)
}

/// Returns a number of the peer's process that no other process has before the next boot.
fn peer_identity(fd: BorrowedFd<'_>) -> Option<u64> {
    /// The file system of pidfds, which has a file for each process. Before there was one, all pidfds were the same file.
    const PIDFS: FsWord = 0x5049_4446;
    let pidfd = peer_pidfd(fd).ok()?;
    let is_own_file = fstatfs(&pidfd).ok()?.f_type == PIDFS;
    is_own_file.then_some(fstat(&pidfd).ok()?.st_ino)
}

/// Returns the supplementary groups of the peer; none if the kernel does not tell them.
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
        // ERANGE comes with the number of groups; Linux allows 65536.
        if io::Error::last_os_error().raw_os_error() != Some(libc::ERANGE) || n <= groups.len() || n > 65536 {
            return Vec::new();
        }
        groups.resize(n, 0);
    }
}

/// Makes a listening socket at `path`, in place of one that an earlier daemon has left there. The caller must have made sure that
/// no other daemon is running (by a lock file), because a socket in use would be replaced as well.
pub fn listen_at(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    listen_at_with(path, kind, |_, _| Ok(()))
}

/// Makes the kernel tell for each packet which process sent it, on all connections of a listening socket. The connections
/// inherit this option, so it must be set before the socket can be reached.
pub fn ask_for_senders(listener: BorrowedFd<'_>) -> io::Result<()> {
    Ok(set_socket_passcred(listener, true)?)
}

/// Does the same as [`listen_at`]. `prepare` gets the socket and its path before anybody can connect, and sets its owner, mode
/// and options. A program that connects finds either the old socket, which refuses the connection, or the new one, which is
/// ready.
pub fn listen_at_with(
    path: &Path,
    kind: SocketType,
    prepare: impl FnOnce(BorrowedFd<'_>, &Path) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something that is not a socket is there",
            ));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // This name is short, so that it fits wherever the daemon's own socket does.
    let new = path.with_file_name(".new.sock");
    let _ = std::fs::remove_file(&new); // A daemon that was killed in this function may have left it.
    SocketAddrUnix::new(path)?;
    let fd = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    bind(&fd, &SocketAddrUnix::new(&new)?)?;
    prepare(fd.as_fd(), &new)?;
    listen(&fd, BACKLOG)?;
    std::fs::rename(&new, path)?;
    Ok(fd)
}

/// Returns the next waiting connection, non-blocking; `None` if there is none.
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

/// Connects to a seqpacket socket. The returned socket blocks.
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
    fn a_packet_that_exceeds_the_limits_is_truncated_and_reported() {
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
    fn each_packet_comes_with_its_sender_and_never_with_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listen_at_with(&path, SocketType::SEQPACKET, |fd, _| ask_for_senders(fd)).unwrap();
        let client = connect_to(&path).unwrap();
        let me = std::process::id();
        // This packet is sent before the connection is accepted.
        send::<OwnedFd>(client.as_fd(), b"early", &[]).unwrap();
        let server = PacketSocket::new(accept(listener.as_fd()).unwrap().unwrap(), 1 << 20);
        let hear = |len| server.hear(&mut vec![0; len]);
        let early = hear(100).unwrap().unwrap();
        assert_eq!((early.bytes.as_slice(), early.sender, early.truncated), (&b"early"[..], Some(me), false));
        assert!(!early.carries_fds);
        // Another process sends over the same connection.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "printf child >&0"])
            .stdin(client.try_clone().unwrap())
            .spawn()
            .unwrap();
        let number = child.id();
        assert!(child.wait().unwrap().success());
        let packet = hear(100).unwrap().unwrap();
        assert_eq!(
            (packet.bytes.as_slice(), packet.sender),
            (&b"child"[..], Some(number)),
            "although it has ended"
        );
        send::<OwnedFd>(client.as_fd(), b"too long", &[]).unwrap();
        assert!(hear(3).unwrap().unwrap().truncated);
        assert!(hear(3).unwrap().is_none());
        // A packet with a descriptor stays where it is, and the descriptor is open there only.
        let (read, write) = rustix::pipe::pipe().unwrap();
        send(client.as_fd(), b"gift", &[write]).unwrap();
        for _ in 0..2 {
            let gift = hear(100).unwrap().unwrap();
            assert_eq!((gift.bytes.as_slice(), gift.carries_fds), (&b"gift"[..], true));
        }
        assert!(
            fdpass::receive_from(server.as_fd(), &mut [0; 4], 8, RecvFlags::empty()).unwrap().fds.len() == 1
        );
        assert_eq!(rustix::io::read(&read, &mut [0u8; 4]), Ok(0));
        drop(client);
        assert!(matches!(hear(3), Err(Gone::Closed)));
    }

    #[test]
    fn the_connection_of_a_peer_that_never_reads_fails() {
        let (mut a, b) = pair(10_000);
        let result = (0..100_000).find_map(|_| a.send(vec![7; 1000], vec![]).err());
        assert!(matches!(result, Some(Gone::NotReading(n)) if n < 20_000), "{result:?}");
        // Queued packets are not lost if the peer does read.
        let mut got = 0;
        while b.receive(2000, 0).unwrap().is_some() {
            got += 1;
            a.flush().unwrap();
        }
        assert!(got > 10 && a.queued() == 0);
    }

    #[test]
    fn the_kernel_identifies_the_peer() {
        let (a, _b) = pair(1);
        let peer = peer(a.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
    }
}
