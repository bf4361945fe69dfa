//! The files of segments: they are made, checked, mapped, and watched for truncation.

use super::config;
use super::file_jobs::{FileJobs, Identity};
use super::file_making::{NewFile, check_file_system, check_folder, check_memory, check_room};
use super::file_work::Args;
use super::fixed_size::without_truncation;
use super::front::{Front, Repairs};
use super::own_folder::{self, Folders};
use super::watched_files::WatchedFiles;
use crate::no_answer::{self, no_answer};
use crate::poller::Poller;
use crate::{at_hand, length};
use ginnel_broker::broker::World;
use ginnel_broker::memory::MemoryFile;
use ginnel_broker::objects::sync::SyncUser;
use ginnel_config::{Bytes, Problem};
use ginnel_layout::board::{self, Place};
use ginnel_layout::channel::Capacities;
use ginnel_layout::ring::{self, SideState};
use ginnel_layout::segment::SIZE_UNIT;
use ginnel_layout::sync::{self, SyncKind};
use ginnel_layout::{CACHE_LINE, Name};
use ginnel_ring::board::Poster;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_sync::User;
use ginnel_sync::authority::{self, Left};
use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tracing::{error, info, warn};

/// The shortest time between two notices to the users of a segment whose file is truncated again and again.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// How long the daemon waits until a file of slices has grown.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the daemon waits until a file is removed.
const REMOVAL: Duration = Duration::from_millis(200);
/// How long a daemon that serves waits until a new file is there.
const MAKING: Duration = Duration::from_secs(1);
/// The bits of a file's mode.
const MODE: u32 = 0o7777;

/// A segment that is open.
struct Open {
    path: PathBuf,
    /// The offset in the file at which the segment ends.
    end: u64,
    /// The file and its mapping; `None` if the file could not be opened.
    memory: Option<(Arc<OwnedFd>, Mapping)>,
    /// The same file for programs that may write but must not truncate it. `None` if the kernel cannot separate the two rights.
    for_writers: Option<Arc<OwnedFd>>,
    /// The same file, open for reading only.
    read_only: Option<Arc<OwnedFd>>,
    /// The correct contents of the memory in front of the arena, once they are known.
    front: Option<Front>,
    /// The damage that was found and repaired.
    repairs: Repairs,
    /// The file that was opened. It differs from a file that has replaced it.
    identity: Identity,
    broken: bool,
    /// The segment is broken because its file was truncated.
    cut: bool,
    /// The time at which the users were last told that the truncated part reads as zeros.
    told: Option<Instant>,
    /// The reason why the file could not be opened.
    why: Option<String>,
}

/// All segments of the host.
#[derive(Default)]
pub struct Segments {
    open: BTreeMap<Name, Open>,
    /// The segments whose memory was lost since the last [`Segments::take_newly_broken`], and whether their files were truncated.
    newly_broken: Vec<(Name, bool)>,
    /// The segments that were truncated again soon after their users were told of it.
    to_tell: BTreeSet<Name>,
    /// The files, which are watched.
    files: WatchedFiles,
    /// The processes that change them.
    jobs: FileJobs,
    /// The folders that have the files.
    folders: Folders,
    /// The files that were made since the start. All slices in such a file are new, including those in front of the first one
    /// opened.
    made: BTreeSet<PathBuf>,
    /// The files of which this daemon does not know who has them, and which were in use when it looked.
    strange: BTreeSet<PathBuf>,
    /// The journal is not believed, so files that the books do not know may be in use by those who should have them.
    is_doubtful: bool,
}

impl Segments {
    /// Starts without segments. What happens to their files is an event of this poller.
    pub fn new(poller: &Poller, folders: Folders) -> Self {
        let (files, jobs) = (WatchedFiles::new(poller), FileJobs::new(poller));
        Self { files, jobs, folders, ..Self::default() }
    }

    /// Notes that the journal is not believed.
    pub fn doubt(&mut self) {
        self.is_doubtful = true;
    }

    /// Makes and checks the folder of a segment's file.
    pub fn prepare(&mut self, config: &config::Segment, place: &str) -> Result<(), Problem> {
        config.folder.as_ref().map_or(Ok(()), |folder| Ok(self.folders.prepare(folder, place)?))
    }

    /// Notes that others are served from now on, so that nothing may wait.
    pub fn serve(&mut self) {
        self.folders.serves();
    }

