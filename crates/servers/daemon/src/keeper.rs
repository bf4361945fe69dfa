//! The keeper, which holds file descriptors by name, so that they outlive the daemon.
//!
//! If the daemon is a systemd unit, it gives the descriptors to the service manager's file descriptor store. Otherwise it gives
//! them to a process of its own, `ginneld keeper`, which does nothing else. The first daemon starts this process, which outlives
//! the daemon; the next daemon finds it through its socket.
//!
//! The keeper process speaks packets over that socket, and only with its own user:
//!
//! | request | descriptors | answer |
//! |---|---|---|
//! | `S` name | to hold, in place of those that have this name | `K` |
//! | `D` name | | `K` |
//! | `F` | | `E` name with descriptors, for each name; then `K` |
//! | `X` | | `K`; the keeper ends |
//!
//! Instead of `K` the answer can be `N` and a text with the reason.
#![allow(unsafe_code)] // For descriptors that systemd passes as numbers in the environment.

mod link;

use crate::at_hand;
use crate::namer::{Namer, NewSocket, SocketKind};
use crate::packet::{self, Gone, MAX_FDS, Packet};
use anyhow::{Context, bail};
use link::{Link, Refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, inotify};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The most descriptors that one keeper holds. `FileDescriptorStoreMax=` in the unit has the same value.
const MAX_HELD: usize = 16384;
/// The most connections at a time. There is only one daemon.
const MAX_CONNECTIONS: usize = 8;
/// The longest packet: one letter and a name.
const MAX_PACKET: usize = 256;
/// The longest time that a keeper needs for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// An environment variable that our unit files set, because systemd before version 254 does not tell a service whether it has a
/// store.
const STORE_VARIABLE: &str = "GINNEL_FDSTORE";

/// Descriptors by name.
pub type Held = BTreeMap<String, Vec<OwnedFd>>;

/// The daemon's connection to its keeper.
#[derive(Debug)]
pub struct Keeper(Backend);

#[derive(Debug)]
enum Backend {
    /// The number of descriptors that each name has.
    Systemd(BTreeMap<String, usize>),
    Process {
        socket: PathBuf,
        /// `None` if it has died, and no other has taken its place yet.
        link: Option<Link>,
        /// The keeper process, if it is our child, so that its end leaves no zombie.
        child: Option<Child>,
    },
}

impl Keeper {
    /// Finds the keeper, or starts one with a socket at this path, and fetches the descriptors that it holds. The process must
    /// not have other threads yet, and must call this only once, because it takes over descriptors from the environment.
    pub fn open(socket: &Path, namer: &mut Namer) -> anyhow::Result<(Self, Held)> {
        let notify = std::env::var_os("NOTIFY_SOCKET").is_some();
        if notify && ["FDSTORE", STORE_VARIABLE].iter().any(|v| std::env::var_os(v).is_some_and(|n| n != "0"))
        {
            let held = from_systemd().context("the descriptors that systemd has stored")?;
            let counts = held.iter().map(|(name, fds)| (name.clone(), fds.len())).collect();
            return Ok((Self(Backend::Systemd(counts)), held));
        }
        let mut open = || {
            let (connection, child) = connect(socket, namer)?;
            let held = fetch(connection.as_fd())?;
            Ok::<_, anyhow::Error>((
                Self(Backend::Process {
                    socket: socket.to_owned(),
                    link: Some(Link::new(connection)),
                    child,
                }),
                held,
            ))
        };
        // A keeper that is just ending still accepts the connection, but does not answer.
        let deadline = Instant::now() + PATIENCE;
        loop {
            match open() {
                Err(error) if closed(&error) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return other.with_context(|| format!("the keeper at {}", socket.display())),
            }
        }
    }

    /// Holds these descriptors under this name, in place of those that had it. When this returns, the next daemon will get them.
    pub fn store<Fd: AsFd>(&mut self, name: &str, fds: &[Fd]) -> anyhow::Result<()> {
        self.remove_from_systemd(name)?;
        match &mut self.0 {
            Backend::Systemd(counts) => {
                // systemd silently drops descriptors beyond the limit.
                let (others, most) = (counts.values().sum::<usize>(), most_stored());
                if others + fds.len() > most {
                    bail!(
                        "systemd's descriptor store has {others} descriptors, and {most} is the limit: raise FileDescriptorStoreMax= of the unit, or declare fewer VMs"
                    );
                }
                counts.insert(name.to_owned(), fds.len());
                for (i, fd) in fds.iter().enumerate() {
                    let name = format!("{name}.{i}");
                    let states =
                        [NotifyState::FdStore, NotifyState::FdName(&name), NotifyState::Custom("FDPOLL=0")];
                    sd_notify::notify_with_fds(false, &states, &[fd.as_fd()])
                        .context("systemd's descriptor store")?;
                }
                Ok(())
            }
            Backend::Process { link: Some(link), .. } => link.ask(b'S', name, fds),
            Backend::Process { .. } => {
                bail!("the keeper has died, and no other can be started yet (the log says why)")
            }
        }
    }

