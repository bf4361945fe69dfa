//! The **namer**: a process that makes and removes names in a folder through which others may pass.
//!
//! Whoever may pass through a folder, and may write in any other folder of its file system, can hold the folder's lock as long as he likes:
//! by a rename between the two, for which the kernel takes both locks before it looks at the permissions. Everybody who makes, renames or
//! removes a name in the folder waits meanwhile, and not even `kill -9` ends that. So it happens to the namer, which does one thing after
//! another. The daemon waits for it a short time, and asks for the outcome again later.
//!
//! A namer that is held up outlives its daemon, and does one thing more when it is let go. The namer of a successor must not do the same
//! before, or it would be undone. So a namer has a file lock (`flock`) of the folder meanwhile, which ends with its process, and looks
//! whether its daemon is still there when it has got the lock.

use crate::at_hand;
use crate::no_answer::{self, no_answer};
use crate::packet::{self, BACKLOG, Gone};
use crate::patience::Patience;
use crate::spawned::{Spawned, end_with_parent, own_program};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, listen, shutdown, socketpair};
use rustix::process::{Pid, getppid};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a daemon that serves nobody yet waits for names, in all.
const AT_START: Duration = Duration::from_secs(4);
/// An answer that comes so soon uses up no patience. It takes milliseconds, unless the machine is busy or somebody holds a lock.
const AT_ONCE: Duration = Duration::from_millis(100);
/// The longest packet: a path and some numbers, or the text of an error.
const MAX_PACKET: usize = 16 << 10;
/// The mode of a file: it is nobody else's concern.
const PRIVATE: u32 = 0o600;

/// What a namer does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Makes a folder, and those above it, unless they exist.
    Folder {
        /// The folder.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Makes an empty file for this user only, unless there is one.
    File {
        /// The file.
        path: PathBuf,
    },
    /// Makes a listening socket, in place of one that an earlier daemon has left there.
    Socket(NewSocket),
    /// Removes a file, if there is one.
    Removal {
        /// The file.
        path: PathBuf,
    },
    /// Looks whether there is a file.
    Look {
        /// The file.
        path: PathBuf,
    },
}

/// What a socket says to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketKind {
    /// Bytes.
    Stream,
    /// Packets.
    Packets,
    /// Packets, and who has sent each, which the attach protocol needs.
    PacketsOfSenders,
}

/// A listening socket that is to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSocket {
    /// Its path.
    pub path: PathBuf,
    /// What comes over its connections.
    pub kind: SocketKind,
    /// The user who gets it.
    pub user: Option<u32>,
    /// The group that gets it.
    pub group: Option<u32>,
    /// Its mode.
    pub mode: u32,
}

impl Work {
    fn path(&self) -> &Path {
        match self {
            Self::Folder { path, .. }
            | Self::File { path }
            | Self::Socket(NewSocket { path, .. })
            | Self::Removal { path }
            | Self::Look { path } => path,
        }
    }
}

/// Why a name is not as it should be.
#[derive(Debug, Error)]
pub enum Unnamed {
    /// A process waits for its folder. What is to be made will be when that answers, unless the daemon ends before.
    #[error("{}", no_answer("its folder"))]
    Held,
    /// It cannot be.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl Unnamed {
    /// Returns what to do about it; `otherwise` if it is not held.
    pub fn fix<'a>(&self, otherwise: &'a str) -> &'a str {
        match self {
            Self::Held => no_answer::FIX,
            Self::Failed(_) => otherwise,
        }
    }
}

/// Whether there was a file to [`Work::Look`] at (true for all other work), and the socket that was made.
type Answer = Result<(bool, Option<OwnedFd>), String>;

/// The daemon's side of the namer.
#[derive(Debug)]
pub struct Namer {
    /// `None` if none has been needed, or the last one was killed.
    worker: Option<Worker>,
    /// What is to be done, in this order. The worker does the first.
    asked: VecDeque<Work>,
    /// What was done and not asked for again.
    done: Vec<(Work, Answer)>,
    /// How long it can be waited for.
    patience: Patience,
    /// The worker has not been in time, so nobody waits for it until it is.
    is_held_up: bool,
    command: fn() -> Command,
}

impl Default for Namer {
    fn default() -> Self {
        Self {
            worker: None,
            asked: VecDeque::new(),
            done: Vec::new(),
            patience: Patience::new(AT_START, 0),
            is_held_up: false,
            command: || own_program(["namer"]),
        }
    }
}

