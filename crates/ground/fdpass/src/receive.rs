//! Receiving a message with its file descriptors.

use crate::MAX_FDS;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The result of one call of [`receive`].
#[derive(Debug)]
pub struct Received {
    /// The number of bytes of the buffer that were filled. 0 is the end of the connection, or an empty packet on a seqpacket
    /// socket.
    pub len: usize,
    /// The descriptors, close-on-exec; empty if `fds_lost`.
    pub fds: Vec<OwnedFd>,
    /// The packet was longer than the buffer, and the rest is lost. This is never set on a stream socket.
    pub truncated: bool,
    /// The message carried more descriptors than were asked for, or more than this process may open now. All are closed.
    pub fds_lost: bool,
    /// The process that sent the message, according to the kernel. Only [`receive_from`] sets it. It is `None` if the process is
    /// in a process namespace that is not visible from here, or if the socket lacks `SO_PASSCRED`.
    pub sender: Option<u32>,
}

/// Receives one packet, or the bytes that a stream has, into `into`, with at most `max_fds` descriptors ([`MAX_FDS`] if that is
/// less). The kernel installs no more than that in this process.
///
/// Blocks if the socket does; with [`RecvFlags::DONTWAIT`] it never blocks. For a socket with `SO_PASSCRED` use
/// [`receive_from`]: here the credentials find no room, so every message would count as one whose descriptors were lost.
///
/// # Errors
///
/// [`Errno::AGAIN`] if there is nothing to receive and the socket does not block, or if its timeout (`SO_RCVTIMEO`) expired.
/// Otherwise the errors of `recvmsg(2)`, except `EINTR`.
pub fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    max_fds: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    receive_with(socket, into, max_fds, 0, flags)
}

/// Does the same as [`receive`] for a socket with `SO_PASSCRED`, and returns which process sent the message.
pub fn receive_from(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    max_fds: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    receive_with(socket, into, max_fds, CREDENTIALS, flags)
}

/// The size of a control message's header, after which its data begins.
const HEADER: usize = length(0);
/// Room for the sender's credentials when other messages follow them.
const CREDENTIALS: usize = length(size_of::<libc::ucred>()).next_multiple_of(size_of::<usize>());
/// Room for everything that a caller may ask for.
const SPACE: usize = CREDENTIALS + length(MAX_FDS * size_of::<RawFd>());

/// Returns the bytes of a control message with `data` bytes, without the padding behind it. The kernel divides the remaining room
/// by the size of a descriptor, so padding would let in descriptors that the caller has not asked for.
const fn length(data: usize) -> usize {
    // SAFETY: this only computes a number.
    unsafe { libc::CMSG_LEN(data as libc::c_uint) as usize }
}

/// A buffer that is aligned as control messages require.
#[repr(C, align(8))]
struct Control([u8; SPACE]);

fn receive_with(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    max_fds: usize,
    credentials: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let max_fds = max_fds.min(MAX_FDS);
    let room = credentials
        + match max_fds {
            0 => 0,
            n => length(n * size_of::<RawFd>()),
        };
    let mut control = Control([0; SPACE]);
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: zeros are a valid `msghdr` without buffers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    let flags = flags.bits() as libc::c_int | libc::MSG_CMSG_CLOEXEC;
    let mut was_reset = false;
    let len = loop {
        // The previous call may have changed these fields.
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), room as _);
        // SAFETY: the kernel writes at most `into.len()` bytes to `into` and `room` bytes to `control`, which is not less
        // than that, and both outlive the call.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
        match usize::try_from(got).map_err(|_| last_error()) {
            Ok(len) => break len,
            Err(Errno::INTR) => {}
            // The kernel reports this once if the peer closed its end before it had read everything. What the peer sent before
            // that can still be received, and then comes the end of the connection.
            Err(Errno::CONNRESET) if !was_reset => was_reset = true,
            Err(errno) => return Err(errno),
        }
    };
    let used = control.0.get(..message.msg_controllen as usize).unwrap_or_default();
    // SAFETY: these are the control messages that the kernel has just written, and nobody else has seen them.
    let (mut fds, sender) = unsafe { parse(used) };
    let fds_lost = message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > max_fds;
    if fds_lost {
        fds.clear();
    }
    Ok(Received { len, fds, truncated: message.msg_flags & libc::MSG_TRUNC != 0, fds_lost, sender })
}

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Returns the descriptors and the sender's process number from control messages. Does not use `CMSG_NXTHDR`, which skips a last
/// message whose padding is cut off and would leak its descriptors.
///
/// # Safety
///
/// The descriptors in `messages` must be open, and nobody else may own them.
unsafe fn parse(mut messages: &[u8]) -> (Vec<OwnedFd>, Option<u32>) {
    let (mut fds, mut sender) = (Vec::new(), None);
    while messages.len() >= HEADER {
        // SAFETY: there are enough bytes, and any bytes are a valid header.
        let header: libc::cmsghdr = unsafe { messages.as_ptr().cast::<libc::cmsghdr>().read_unaligned() };
        let len = header.cmsg_len;
        let Some(data) = messages.get(HEADER..len) else { break };
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let (numbers, _) = data.as_chunks();
                // SAFETY: the caller guarantees that the descriptors are open and owned by nobody else.
                fds.extend(
                    numbers.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(*fd)) }),
                );
            }
            // A `ucred` begins with the process number.
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                let pid = data.first_chunk().map(|pid| u32::from_ne_bytes(*pid));
                sender = pid.filter(|pid| *pid != 0);
            }
            _ => {}
        }
        messages = messages.get(len.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
    }
    (fds, sender)
}
const _: () = assert!(std::mem::offset_of!(libc::ucred, pid) == 0 && size_of::<libc::pid_t>() == 4);