    /// Drops the descriptors that have this name.
    pub fn remove(&mut self, name: &str) -> anyhow::Result<()> {
        match &mut self.0 {
            Backend::Systemd(_) => self.remove_from_systemd(name),
            Backend::Process { link: Some(link), .. } => link.ask::<OwnedFd>(b'D', name, &[]),
            Backend::Process { .. } => Ok(()), // It holds nothing.
        }
    }

    fn remove_from_systemd(&mut self, name: &str) -> anyhow::Result<()> {
        let Backend::Systemd(counts) = &mut self.0 else { return Ok(()) };
        for i in 0..counts.remove(name).unwrap_or(0) {
            let name = format!("{name}.{i}");
            sd_notify::notify(false, &[NotifyState::FdStoreRemove, NotifyState::FdName(&name)])
                .context("systemd's descriptor store")?;
        }
        Ok(())
    }

    /// Returns a descriptor that becomes readable when there is something to [`Keeper::hear`]. `None` if the keeper is systemd.
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Backend::Systemd(_) => None,
            Backend::Process { link, .. } => link.as_ref().map(Link::as_fd),
        }
    }

    /// Receives answers that come late. Returns false if the keeper has died: then call [`Keeper::reopen`] and store everything again.
    pub fn hear(&mut self) -> bool {
        let Backend::Process { link: Some(link), .. } = &mut self.0 else { return true };
        let heard = link.hear(Duration::ZERO);
        heard.map(|refusals| refusals.iter().for_each(Refusal::log)).is_ok()
    }

    /// Returns whether it has died, and [`Keeper::reopen`] has failed: then try that again.
    pub fn is_lost(&self) -> bool {
        matches!(self.0, Backend::Process { link: None, .. })
    }

    /// Starts a keeper in place of one that has died. The new one holds nothing.
    pub fn reopen(&mut self, namer: &mut Namer) -> anyhow::Result<()> {
        let Backend::Process { socket, link, child } = &mut self.0 else { return Ok(()) };
        *link = None;
        if let Some(mut child) = child.take() {
            let _ = child.try_wait();
        }
        // Nobody is looked for: the socket may be one that the namer has made late, where nobody answers yet.
        let (connection, started) =
            start(socket, namer).with_context(|| format!("the keeper at {}", socket.display()))?;
        (*link, *child) = (Some(Link::new(connection)), Some(started));
        Ok(())
    }

    /// Ends the keeper, which drops all descriptors that it holds.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        match &mut self.0 {
            Backend::Systemd(_) => Ok(()), // systemd drops them when the unit is stopped.
            Backend::Process { link, child, .. } => {
                link.as_mut().map_or(Ok(()), |link| link.insist(b'X'))?;
                if let Some(mut child) = child.take() {
                    child.wait()?;
                }
                Ok(())
            }
        }
    }
}

/// Returns how many descriptors systemd stores for this service. Only version 254 and later tell this.
fn most_stored() -> usize {
    let said = std::env::var("FDSTORE").ok().and_then(|n| n.parse().ok());
    said.map_or(MAX_HELD, |n: usize| n.min(MAX_HELD))
}

/// Returns whether systemd has passed descriptors to this process. systemd drops them when the service fails for good.
pub fn is_entrusted() -> bool {
    let number = |variable| std::env::var(variable).ok().and_then(|text| text.parse::<u32>().ok());
    number("LISTEN_PID") == Some(std::process::id()) && number("LISTEN_FDS").is_some_and(|fds| fds > 0)
}

/// Keeps the descriptors that systemd has passed to this process from the processes that it starts. The process must not have opened any
/// other descriptor yet.
pub fn keep_to_itself() {
    if !is_entrusted() {
        return;
    }
    let count = std::env::var("LISTEN_FDS").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    for fd in (3..).take(count) {
        // SAFETY: the number is only passed to a system call, which refuses one that is not open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC).is_err() {
            break;
        }
    }
}

/// Returns whether a keeper listens at this path.
pub fn is_there(socket: &Path) -> bool {
    reach(socket).is_ok()
}

