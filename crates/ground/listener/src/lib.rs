//! Makes Unix sockets at a path, which have their owner and permissions before anybody can connect.

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, chmod, chownat, fchmod, fstat, lstat, open, unlink,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use thiserror::Error;

/// Who may connect to a socket.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Its permissions.
    pub mode: Mode,
    /// Its owner, if it is not to be the user of this process.
    pub user: Option<Uid>,
    /// Its group, if it is not to be that of this process.
    pub group: Option<Gid>,
}

/// Why a socket cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failed {
    /// Something else has the name.
    #[error("what is there is not a socket")]
    NotASocket,
    /// A socket that a dead process has left stays.
    #[error("an old socket cannot be removed: {0}")]
    Old(Errno),
    /// There is no socket, or it does not get the name.
    #[error("it cannot be bound: {0}")]
    Bind(Errno),
    /// Somebody who may write in the folder has removed or replaced the new socket.
    #[error("another process has taken the new socket away")]
    TakenAway,
    /// The new socket does not get its owner or its permissions.
    #[error("its owner and permissions cannot be set: {0}")]
    Access(Errno),
}

impl Failed {
    /// Returns what to do about it.
    pub fn fix(self) -> &'static str {
        match self {
            Self::NotASocket => "remove it, or choose another path",
            Self::Old(_) | Self::Bind(_) => "choose a path that can be written",
            Self::TakenAway => "choose a folder in which nobody else may write",
            Self::Access(_) => "start as root, or as a member of that group",
        }
    }
}

/// Makes a socket at this path, in place of one that a dead process has left. The caller has made sure that nobody listens there.
/// Nobody can connect before the caller calls `listen(2)`, and then the socket has its owner and permissions. It is closed on exec.
pub fn bind(path: &Path, kind: SocketType, access: Access) -> Result<OwnedFd, Failed> {
    bind_and(path, kind, access, || ())
}

/// Does the same as [`bind`], and calls `then` at the moment from which on others may know of the socket.
fn bind_and(path: &Path, kind: SocketType, access: Access, then: impl FnOnce()) -> Result<OwnedFd, Failed> {
    match lstat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return Err(Failed::NotASocket);
        }
        Ok(_) => unlink(path).map_err(Failed::Old)?,
        Err(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(Failed::Bind)?;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).map_err(Failed::Bind)?;
    // Linux makes the file with the mode of the socket.
    fchmod(&socket, Mode::empty()).map_err(Failed::Bind)?;
    rustix::net::bind(&socket, &address).map_err(Failed::Bind)?;
    then();
    // From here on, the name may lead elsewhere. The descriptor leads to the file that was looked at.
    let file =
        open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
            match errno {
                Errno::NOENT => Failed::TakenAway,
                errno => Failed::Access(errno),
            }
        })?;
    let stat = fstat(&file).map_err(Failed::Access)?;
    // No other socket of this user has no permissions, except one that is being made, too.
    let is_new = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && Mode::from_raw_mode(stat.st_mode).is_empty()
        && stat.st_uid == rustix::process::geteuid().as_raw();
    if !is_new {
        return Err(Failed::TakenAway);
    }
    // The kernel changes the mode of such a descriptor itself only since Linux 6.6.
    chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), access.mode).map_err(Failed::Access)?;
    if access.user.is_some() || access.group.is_some() {
        chownat(&file, "", access.user, access.group, AtFlags::EMPTY_PATH).map_err(Failed::Access)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;

    kit::test_that_skips_are_seen!();

    const OTHER: u32 = 64001;

    fn access(mode: u32) -> Access {
        Access { mode: Mode::from_raw_mode(mode), user: None, group: None }
    }

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        (folder, path)
    }

    #[test]
    fn it_has_its_permissions_before_anybody_can_connect() {
        let (_folder, path) = folder();
        let bound = bind_and(&path, SocketType::STREAM, access(0o666), || {
            assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0);
        });
        let socket = bound.unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o666);
        UnixStream::connect(&path).unwrap_err();
        rustix::net::listen(&socket, 1).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn root_gives_it_to_others() {
        kit::require!(rustix::process::geteuid().is_root(), "only root can give sockets to others");
        let (_folder, path) = folder();
        let theirs =
            Access { user: Some(Uid::from_raw(OTHER)), group: Some(Gid::from_raw(OTHER)), ..access(0o660) };
        let _socket = bind(&path, SocketType::SEQPACKET, theirs).unwrap();
        let file = path.metadata().unwrap();
        assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o660, OTHER, OTHER));
    }

    #[test]
    fn what_somebody_puts_in_its_place_stays_as_it_is() {
        let (folder, path) = folder();
        let root = rustix::process::geteuid().is_root();
        let user = root.then(|| Uid::from_raw(OTHER));
        let (precious, moved) = (folder.path().join("precious"), folder.path().join("moved"));
        std::fs::write(&precious, "").unwrap();
        rustix::fs::chmod(&precious, Mode::from_raw_mode(0o600)).unwrap();
        let control = folder.path().join("control");
        let _control = bind(&control, SocketType::STREAM, access(0o600)).unwrap();
        let is_as_before = |file: &Path| {
            let file = file.metadata().unwrap();
            (file.mode() & 0o7777, file.uid()) == (0o600, rustix::process::geteuid().as_raw())
        };
        let attempt = |replace: &dyn Fn()| {
            let _ = std::fs::remove_file(&path);
            bind_and(&path, SocketType::STREAM, Access { user, ..access(0o666) }, || {
                std::fs::rename(&path, &moved).unwrap();
                replace();
            })
        };
        // A symbolic link, a file, another socket of this user, one of another user, and nothing.
        assert_eq!(attempt(&|| symlink(&precious, &path).unwrap()).unwrap_err(), Failed::TakenAway);
        assert_eq!(
            attempt(&|| std::fs::hard_link(&precious, &path).unwrap()).unwrap_err(),
            Failed::TakenAway
        );
        assert_eq!(attempt(&|| std::fs::hard_link(&control, &path).unwrap()).unwrap_err(), Failed::TakenAway);
        if root {
            let theirs = || {
                drop(UnixListener::bind(&path).unwrap());
                chmod(&path, Mode::empty()).unwrap();
                std::os::unix::fs::chown(&path, Some(OTHER + 1), None).unwrap();
            };
            assert_eq!(attempt(&theirs).unwrap_err(), Failed::TakenAway);
            assert_eq!(path.metadata().unwrap().uid(), OTHER + 1);
        }
        assert_eq!(attempt(&|| ()).unwrap_err(), Failed::TakenAway);
        assert!(is_as_before(&precious) && is_as_before(&control));
    }

    #[test]
    fn only_sockets_are_replaced() {
        let (_folder, path) = folder();
        drop(bind(&path, SocketType::STREAM, access(0o600)).unwrap());
        drop(bind(&path, SocketType::STREAM, access(0o600)).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path, SocketType::STREAM, access(0o600)).unwrap_err(), Failed::NotASocket);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        let nowhere = path.join("socket");
        assert_eq!(
            bind(&nowhere, SocketType::STREAM, access(0o600)).unwrap_err(),
            Failed::Bind(Errno::NOTDIR)
        );
        let long = path.with_file_name("x".repeat(200));
        assert_eq!(
            bind(&long, SocketType::STREAM, access(0o600)).unwrap_err(),
            Failed::Bind(Errno::NAMETOOLONG)
        );
    }
}
