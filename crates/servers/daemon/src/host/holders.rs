//! The processes that have the files of segments, open or mapped, as `/proc` shows them.
//!
//! A process can hold up whoever looks at its memory map, by a page fault on a file system of its own, and so a process of its own looks
//! (`ginneld holders`). What it has seen counts, also if it does not come to an end. Open files come first: they cannot be held, and
//! QEMU keeps the files of its memory open.
//!
//! A program that wants to hide can do so: a descriptor in a socket's queue is seen nowhere. This is for finding QEMUs.

use super::restoring::Identity;
use super::token::Token;
use crate::pidwatch;
use crate::poller::{Interest, Poller};
use crate::spawned::{Spawned, end_with_parent, own_program};
use ginnel_broker::process::Process;
use ginnel_layout::Name;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long a look may take. What it has seen by then counts.
const PATIENCE: Duration = Duration::from_secs(2);
/// The shortest rest between two looks, and how many times as long as the last look it is at least.
const REST: Duration = Duration::from_secs(2);
const RESTS: u32 = 50;
/// The processes that were killed and do not end, from which on no more are started.
const STUCK: usize = 4;
/// What the process says when it has seen everything.
const DONE: &str = "done";

/// A process that has a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The process.
    pub process: Process,
    /// It is a QEMU, as the name of its program says.
    pub is_qemu: bool,
    /// The name that it has given itself.
    pub command: String,
}

/// The holders of each segment's file.
pub type Found = BTreeMap<Name, BTreeSet<Holder>>;

/// A look that is under way.
#[derive(Debug)]
struct Look {
    process: Spawned,
    output: OwnedFd,
    said: Vec<u8>,
    names: Vec<Name>,
    begun: Instant,
}

/// The looks of the daemon.
#[derive(Debug, Default)]
pub struct Looks {
    /// By even numbers: of the tokens of what they say. The tokens of their ends have the numbers after these.
    present: Option<(u64, Look)>,
    /// Those that were killed.
    ending: BTreeMap<u64, Spawned>,
    numbers: u64,
    /// What was seen last.
    pub found: Found,
    next: Option<Instant>,
}

impl Looks {
    /// Returns whether a look is under way.
    pub fn is_looking(&self) -> bool {
        self.present.is_some()
    }

    /// Looks for the processes that have these files, unless that was done just now.
    pub fn begin(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>) {
        if self.is_looking() || self.next.is_some_and(|next| Instant::now() < next) || files.is_empty() {
            return;
        }
        if let Err(error) = self.start(poller, files) {
            warn!(%error, "the processes that have segments cannot be looked for");
            self.next = Some(Instant::now() + REST);
        }
    }

    /// Does the same at once and waits for the result, but not for long.
    pub fn look(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>) -> io::Result<&Found> {
        self.found.clear();
        let number = self.start(poller, files)?;
        while let Some(left) = self.left().filter(|left| !left.is_zero()) {
            if let Some((_, look)) = &self.present {
                let time = Timespec::try_from(left).ok();
                let _ = poll(&mut [PollFd::new(&look.output, PollFlags::IN)], time.as_ref());
            }
            self.ready(poller, number);
        }
        self.give_up(poller);
        Ok(&self.found)
    }

    fn start(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>) -> io::Result<u64> {
        if self.ending.len() >= STUCK {
            return Err(io::Error::other(format!("{STUCK} processes that did this are stuck")));
        }
        let (output, say) = pipe_with(PipeFlags::CLOEXEC)?;
        ioctl_fionbio(&output, true)?;
        let arguments = files.iter().flat_map(|(_, path)| ["--file".into(), OsString::from(path)]);
        let mut command = own_program(std::iter::once("holders".into()).chain(arguments));
        command.stdin(Stdio::null()).stdout(Stdio::from(say));
        let number = self.numbers;
        self.numbers += 2;
        let process = Spawned::start(&mut command, poller, Token::Look(number + 1).into())?;
        if let Err(error) = poller.add(&output, Token::Look(number).into(), Interest::READ) {
            self.ending.insert(number, process);
            return Err(error);
        }
        let names = files.into_iter().map(|(name, _)| name).collect();
        self.present =
            Some((number, Look { process, output, said: Vec::new(), names, begun: Instant::now() }));
        Ok(number)
    }

    /// Handles an event with the token of this number.
    pub fn ready(&mut self, poller: &Poller, number: u64) {
        let (number, has_ended) = (number & !1, number & 1 == 1);
        if has_ended && let Some(process) = self.ending.remove(&number) {
            process.bury(poller);
            return;
        }
        let Some((present, look)) = &mut self.present else { return };
        if *present != number {
            return;
        }
        let mut bytes = [0; 4096];
        loop {
            match rustix::io::read(&look.output, &mut bytes) {
                Ok(0) => return self.end(poller),
                Ok(len) => look.said.extend_from_slice(&bytes[..len]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return self.end(poller),
            }
        }
        if look.said.ends_with(format!("{DONE}\n").as_bytes()) || has_ended {
            self.end(poller);
        }
    }

    /// Ends a look that takes too long.
    pub fn give_up(&mut self, poller: &Poller) {
        if self.left() == Some(Duration::ZERO) {
            warn!("a process cannot be looked at: which processes have segments may not be known completely");
            self.end(poller);
        }
    }

    /// Returns the time until [`Looks::give_up`].
    pub fn left(&self) -> Option<Duration> {
        self.present.as_ref().map(|(_, look)| PATIENCE.saturating_sub(look.begun.elapsed()))
    }

    fn end(&mut self, poller: &Poller) {
        let Some((number, mut look)) = self.present.take() else { return };
        poller.remove(&look.output);
        self.found = parse(&look.names, &look.said);
        self.next = Some(Instant::now() + REST.max(look.begun.elapsed() * RESTS));
        look.process.kill();
        self.ending.insert(number, look.process);
    }
}

fn parse(names: &[Name], said: &[u8]) -> Found {
    let mut found = Found::new();
    for line in String::from_utf8_lossy(said).lines() {
        let mut words = line.splitn(5, ' ');
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (Some(file), Some(pid), Some(started), Some(is_qemu)) = (number(), number(), number(), number())
        else {
            continue;
        };
        let name = usize::try_from(file).ok().and_then(|file| names.get(file));
        let (Some(name), Ok(pid)) = (name, u32::try_from(pid)) else { continue };
        let process = Process { pid, started };
        let command = words.next().unwrap_or_default().to_owned();
        found.entry(*name).or_default().insert(Holder { process, is_qemu: is_qemu == 1, command });
    }
    found
}

/// Arguments of `ginneld holders`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A file.
    #[arg(long = "file")]
    pub files: Vec<PathBuf>,
}