#[derive(Debug)]
struct Worker {
    socket: OwnedFd,
    process: Spawned,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends with the connection, at once unless it is held up.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.process.wait(AT_ONCE);
        self.process.try_bury();
    }
}

impl Namer {
    /// Notes that others are served from now on.
    pub fn serves(&mut self) {
        self.patience = Patience::meanwhile();
    }

    /// Makes sure that there is a folder. Only if the kernel does not have it at hand, this waits, and for a short time.
    pub fn folder(&mut self, path: &Path, mode: u32) -> Result<(), Unnamed> {
        if is_at_hand(path, OFlags::DIRECTORY) {
            return Ok(());
        }
        self.ask(&Work::Folder { path: path.to_owned(), mode }).map(drop)
    }

    /// Makes sure that there is a file. Only if the kernel does not have it at hand, this waits, and for a short time.
    pub fn file(&mut self, path: &Path) -> Result<(), Unnamed> {
        if is_at_hand(path, OFlags::empty()) {
            return Ok(());
        }
        self.ask(&Work::File { path: path.to_owned() }).map(drop)
    }

    /// Makes a listening socket. If this returns that the folder is held, the next call for the same socket returns what has become of it.
    pub fn socket(&mut self, new: &NewSocket) -> Result<OwnedFd, Unnamed> {
        let work = Work::Socket(new.clone());
        // One that was asked for in another way has another owner or mode.
        self.done.retain(|(done, _)| *done == work || done.path() != new.path);
        // The kernel leaves out a descriptor for which there is no room, and says nothing.
        let lost = || io::Error::other("this process has too many descriptors open; raise LimitNOFILE=");
        let socket = self.ask(&work)?.1.ok_or_else(lost)?;
        // The kernel tells programs who has called this.
        listen(&socket, BACKLOG).map_err(io::Error::from)?;
        Ok(socket)
    }

    /// Removes a file, if there is one.
    pub fn remove(&mut self, path: &Path) -> Result<(), Unnamed> {
        self.done.retain(|(done, _)| done.path() != path);
        self.ask(&Work::Removal { path: path.to_owned() }).map(drop)
    }

    /// Returns whether there is a file. Only if the kernel does not have it at hand, this waits, and for a short time.
    pub fn is_there(&mut self, path: &Path) -> Result<bool, Unnamed> {
        if is_at_hand(path, OFlags::empty()) {
            return Ok(true);
        }
        Ok(self.ask(&Work::Look { path: path.to_owned() })?.0)
    }

    fn ask(&mut self, work: &Work) -> Result<(bool, Option<OwnedFd>), Unnamed> {
        let begin = Instant::now();
        let left = self.patience.left(begin);
        let answer = self.ask_until(work, if self.is_held_up { begin } else { begin + left });
        let waited = begin.elapsed();
        if waited > AT_ONCE {
            self.patience.waited(waited);
        }
        answer
    }

    fn ask_until(&mut self, work: &Work, until: Instant) -> Result<(bool, Option<OwnedFd>), Unnamed> {
        // What was asked for last with this name is what comes of it.
        let is_known = match self.asked.iter().rev().find(|asked| asked.path() == work.path()) {
            Some(last) => last == work,
            None => self.done.iter().any(|(done, _)| done == work),
        };
        if !is_known {
            self.asked.push_back(work.clone());
            if self.asked.len() == 1 {
                self.send();
            }
        }
        loop {
            if let Some(at) = self.done.iter().position(|(done, _)| done == work) {
                let (_, answer) = self.done.remove(at);
                return answer.map_err(|error| io::Error::other(error).into());
            }
            if !self.hear(until) {
                self.is_held_up = true;
                return Err(Unnamed::Held);
            }
        }
    }

    /// Takes an answer, if there is one until then. Returns whether there was.
    fn hear(&mut self, until: Instant) -> bool {
        let Some(worker) = &self.worker else { return false };
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(&worker.socket, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return false,
            Ok(_) => {}
            // The next call finds out how much time is left.
            Err(Errno::INTR) => return true,
            // To receive without having looked could take for ever.
            Err(_) => return false,
        }
        let answer = match packet::receive(worker.socket.as_fd(), MAX_PACKET, 1) {
            Ok(mut answer) => match serde_json::from_slice(&answer.bytes) {
                Ok(result) => Result::<bool, String>::map(result, |there| (there, answer.fds.pop())),
                Err(error) => Err(error.to_string()),
            },
            // A signal for the whole group of processes, such as that of a terminal, was for it too.
            Err(gone) => {
                self.worker = None;
                Err(format!("the namer has ended ({gone})"))
            }
        };
        self.is_held_up = false;
        if let Some(work) = self.asked.pop_front()
            // What comes later with the same name is in its place.
            && self.asked.iter().all(|later| later.path() != work.path())
        {
            self.done.push((work, answer));
        }
        if !self.asked.is_empty() {
            self.send();
        }
        true
    }