    /// Lets a process make the file of a segment, and waits until it is there: at a start as long as the kernel needs to find the memory,
    /// and later only for a moment. Then, as at a start where others hold the folder's lock, the process goes on with it.
    fn make(&mut self, config: &config::Segment, place: &str) -> Result<(), Problem> {
        let path = &config.path;
        let time = match (self.folders.is_starting(), self.jobs.is_making(path)) {
            (true, _) => None,
            (false, true) => Some(Duration::ZERO),
            (false, false) => Some(MAKING),
        };
        self.begin_making(config, place)?;
        if !self.jobs.wait_made(path, time) {
            let what = format!("{} is being made, or {}", path.display(), no_answer("its folder"));
            let fix = format!("the daemon tries again by itself; {}", no_answer::FIX);
            return Err(Problem::new(place, what, fix));
        }
        for (path, result) in self.take_made(|made| made == path) {
            result.map_err(|problem| Problem { place: place.to_owned(), ..problem })?;
            info!(segment = %config.name, path = %path.display(), size = %Bytes(config.size), "segment created");
        }
        Ok(())
    }

    /// Lets a process make the file of a segment, unless one does so.
    pub fn begin_making(&mut self, config: &config::Segment, place: &str) -> Result<(), Problem> {
        self.jobs.make(&NewFile::of(config)).map_err(|error| {
            let what = format!("no process can make {}: {error}", config.path.display());
            Problem::new(place, what, "see which resource of the system is used up")
        })
    }

    /// Returns those of these files that were to be made since the last call, and whether they are.
    pub fn take_made(&mut self, which: impl Fn(&Path) -> bool) -> Vec<(PathBuf, Result<(), Problem>)> {
        let made = self.jobs.take_made(which);
        self.made.extend(made.iter().filter(|(_, result)| result.is_ok()).map(|(path, _)| path.clone()));
        made
    }

    /// Returns whether the file is being made.
    pub fn is_making(&self, path: &Path) -> bool {
        self.jobs.is_making(path)
    }

    /// Forgets that this file was made. Returns false if a segment uses the file, or if it was not made since the start.
    pub fn forget_made(&mut self, path: &Path) -> bool {
        !self.open.values().any(|open| open.path == path) && self.made.remove(path)
    }

