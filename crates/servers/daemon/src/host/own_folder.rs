//! The daemon's own folder, in which the files of segments lie: `ginnel` in `shm_dir`, or in the folder that a segment names as its
//! `backing`.
//!
//! Every user may make files in `/dev/shm`, the usual `shm_dir`, and so could take the name of a segment's file before the daemon
//! makes it. Only the daemon's user may write in its own folder. Others pass through it to the files that they may open, but cannot
//! list it: whoever lists a folder holds its lock, and for ever if the list goes to a page that never comes.
//!
//! Somebody may also hold the lock of `shm_dir`, and whoever makes a folder there, or looks for one that is not there, waits for it. So
//! a process does that (`ginneld folder`). Once the folder exists, nothing waits for the lock of `shm_dir`, except for files
//! of older daemons, which are in `shm_dir` itself.

use super::config::OWN_FOLDER;
use super::{file_making, random};
use crate::at_hand;
use crate::folder_lock::{Refused, lock};
use crate::no_answer::{self, no_answer};
use crate::spawned::{Speaker, own_program};
use ginnel_config::Problem;
use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tracing::warn;

/// The name of its lock. No segment has such a name.
const LOCK: &str = ".lock";
/// The mode of the folder: others may pass through it.
const MODE: u32 = 0o711;
/// How long the daemon waits for the process that makes the folder.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the folder is put in its place, before the process gives up. Each attempt may fail with a probability of one half.
const ATTEMPTS: u32 = 128;
/// How often what others have put there is moved away, where that leaves the place empty for a moment.
const MOVES: u32 = 8;
/// Opens whatever has a name, even a symbolic link.
const ANYTHING: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The folders of this daemon.
#[derive(Debug, Default)]
pub struct Folders {
    /// The locks of those that are ready.
    ready: BTreeMap<PathBuf, File>,
    /// The processes that have not made theirs yet.
    asked: BTreeMap<PathBuf, Speaker>,
    /// Nobody is served yet, so this may wait.
    is_starting: bool,
}

impl Folders {
    /// Starts without folders. Until [`Folders::serves`], locks are waited for.
    pub fn new() -> Self {
        Self { is_starting: true, ..Self::default() }
    }

    /// Returns whether nobody is served yet.
    pub fn is_starting(&self) -> bool {
        self.is_starting
    }

    /// Notes that others are served from now on.
    pub fn serves(&mut self) {
        self.is_starting = false;
    }

    /// Makes a folder unless it exists, checks that it is this daemon's, and locks it against others. Waits for at most ten seconds.
    pub fn prepare(&mut self, path: &Path, place: &str) -> Result<(), Refused> {
        let exists = |lock: &File| fs::fstat(lock).is_ok_and(|stat| stat.st_nlink > 0);
        if self.ready.get(path).is_some_and(exists) {
            return Ok(());
        }
        self.ready.remove(path);
        // A look at what the kernel has at hand takes no lock. A tmpfs has everything at hand that exists.
        let found = at_hand::open(path, ANYTHING).ok().flatten();
        let is_own = |folder| examine(&folder, path).is_ok() && at_hand::stat(&path.join(LOCK)).is_some();
        if !found.is_some_and(is_own) {
            self.ask(path, place).map_err(Refused::Failed)?;
            check(path, place).map_err(Refused::Failed)?;
        }
        self.ready.insert(path.to_owned(), lock(path, LOCK, self.is_starting)?);
        Ok(())
    }

    /// Lets a process make the folder.
    fn ask(&mut self, path: &Path, place: &str) -> Result<(), Problem> {
        let failed = |error: io::Error| {
            let what = format!("no process can make {}: {error}", path.display());
            Problem::new(place, what, "see which resource of the system is used up")
        };
        let (mut maker, time) = match self.asked.remove(path) {
            Some(maker) => (maker, Duration::ZERO),
            None => (start(path).map_err(failed)?, PATIENCE),
        };
        let Some(said) = said(&mut maker, time).map_err(failed)? else {
            self.asked.insert(path.to_owned(), maker);
            let what = format!("{} cannot be made: {}", path.display(), no_answer("the folder above it"));
            let fix = format!("the daemon tries again by itself; {}", no_answer::FIX);
            return Err(Problem::new(place, what, fix));
        };
        match said.split_once('\n') {
            Some((what, fix)) => Err(Problem::new(place, what, fix)),
            None if said.is_empty() => Ok(()),
            None => {
                warn!("{said}");
                Ok(())
            }
        }
    }
}

/// Starts a process that makes a folder. If the daemon ends meanwhile, the process goes on, which harms nobody.
fn start(path: &Path) -> io::Result<Speaker> {
    let mut command = own_program(["folder".as_ref(), "--path".as_ref(), path.as_os_str()]);
    Speaker::start(command.stdin(Stdio::null()))
}

