//! The processes that have the files of segments, open or mapped, as `/proc` shows them.
//!
//! A process can hold up whoever looks at its memory map, by a page fault on a file system of its own, and so a process of its own looks
//! (`ginneld holders`). What it has seen counts, also if it does not come to an end. Open files come first: they cannot be held, and
//! QEMU keeps the files of its memory open. But processes with very many descriptors can make it last. Only if the look has seen all open
//! files, it is complete: then a QEMU that it has not found is none.
//!
//! A program that wants to hide can do so: a descriptor in a socket's queue is seen nowhere. This is for finding QEMUs.

use super::file_jobs::Identity;
use super::token::Token;
use crate::pidwatch;
use crate::poller::Poller;
use crate::spawned::{Spawned, Speaker, end_with_parent, own_program};
use ginnel_broker::process::Process;
use ginnel_layout::Name;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long a look may take that somebody waits for. What it has seen by then counts.
pub const WAIT: Duration = Duration::from_secs(2);
/// How long any other look may take.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The shortest rest between two looks, how many times as long as the last look it is at least, and the longest.
const REST: Duration = Duration::from_secs(2);
const RESTS: u32 = 50;
const MOST_REST: Duration = Duration::from_secs(120);
/// A process with more descriptors than these is looked at when all others were.
const MANY: usize = 4096;
/// The processes that were killed and do not end, from which on no more are started.
const STUCK: usize = 4;
/// What the process says when it has seen all open files, and when it has seen everything.
const OPENED: &str = "opened";
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
    speaker: Speaker,
    names: Vec<Name>,
    begun: Instant,
    patience: Duration,
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
    /// The segments all of whose holders were seen then, as far as a look can see them.
    complete: BTreeSet<Name>,
    next: Option<Instant>,
}

impl Looks {
    /// Returns whether a look is under way.
    pub fn is_looking(&self) -> bool {
        self.present.is_some()
    }

    /// Looks for the processes that have these files, unless that was done just now.
    pub fn begin(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>, patience: Duration) {
        if self.is_looking() || self.next.is_some_and(|next| Instant::now() < next) || files.is_empty() {
            return;
        }
        if let Err(error) = self.start(poller, files, patience) {
            warn!(%error, "the processes that have segments cannot be looked for");
            self.next = Some(Instant::now() + REST);
        }
    }

    /// Does the same at once and waits for the result, but not for long.
    pub fn look(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>) -> io::Result<&Found> {
        self.found.clear();
        self.complete.clear();
        let number = self.start(poller, files, WAIT)?;
        while let Some(left) = self.left().filter(|left| !left.is_zero()) {
            if let Some((_, look)) = &self.present {
                look.speaker.wait(Some(Instant::now() + left));
            }
            self.ready(poller, number);
        }
        self.give_up(poller);
        // If somebody has made it last, the next one may take longer, and need not rest first.
        self.next = None;
        Ok(&self.found)
    }

    /// Returns the segments all of whose holders the last look has seen, once.
    pub fn take_complete(&mut self) -> BTreeSet<Name> {
        std::mem::take(&mut self.complete)
    }

