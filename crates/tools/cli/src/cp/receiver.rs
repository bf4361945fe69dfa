//! The side of a copy that receives the files.

use super::direct::{Direct, Way};
use super::frame::{Frame, Kind, MAX_PATH, RESUMABLE, check_name, check_path, plain};
use super::location::base;
use super::partial::{Partial, permissions, times};
use super::progress::Progress;
use super::root::{FOLDER, Root, explain, open_below, os};
use anyhow::{Context, Result, anyhow, bail, ensure};
use ginnel::{Mapping, Message, MessageReceiver, MessageSender, SharedSlice};
use rustix::fs::{
    AtFlags, Mode, Timespec, fchmod, futimens, mkdirat, renameat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The file size in bytes from which the receiver tries out whether writing without the page cache is faster.
const WORTH_A_TRIAL: u64 = 64 << 20;

/// The target of the files.
pub enum Target {
    /// A folder, in which each source gets its own name.
    Into(Arc<OwnedFd>),
    /// A folder, and the name that the only source gets in it.
    As(Arc<OwnedFd>, Vec<u8>),
}

impl Target {
    /// Finds out whether the user's path is a folder to copy into, or a new name.
    pub fn at(root: &Root, path: &[u8], must_be_folder: bool) -> Result<Self> {
        match root.open(if path.is_empty() { b"." } else { path }, FOLDER) {
            Ok(folder) => return Ok(Self::Into(Arc::new(folder))),
            Err(error) if must_be_folder || path.ends_with(b"/") => {
                return Err(error.context("the target must be a folder that exists"));
            }
            Err(_) => {}
        }
        let name = base(path);
        check_name(name)?;
        let start = path.len() - name.len();
        let parent = if start == 0 { b".".as_slice() } else { &path[..start] };
        let folder = root.open(parent, FOLDER).context("no such folder for the target")?;
        Ok(Self::As(Arc::new(folder), name.to_vec()))
    }
}

/// Receives files from a sender at the other end of a channel.
pub struct Receiver<'a> {
    pub input: &'a mut MessageReceiver,
    pub answers: &'a mut MessageSender,
    pub target: Target,
    /// Whether to continue files of which an earlier copy has left a part.
    pub resume: bool,
    /// Whether to write without the page cache even where that is slower, if it is possible at all.
    pub direct: bool,
    /// Whether folders were requested.
    pub recursive: bool,
    /// The base names of the requested sources, in order; the sender may not choose others. `None` for a server, whose
    /// client chooses the names.
    pub expected: Option<VecDeque<Vec<u8>>>,
    pub progress: &'a mut Progress,
}

/// The source and the file that are being received.
#[derive(Default)]
struct Position {
    /// The folder and the name of the current source.
    top: Option<(Arc<OwnedFd>, Vec<u8>)>,
    /// Whether the current source is a folder that merges into the target itself.
    merges: bool,
    /// The folder of the current source, if it is one.
    tree: Option<Arc<OwnedFd>>,
    /// The folder that was used last, with its path below the source.
    last: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// The file whose content is being received.
    file: Option<Incoming>,
}

struct Incoming {
    partial: Partial,
    direct: Option<Direct>,
    path: Vec<u8>,
    mode: u32,
    modified: Timespec,
    /// Whether no block has arrived yet, so that the sender may begin anew instead of continuing.
    fresh: bool,
}