/// Connects to the socket of a keeper. To look for one that is not there would be to wait for whoever holds the lock of the folder.
fn reach(socket: &Path) -> io::Result<OwnedFd> {
    let found = at_hand::look(socket, OFlags::PATH)?.ok_or(Errno::NOENT)?;
    packet::connect_to(format!("/proc/self/fd/{}", found.as_raw_fd()).as_ref())
}

/// Takes the descriptors that systemd has stored for us. Their names end in `.` and a number.
fn from_systemd() -> anyhow::Result<Held> {
    let mut numbered: BTreeMap<String, BTreeMap<u32, OwnedFd>> = BTreeMap::new();
    for (fd, name) in sd_notify::listen_fds_with_names(false)? {
        // SAFETY: systemd has passed this number to this process (its pid was compared), and nothing else takes it over.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        match name.rsplit_once('.').and_then(|(name, i)| Some((name, i.parse().ok()?))) {
            Some((name, i)) => drop(numbered.entry(name.to_owned()).or_default().insert(i, fd)),
            None => warn!(name, "systemd has stored a descriptor of an unknown name"),
        }
    }
    Ok(numbered.into_iter().map(|(name, fds)| (name, fds.into_values().collect())).collect())
}

/// Returns whether the error says that the other end has closed the connection.
fn closed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Gone::Closed))
        || matches!(error.downcast_ref(), Some(&(Errno::PIPE | Errno::CONNRESET)))
}

/// Connects to the keeper, and starts it if there is none.
fn connect(socket: &Path, namer: &mut Namer) -> anyhow::Result<(OwnedFd, Option<Child>)> {
    if namer.is_there(socket)?
        && let Ok(connection) = reach(socket)
    {
        patient(&connection)?;
        return Ok((connection, None));
    }
    start(socket, namer).map(|(connection, child)| (connection, Some(child)))
}

/// Starts a keeper, and connects to it.
fn start(socket: &Path, namer: &mut Namer) -> anyhow::Result<(OwnedFd, Child)> {
    // The daemon makes the keeper's socket, so that it can talk to the keeper at once. This also replaces the socket of a dead
    // keeper.
    let kind = SocketKind::Packets;
    let new = NewSocket { path: socket.to_owned(), kind, user: None, group: None, mode: 0o600 };
    let listener = namer.socket(&new)?;
    let program = std::env::current_exe().context("this program's own file")?;
    let mut command = Command::new(program);
    command.arg("keeper").arg("--socket").arg(socket);
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(listener))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = command.spawn().context("starting it")?;
    info!(pid = child.id(), socket = %socket.display(), "keeper started");
    let connection = reach(socket)?;
    patient(&connection)?;
    Ok((connection, child))
}

fn patient(connection: &OwnedFd) -> io::Result<()> {
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(connection, direction, Some(PATIENCE))?;
    }
    Ok(())
}

fn fetch(connection: BorrowedFd<'_>) -> anyhow::Result<Held> {
    packet::send::<OwnedFd>(connection, b"F", &[]).context("asking the keeper")?;
    let mut held = Held::new();
    loop {
        let Packet { bytes, fds, truncated, .. } =
            packet::receive(connection, MAX_PACKET, MAX_FDS).context("the keeper's answer")?;
        match bytes.split_first() {
            _ if truncated => bail!("descriptors were lost: raise the limit on open files (LimitNOFILE=)"),
            Some((b'E', name)) => drop(held.insert(String::from_utf8_lossy(name).into_owned(), fds)),
            Some((b'K', _)) => return Ok(held),
            Some((b'N', why)) => bail!("it refuses: {}", String::from_utf8_lossy(why)),
            _ => bail!("it has sent an unknown answer"),
        }
    }
}

/// Raises the limit of open files as far as this process may without privileges.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Raises the limit of open files as far as possible, and to at least `needed` if this process may raise its hard limit. Returns
/// the limit that is now in effect.
pub fn provide_open_files(needed: u64) -> u64 {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if maximum.is_some_and(|maximum| maximum < needed) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum: Some(needed) });
    }
    raise_open_files();
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How often the keeper looks for its socket if it cannot be told of its removal, in seconds.
const LOOK: i64 = 5;

/// Arguments of `ginneld keeper`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The path of its socket, shown in the list of processes. The socket itself is standard input.
    #[arg(long)]
    pub socket: PathBuf,
}

