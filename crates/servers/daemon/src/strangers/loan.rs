//! A descriptor that a program lends with a report. It lies in the queue of a Unix socket, of which the program has kept a copy.
//! So the program can take it back until the helper takes it, and the end of that socket tells the program that the helper has
//! closed it.

use crate::interrupt::interrupted;
use ginnel_fdpass::{MAX_FDS, RecvFlags, receive_from};
use rustix::net::{AddressFamily, sockopt};
use std::mem::replace;
use std::os::fd::{AsFd, OwnedFd};

/// Replaces the socket in `fds` by the descriptor that was lent in it. Returns the descriptors to close after it. If the program
/// lent nothing (because it took the descriptor back) or more than one descriptor, `fds` keeps the socket, which is not a TCP
/// socket.
#[must_use]
pub fn open(fds: &mut Vec<OwnedFd>) -> Vec<OwnedFd> {
    let [socket] = &fds[..] else { return Vec::new() };
    if sockopt::socket_domain(socket) != Ok(AddressFamily::UNIX) {
        return Vec::new();
    }
    // The program has this socket too, and may set options that leave no room for descriptors: then the kernel closes them in
    // this call.
    let got = interrupted(|| receive_from(socket.as_fd(), &mut [0], MAX_FDS, RecvFlags::DONTWAIT));
    match got.map(|got| got.fds) {
        Ok(lent) if lent.len() == 1 => replace(fds, lent),
        Ok(others) => others,
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_fdpass::{SendFlags, send};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_lent_descriptor_is_closed_before_the_program_sees_the_end() {
        let (near, far) = pair();
        let (socket, peer) = pair();
        send(near.as_fd(), &[0], &[&socket], SendFlags::empty()).unwrap();
        drop(socket);
        let mut fds = vec![far];
        let rest = open(&mut fds);
        assert_eq!((fds.len(), rest.len()), (1, 1));
        drop(fds);
        drop(rest);
        assert_eq!(rustix::io::read(&near, &mut [0]), Ok(0));
        let ended = poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        assert_eq!(ended, Ok(1));
    }

    #[test]
    fn exactly_one_descriptor_can_be_lent() {
        for count in [0, 2, 20] {
            let (near, far) = pair();
            let (socket, peer) = pair();
            send(near.as_fd(), &[0], &vec![&socket; count], SendFlags::empty()).unwrap();
            drop(socket);
            let mut fds = vec![far];
            let rest = open(&mut fds);
            assert_eq!((fds.len(), rest.len()), (1, count));
            drop(rest);
            assert_eq!(rustix::io::read(&peer, &mut [0]), Ok(0), "all are closed");
            assert_eq!(open(&mut fds).len(), 0, "there is no more");
        }
    }
}