    /// Opens a segment's file, or makes it if there is none and `may_create` is set. Returns whether the segment's memory is new.
    /// `own` is the file that has its memory; another one with its name is not used. If this daemon's books have its size, a file that
    /// is longer was made so by somebody else, and is cut (`cuts`).
    pub fn open(
        &mut self,
        config: &config::Segment,
        own: MemoryFile,
        place: &str,
        may_create: bool,
        cuts: bool,
    ) -> Result<bool, Problem> {
        self.check_removed(&config.path, place)?;
        self.prepare(config, place)?;
        let mut found = existing(config, place, cuts)?;
        if found.as_ref().is_some_and(|file| !self.is_own(file, &config.path, own)) {
            found = None;
            self.replace_strange(config, place, may_create)?;
        }
        let (file, created) = match found {
            Some(file) => {
                // A file of slices grows with them. But if it was truncated while programs or VMs have its pages, it must not grow
                // back.
                let grows = length::of(&file) < config.end();
                if grows && !may_create {
                    let what = format!("{} was truncated", config.path.display());
                    return Err(Problem::new(place, what, "stop all its users and remove the file"));
                }
                self.put_right(&file, grows, may_create, config, place)?;
                (file, grows || self.made.contains(&config.path))
            }
            None if may_create && config.folder.is_some() => {
                self.make(config, place)?;
                let Some(file) = existing(config, place, cuts)? else {
                    let what = format!("{} was removed as soon as it was made", config.path.display());
                    return Err(Problem::new(place, what, "find out who does that"));
                };
                (file, true)
            }
            None => {
                let what =
                    format!("its file {} is missing, and programs or VMs use it", config.path.display());
                return Err(Problem::new(place, what, "stop them all, then restart the daemon"));
            }
        };
        let system = |what: &'static str| {
            move |error: std::io::Error| {
                Problem::new(place, format!("{what}: {error}"), "see which resource of the system is used up")
            }
        };
        let stat = fs::fstat(&file).map_err(|e| system("its file cannot be examined")(e.into()))?;
        let len = usize::try_from(config.size).map_err(|_| {
            Problem::new(
                place,
                format!("{} cannot be mapped here", Bytes(config.size)),
                "choose a smaller size",
            )
        })?;
        let mapping = Mapping::of_file(&file, config.offset.unwrap_or(0), len, Protection::ReadWrite)
            .map_err(system("it cannot be mapped"))?;
        // The memory of a segment that is removed must not live on in a process that closes connections.
        mapping.keep_from_children();
        let (file, identity) = (Arc::new(file), (stat.st_dev, stat.st_ino));
        let open = Open {
            path: config.path.clone(),
            end: config.end(),
            for_writers: without_truncation(&file).map(Arc::new),
            read_only: Some(Arc::new(read_only(&file).map_err(system("it cannot be opened for reading"))?)),
            memory: Some((file.clone(), mapping)),
            front: None,
            repairs: Repairs::default(),
            identity,
            broken: false,
            cut: false,
            told: None,
            why: None,
        };
        self.replace(config.name, open);
        let size = config.offset.is_none().then_some(config.size);
        self.files.watch(identity, &config.path, &file, size);
        Ok(created)
    }

    /// Returns whether a file is the one that has a segment's memory, or is to have it.
    fn is_own(&self, file: &OwnedFd, path: &Path, own: MemoryFile) -> bool {
        let identity = fs::fstat(file).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino));
        match own {
            MemoryFile::Unrecorded => true,
            MemoryFile::Is(device, inode) if (device, inode) == identity => true,
            // Slices share a file.
            _ => self.made.contains(path) || self.open.values().any(|open| open.identity == identity),
        }
    }

    /// Removes a file that has a segment's name and is not known to have its memory, unless others have it.
    fn replace_strange(
        &mut self,
        config: &config::Segment,
        place: &str,
        may_create: bool,
    ) -> Result<(), Problem> {
        let path = config.path.display();
        if !may_create {
            let what = format!("{path} was replaced, and programs or VMs use the earlier file");
            return Err(Problem::new(place, what, "stop them all, then restart the daemon"));
        }
        // While others are served, only the first look is waited for.
        let time = if self.strange.insert(config.path.clone()) { REMOVAL } else { Duration::ZERO };
        self.jobs.remove_unused(&config.path, time).map_err(|error| {
            let what = format!("whether anybody uses {path} cannot be found out: {error}");
            Problem::new(place, what, "see the log; or stop all its users and remove the file")
        })?;
        if is_there(config) {
            let what = format!("{path} is not known to this daemon's journal, and VMs or programs use it");
            let fix = "stop them all; some seconds later the segment is in service, with an empty file";
            return Err(Problem::new(place, what, fix));
        }
        self.strange.remove(&config.path);
        warn!(segment = %config.name, path = %path, "its file was not known to this daemon's journal, and nobody used it: it is made anew");
        Ok(())
    }

    /// Returns the file that has a segment's memory.
    pub fn memory_file(&self, name: &Name) -> Option<MemoryFile> {
        let open = self.open.get(name).filter(|open| open.memory.is_some())?;
        Some(MemoryFile::Is(open.identity.0, open.identity.1))
    }

    /// Changes what is not as it should be of an existing file: its length, memory, owner or mode. A program that has the file open may
    /// hold the lock that this needs for ever, so a process does it. Only a change of length is waited for. A segment that is not `idle`
    /// must do with the memory that it has if there is no room for more.
    fn put_right(
        &mut self,
        file: &OwnedFd,
        grows: bool,
        idle: bool,
        config: &config::Segment,
        place: &str,
    ) -> Result<(), Problem> {
        let failed = |error: std::io::Error| {
            let what = format!("{} cannot be changed as it is declared: {error}", config.path.display());
            Problem::new(place, what, "see which resource of the system is used up")
        };
        let stat = fs::fstat(file).map_err(|errno| failed(errno.into()))?;
        let identity = (stat.st_dev, stat.st_ino);
        let is = |wish: Option<u32>, now: u32| wish.is_none_or(|wish| wish == now);
        let right = is(config.owner, stat.st_uid) && is(config.group, stat.st_gid);
        let mut work = Args { path: config.path.clone(), ..Args::default() };
        if !right {
            (work.owner, work.group) = (config.owner, config.group);
        }
        // A change of owner may take bits of the mode away.
        if !right || stat.st_mode & MODE != config.mode {
            work.mode = Some(config.mode);
        }
        // (A file that is too small is refused elsewhere, and one of slices may be longer.)
        if config.offset.is_none() && length::of_stat(&stat) > config.size {
            work.shorten = Some(config.size);
        }
        if grows || !is_allocated(&stat, config) {
            let from = config.offset.unwrap_or(0);
            let missing = if grows { config.size } else { not_allocated(&stat).min(config.size) };
            match check_room(file, missing, &NewFile::of(config), place)
                .and_then(|()| check_memory(file, missing, place))
            {
                Ok(()) => (work.allocate_from, work.allocate_to) = (Some(from), Some(from + config.size)),
                Err(problem) if idle => return Err(problem),
                Err(problem) => {
                    error!(segment = %config.name, "{problem}; it is in use, and who touches the missing part may die");
                }
            }
        }
        let none = (None, None, None, None);
        if (work.mode, work.allocate_from, work.shorten, work.owner.or(work.group)) == none {
            return Ok(());
        }
        let time = if grows { PATIENCE } else { Duration::ZERO };
        if !self.jobs.change(identity, file, &work, time).map_err(failed)? && grows {
            let what = format!("{} is being made longer", config.path.display());
            let fix = "wait until that is done; if it takes long, a program that has the file open holds its lock: end its users";
            return Err(Problem::new(place, what, fix));
        }
        Ok(())
    }

    /// Removes the file that an earlier segment of this name has left. Whoever has that file would have the new segment's memory too.
    pub fn remove_leftover(&mut self, config: &config::Segment, place: &str) -> Result<(), Problem> {
        // Slices that are new lie behind everything that was ever in their file. A file of another size is refused elsewhere: the
        // configuration may be wrong. And if the journal is not believed, `open` finds out whether anybody has the file.
        let size = || at_hand::length(&config.path);
        if config.offset.is_some() || self.is_doubtful || self.made.contains(&config.path) {
            return Ok(());
        }
        self.prepare(config, place)?;
        if !is_there(config) || size() != config.size || self.jobs.is_removing(&config.path) {
            return Ok(());
        }
        let path = config.path.display();
        warn!(segment = %config.name, %path, "this file of an earlier segment is removed: the new segment gets a new one");
        self.jobs.remove(&config.path, REMOVAL).map(drop).map_err(|error| {
            Problem::new(
                place,
                format!("{path} of an earlier segment cannot be removed: {error}"),
                "remove it",
            )
        })
    }

    /// Puts a segment out of service whose file is as it should be. The endpoints that it has still see in its memory what becomes of them.
    pub fn withhold(&mut self, name: &Name, why: String) {
        if let Some(open) = self.open.get_mut(name) {
            (open.broken, open.why) = (true, Some(why));
        }
    }

    /// Returns whether a segment is out of service although its file is as it should be.
    pub fn is_withheld(&self, name: &Name) -> bool {
        self.open.get(name).is_some_and(|open| open.memory.is_some() && open.why.is_some())
    }

    /// Registers a segment whose file cannot be used, for programs that still have its memory and for status requests.
    pub fn open_broken(&mut self, config: &config::Segment, why: String) {
        let open = Open {
            path: config.path.clone(),
            end: config.end(),
            memory: None,
            for_writers: None,
            read_only: None,
            front: None,
            repairs: Repairs::default(),
            identity: (0, 0),
            broken: true,
            cut: false,
            told: None,
            why: Some(why),
        };
        self.replace(config.name, open);
    }

    fn replace(&mut self, name: Name, open: Open) {
        self.open.insert(name, open);
        self.forget_files();
    }

    fn forget_files(&mut self) {
        let open = &self.open;
        self.files.keep(|identity| open.values().any(|open| open.identity == identity));
    }

    /// Writes the info block and the header in front of a segment's arena. If the segment is not `new`, the old contents are
    /// checked first.
    pub fn write_front(&mut self, front: Front, new: bool) {
        let Some(open) = self.open.get_mut(&front.name) else { return };
        let Some((_, mapping)) = &open.memory else { return };
        front.write(mapping, new);
        open.front = Some(front);
        self.check_front(&front.name);
    }

    /// Checks the memory in front of a segment's arena, and repairs it.
    pub fn check_front(&mut self, name: &Name) {
        if !self.check(name) {
            return;
        }
        let Some(open) = self.open.get_mut(name) else { return };
        if let (Some((_, mapping)), Some(front)) = (&open.memory, &open.front) {
            front.repair(mapping, &mut open.repairs);
        }
    }

    /// Returns which damage in front of the segment's arena this daemon has repaired.
    pub fn repairs(&self, name: &Name) -> Repairs {
        self.open.get(name).map_or_else(Repairs::default, |open| open.repairs)
    }

    /// Removes the file of a segment. Returns false if that is not done yet: a program that has the file open may hold the lock that it
    /// needs for ever. Then a process goes on with it.
    pub fn remove_file(&mut self, name: &Name) -> std::io::Result<bool> {
        let Some(open) = self.open.get(name) else { return Ok(true) };
        self.jobs.remove(&open.path, REMOVAL)
    }

    /// Removes a file that was made for a segment which is not declared after all.
    pub fn discard(&mut self, path: &Path) {
        if let Err(error) = self.jobs.remove(path, REMOVAL) {
            warn!(path = %path.display(), %error, "a file that is not needed cannot be removed");
        }
    }

    /// Checks that a file is not still being removed.
    pub fn check_removed(&self, path: &Path, place: &str) -> Result<(), Problem> {
        if !self.jobs.is_removing(path) {
            return Ok(());
        }
        let what = format!(
            "{} of an earlier segment is still being removed: a program holds its lock, or that of its folder",
            path.display()
        );
        let fix = "end the programs of other users that use this file system, then try again";
        Err(Problem::new(place, what, fix))
    }

    /// Forgets a segment and leaves its file.
    pub fn forget(&mut self, name: &Name) {
        if let Some(open) = self.open.remove(name) {
            self.made.remove(&open.path);
        }
        self.forget_files();
    }

    /// Returns the path of a segment's file.
    pub fn path(&self, name: &Name) -> Option<&Path> {
        self.open.get(name).map(|open| open.path.as_path())
    }

    /// Returns a segment's file, open for a program that may write.
    pub fn file(&self, name: &Name) -> Option<Arc<OwnedFd>> {
        let open = self.open.get(name)?;
        open.for_writers.clone().or_else(|| open.memory.as_ref().map(|(file, _)| file.clone()))
    }

    /// Returns a segment's file, open for reading only.
    pub fn read_only_file(&self, name: &Name) -> Option<Arc<OwnedFd>> {
        self.open.get(name)?.read_only.clone()
    }

    /// Checks whether a segment's file is still there and has its size. It is not looked up by its name: if it is not there, that would
    /// wait for whoever holds the lock of the folder.
    pub fn check(&mut self, name: &Name) -> bool {
        let Some(open) = self.open.get_mut(name) else { return false };
        let Some((file, mapping)) = &open.memory else { return false };
        if open.broken {
            return false;
        }
        let stat = fs::fstat(file);
        let whole = stat.is_ok_and(|stat| length::of_stat(&stat) >= open.end);
        let there = stat.is_ok_and(|stat| stat.st_nlink > 0);
        // Somebody has truncated the file and made it longer again, and this process has touched the missing memory in between.
        let was_cut = mapping.is_broken();
        if whole && there && !was_cut {
            return true;
        }
        let what = match (whole, there) {
            (false, _) => "was truncated",
            (_, false) => "was removed or replaced",
            _ => "was truncated for a while",
        };
        error!(segment = %name, path = %open.path.display(), "segment broken: its file {what}; stop its VMs and programs, remove the segment and create it anew");
        mapping.mark_broken();
        let cut = !whole || was_cut;
        (open.broken, open.cut) = (true, cut);
        self.newly_broken.push((*name, cut));
        false
    }

    /// Marks a segment as truncated that an earlier daemon has found truncated, and that is in use.
    pub fn was_cut(&mut self, name: &Name) {
        let Some(open) = self.open.get_mut(name) else { return };
        (open.broken, open.cut) = (true, true);
    }

    /// Checks all segments.
    pub fn check_all(&mut self) {
        let names: Vec<Name> = self.open.keys().copied().collect();
        for name in names {
            self.check(&name);
        }
    }

    /// Returns the segments that were found broken since the last call, and whether that is because their files were truncated.
    pub fn take_newly_broken(&mut self) -> Vec<(Name, bool)> {
        std::mem::take(&mut self.newly_broken)
    }

    /// Checks the segments whose files were modified other than through mappings.
    pub fn check_modified(&mut self) {
        for identity in self.files.take_modified() {
            for name in self.in_file(identity) {
                self.check(&name);
            }
            self.files.mend(identity, &mut self.jobs);
        }
    }

    /// Gives truncated files their size back, if `needed` returns true for one of the segments in the file. The truncated
    /// contents stay lost, and the segment stays broken.
    pub fn restore(&mut self, needed: impl Fn(&Name) -> bool) {
        for identity in self.files.all() {
            if self.files.is_short(identity) && self.in_file(identity).iter().any(&needed) {
                self.files.restore(identity, &mut self.jobs);
            }
        }
    }

    /// Handles an event of a process that changes a file. Returns the segments whose file has got its size back.
    pub fn file_work(&mut self, number: u64) -> Vec<Name> {
        let news = self.jobs.ready(number);
        let restored = news.and_then(|news| self.files.restored(news, &mut self.jobs));
        restored.map_or_else(Vec::new, |identity| self.in_file(identity))
    }

    /// Returns whether a file was removed since the last call that a segment out of service has waited for.
    pub fn take_removed(&mut self) -> bool {
        self.jobs.take_removed()
    }

    /// Prepares to tell all users of a segment that its file was truncated and has its size again. Returns false if the file was
    /// not truncated, or is still short, or if the users were told just now. In the last case they are told again later.
    pub fn begin_telling(&mut self, name: &Name) -> bool {
        let Some(open) = self.open.get_mut(name).filter(|open| open.cut) else { return false };
        let Some((file, mapping)) = &mut open.memory else { return false };
        if length::of(&*file) < open.end {
            return false;
        }
        if open.told.is_some_and(|told| told.elapsed() < TELL_AGAIN) {
            self.to_tell.insert(*name);
            return false;
        }
        // The present mapping may have been replaced by zeros.
        match Mapping::of_file(&*file, open.end - mapping.len() as u64, mapping.len(), Protection::ReadWrite)
        {
            Ok(new) => {
                new.keep_from_children();
                *mapping = new;
            }
            Err(error) => error!(segment = %name, %error, "its file cannot be mapped again"),
        }
        if open.told.replace(Instant::now()).is_none() {
            warn!(segment = %name, path = %open.path.display(), "its file has its size again: what was cut off reads as zeros, and the segment stays broken");
        }
        true
    }

    /// Returns the segments whose users must be told again.
    pub fn take_to_tell(&mut self) -> BTreeSet<Name> {
        std::mem::take(&mut self.to_tell)
    }

    fn in_file(&self, identity: Identity) -> Vec<Name> {
        let inside = self.open.iter().filter(|(_, open)| open.identity == identity);
        inside.map(|(name, _)| *name).collect()
    }

    /// Returns whether a segment is known to be broken, without checking its file.
    pub fn is_known_broken(&self, name: &Name) -> bool {
        self.open.get(name).is_none_or(|open| open.broken)
    }

    /// Returns why a segment could not be opened.
    pub fn why_broken(&self, name: &Name) -> Option<&str> {
        self.open.get(name)?.why.as_deref()
    }

    /// Zeroes the ring headers of a block, and the first word of the data behind each.
    pub fn zero(&self, name: &Name, offset: u64, capacities: Capacities) {
        let Some(Open { memory: Some((_, mapping)), .. }) = self.open.get(name) else { return };
        let zeros = [0u8; ring::HEADER + 8];
        let (one, other) = capacities.rings(true);
        for at in [one, other] {
            if let Some(ring) = part(mapping, offset + at as u64, zeros.len()) {
                ring.write(0, &zeros);
            }
        }
        // A program learns of the block through a socket or a control ring, which orders these stores before that.
    }

    /// Makes a page a readiness board.
    pub fn new_board(&self, name: &Name, offset: u64) {
        let Some(Open { memory: Some((_, mapping)), .. }) = self.open.get(name) else { return };
        if let Some(page) = part(mapping, offset, board::LEN) {
            page.write(0, &[0; board::LEN]);
        }
    }

    /// Marks all lanes of a readiness board and wakes everyone who sleeps at it. Its words were lost, so nothing is known about
    /// them.
    pub fn post_all(&self, name: &Name, offset: u64) {
        let Some(Open { memory: Some((_, mapping)), .. }) = self.open.get(name) else { return };
        let Some(page) = part(mapping, offset, board::LEN) else { return };
        for lane in (0..board::LANES).filter_map(|lane| page.part(lane * board::LANE, board::LANE)) {
            // ORDER board.bits: the states of the rings are visible before the bits. Pairs with:
            // `ginnel_ring::board::Lane::take`.
            for word in 0..board::WORDS {
                lane.fetch_or_u64(board::BITS + word * 8, u64::MAX);
            }
            // ORDER board.summary: the bits are visible before the summary. Pairs with: `ginnel_ring::board::Lane::take`.
            lane.fetch_or_u64(board::SUMMARY, u64::MAX);
        }
    }

    /// Wakes those who sleep at these wake words, through a lane of one of these boards. The members can write the words beside
    /// the wake words, which name the lane, so this uses them only if they lie in one of the boards.
    pub fn post(&self, name: &Name, words: [u64; 2], boards: &[u64]) {
        let Some(Open { memory: Some((_, mapping)), .. }) = self.open.get(name) else { return };
        for word in words {
            let Some(line) = part(mapping, word, CACHE_LINE) else { continue };
            let place = Place(line.load_relaxed_u64(ring::DATA_NOTIFY - ring::DATA_ARMED));
            if place.board().is_some_and(|board| boards.contains(&board))
                && let Some(lane) = part(mapping, place.lane(), board::LANE)
            {
                // The daemon rings their doorbell whether or not the lane is armed, because it does not know here what they have
                // seen of it.
                let _ = Poster::default().post(&lane, place.slot());
            }
        }
    }

    /// Makes a page a synchronisation object.
    pub fn new_sync(&self, name: &Name, offset: u64, kind: SyncKind, limit: u32, permits: u32) {
        if let Some(page) = self.sync_page(name, offset) {
            authority::format(&page, kind, limit, permits);
        }
    }

    /// Writes who has a slot of a synchronisation object.
    pub fn seat(&self, name: &Name, offset: u64, user: SyncUser, endpoint_epoch: u32, bell: u32) {
        let seated = User::new(user.slot as usize, user.epoch, user.endpoint);
        if let (Some(page), Some(user)) = (self.sync_page(name, offset), seated) {
            authority::seat(&page, user, endpoint_epoch, bell);
        }
    }

    /// Takes back a slot of a synchronisation object. Returns the slots whose users must look at the object, one bit for each.
    pub fn reclaim(&self, name: &Name, offset: u64, kind: SyncKind, slot: u32, left: Left) -> u64 {
        self.sync_page(name, offset).map_or(0, |page| authority::reclaim(&page, kind, slot as usize, left))
    }

    /// Returns the words of a synchronisation object, to show them.
    pub fn sync_page(&self, name: &Name, offset: u64) -> Option<Mapping> {
        let Open { memory: Some((_, mapping)), .. } = self.open.get(name)? else { return None };
        part(mapping, offset, sync::SIZE)
    }

    /// Writes the state of a side. If the side has written before its death that it was done, this stays. Another member that can
    /// write this word deceives only those who share the segment with it, and could have written it later as well.
    pub fn mark(&self, name: &Name, at: u64, state: SideState) {
        let Some(Open { memory: Some((_, mapping)), .. }) = self.open.get(name) else { return };
        // The word has a cache line to itself.
        if let Some(word) = part(mapping, at, CACHE_LINE) {
            // The side's own statement about its end stays, except that lost memory takes precedence over everything.
            let said = [SideState::FINISHED, SideState::ABORTED, SideState::LOST];
            if said.contains(&SideState(word.load_relaxed_u32(0))) && state != SideState::LOST {
                return;
            }
            // ORDER ring.finish: everything that the dead process published is visible before the state. Pairs with:
            // `ginnel_ring::side`.
            word.store_release_u32(0, state.0);
        }
    }
}