    fn start(&mut self, poller: &Poller, files: Vec<(Name, PathBuf)>, patience: Duration) -> io::Result<u64> {
        if self.ending.len() >= STUCK {
            return Err(io::Error::other(format!("{STUCK} processes that did this are stuck")));
        }
        let arguments = files.iter().flat_map(|(_, path)| ["--file".into(), OsString::from(path)]);
        let mut command = own_program(std::iter::once("holders".into()).chain(arguments));
        let number = self.numbers;
        let tokens = [number, number + 1].map(|number| Token::Look(number).into());
        let speaker = Speaker::start_with(command.stdin(Stdio::null()), poller, tokens)?;
        self.numbers += 2;
        let names = files.into_iter().map(|(name, _)| name).collect();
        let look = Look { speaker, names, begun: Instant::now(), patience };
        self.present = Some((number, look));
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
        if look.speaker.hear() || says(look.speaker.said(), DONE) || has_ended {
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
        self.present.as_ref().map(|(_, look)| look.patience.saturating_sub(look.begun.elapsed()))
    }

    fn end(&mut self, poller: &Poller) {
        let Some((number, mut look)) = self.present.take() else { return };
        look.speaker.ignore(poller);
        self.found = parse(&look.names, look.speaker.said());
        self.complete = match says(look.speaker.said(), OPENED) {
            true => look.names.iter().copied().collect(),
            false => BTreeSet::new(),
        };
        self.next = Some(Instant::now() + (look.begun.elapsed() * RESTS).clamp(REST, MOST_REST));
        look.speaker.process.kill();
        self.ending.insert(number, look.speaker.process);
    }
}

/// Returns whether a line has this word and nothing else. A process may have any name, and that name ends the line which tells of it.
fn says(said: &[u8], word: &str) -> bool {
    said.split_inclusive(|&byte| byte == b'\n').any(|line| line.strip_suffix(b"\n") == Some(word.as_bytes()))
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

/// A process that is looked at.
struct Candidate {
    pid: u32,
    is_qemu: bool,
    /// Which of the files it has, as far as that was said.
    known: BTreeSet<usize>,
}

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
    let mut processes = candidates()?;
    let mut with_many = Vec::new();
    for process in &mut processes {
        let (found, is_all) = opened(process.pid, &names, MANY);
        tell(process, &found, &files)?;
        if !is_all {
            with_many.push(process);
        }
    }
    for process in with_many {
        tell(process, &opened(process.pid, &names, usize::MAX).0, &files)?;
    }
    say(&format!("{OPENED}\n"))?;
    for process in &mut processes {
        tell(process, &mapped(process.pid), &files)?;
    }
    say(&format!("{DONE}\n"))
}

/// Returns all processes but this program's, QEMUs first.
fn candidates() -> anyhow::Result<Vec<Candidate>> {
    let own = fs::read_link("/proc/self/exe")?;
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let exe = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if exe != own {
            let is_qemu = exe.file_name().is_some_and(|name| name.to_string_lossy().contains("qemu"));
            all.push(Candidate { pid, is_qemu, known: BTreeSet::new() });
        }
    }
    all.sort_by_key(|process| !process.is_qemu);
    Ok(all)
}

/// Says which of the files a process has. Only for such a process, the time of its start is read: that may take as long as some other
/// process needs to end.
fn tell(
    process: &mut Candidate,
    found: &[Identity],
    files: &BTreeMap<Identity, Vec<usize>>,
) -> anyhow::Result<()> {
    let numbers = found.iter().filter_map(|identity| files.get(identity)).flatten();
    let new: Vec<usize> = numbers.copied().filter(|file| process.known.insert(*file)).collect();
    if new.is_empty() {
        return Ok(());
    }
    let Some(Process { pid, started }) = pidwatch::process(process.pid) else { return Ok(()) };
    let command = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    // Whoever chooses the name of a process must not write lines of this answer.
    let command = String::from_utf8_lossy(&command).replace(|c: char| c.is_control(), "");
    for file in new {
        say(&format!("{file} {pid} {started} {} {command}\n", u8::from(process.is_qemu)))?;
    }
    Ok(())
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

/// Returns the files with one of these names that a process has open, and whether these are all: at most so many descriptors are looked at.
fn opened(pid: u32, names: &BTreeSet<&OsStr>, most: usize) -> (Vec<Identity>, bool) {
    // It has ended, or this user may not look at it.
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return (Vec::new(), true) };
    let mut files = entries.flatten().map(|entry| entry.path());
    let named = files.by_ref().take(most).filter(|file| {
        fs::read_link(file).is_ok_and(|link| link.file_name().is_some_and(|name| names.contains(name)))
    });
    let found = named.filter_map(|file| identity(&file)).collect();
    (found, files.next().is_none())
}

/// Returns the files that a process has mapped.
fn mapped(pid: u32) -> Vec<Identity> {
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
        assert!(opened(me, &names, usize::MAX).0.contains(&wanted));
        assert!(!mapped(me).contains(&wanted));
        let mapping = Mapping::of_file(file.as_file(), 0, 4096, Protection::Read).unwrap();
        let (name, path) = (file.path().file_name().unwrap().to_owned(), file.into_temp_path());
        let names = BTreeSet::from([name.as_os_str()]);
        assert!(!opened(me, &names, usize::MAX).0.contains(&wanted));
        assert!(mapped(me).contains(&wanted));
        drop((mapping, path));
        assert!(!mapped(me).contains(&wanted));
    }

    #[test]
    fn the_name_of_a_process_is_no_end_of_an_answer() {
        assert!(!says(b"0 7 9 1 done\n", DONE) && !says(b"0 7 9 1 opened\nopened", OPENED));
        let all = b"0 7 9 1 x\nopened\n0 8 9 1 y\ndone\n";
        assert!(says(all, OPENED) && says(all, DONE));
    }

    #[test]
    fn it_is_seen_that_a_process_has_more_descriptors_than_were_looked_at() {
        let me = std::process::id();
        assert!(!opened(me, &BTreeSet::new(), 1).1 && opened(me, &BTreeSet::new(), usize::MAX).1);
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
