//! The side of a copy that sends the files.

use super::checksum::Checksum;
use super::frame::{Frame, Kind, RESUMABLE, check_path, plain, short};
use super::location::base;
use super::progress::Progress;
use super::root::{FOLDER, Root, explain, kind_of, open_below, os, stat};
use anyhow::{Context, Result, anyhow};
use ginnel::{MessageReceiver, MessageSender};
use rustix::fs::{Advice, AtFlags, Dir, FileType, OFlags, Stat, fadvise, openat, readlinkat, statat};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Size of a block in bytes: large enough to make its frame cheap, and small enough to stay in the processor's cache
/// between reading and adding it to the checksum.
const BLOCK: usize = 256 << 10;

/// How to send.
#[derive(Clone, Copy)]
pub struct Options {
    /// Whether to send folders too. Without this, a symbolic link that the user names stands for its target.
    pub recursive: bool,
    /// Whether to ask for the part that exists already.
    pub resume: bool,
}

/// Sends files to a receiver at the other end of a channel.
pub struct Sender<'a> {
    pub out: &'a mut MessageSender,
    pub answers: &'a mut MessageReceiver,
    pub root: &'a Root,
    pub options: Options,
    pub progress: &'a mut Progress,
}

/// Why a file is not sent.
enum Failure {
    /// The other files can still be sent.
    File(anyhow::Error),
    /// The channel cannot be used any more.
    Channel(anyhow::Error),
}

impl From<ginnel::Error> for Failure {
    fn from(error: ginnel::Error) -> Self {
        Self::Channel(error.into())
    }
}

/// Returns the failure for an error of a file.
fn file(error: impl Into<anyhow::Error>) -> Failure {
    Failure::File(error.into())
}

