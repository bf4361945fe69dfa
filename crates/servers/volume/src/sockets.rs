//! The sockets of a volume. They are bound before the sandbox is entered, with their owner and permissions. Also the
//! notifications for systemd.

use ginnel_config::Problem;
use ginnel_listener::{self as listener, Failed};
use ginnel_volume_control::config::Permissions;
use rustix::fs::{Gid, Uid};
use rustix::net::{SocketType, listen};
use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;

/// Who may connect to a socket: [`Permissions`] with resolved accounts.
#[derive(Clone, Copy, Debug)]
pub struct Access(listener::Access);

impl Access {
    /// Looks up the accounts. `keys` is the beginning of their keys in a configuration: `socket` or `control`.
    pub fn find(permissions: &Permissions, keys: &str) -> Result<Self, Problem> {
        let Permissions { mode, user, group } = permissions;
        let user = user.as_ref().map(|user| user.user(format_args!("{keys}-user"))).transpose()?;
        let group = group.as_ref().map(|group| group.group(format_args!("{keys}-group"))).transpose()?;
        let mode = rustix::fs::Mode::from_raw_mode(mode.0);
        Ok(Self(listener::Access { mode, user: user.map(Uid::from_raw), group: group.map(Gid::from_raw) }))
    }
}

/// Listens at a path, replacing a socket that a dead process has left. Nobody else can connect before the socket has its
/// owner and mode. Creates the folder if it does not exist.
pub fn bind(path: &Path, access: Access) -> Result<UnixListener, Problem> {
    make_folder(path)?;
    if is_served(path) {
        let fix = "stop that volume first, or choose another name or socket";
        return Err(Problem::new(path.display(), "another process listens there already", fix));
    }
    let problem = |failed: Failed| Problem::new(path.display(), failed, failed.fix());
    let socket = listener::bind(path, SocketType::STREAM, access.0).map_err(problem)?;
    listen(&socket, BACKLOG).map_err(|errno| problem(Failed::Bind(errno)))?;
    Ok(socket.into())
}

/// Creates the folder of a socket, if it does not exist. Others need not list it: whoever can, can hold its lock, for which the next
/// process that makes a socket there would wait.
pub fn make_folder(path: &Path) -> Result<(), Problem> {
    let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) else { return Ok(()) };
    DirBuilder::new().recursive(true).mode(0o711).create(folder).map_err(|error| {
        let what = format!("the folder cannot be created: {error}");
        Problem::new(path.display(), what, "choose a path that can be written")
    })
}

/// Returns whether a process listens at a socket.
pub fn is_served(path: &Path) -> bool {
    UnixStream::connect(path).is_ok()
}

/// Sends notifications to systemd (sd_notify(3)), on a socket that is connected before the sandbox is entered.
#[derive(Debug)]
pub struct Notify(Option<UnixDatagram>);

impl Notify {
    /// Connects to the socket that `NOTIFY_SOCKET` names. Without it, notifications go nowhere.
    pub fn from_environment() -> Self {
        Self(std::env::var_os("NOTIFY_SOCKET").and_then(|path| connect(&path).ok()))
    }

    /// Reports that the volume serves.
    pub fn ready(&self) {
        self.tell("READY=1\n");
    }

    /// Reports that the volume ends.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\n");
    }

    /// Reports the state of the volume in one line.
    pub fn status(&self, text: &str) {
        self.tell(&format!("STATUS={}\n", text.replace('\n', " ")));
    }

    fn tell(&self, text: &str) {
        if let Some(socket) = &self.0 {
            // If systemd does not listen, nobody needs the notification.
            let _ = socket.send(text.as_bytes());
        }
    }
}

fn connect(path: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    match path.as_bytes() {
        [b'@', name @ ..] => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        _ => socket.connect(path)?,
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_config::Mode;
    use std::os::unix::fs::PermissionsExt;

    fn access(mode: u32) -> Access {
        let mode = rustix::fs::Mode::from_raw_mode(mode);
        Access(listener::Access { mode, user: None, group: None })
    }

    #[test]
    fn accounts_that_are_not_there_are_named() {
        use ginnel_config::Account;
        let nobody = Some(Account::Name("no-such-account-here".into()));
        let permissions = Permissions { mode: Mode(0o600), user: None, group: nobody };
        let error = Access::find(&permissions, "control").unwrap_err().to_string();
        assert!(error.starts_with("control-group: there is no group \"no-such-account-here\"; "), "{error}");
    }

    #[test]
    fn one_listener_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub/v.sock");
        let first = bind(&path, access(0o640)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        let error = bind(&path, access(0o640)).unwrap_err().to_string();
        assert!(error.contains("listens there already"), "{error}");
        assert!(is_served(&path) && !is_served(&folder.path().join("other.sock")));
        // As a killed process leaves it.
        drop(first);
        // A process that another test is starting at this moment has a copy of the descriptor until its program runs.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while is_served(&path) {
            assert!(std::time::Instant::now() < until, "somebody still listens");
            std::thread::yield_now();
        }
        bind(&path, access(0o600)).unwrap();
    }

    #[test]
    fn files_are_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(bind(&path, access(0o600)).unwrap_err().to_string().contains("not a socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn systemd_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        let notify = Notify(connect(path.as_os_str()).ok());
        notify.ready();
        notify.status("two\nlines");
        let mut buffer = [0; 64];
        let n = systemd.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"READY=1\n");
        let n = systemd.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"STATUS=two lines\n");
        Notify(None).ready();
    }
}