impl Receiver<'_> {
    /// Receives everything, and confirms that it is stored.
    pub fn receive_all(&mut self) -> Result<()> {
        let mut position = Position::default();
        loop {
            let message = self.input.peek()?;
            let frame = Frame::of(&message)?;
            if frame.kind == Kind::DATA {
                let incoming =
                    position.file.as_mut().ok_or_else(|| anyhow!("the sender sent data without a file"))?;
                if incoming.fresh {
                    self.progress.resumed(frame.size);
                }
                let n = incoming.store(&frame, &message)?;
                message.release()?;
                self.progress.moved(n);
                continue;
            }
            let tail = Frame::tail(&message)?;
            message.release()?;
            match frame.kind {
                Kind::TOP => self.top(&mut position, &tail)?,
                Kind::FOLDER => self.folder(&mut position, &tail)?,
                Kind::LEAVE => leave(&mut position, &frame, &tail)?,
                Kind::FILE => self.file(&mut position, &frame, &tail)?,
                Kind::END => {
                    let incoming = position
                        .file
                        .take()
                        .ok_or_else(|| anyhow!("the sender ended a file that it had not begun"))?;
                    incoming.finish(&frame)?;
                    self.progress.done();
                }
                Kind::DROP => drop(position.file.take()),
                Kind::LINK => {
                    link(&mut position, &frame, &tail)?;
                    self.progress.done();
                }
                Kind::REFUSED => self.progress.refused(&plain(&tail)),
                Kind::DONE => {
                    ensure!(position.file.is_none(), "the sender ended in the middle of a file");
                    Frame::new(Kind::STORED).send(self.answers, &[])?;
                    return Ok(());
                }
                Kind::ERROR => bail!("{}", plain(&tail)),
                other => bail!("the sender broke the copy protocol: kind {}", other.0),
            }
        }
    }

    /// Begins a new source.
    fn top(&mut self, position: &mut Position, name: &[u8]) -> Result<()> {
        ensure!(position.file.is_none(), "the sender began a source in the middle of a file");
        if let Some(expected) = &mut self.expected {
            // Refused sources are skipped.
            while expected
                .pop_front()
                .ok_or_else(|| anyhow!("the sender sent {:?}, which was not requested", plain(name)))?
                != name
            {}
        }
        let (folder, own) = match &self.target {
            Target::Into(folder) => (folder.clone(), name.to_vec()),
            Target::As(folder, own) => (folder.clone(), own.clone()),
        };
        *position = Position { merges: own.is_empty(), ..Position::default() };
        if !position.merges {
            check_name(&own)?;
        }
        position.top = Some((folder, own));
        Ok(())
    }

    fn folder(&mut self, position: &mut Position, path: &[u8]) -> Result<()> {
        ensure!(self.recursive, "the sender sent a folder, which was not requested");
        ensure!(position.file.is_none(), "the sender began a folder in the middle of a file");
        let tree = if path.is_empty() && position.merges {
            position.top.as_ref().map(|(folder, _)| folder.clone()).ok_or_else(no_source)?
        } else {
            let (parent, name) = position.spot(path)?;
            match mkdirat(&parent, os(&name), Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(explain(errno, &plain(path_or(path, &name)))),
            }
            let opened = open_below(parent.as_fd(), &name, FOLDER);
            Arc::new(opened.map_err(|e| explain(e, &plain(path_or(path, &name))))?)
        };
        if path.is_empty() {
            position.tree = Some(tree.clone());
        }
        position.last = Some((path.to_vec(), tree));
        Ok(())
    }

    fn file(&mut self, position: &mut Position, frame: &Frame, path: &[u8]) -> Result<()> {
        ensure!(position.file.is_none(), "the sender began a file in the middle of another");
        let (folder, name) = position.spot(path)?;
        let large = frame.size >= RESUMABLE;
        let partial = Partial::begin(&folder, &name, self.resume && large)?;
        self.progress.file(&plain(path_or(path, &name)), frame.size);
        if large {
            let have =
                Frame { size: partial.sum.len(), checksum: partial.sum.value(), ..Frame::new(Kind::HAVE) };
            have.send(self.answers, &[])?;
        }
        let modified = modified(frame);
        let path = path_or(path, &name).to_vec();
        let direct = if self.direct && large || frame.size >= WORTH_A_TRIAL {
            Direct::begin(partial.fd(), !self.direct)
        } else {
            None
        };
        position.file = Some(Incoming { partial, direct, path, mode: frame.mode, modified, fresh: true });
        Ok(())
    }
}

impl Position {
    /// Returns the folder that contains the entry at `path` of the current source, and the entry's name there.
    fn spot(&mut self, path: &[u8]) -> Result<(Arc<OwnedFd>, Vec<u8>)> {
        check_path(path)?;
        if path.is_empty() {
            let (folder, name) = self.top.clone().ok_or_else(no_source)?;
            check_name(&name)?;
            return Ok((folder, name));
        }
        let tree = self.tree.as_ref().ok_or_else(no_source)?;
        let (parent, name) = match path.iter().rposition(|&b| b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&path[..0], path),
        };
        if let Some((last, folder)) = &self.last
            && last == parent
        {
            return Ok((folder.clone(), name.to_vec()));
        }
        let folder = open_below(tree.as_fd(), parent, FOLDER).map_err(|e| explain(e, &plain(parent)))?;
        let folder = Arc::new(folder);
        self.last = Some((parent.to_vec(), folder.clone()));
        Ok((folder, name.to_vec()))
    }
}