impl Sender<'_> {
    /// Sends the files at `paths`, and waits until they are stored. Files that cannot be read are refused, and the
    /// others are sent.
    pub fn send_all<'p>(&mut self, paths: impl Iterator<Item = &'p [u8]>) -> Result<()> {
        self.send_each(paths).map_err(|error| self.verdict(error))
    }

    fn send_each<'p>(&mut self, paths: impl Iterator<Item = &'p [u8]>) -> Result<()> {
        for path in paths {
            let mut walk = Walk { sender: self, shown: plain(path) };
            match walk.top(path) {
                Err(Failure::File(error)) => walk.refuse(&error)?,
                Err(Failure::Channel(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        Frame::new(Kind::DONE).send(self.out, &[])?;
        Frame::expect(self.answers, Kind::STORED)?;
        Ok(())
    }

    /// Returns the receiver's error, if it has sent one before it closed the channel.
    fn verdict(&mut self, error: anyhow::Error) -> anyhow::Error {
        match error.downcast_ref::<ginnel::Error>() {
            Some(ginnel::Error::Closed) => {}
            _ => return error,
        }
        loop {
            match Frame::receive(self.answers) {
                Ok((frame, text)) if frame.kind == Kind::ERROR => return anyhow!("{}", plain(&text)),
                Ok(_) => {}
                Err(_) => return error,
            }
        }
    }
}

/// One source that is being sent.
struct Walk<'a, 'b> {
    sender: &'a mut Sender<'b>,
    /// The source as the user has written it.
    shown: String,
}

/// A remaining step in a tree.
enum Step {
    Enter(Vec<u8>),
    Leave(Vec<u8>, Stat),
}

impl Walk<'_, '_> {
    /// Returns a path for messages.
    fn shown(&self, below: &[u8]) -> String {
        if below.is_empty() {
            self.shown.clone()
        } else {
            format!("{}/{}", self.shown.trim_end_matches('/'), plain(below))
        }
    }

    fn refuse(&mut self, error: &anyhow::Error) -> Result<()> {
        let text = format!("{error:#}");
        self.sender.progress.refused(&text);
        Ok(Frame::new(Kind::REFUSED).send(self.sender.out, short(&text))?)
    }

    fn top(&mut self, path: &[u8]) -> Result<(), Failure> {
        let recursive = self.sender.options.recursive;
        let follow = if recursive && !path.ends_with(b"/") { OFlags::NOFOLLOW } else { OFlags::empty() };
        // Looks at the file before it is opened, because opening a device can have effects.
        let found = self.sender.root.open(path, OFlags::PATH | follow).map_err(file)?;
        let stat = stat(&found, &self.shown).map_err(file)?;
        let kind = kind_of(&stat, &self.shown).map_err(file)?;
        if kind == FileType::Directory && !recursive {
            return Err(file(anyhow!("{}: is a folder; copy it with --recursive (-r)", self.shown)));
        }
        Frame::new(Kind::TOP).send(self.sender.out, base(path))?;
        match kind {
            FileType::Symlink => self.link(found.as_fd(), b"", b"", &stat),
            FileType::Directory => {
                let top = self.sender.root.open(path, FOLDER | follow).map_err(file)?;
                self.tree(&top)
            }
            _ => {
                let opened = self.sender.root.open(path, OFlags::RDONLY | follow).map_err(file)?;
                self.file(opened, b"")
            }
        }
    }

    /// Sends a folder and everything below it. The files of a folder come before its folders. Only the top folder and
    /// the file or folder that is being read are open.
    fn tree(&mut self, top: &OwnedFd) -> Result<(), Failure> {
        let mut steps = vec![Step::Enter(Vec::new())];
        while let Some(step) = steps.pop() {
            match step {
                Step::Leave(path, stat) => stamped(Kind::LEAVE, &stat).send(self.sender.out, &path)?,
                Step::Enter(path) => match self.folder(top, &path, &mut steps) {
                    Err(Failure::File(error)) => self.refuse(&error).map_err(Failure::Channel)?,
                    other => other?,
                },
            }
        }
        Ok(())
    }

    fn folder(&mut self, top: &OwnedFd, path: &[u8], steps: &mut Vec<Step>) -> Result<(), Failure> {
        let shown = self.shown(path);
        check_path(path).map_err(file)?;
        let folder = open_below(top.as_fd(), path, FOLDER).map_err(|e| file(explain(e, &shown)))?;
        let own = stat(&folder, &shown).map_err(file)?;
        let names = names(folder.as_fd()).with_context(|| shown.clone()).map_err(file)?;
        Frame::new(Kind::FOLDER).send(self.sender.out, path)?;
        steps.push(Step::Leave(path.to_vec(), own));
        let begin = steps.len();
        for name in names {
            let below = if path.is_empty() { name.clone() } else { [path, b"/", &name].concat() };
            match self.entry(folder.as_fd(), &name, &below) {
                Ok(true) => steps.push(Step::Enter(below)),
                Ok(false) => {}
                Err(Failure::File(error)) => self.refuse(&error).map_err(Failure::Channel)?,
                Err(channel) => return Err(channel),
            }
        }
        steps[begin..].reverse();
        Ok(())
    }

    /// Sends one entry of a folder. Returns true if it is a folder, which is sent later.
    fn entry(&mut self, folder: BorrowedFd<'_>, name: &[u8], below: &[u8]) -> Result<bool, Failure> {
        let shown = self.shown(below);
        check_path(below).map_err(file)?;
        let stat =
            statat(folder, os(name), AtFlags::SYMLINK_NOFOLLOW).map_err(|e| file(explain(e, &shown)))?;
        match kind_of(&stat, &shown).map_err(file)? {
            FileType::Directory => return Ok(true),
            FileType::Symlink => self.link(folder, name, below, &stat)?,
            _ => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | super::root::SAFE;
                let opened = openat(folder, os(name), flags, rustix::fs::Mode::empty());
                self.file(opened.map_err(|e| file(explain(e, &shown)))?, below)?;
            }
        }
        Ok(false)
    }

    fn link(
        &mut self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        below: &[u8],
        stat: &Stat,
    ) -> Result<(), Failure> {
        let target =
            readlinkat(folder, os(name), Vec::new()).map_err(|e| file(explain(e, &self.shown(below))))?;
        let tail = [below, target.as_bytes()].concat();
        let frame = Frame { extra: below.len() as u32, ..stamped(Kind::LINK, stat) };
        frame.send(self.sender.out, &tail)?;
        self.sender.progress.done();
        Ok(())
    }

    /// Sends the content of a file. Of a file that grows meanwhile, sends what was there at the beginning.
    fn file(&mut self, opened: OwnedFd, below: &[u8]) -> Result<(), Failure> {
        let shown = self.shown(below);
        let stat = stat(&opened, &shown).map_err(file)?;
        if kind_of(&stat, &shown).map_err(file)? != FileType::RegularFile {
            return Err(file(anyhow!("{shown}: was replaced while it was being opened")));
        }
        let opened = File::from(opened);
        let size = stat.st_size as u64;
        let sender = &mut *self.sender;
        Frame { size, ..stamped(Kind::FILE, &stat) }.send(sender.out, below)?;
        sender.progress.file(&shown, size);
        match sender.content(&opened, size) {
            Ok(sum) => {
                let frame = Frame { size: sum.len(), checksum: sum.value(), ..Frame::new(Kind::END) };
                frame.send(sender.out, &[])?;
                sender.progress.done();
                Ok(())
            }
            Err(Failure::File(error)) => {
                Frame::new(Kind::DROP).send(sender.out, &[])?;
                Err(Failure::File(error.context(shown)))
            }
            Err(channel) => Err(channel),
        }
    }
}

impl Sender<'_> {
    /// Asks how much of a large file the receiver has already, and checks that it is the same content.
    fn agree(&mut self, opened: &File, size: u64) -> Result<Checksum, Failure> {
        let have = Frame::expect(self.answers, Kind::HAVE).map_err(Failure::Channel)?;
        let mut sum = Checksum::new();
        if !self.options.resume || have.size == 0 || have.size > size {
            return Ok(sum);
        }
        let mut piece = vec![0; BLOCK];
        while sum.len() < have.size {
            let want = piece.len().min(usize::try_from(have.size - sum.len()).unwrap_or(usize::MAX));
            match (&*opened).read(&mut piece[..want]) {
                Ok(0) | Err(_) => break,
                Ok(n) => sum.add(&piece[..n]),
            }
        }
        if sum.len() == have.size && sum.value() == have.checksum {
            self.progress.resumed(have.size);
            return Ok(sum);
        }
        rustix::fs::seek(opened, rustix::fs::SeekFrom::Start(0)).map_err(file)?;
        Ok(Checksum::new())
    }

    /// Sends the bytes that the receiver does not have. The kernel reads them directly into the ring.
    fn content(&mut self, opened: &File, size: u64) -> Result<Checksum, Failure> {
        let mut sum = Checksum::new();
        if size >= RESUMABLE {
            // A hint: without it, the kernel reads ahead less.
            let _ = fadvise(opened, 0, None, Advice::Sequential);
            sum = self.agree(opened, size)?;
        }
        let most = BLOCK.min((self.out.max_message() - Frame::LEN) & !4095);
        // Files of the kernel (/proc) report size 0 and have content, so they are read to the end.
        while size == 0 || sum.len() < size {
            let left = if size == 0 { most as u64 } else { size - sum.len() };
            let want = most.min(usize::try_from(left).unwrap_or(usize::MAX));
            let claim = self.out.claim(Frame::LEN + want)?;
            let (at, mut got) = (sum.len(), 0);
            while got < want {
                match claim.slice().skip(Frame::LEN + got).read_from(opened.as_fd()) {
                    Ok(0) => break,
                    Ok(n) => got += n,
                    Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                    Err(error) => return Err(file(error)),
                }
            }
            if got == 0 {
                break;
            }
            let whole = claim.slice();
            sum.add_shared(&whole.skip(Frame::LEN).first(got));
            let frame = Frame { size: at, checksum: sum.value(), ..Frame::new(Kind::DATA) };
            whole.write(0, zerocopy::IntoBytes::as_bytes(&frame));
            claim.send(Frame::LEN + got)?;
            self.progress.moved(got as u64);
        }
        if sum.len() < size {
            return Err(file(anyhow!("became shorter while it was being read")));
        }
        Ok(sum)
    }
}

/// Returns a frame with the mode and time of `stat`.
fn stamped(kind: Kind, stat: &Stat) -> Frame {
    let (seconds, nanos) = (stat.st_mtime, stat.st_mtime_nsec as u32);
    Frame { mode: stat.st_mode & 0o7777, seconds, nanos, ..Frame::new(kind) }
}

/// Returns the names of a folder's entries, sorted.
fn names(folder: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