/// Returns what such a process has said, which it does at its end only, if at all; `None` if that is not within this time.
fn said(maker: &mut Speaker, at_most: Duration) -> io::Result<Option<String>> {
    let until = Instant::now() + at_most;
    while maker.wait(Some(until)) {
        if maker.hear() {
            maker.process.wait(PATIENCE);
            return match maker.process.try_bury() {
                Some(status) if status.success() => {
                    Ok(Some(String::from_utf8_lossy(maker.said()).into_owned()))
                }
                status => Err(io::Error::other(format!("it failed ({status:?})"))),
            };
        }
    }
    Ok(None)
}

/// Checks that a folder is the daemon's own. Returns false if there is none.
pub fn check(path: &Path, place: &str) -> Result<bool, Problem> {
    match fs::open(path, ANYTHING, Mode::empty()) {
        Ok(folder) => examine(&folder, path).map(|()| true).map_err(|stranger| stranger.problem(path, place)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => {
            let what = format!("{} cannot be examined: {errno}", path.display());
            Err(Problem::new(place, what, "let the daemon's user reach it"))
        }
    }
}

/// What is in the place of the folder.
#[derive(Debug)]
struct Stranger {
    kind: FileType,
    owner: u32,
    mode: u32,
}

impl Stranger {
    fn problem(&self, path: &Path, place: &str) -> Problem {
        let (path, own) = (path.display(), own_user());
        let in_the_way = format!("{path} is {}, where the daemon's own folder should be", self.what());
        let (what, fix) = match self.kind {
            FileType::Directory if self.owner == own => (
                format!("others may write in {path} (mode {:04o})", self.mode),
                format!("look for files in it that are not the daemon's, then chmod {MODE:04o} {path}"),
            ),
            _ if self.owner == own => (in_the_way, "move it away".to_owned()),
            // It may well be the folder of a daemon that runs as root.
            FileType::Directory if self.owner == 0 => (
                in_the_way,
                format!(
                    "run this as root, if that is the daemon's user; otherwise name a folder of user {own} in daemon.shm_dir"
                ),
            ),
            _ => (
                in_the_way,
                format!(
                    "as root, move it away; or name a folder of the daemon's user ({own}) in daemon.shm_dir"
                ),
            ),
        };
        Problem::new(place, what, fix)
    }

    /// Returns whether the daemon may move it away by itself: it is root's, and this is not.
    fn is_movable(&self) -> bool {
        own_user() == 0 && self.owner != 0
    }

    fn what(&self) -> String {
        let kind = match self.kind {
            FileType::Directory => "a folder",
            FileType::RegularFile => "a file",
            FileType::Symlink => "a symbolic link",
            FileType::Fifo => "a FIFO",
            FileType::Socket => "a socket",
            _ => "a device",
        };
        format!("{kind} of user {}", self.owner)
    }
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Checks that this is a folder of the daemon's user, and that no other user may write in it.
fn examine(file: &OwnedFd, path: &Path) -> Result<(), Stranger> {
    let Ok(stat) = fs::fstat(file) else {
        return Err(Stranger { kind: FileType::Unknown, owner: 0, mode: 0 });
    };
    let kind = FileType::from_raw_mode(stat.st_mode);
    let mode = stat.st_mode & 0o7777;
    if kind != FileType::Directory || stat.st_uid != own_user() || mode & 0o022 != 0 {
        return Err(Stranger { kind, owner: stat.st_uid, mode });
    }
    if mode & 0o044 != 0 {
        warn!(path = %path.display(), "other users may list this folder, and so hold up the daemon there: chmod {MODE:04o}");
    }
    Ok(())
}

/// Arguments of `ginneld folder`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder.
    #[arg(long)]
    pub path: PathBuf,
}

/// Makes the folder. Prints what is wrong and how to fix it, on two lines; or what was in its way, on one; or nothing.
pub fn run(args: Args) -> anyhow::Result<()> {
    let said = match make(&args.path) {
        Ok(moved) => moved,
        Err(problem) => format!("{}\n{}", problem.what, problem.fix),
    };
    io::stdout().write_all(said.as_bytes())?;
    Ok(())
}

/// Returns what was moved away.
fn make(path: &Path) -> Result<String, Problem> {
    let above = path.parent().unwrap_or(Path::new("/"));
    file_making::open_folder(above, "")?;
    // The users of QEMUs must be able to pass through the folder.
    rustix::process::umask(Mode::empty());
    if !is_there(path)? {
        let new = New::make(path)?;
        let put = new.put(path);
        if let Ok(Some(moved)) = put {
            return Ok(moved);
        }
        new.remove();
        put?;
    }
    // The daemon itself must not wait for the lock of this folder either.
    make_lock(path).map(|()| String::new())
}

/// Returns whether the own folder is there. What only a person may move away is a problem.
fn is_there(path: &Path) -> Result<bool, Problem> {
    let Ok(found) = fs::open(path, ANYTHING, Mode::empty()) else { return Ok(false) };
    match examine(&found, path) {
        Ok(()) => Ok(true),
        Err(stranger) if stranger.is_movable() => Ok(false),
        Err(stranger) => Err(stranger.problem(path, "")),
    }
}

/// Makes the lock in the folder, unless it is there.
fn make_lock(folder: &Path) -> Result<(), Problem> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = fs::open(folder.join(LOCK), flags, Mode::RUSR | Mode::WUSR);
    made.map(drop).map_err(|errno| failed(&folder.join(LOCK), errno, "let the daemon's user write there"))
}