    /// Lets the worker do the first that is to be done. If that is impossible, that is its outcome.
    fn send(&mut self) {
        let Some(work) = self.asked.front() else { return };
        let sent = match &self.worker {
            Some(worker) => worker.send(work),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        let sent = sent.or_else(|_| {
            let worker = Worker::start(self.command)?;
            self.worker.insert(worker).send(work)
        });
        if let Err(error) = sent
            && let Some(work) = self.asked.pop_front()
        {
            self.done.push((work, Err(format!("no process can do it: {error}"))));
            self.send();
        }
    }
}

/// Returns whether the kernel has this file at hand, or one that it is a link to. What it has not is the namer's concern.
fn is_at_hand(path: &Path, flags: OFlags) -> bool {
    matches!(at_hand::look(path, OFlags::PATH | flags), Ok(Some(_)))
}

impl Worker {
    fn start(command: fn() -> Command) -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let process = Spawned::start(command().stdin(Stdio::from(theirs)))?;
        Ok(Self { socket, process })
    }

    fn send(&self, work: &Work) -> io::Result<()> {
        Ok(packet::send::<OwnedFd>(self.socket.as_fd(), &serde_json::to_vec(work)?, &[])?)
    }
}

/// Does what the daemon asks for over standard input, until it ends.
pub fn run() -> anyhow::Result<()> {
    end_with_parent()?;
    let stdin = io::stdin();
    // The daemon has made this connection. If it ended before this process could ask to end with it, another is the parent.
    let daemon = Pid::from_raw(packet::peer(stdin.as_fd())?.pid as i32);
    loop {
        let work: Work = match packet::receive(stdin.as_fd(), MAX_PACKET, 0) {
            Ok(packet) => serde_json::from_slice(&packet.bytes)?,
            Err(Gone::Closed) => return Ok(()),
            Err(gone) => return Err(gone.into()),
        };
        let _turn = turn(&work);
        if getppid() != daemon {
            return Ok(());
        }
        let (answer, socket) = match perform(&work) {
            Ok((there, socket)) => (Ok(there), socket),
            Err(error) => (Err(error.to_string()), None),
        };
        packet::send(stdin.as_fd(), &serde_json::to_vec(&answer)?, socket.as_slice())?;
    }
}

/// Waits until no other namer works in the same folder, if that could undo this work or be undone by it. Returns what keeps others from it;
/// `None` if the file system has no such locks. (Whoever may list the folder can have this lock, too. Then he can also hold the kernel's.)
fn turn(work: &Work) -> Option<File> {
    match work {
        Work::Socket(_) | Work::Removal { .. } => {}
        // The folder above may be one that all users may list.
        Work::Folder { .. } | Work::File { .. } | Work::Look { .. } => return None,
    }
    let folder = File::open(work.path().parent()?).ok()?;
    flock(&folder, FlockOperation::LockExclusive).ok()?;
    Some(folder)
}

fn perform(work: &Work) -> io::Result<(bool, Option<OwnedFd>)> {
    match work {
        Work::Folder { path, mode } => DirBuilder::new().recursive(true).mode(*mode).create(path)?,
        Work::File { path } => {
            File::options().write(true).create(true).truncate(false).mode(PRIVATE).open(path)?;
        }
        Work::Socket(new) => return Ok((true, Some(make_socket(new)?))),
        Work::Removal { path } => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
        Work::Look { path } => return Ok((path.try_exists()?, None)),
    }
    Ok((true, None))
}