/// Opens a file again for reading only.
fn read_only(file: &OwnedFd) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Returns a part of the mapping. The books never name a place outside the segment; if they did, this logs an error and does not
/// panic.
fn part(mapping: &Mapping, at: u64, len: usize) -> Option<Mapping> {
    let part = usize::try_from(at).ok().and_then(|at| mapping.part(at, len));
    if part.is_none() {
        error!(at, len, "a place outside the segment; please report this");
    }
    part
}

impl World for Segments {
    fn is_broken(&mut self, segment: &Name) -> bool {
        !self.check(segment)
    }

    fn why_broken(&self, segment: &Name) -> Option<String> {
        self.why_broken(segment).map(str::to_owned)
    }

    fn random(&mut self) -> [u8; 16] {
        super::random::bytes()
    }

    fn now(&mut self) -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.map_or(0, |since| since.as_secs())
    }

    fn elapsed(&self) -> Duration {
        ginnel_clock::monotonic()
    }
}

/// Returns the offset of a new slice in a file that slices share: behind everything that was ever in it. An offset is not used
/// again as long as the file exists, because a VM that is not declared any more may still have that part mapped.
pub fn next_place(file: &Path, others: impl Iterator<Item = u64>) -> u64 {
    let size = at_hand::length(file);
    others.fold(size, u64::max).next_multiple_of(SIZE_UNIT)
}