fn failed(path: &Path, errno: Errno, fix: &str) -> Problem {
    Problem::new("", format!("{} cannot be made: {errno}", path.display()), fix)
}

const WRITE_ABOVE: &str = "let the daemon's user write in the folder above it";

/// Returns another name in the same folder, which nobody can have taken.
fn beside(path: &Path, why: &str) -> PathBuf {
    let number = u128::from_ne_bytes(random::bytes());
    path.with_file_name(format!("{OWN_FOLDER}.{why}.{number:032x}"))
}

/// A new folder, complete with its lock, that has another name yet.
#[derive(Debug)]
struct New {
    path: PathBuf,
    folder: OwnedFd,
}

impl New {
    fn make(place: &Path) -> Result<Self, Problem> {
        let path = beside(place, "new");
        let failed = |errno| failed(place, errno, WRITE_ABOVE);
        fs::mkdir(&path, Mode::from_raw_mode(MODE)).map_err(failed)?;
        let folder = fs::open(&path, ANYTHING | OFlags::DIRECTORY, Mode::empty()).map_err(failed)?;
        let new = Self { path, folder };
        match make_lock(&new.path) {
            Ok(()) => Ok(new),
            Err(problem) => {
                new.remove();
                Err(problem)
            }
        }
    }

    /// Puts it in its place with one call, whether nothing is there or a thing of another user. Whoever tries to take the name all the time
    /// waits for the lock of the folder above, and so has the turn after each call. Returns what was moved away; `None` if another
    /// process of this user was faster.
    fn put(&self, path: &Path) -> Result<Option<String>, Problem> {
        let (mut moved, mut moves) = (String::new(), 0);
        for _ in 0..ATTEMPTS {
            if is_there(path)? {
                return Ok(None);
            }
            // Somebody may also take the name and leave it all the time. That nobody knows which call comes next makes each as good as
            // the toss of a coin.
            let exchange = own_user() == 0 && random::bytes()[0] & 1 == 1;
            let how = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
            match fs::renameat_with(CWD, &self.path, CWD, path, how) {
                Ok(()) if !exchange => return Ok(Some(moved)),
                Ok(()) => match move_away(&self.path, path)? {
                    Some(moved) => return Ok(Some(moved)),
                    // Another process of this user has put its folder there in the last moment, or root has made something.
                    None => drop(fs::renameat_with(CWD, &self.path, CWD, path, RenameFlags::EXCHANGE)),
                },
                Err(Errno::EXIST | Errno::NOENT) => {}
                // A hugetlbfs before Linux 5.16 exchanges no names. Each attempt leaves what it has moved away.
                Err(Errno::INVAL) if exchange && moves < MOVES => {
                    moved = move_away(path, path)?.unwrap_or(moved);
                    moves += 1;
                }
                Err(errno) => return Err(failed(path, errno, WRITE_ABOVE)),
            }
        }
        let what = format!("others take the name {} again and again", path.display());
        Err(Problem::new("", what, "end their programs, or name a folder of root in daemon.shm_dir"))
    }

    /// Removes it. Its name may be another's by now, so this goes by the descriptor where it follows links.
    fn remove(&self) {
        let _ = fs::unlinkat(&self.folder, LOCK, AtFlags::empty());
        let _ = fs::rmdir(&self.path);
    }
}

/// Gives what another user has put in the folder's place, and which has the name `at` now, a name that says so. Returns that it did, or
/// `None` if it is not another user's.
fn move_away(at: &Path, place: &Path) -> Result<Option<String>, Problem> {
    let Ok(found) = fs::open(at, ANYTHING, Mode::empty()) else { return Ok(Some(String::new())) };
    let Some(stranger) = examine(&found, at).err().filter(Stranger::is_movable) else { return Ok(None) };
    let to = beside(place, &format!("of-user-{}", stranger.owner));
    match fs::renameat_with(CWD, at, CWD, &to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Some(format!(
            "{} was {}, where the daemon's own folder should be: it is called {} now",
            place.display(),
            stranger.what(),
            to.display()
        ))),
        Err(Errno::NOENT) => Ok(Some(String::new())),
        Err(errno) => {
            let what = format!("{} is {}, and cannot be moved away: {errno}", at.display(), stranger.what());
            Err(Problem::new("", what, "remove it"))
        }
    }
}
