//! The **finder**: a process that connects to the control socket of a QEMU for the daemon.
//!
//! Others may hold the lock of a folder on the way there, or have put a file system on it that does not answer. If the finder takes long,
//! it is killed, and not waited for. It is the daemon without `exec`, see `forked`.
#![allow(unsafe_code)] // A process without `exec`.

use crate::at_hand;
use crate::closer::{Closer, Connected};
use crate::forked::{Abandoned, Forked, name, part_from_daemon};
use crate::namer::Unnamed;
use crate::patience::Patience;
use crate::spawned::becomes_readable;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, getpeername, socket_with,
};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
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
        let finder = start(&socket, &address)?;
        let has_ended = becomes_readable(finder.ended(), Some(begin + left));
        patience.waited(begin.elapsed());
        if !has_ended {
            self.abandoned.push((path.to_owned(), finder.abandon()));
            // It may be connected by now, and have something in its queue that nobody can close.
            drop(Connected::new(socket, closer));
            return Err(Unnamed::Held);
        }
        if getpeername(&socket).is_ok() {
            return Ok(Connected::new(socket, closer));
        }
        match at_hand::look(path, OFlags::PATH | OFlags::CLOEXEC).map_err(io::Error::from)? {
            Some(_) => {
                Err(io::Error::other("nobody listens there, or another client is connected to it").into())
            }
            None => Err(io::Error::from(Errno::NOENT).into()),
        }
    }
}

/// Starts a finder that connects this socket.
fn start(socket: &OwnedFd, address: &SocketAddrUnix) -> io::Result<Forked> {
    // SAFETY: `part_from_daemon`, `name` and `connect` only make system calls: they use no allocator, no lock and no log.
    unsafe {
        Forked::start(|| {
            part_from_daemon(&[socket]);
            name(c"ginneld-finder");
            let _ = connect(socket, address);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::at_hand::tests::link_not_at_hand;
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
        assert!(refused(&mut finder).to_string().contains("nobody listens there"));
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