fn make_socket(new: &NewSocket) -> io::Result<OwnedFd> {
    let kind = match new.kind {
        SocketKind::Stream => SocketType::STREAM,
        SocketKind::Packets | SocketKind::PacketsOfSenders => SocketType::SEQPACKET,
    };
    packet::listen_at_with(&new.path, kind, |socket, path| {
        if new.kind == SocketKind::PacketsOfSenders {
            packet::ask_for_senders(socket)?;
        }
        std::os::unix::fs::chown(path, new.user, new.group)?;
        std::fs::set_permissions(path, Permissions::from_mode(new.mode))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::wait::{wait_for, wait_until};
    use rustix::net::sockopt::socket_passcred;
    use rustix::process::{
        PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process, pidfd_open, setrlimit,
    };
    use std::os::unix::fs::MetadataExt;

    kit::program! {
        fn worker() {
            run().unwrap();
        }
    }

    fn namer() -> Namer {
        Namer {
            patience: Patience::new(Duration::from_millis(50), 100),
            command: || kit::program::command(worker),
            ..Namer::default()
        }
    }

    fn signal(namer: &Namer, signal: Signal) {
        let pid = namer.worker.as_ref().unwrap().process.id();
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }

    fn socket(path: &Path, mode: u32) -> NewSocket {
        let kind = SocketKind::PacketsOfSenders;
        NewSocket { path: path.to_owned(), kind, user: None, group: None, mode }
    }

    /// Asks until the namer is in time.
    fn patiently<T>(mut ask: impl FnMut() -> Result<T, Unnamed>) -> Result<T, io::Error> {
        wait_for("the namer", || match ask() {
            Err(Unnamed::Held) => None,
            Err(Unnamed::Failed(error)) => Some(Err(error)),
            Ok(made) => Some(Ok(made)),
        })
    }

    #[test]
    fn names_are_made_and_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut namer, folder) = (namer(), dir.path().join("a/b"));
        patiently(|| namer.folder(&folder, 0o711)).unwrap();
        let (file, path) = (folder.join("file"), folder.join("socket"));
        assert!(!patiently(|| namer.is_there(&file)).unwrap());
        patiently(|| namer.file(&file)).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, PRIVATE);
        std::fs::write(&file, "kept").unwrap();
        patiently(|| namer.file(&file)).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"kept");
        let listener = patiently(|| namer.socket(&socket(&path, 0o620))).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o620);
        let connection = packet::connect_to(&path).unwrap();
        assert!(packet::accept(listener.as_fd()).unwrap().is_some());
        // A program sees the daemon at the other end, and not the namer.
        assert_eq!(packet::peer(connection.as_fd()).unwrap().pid, std::process::id());
        assert!(socket_passcred(&listener).unwrap());
        let plain = NewSocket { kind: SocketKind::Packets, ..socket(&path, 0o600) };
        assert!(!socket_passcred(patiently(|| namer.socket(&plain)).unwrap()).unwrap());
        // Another takes its place; a file that is not a socket stays.
        let again = patiently(|| namer.socket(&socket(&path, 0o660))).unwrap();
        let _connection = packet::connect_to(&path).unwrap();
        assert!(packet::accept(again.as_fd()).unwrap().is_some());
        let refused = patiently(|| namer.socket(&socket(&file, 0o660))).unwrap_err();
        assert!(refused.to_string().contains("not a socket"), "{refused}");
        patiently(|| namer.remove(&path)).unwrap();
        patiently(|| namer.remove(&path)).unwrap();
        assert!(!path.exists());
    }

    kit::program! {
        /// A daemon that has room for no further descriptor.
        fn full_daemon() {
            let dir = PathBuf::from(std::env::var_os("TEST_DIR").unwrap());
            let mut namer = namer();
            patiently(|| namer.file(&dir.join("file"))).unwrap();
            let limit = getrlimit(Resource::Nofile);
            // (It may still wait for one.)
            setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..limit }).unwrap();
            let new = socket(&dir.join("socket"), 0o600);
            println!("{}", patiently(|| namer.socket(&new)).unwrap_err());
            setrlimit(Resource::Nofile, limit).unwrap();
            patiently(|| namer.socket(&new)).unwrap();
        }
    }

    #[test]
    fn without_room_for_its_descriptor_a_socket_is_refused_for_that_reason() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let full = kit::program::command(full_daemon).env("TEST_DIR", dir.path()).output().unwrap();
        let said = String::from_utf8(full.stdout).unwrap();
        assert!(full.status.success() && said.contains("LimitNOFILE="), "{said}");
    }

    #[test]
    fn what_is_asked_for_last_is_what_comes_of_a_name() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut namer, path) = (namer(), dir.path().join("socket"));
        let new = socket(&path, 0o600);
        patiently(|| namer.file(&dir.path().join("file"))).unwrap();
        signal(&namer, Signal::STOP);
        for _ in 0..2 {
            assert!(matches!(namer.remove(&path), Err(Unnamed::Held)));
            assert!(matches!(namer.socket(&new), Err(Unnamed::Held)));
        }
        assert!(matches!(namer.remove(&path), Err(Unnamed::Held)));
        signal(&namer, Signal::CONT);
        patiently(|| namer.remove(&path)).unwrap();
        assert!(!path.exists());

        signal(&namer, Signal::STOP);
        assert!(matches!(namer.socket(&new), Err(Unnamed::Held)));
        assert!(matches!(namer.remove(&path), Err(Unnamed::Held)));
        signal(&namer, Signal::CONT);
        let listener = patiently(|| namer.socket(&new)).unwrap();
        let _connection = packet::connect_to(&path).unwrap();
        assert!(packet::accept(listener.as_fd()).unwrap().is_some());
    }

    #[test]
    fn what_a_held_namer_does_late_is_not_lost_unless_it_is_not_wanted_any_more() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut namer, file) = (namer(), dir.path().join("file"));
        patiently(|| namer.file(&file)).unwrap();
        signal(&namer, Signal::STOP);
        let [wanted, gone, other] = ["wanted", "gone", "other"].map(|name| dir.path().join(name));
        for _ in 0..3 {
            assert!(matches!(namer.socket(&socket(&wanted, 0o600)), Err(Unnamed::Held)));
            assert!(matches!(namer.socket(&socket(&gone, 0o600)), Err(Unnamed::Held)));
            assert!(matches!(namer.socket(&socket(&other, 0o600)), Err(Unnamed::Held)));
        }
        assert!(matches!(namer.remove(&gone), Err(Unnamed::Held)));
        signal(&namer, Signal::CONT);
        patiently(|| namer.socket(&socket(&wanted, 0o600))).unwrap();
        // It is wanted in another way now.
        patiently(|| namer.socket(&socket(&other, 0o666))).unwrap();
        assert_eq!(other.metadata().unwrap().mode() & 0o777, 0o666);
        assert!(!gone.exists() && wanted.exists());
        let left: Vec<_> =
            namer.done.iter().filter(|(_, answer)| answer.as_ref().is_ok_and(|a| a.1.is_some())).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn it_waits_for_another_that_works_in_the_same_folder() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut namer, file) = (namer(), dir.path().join("file"));
        patiently(|| namer.file(&file)).unwrap();
        let other = turn(&Work::Removal { path: file.clone() }).unwrap();
        for _ in 0..2 {
            assert!(matches!(namer.remove(&file), Err(Unnamed::Held)));
        }
        assert!(file.exists());
        // One that waits can be killed.
        signal(&namer, Signal::KILL);
        assert!(patiently(|| namer.remove(&file)).unwrap_err().to_string().contains("has ended"));
        drop(other);
        patiently(|| namer.remove(&file)).unwrap();
        assert!(!file.exists());
    }

    kit::program! {
        /// A namer whose daemon ends before it has asked to end with it.
        fn late_worker() {
            kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
            run().unwrap();
        }
    }

    kit::program! {
        /// A daemon that is killed when it has asked for something.
        fn mortal_daemon() {
            let mut namer = Namer {
                command: || {
                    let mut command = kit::program::command(late_worker);
                    command.stdout(Stdio::null()).stderr(Stdio::null());
                    command
                },
                ..namer()
            };
            assert!(matches!(namer.remove(Path::new(&std::env::var("TEST_FILE").unwrap())), Err(Unnamed::Held)));
            println!("{}", namer.worker.as_ref().unwrap().process.id());
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
    }

    #[test]
    fn one_whose_daemon_has_ended_does_nothing_more() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let daemon = kit::program::command(mortal_daemon).env("TEST_FILE", &file).output().unwrap();
        let pid = String::from_utf8(daemon.stdout).unwrap().trim().parse().unwrap();
        let ended = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
        wait_until("its end", || {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&at_once)) == Ok(1)
        });
        assert!(file.exists());
    }

    #[test]
    fn one_that_was_killed_is_replaced() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut namer, file) = (namer(), dir.path().join("file"));
        patiently(|| namer.file(&file)).unwrap();
        signal(&namer, Signal::KILL);
        namer.worker.as_ref().unwrap().process.wait(Duration::from_secs(10));
        patiently(|| namer.remove(&file)).unwrap();
        assert!(!file.exists());
        // If it dies while it works, that is an error, and the next one works again.
        signal(&namer, Signal::STOP);
        assert!(matches!(namer.file(&file), Err(Unnamed::Held)));
        signal(&namer, Signal::KILL);
        let failed = patiently(|| namer.file(&file)).unwrap_err();
        assert!(failed.to_string().contains("has ended"), "{failed}");
        patiently(|| namer.file(&file)).unwrap();
    }
}