/// Opens a segment's file if it exists, and checks that it is one of ours. Changes nothing.
fn existing(config: &config::Segment, place: &str, may_be_longer: bool) -> Result<Option<OwnedFd>, Problem> {
    let path = config.path.display();
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match at_hand::open(&config.path, flags) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(None),
        Err(Errno::LOOP) => {
            return Err(Problem::new(place, format!("{path} is a symbolic link"), "remove it"));
        }
        Err(errno) => {
            let fix = "remove it, or let the daemon's user open it for reading and writing";
            return Err(Problem::new(place, format!("{path} cannot be opened: {errno}"), fix));
        }
    };
    let stat = fs::fstat(&file)
        .map_err(|e| Problem::new(place, format!("{path} cannot be examined: {e}"), "remove it"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Problem::new(place, format!("{path} is not a regular file"), "remove it"));
    }
    // Where others may make files, one of them may have linked the file of another segment to this name.
    if config.folder.is_none() && stat.st_nlink != 1 {
        let what = format!("{path} has {} names", stat.st_nlink);
        return Err(Problem::new(place, what, "find out who made the others, then remove this one"));
    }
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != own && Some(stat.st_uid) != config.owner {
        let what = format!("{path} belongs to user {}, not to {}", stat.st_uid, config.owner.unwrap_or(own));
        return Err(Problem::new(place, what, "find out who made it, then remove it"));
    }
    check_file_system(&config.path, &file, place)?;
    let size = length::of_stat(&stat);
    if config.offset.is_none() && size != config.size && !(may_be_longer && size > config.size) {
        let what = format!("{path} has {} bytes, the configuration says {}", Bytes(size), Bytes(config.size));
        let fix = "write its size into the configuration, or stop all its users and remove the file";
        return Err(Problem::new(place, what, fix));
    }
    Ok(Some(file))
}

