//! Sending a message with file descriptors.

use crate::MAX_FDS;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

/// Sends `bytes`, and `fds` with the first of them. Returns how many bytes the socket took: all of them on a seqpacket socket, at
/// least one on a stream socket. The descriptors have been sent in either case, so the caller sends the rest without them.
///
/// Blocks if the socket does; with [`SendFlags::DONTWAIT`] it never blocks.
///
/// # Errors
///
/// [`Errno::AGAIN`] if the socket has no room and does not block, or if its timeout (`SO_SNDTIMEO`) expired.
/// [`Errno::INVAL`] for more than [`MAX_FDS`] descriptors, or for descriptors without a byte to carry them, which a stream socket
/// would drop silently. Otherwise the errors of `sendmsg(2)`, except `EINTR`. On an error nothing was sent.
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
/// The same as for [`send`]. An unknown part of the message may have been sent, so the connection cannot be used any further.
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
