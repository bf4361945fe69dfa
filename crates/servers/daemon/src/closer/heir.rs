//! The **heir**: a process that shares this process's table of descriptors (`CLONE_FILES`) and outlives it.
//!
//! At the end of a process the kernel closes what it has open. If one of these closes waits for ever, so does the process, even after
//! `kill -9`. But the table lives on in the heir, so nothing is closed when the daemon ends. The heir then shuts down the sockets, so that
//! peers see the end and nobody connects any more, and closes files, so that their locks are free. Then it ends, if what is left can be
//! closed.
#![allow(unsafe_code)] // Descriptors that are known by number.

use crate::forked::{Forked, exit, has_ended, name};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

/// The descriptors that are looked at when the daemon has ended. It may not have had more.
const MOST: u64 = 1 << 20;

/// The daemon's side of the heir.
#[derive(Debug)]
pub struct Heir {
    /// Becomes readable when this process has ended.
    daemon: OwnedFd,
    child: Forked,
}

impl Heir {
    /// Starts the heir. The earlier this is, the less memory it keeps.
    pub fn start() -> io::Result<Self> {
        let daemon = pidfd_open(getpid(), PidfdFlags::empty())?;
        let child = start(daemon.as_fd())?;
        Ok(Self { daemon, child })
    }

    /// Starts another heir if there is none any more.
    pub fn keep(&mut self) {
        if !self.child.has_ended() {
            return;
        }
        match start(self.daemon.as_fd()) {
            Ok(child) => {
                tracing::warn!(
                    "the process that closes what this one leaves has ended, and is started again: was it killed?"
                );
                self.child = child;
            }
            Err(error) => tracing::error!(%error, "nobody will close what this process leaves"),
        }
    }
}

fn start(daemon: BorrowedFd<'_>) -> io::Result<Forked> {
    // SAFETY: `serve` makes system calls only.
    unsafe { Forked::start(|| serve(daemon)) }
}

/// What the heir does, by system calls only.
fn serve(daemon: BorrowedFd<'_>) -> ! {
    name(c"ginneld-heir");
    while !has_ended(daemon) {
        let _ = poll(&mut [PollFd::new(&daemon, PollFlags::IN)], None);
    }
    // Nothing here waits for what a stranger can hold.
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(MOST).min(MOST);
    // Standard input and output may be sockets that other programs share.
    for fd in 3..limit as RawFd {
        // SAFETY: nobody closes it meanwhile, because no other process with this table lives.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let Ok(stat) = rustix::fs::fstat(borrowed) else { continue };
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            // Sockets are closed last, together, because that may take for ever. Nobody can connect to one that was shut down.
            rustix::fs::FileType::Socket => {
                let _ = shutdown(borrowed, Shutdown::Both);
                if socket_acceptconn(borrowed) == Ok(true) {
                    while let Ok(waiting) = accept_with(borrowed, SocketFlags::CLOEXEC) {
                        let _ = shutdown(&waiting, Shutdown::Both);
                        let _ = waiting.into_raw_fd();
                    }
                }
            }
            // What an epoll or an eventfd is closed with may be anything, too. Nobody misses them.
            rustix::fs::FileType::Unknown => {}
            // SAFETY: the daemon, which has opened it, has ended.
            _ => unsafe {
                libc::close(fd);
            },
        }
    }
    exit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::wait_until;

    #[test]
    fn one_that_was_killed_is_replaced() {
        let mut heir = Heir::start().unwrap();
        let first = heir.child.pid();
        heir.keep();
        assert_eq!(heir.child.pid(), first);
        rustix::process::kill_process(first, rustix::process::Signal::KILL).unwrap();
        wait_until("its end", || heir.child.has_ended());
        heir.keep();
        assert_ne!(heir.child.pid(), first);
        assert!(!heir.child.has_ended());
    }
}
