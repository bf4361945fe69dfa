//! The **finder**: a process that connects to the control socket of a QEMU for the daemon.
//!
//! Others may hold the lock of a folder on the way there, or have put a file system on it that does not answer. If the finder takes long,
//! it is killed, and not waited for. It is the daemon without `exec`, see `forked`.
#![allow(unsafe_code)] // A process without `exec`.

use crate::closer::{Closer, Connected};
use crate::forked::{Abandoned, Forked, Shared, name, part_from_daemon};
use crate::namer::Unnamed;
use crate::patience::Patience;
use crate::poller::becomes_readable;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// How long the daemon waits for each path, at most at a time, and how much of that comes back, in percent of the time that passes.
const PATIENCE: (Duration, u32) = (Duration::from_millis(500), 2);

/// The daemon's side of the finder.
#[derive(Debug, Default)]
pub struct Finder {
    /// How long each path may be waited for: what one QEMU's user uses up, others have all the same.
    patience: BTreeMap<PathBuf, Patience>,
    /// What is looked up by those that may be held up.
    abandoned: Vec<(PathBuf, Abandoned)>,
}

impl Finder {
    /// Connects to a socket, also through symbolic links: whoever makes these finds out no more than by a socket of his own, because the
    /// daemon speaks only to the process that it expects there. Waits for a short time only.
    pub fn connect(&mut self, path: &Path, closer: &Closer) -> Result<Connected, Unnamed> {
        self.abandoned.retain(|(_, finder)| !finder.is_buried());
        let begin = Instant::now();
        let patience =
            self.patience.entry(path.to_owned()).or_insert_with(|| Patience::new(PATIENCE.0, PATIENCE.1));
        let left = patience.left(begin);
        if left.is_zero() || self.abandoned.iter().any(|(of, _)| of == path) {
            return Err(Unnamed::Held);
        }
        let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io::Error::from)?;
        let outcome = Shared::new()?;
        let finder = start(&socket, &address, &outcome)?;
        let has_ended = becomes_readable(finder.ended(), Some(begin + left));
        patience.waited(begin.elapsed());
        if !has_ended {
            self.abandoned.push((path.to_owned(), finder.abandon()));
            // It may be connected by now, and have something in its queue that nobody can close.
            drop(Connected::new(socket, closer));
            return Err(Unnamed::Held);
        }
        // The finder has ended, and its end was seen after all that it has done.
        match outcome.load(Ordering::Relaxed) {
            CONNECTED => Ok(Connected::new(socket, closer)),
            KILLED => Err(io::Error::other("the process that connects was killed").into()),
            errno => Err(io::Error::from_raw_os_error(errno).into()),
        }
    }
}

/// What a finder says that has connected; otherwise it says the error number.
const CONNECTED: i32 = -1;
/// What one has said that was killed first.
const KILLED: i32 = 0;

/// Starts a finder that connects this socket.
fn start(socket: &OwnedFd, address: &SocketAddrUnix, outcome: &Shared<AtomicI32>) -> io::Result<Forked> {
    // SAFETY: `part_from_daemon`, `name` and `connect` only make system calls, and the store is one to memory: no allocator, no lock and no
    // log is used.
    unsafe {
        Forked::start(|| {
            part_from_daemon(&[socket]);
            name(c"ginneld-finder");
            let said = connect(socket, address).map_or_else(Errno::raw_os_error, |()| CONNECTED);
            outcome.store(said, Ordering::Relaxed);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::at_hand::tests::link_not_at_hand;
    use crate::at_hand::{self};
    use rustix::fs::OFlags;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn it_connects_through_a_link_that_is_not_at_hand() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let link = link_not_at_hand(dir.path());
        let place = link.join("socket");
        kit::require!(at_hand::look(&place, OFlags::PATH).unwrap().is_none(), "no times of access");
        let (mut finder, closer) = (Finder::default(), Closer::start().unwrap());
        let refused = |finder: &mut Finder| match finder.connect(&place, &closer) {
            Err(Unnamed::Failed(error)) => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&mut finder).kind(), io::ErrorKind::NotFound);
        let listener = UnixListener::bind(&place).unwrap();
        let socket = finder.connect(&place, &closer).unwrap();
        let mut peer = listener.accept().unwrap().0;
        peer.write_all(b"hello").unwrap();
        let mut said = [0; 5];
        assert_eq!(rustix::io::read(&socket, &mut said), Ok(5));
        // The finder has left nothing open.
        drop(socket);
        assert_eq!(peer.read(&mut said).unwrap(), 0);
        drop(listener);
        assert_eq!(refused(&mut finder).kind(), io::ErrorKind::ConnectionRefused);
        assert!(finder.abandoned.is_empty());
        // One whose time is over waits for nobody.
        finder.patience.insert(place.clone(), Patience::new(Duration::ZERO, 0));
        assert!(matches!(finder.connect(&place, &closer), Err(Unnamed::Held)));
        // Others do not wait for it.
        let other = dir.path().join("other");
        let _listener = UnixListener::bind(&other).unwrap();
        assert!(finder.connect(&other, &closer).is_ok());
    }
}