/// Checks whether a segment could be opened or made, without making it.
pub fn check(config: &config::Segment, place: &str) -> Result<(), Problem> {
    let shared = config.shared_file.as_ref().map(|file| config.at(file, 0));
    let config = shared.as_ref().unwrap_or(config);
    if is_there(&config.at_old_place()) {
        return Ok(());
    }
    let folder = config.folder.as_ref().map_or(Ok(true), |folder| own_folder::check(folder, place))?;
    if folder && existing(config, place, false)?.is_some() {
        return Ok(());
    }
    check_folder(&NewFile::of(config), place)
}

/// Returns whether a segment's file is there and was made for a daemon of this user.
pub fn is_there(config: &config::Segment) -> bool {
    let own = rustix::process::geteuid().as_raw();
    at_hand::stat(config.shared_file.as_ref().unwrap_or(&config.path)).is_some_and(|stat| {
        let owned = stat.st_uid == own || Some(stat.st_uid) == config.owner;
        owned && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
    })
}

/// Returns whether all memory of the segment is allocated. If the segment is a part of a file, this is not known unless all of the file
/// is.
fn is_allocated(stat: &fs::Stat, config: &config::Segment) -> bool {
    not_allocated(stat) == 0 && length::of_stat(stat) >= config.end()
}

/// Returns how many bytes of a file have no memory.
fn not_allocated(stat: &fs::Stat) -> u64 {
    let has = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    length::of_stat(stat).saturating_sub(has)
}