/// Runs the keeper's process until it is told to end.
pub fn run(args: Args) -> anyhow::Result<()> {
    // The keeper leaves the daemon's terminal and process group, so that signals to these do not end it.
    let _ = rustix::process::setsid();
    raise_open_files();
    let stdin = io::stdin();
    // When its socket is removed, nobody can find the keeper any more, so it ends.
    let removed = watch_of(&args.socket);
    let look = removed.is_none().then_some(Timespec { tv_sec: LOOK, tv_nsec: 0 });
    let file = rustix::fs::stat(&args.socket)?.st_ino;
    let mut held = Held::new();
    let mut connections: Vec<OwnedFd> = Vec::new();
    loop {
        let ready: Vec<bool> = {
            let watch = removed.as_ref().map_or_else(|| stdin.as_fd(), AsFd::as_fd);
            let always = [PollFd::new(&stdin, PollFlags::IN), PollFd::from_borrowed_fd(watch, PollFlags::IN)];
            let others = connections.iter().map(|c| PollFd::new(c, PollFlags::IN));
            let mut fds: Vec<PollFd<'_>> = always.into_iter().chain(others).collect();
            match poll(&mut fds, look.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let mut index = 1;
        let mut stop = false;
        connections.retain(|connection| {
            index += 1;
            if !ready[index] {
                return true;
            }
            // All that it has asked for: the next daemon, whose connection is a later one, must get what the last one has stored.
            while serve(connection.as_fd(), &mut held, &mut stop) {
                if !is_readable(connection) {
                    return true;
                }
            }
            false
        });
        if stop {
            let _ = std::fs::remove_file(&args.socket);
            return Ok(());
        }
        while removed.as_ref().is_some_and(|removed| rustix::io::read(removed, &mut [0u8; 1024]).is_ok()) {}
        // The kernel notifies when the last link is gone from the count, which may be before the name is gone.
        let is_there = rustix::fs::stat(&args.socket).is_ok_and(|s| s.st_ino == file && s.st_nlink > 0);
        if connections.is_empty() && !is_there {
            return Ok(());
        }
        if ready[0]
            && let Ok(Some(connection)) = packet::accept(stdin.as_fd())
            && connections.len() < MAX_CONNECTIONS
            && packet::peer(connection.as_fd()).is_ok_and(|p| p.uid == rustix::process::geteuid().as_raw())
            && rustix::io::ioctl_fionbio(&connection, false).is_ok()
            && patient(&connection).is_ok()
        {
            connections.push(connection);
        }
    }
}

/// Returns an inotify descriptor that says when a file is removed; `None` if the user has no more of these (128 by default).
fn watch_of(path: &Path) -> Option<OwnedFd> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let inotify = inotify::init(flags).ok()?;
    let events = inotify::WatchFlags::ATTRIB | inotify::WatchFlags::DELETE_SELF;
    inotify::add_watch(&inotify, path, events).ok()?;
    Some(inotify)
}

fn is_readable(connection: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&at_once)).is_ok_and(|ready| ready > 0)
}

/// Serves one request. Returns false if the connection must end.
fn serve(connection: BorrowedFd<'_>, held: &mut Held, stop: &mut bool) -> bool {
    let receive = || packet::receive(connection, MAX_PACKET, MAX_FDS);
    // A daemon that ended with answers unread has reset the connection; the kernel says so once, in front of its last requests.
    let received = receive().or_else(|gone| if matches!(gone, Gone::Closed) { receive() } else { Err(gone) });
    let Ok(Packet { bytes, fds, truncated, .. }) = received else {
        return false;
    };
    // A daemon that has ended needs no answer, and what it asked for counts.
    let answer = |text: &str| match packet::send::<OwnedFd>(connection, text.as_bytes(), &[]) {
        Err(Errno::PIPE | Errno::CONNRESET) => true,
        sent => sent.is_ok(),
    };
    let Some((what, Ok(name))) = bytes.split_first().map(|(what, name)| (what, str::from_utf8(name))) else {
        return answer("Na name that is not UTF-8");
    };
    match what {
        _ if truncated => answer("Na request too long, or descriptors lost: raise the limit on open files"),
        b'S' => {
            let others: usize = held.iter().filter(|(n, _)| *n != name).map(|(_, fds)| fds.len()).sum();
            if others + fds.len() > MAX_HELD {
                return answer(&format!("Nit holds {others} descriptors, and {MAX_HELD} is the limit"));
            }
            held.insert(name.to_owned(), fds);
            answer("K")
        }
        b'D' => {
            held.remove(name);
            answer("K")
        }
        b'F' => {
            held.iter()
                .all(|(name, fds)| packet::send(connection, format!("E{name}").as_bytes(), fds).is_ok())
                && answer("K")
        }
        b'X' => {
            *stop = true;
            answer("K")
        }
        _ => answer("Nan unknown request"),
    }
}
