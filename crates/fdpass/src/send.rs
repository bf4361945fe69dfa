//! Sending.

use crate::MAX_FDS;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

/// Sends `bytes`, and `fds` with the first of them. Returns how many bytes the socket took: on a seqpacket socket all of
/// them, on a stream socket at least one. The descriptors have gone in either case, so the rest is sent without them.
///
/// Blocks as the socket does; with [`SendFlags::DONTWAIT`] it never blocks.
///
/// # Errors
///
/// [`Errno::AGAIN`] if the socket has no room and does not block, or its timeout (`SO_SNDTIMEO`) expired.
/// [`Errno::INVAL`] for more than [`MAX_FDS`] descriptors, or for descriptors without a byte to carry them: a stream socket
/// would drop them silently. Otherwise what `sendmsg(2)` returns, except `EINTR`. Nothing was sent.
pub fn send<Fd: AsFd>(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[Fd],
    flags: SendFlags,
) -> Result<usize, Errno> {
    if fds.len() > MAX_FDS || (bytes.is_empty() && !fds.is_empty()) {
        return Err(Errno::INVAL);
    }
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Sends all of `bytes` on a stream socket, and `fds` with the first of them, in as many calls as that takes.
///
/// # Errors
///
/// As [`send`]. An unknown part of the message may have been sent, so the connection is of no further use.
pub fn send_all<Fd: AsFd>(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[Fd],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut sent = send(socket, bytes, fds, flags)?;
    while sent < bytes.len() {
        sent += send::<BorrowedFd<'_>>(socket, &bytes[sent..], &[], flags)?;
    }
    Ok(())
}