/// Returns files that a process has, among others those with one of these names.
type FilesOf = fn(u32, &BTreeSet<&OsStr>) -> Vec<Identity>;

/// Prints a line for each process that has one of the files: which file, the process, whether it is a QEMU, and its name.
pub fn run(args: Args) -> anyhow::Result<()> {
    end_with_parent()?;
    let mut files: BTreeMap<Identity, Vec<usize>> = BTreeMap::new();
    for (number, path) in args.files.iter().enumerate() {
        if let Some(identity) = identity(path) {
            files.entry(identity).or_default().push(number);
        }
    }
    let names: BTreeSet<&OsStr> = args.files.iter().filter_map(|path| path.file_name()).collect();
    let own = fs::read_link("/proc/self/exe")?;
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(process) = pid.and_then(pidwatch::process) else { continue };
        let exe = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if exe != own {
            processes.push((process, exe, BTreeSet::new()));
        }
    }
    let ways: [FilesOf; 2] = [opened, mapped];
    for files_of in ways {
        for (process, exe, known) in &mut processes {
            for identity in files_of(process.pid, &names) {
                for file in files.get(&identity).into_iter().flatten().filter(|file| known.insert(**file)) {
                    tell(*file, process, exe)?;
                }
            }
        }
    }
    say(&format!("{DONE}\n"))
}

fn tell(file: usize, process: &Process, exe: &Path) -> anyhow::Result<()> {
    let Process { pid, started } = process;
    let is_qemu = exe.file_name().is_some_and(|name| name.to_string_lossy().contains("qemu"));
    let command = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    // Whoever chooses the name of a process must not write lines of this answer.
    let command = String::from_utf8_lossy(&command).replace(|c: char| c.is_control(), "");
    say(&format!("{file} {pid} {started} {} {command}\n", u8::from(is_qemu)))
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut output = io::stdout();
    output.write_all(line.as_bytes())?;
    Ok(output.flush()?)
}

/// Returns which file a name leads to, as far as the kernel knows that without asking a file system.
fn identity(path: &Path) -> Option<Identity> {
    let stat = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
}

/// Returns the files with one of these names that a process has open.
fn opened(pid: u32, names: &BTreeSet<&OsStr>) -> Vec<Identity> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let files = entries.flatten().map(|entry| entry.path());
    let named = files.filter(|file| {
        fs::read_link(file).is_ok_and(|link| link.file_name().is_some_and(|name| names.contains(name)))
    });
    named.filter_map(|file| identity(&file)).collect()
}

/// Returns the files that a process has mapped.
fn mapped(pid: u32, _: &BTreeSet<&OsStr>) -> Vec<Identity> {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut all: Vec<Identity> = maps.split(|&byte| byte == b'\n').filter_map(mapping).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the file of a line of `/proc/PID/maps`: addresses, rights, offset, device, inode, path.
fn mapping(line: &[u8]) -> Option<Identity> {
    let mut words = line.split(|&byte| byte == b' ').map(|word| OsStr::from_bytes(word).to_str());
    let (device, inode) = (words.nth(3)??, words.next()??);
    let (major, minor) = device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let inode = inode.parse().ok().filter(|inode| *inode != 0)?;
    Some((makedev(number(major)?, number(minor)?), inode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection};

    #[test]
    fn a_file_is_found_that_is_open_or_mapped() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(4096).unwrap();
        let wanted = identity(file.path()).unwrap();
        let names = BTreeSet::from([file.path().file_name().unwrap()]);
        let me = std::process::id();
        assert!(opened(me, &names).contains(&wanted));
        assert!(!mapped(me, &names).contains(&wanted));
        let mapping = Mapping::of_file(file.as_file(), 0, 4096, Protection::Read).unwrap();
        let (name, path) = (file.path().file_name().unwrap().to_owned(), file.into_temp_path());
        let names = BTreeSet::from([name.as_os_str()]);
        assert!(!opened(me, &names).contains(&wanted));
        assert!(mapped(me, &names).contains(&wanted));
        drop((mapping, path));
        assert!(!mapped(me, &names).contains(&wanted));
    }

    #[test]
    fn an_answer_that_breaks_off_counts_as_far_as_it_goes() {
        let web = Name::new("web").unwrap();
        let found = parse(&[web], b"0 7 9 1 qemu a b\n1 8 9 0 x\n0 5 3 0 y\n0 6");
        let holder = |pid, started, is_qemu, command: &str| Holder {
            process: Process { pid, started },
            is_qemu,
            command: command.into(),
        };
        assert_eq!(found[&web], BTreeSet::from([holder(5, 3, false, "y"), holder(7, 9, true, "qemu a b")]));
    }
}