impl Incoming {
    /// Checks a block and writes it to the file.
    fn store(&mut self, frame: &Frame, message: &Message<'_>) -> Result<u64> {
        if self.fresh && frame.size == 0 {
            self.partial.restart()?;
        }
        self.fresh = false;
        let at = self.partial.sum.len();
        ensure!(
            frame.size == at,
            "{}: the sender skipped from byte {at} to {}",
            plain(&self.path),
            frame.size
        );
        let slice = message.slice().skip(Frame::LEN);
        let sum = &mut self.partial.sum;
        match &mut self.direct {
            Some(direct) => direct.take(sum, &slice),
            None => sum.add_shared(&slice),
        }
        self.check(frame)?;
        let way = match &mut self.direct {
            Some(direct) => direct.write_if_full(self.partial.fd()),
            None => write_out(&slice, self.partial.fd()).map(|()| Way::PageCache),
        };
        if way.with_context(|| format!("writing {}", plain(&self.path)))? == Way::PageCache {
            self.direct = None;
        }
        self.partial.grown();
        Ok(slice.len() as u64)
    }

    fn check(&self, frame: &Frame) -> Result<()> {
        let (ours, theirs) = (self.partial.sum.value(), frame.checksum);
        ensure!(
            ours == theirs,
            "{}: was corrupted during the transfer (checksum {ours:016x} instead of {theirs:016x} at byte {}); copy it again",
            plain(&self.path),
            self.partial.sum.len()
        );
        Ok(())
    }

    fn finish(mut self, frame: &Frame) -> Result<()> {
        if self.fresh && frame.size == 0 {
            self.partial.restart()?;
        }
        let at = self.partial.sum.len();
        ensure!(frame.size == at, "{}: {at} bytes came instead of {}", plain(&self.path), frame.size);
        self.check(frame)?;
        if let Some(direct) = &mut self.direct {
            direct.write_rest(self.partial.fd()).with_context(|| format!("writing {}", plain(&self.path)))?;
        }
        self.partial.finish(self.mode, self.modified)
    }
}

/// Writes shared bytes. The kernel copies directly from the ring.
fn write_out(slice: &SharedSlice<'_, Mapping>, fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut written = 0;
    while written < slice.len() {
        match slice.skip(written).write_to(fd) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => written += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Completes a folder. Its mode is set only now, because it may forbid writing, and its time, because writing would
/// change it.
fn leave(position: &mut Position, frame: &Frame, path: &[u8]) -> Result<()> {
    check_path(path)?;
    if path.is_empty() && position.merges {
        return Ok(());
    }
    let tree = position.tree.as_ref().ok_or_else(no_source)?;
    let shown = || plain(path);
    let folder = open_below(tree.as_fd(), path, FOLDER).map_err(|e| explain(e, &shown()))?;
    fchmod(&folder, permissions(frame.mode)).map_err(|e| explain(e, &shown()))?;
    futimens(&folder, &times(modified(frame))).map_err(|e| explain(e, &shown()))
}

/// Creates a symbolic link, whatever its target is. Like a file, it is created under a hidden name and renamed.
fn link(position: &mut Position, frame: &Frame, tail: &[u8]) -> Result<()> {
    ensure!(position.file.is_none(), "the sender began a link in the middle of a file");
    let (path, target) =
        tail.split_at_checked(frame.extra as usize).ok_or_else(|| anyhow!("a link without target"))?;
    let good = !target.is_empty() && target.len() <= MAX_PATH && !target.contains(&0);
    ensure!(good, "{}: a link with an impossible target", plain(path));
    let (folder, name) = position.spot(path)?;
    let beside = super::partial::hidden_name(&name);
    let fail = |e| explain(e, &plain(path_or(path, &name)));
    // A copy that was killed at this point leaves such a link.
    let _ = unlinkat(&folder, os(&beside), AtFlags::empty());
    symlinkat(os(target), &folder, os(&beside)).map_err(fail)?;
    let placed = utimensat(&folder, os(&beside), &times(modified(frame)), AtFlags::SYMLINK_NOFOLLOW)
        .and_then(|()| renameat(&folder, os(&beside), &folder, os(&name)));
    placed.map_err(|errno| {
        let _ = unlinkat(&folder, os(&beside), AtFlags::empty());
        fail(errno)
    })
}

fn modified(frame: &Frame) -> Timespec {
    Timespec { tv_sec: frame.seconds, tv_nsec: frame.nanos.min(999_999_999).into() }
}

/// Returns the name of an entry for messages: its path in the source, or its name if it is the source.
fn path_or<'p>(path: &'p [u8], name: &'p [u8]) -> &'p [u8] {
    if path.is_empty() { name } else { path }
}

fn no_source() -> anyhow::Error {
    anyhow!("the sender sent an entry without a source")
}
