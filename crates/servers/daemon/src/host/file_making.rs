//! The process that makes the file of a segment. Any user who may write somewhere on the file system can hold the lock of the folder
//! (by a rename into it, for which the kernel takes the locks of both folders before it looks at the permissions), and whoever gives a
//! file a name there waits for it.
//!
//! The file has no name until it is complete: before that, nobody else can have it, and it goes with its process.

use super::{config, memory_limit};
use crate::spawned::end_with_parent;
use ginnel_config::{Bytes, Problem};
use ginnel_layout::segment::RESERVED;
use rustix::fs::{self, AtFlags, CWD, FallocateFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A new file gets its memory in pieces of this size, so that the process can stop in between. A multiple of all huge pages that segments
/// can have.
const PIECE: u64 = 64 << 20;

/// What the process says when the file has its memory, and only lacks its name.
pub const ALLOCATED: &str = "allocated\n";

/// A file that is to be made: the arguments of `ginneld new-file`.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct NewFile {
    /// The file.
    #[arg(long)]
    pub path: PathBuf,
    /// The folder that the administrator knows, for messages.
    #[arg(long)]
    pub named: PathBuf,
    /// The bytes that get memory.
    #[arg(long)]
    pub size: u64,
    /// Where in the file these begin.
    #[arg(long)]
    pub offset: u64,
    /// The user who gets the file.
    #[arg(long)]
    pub owner: Option<u32>,
    /// The group that gets it.
    #[arg(long)]
    pub group: Option<u32>,
    /// Its mode, a decimal number.
    #[arg(long)]
    pub mode: u32,
}

impl NewFile {
    /// Returns the file of a segment, or the part of it that is this segment.
    pub fn of(segment: &config::Segment) -> Self {
        Self {
            path: segment.path.clone(),
            named: segment.named_folder().to_owned(),
            size: segment.size,
            offset: segment.offset.unwrap_or(0),
            owner: segment.owner,
            group: segment.group,
            mode: segment.mode,
        }
    }

    /// Returns the arguments of the command that makes it.
    pub fn to_command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["new-file".into()];
        line.extend(["--path".into(), self.path.clone().into(), "--named".into(), self.named.clone().into()]);
        let numbers = [
            ("--size", Some(self.size)),
            ("--offset", Some(self.offset)),
            ("--owner", self.owner.map(u64::from)),
            ("--group", self.group.map(u64::from)),
            ("--mode", Some(self.mode.into())),
        ];
        for (option, number) in numbers {
            line.extend(number.into_iter().flat_map(|number| [option.into(), number.to_string().into()]));
        }
        line
    }
}

/// Makes the file. Prints [`ALLOCATED`]; or what is wrong, and how to fix it, on two lines.
pub fn run(file: NewFile) -> anyhow::Result<()> {
    end_with_parent()?;
    let mut output = io::stdout();
    if let Err(Problem { what, fix, .. }) = create(&file, &mut output) {
        write!(output, "{what}\n{fix}\n")?;
    }
    Ok(())
}

/// Returns the problem in what the process has said, if it has had one.
pub fn problem(said: &str, place: &str) -> Option<Problem> {
    let (what, fix) = said.strip_prefix(ALLOCATED).unwrap_or(said).split_once('\n')?;
    Some(Problem::new(place, what, fix.trim_end()))
}

fn create(new: &NewFile, told: &mut impl Write) -> Result<(), Problem> {
    check_folder(new, "")?;
    let path = new.path.display();
    let failed = |errno: Errno| {
        let fix = match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => "let the daemon's user write there",
            Errno::EXIST => "find out who has made it just now",
            _ => "see which resource of the system is used up",
        };
        Problem::new("", format!("{path} cannot be created: {errno}"), fix)
    };
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let folder = new.path.parent().unwrap_or(Path::new("/"));
    let file = fs::open(folder, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    allocate(&file, new)?;
    own_and_permit(&file, new)?;
    let _ = told.write_all(ALLOCATED.as_bytes()).and_then(|()| told.flush());
    let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::linkat(CWD, nameless, CWD, &new.path, AtFlags::SYMLINK_FOLLOW).map_err(failed)
}

/// Checks whether a file could be made in its folder.
pub fn check_folder(new: &NewFile, place: &str) -> Result<(), Problem> {
    check_room(&open_folder(&new.named, place)?, new.size, new, place)
}

/// Opens a folder in which the files of segments can lie.
pub fn open_folder(dir: &Path, place: &str) -> Result<OwnedFd, Problem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = fs::open(dir, flags, Mode::empty()).map_err(|errno| {
        let fix = "create the folder, or correct daemon.shm_dir or the segment's backing";
        Problem::new(place, format!("{} cannot be opened: {errno}", dir.display()), fix)
    })?;
    check_file_system(dir, &folder, place)?;
    Ok(folder)
}

/// Checks whether the files of segments can lie on the file system of this file.
pub fn check_file_system(path: &Path, file: &OwnedFd, place: &str) -> Result<(), Problem> {
    let kind =
        fs::fstatfs(file).map_err(|e| Problem::new(place, format!("its file system: {e}"), "use a tmpfs"))?;
    match kind.f_type as u64 {
        TMPFS_MAGIC => return Ok(()),
        HUGETLBFS_MAGIC => {
            let page = u64::try_from(kind.f_bsize).unwrap_or(0);
            if page <= RESERVED {
                return Ok(());
            }
            // Programs map what is behind the reserved front.
            let what = format!(
                "{} has pages of {}, and 2M are the largest that can be used",
                path.display(),
                Bytes(page)
            );
            return Err(Problem::new(
                place,
                what,
                "name a hugetlbfs with pages of 2M (mount -o pagesize=2M), or a tmpfs",
            ));
        }
        _ => {}
    }
    let what = format!("{} is neither on a tmpfs nor on a hugetlbfs", path.display());
    Err(Problem::new(place, what, "name such a folder in daemon.shm_dir or as the segment's backing"))
}

/// Checks whether a file system has room for this many more bytes of a segment.
pub fn check_room(file: &OwnedFd, bytes: u64, new: &NewFile, place: &str) -> Result<(), Problem> {
    let Ok(stat) = fs::fstatfs(file) else { return Ok(()) };
    let page = u64::try_from(stat.f_bsize).unwrap_or(0).max(1);
    if !new.size.is_multiple_of(page) {
        let what = format!("its size {} is not a multiple of the huge page {}", Bytes(new.size), Bytes(page));
        return Err(Problem::new(place, what, "choose a multiple, or a hugetlbfs with smaller pages"));
    }
    // A tmpfs without a limit reports 0 blocks.
    let free = stat.f_bavail.saturating_mul(page);
    if stat.f_blocks > 0 && free < bytes {
        return Err(no_room(new, place, &format!("{} are free", Bytes(free))));
    }
    Ok(())
}

/// Checks whether this process may have this much more memory for a file.
pub fn check_memory(file: &OwnedFd, bytes: u64, place: &str) -> Result<(), Problem> {
    // Huge pages are reserved elsewhere, and the kernel refuses them without killing anybody.
    let is_tmpfs = fs::fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
    if is_tmpfs { memory_limit::check(bytes, place) } else { Ok(()) }
}

fn no_room(new: &NewFile, place: &str, why: &str) -> Problem {
    let dir = new.named.display();
    let what = format!("no room for {} in {dir}: {why}", Bytes(new.size));
    Problem::new(
        place,
        what,
        format!("make the segment smaller, or {dir} larger (mount -o remount,size=...)"),
    )
}

/// Allocates all memory of a new file, so that no program dies later because memory is missing.
fn allocate(file: &OwnedFd, new: &NewFile) -> Result<(), Problem> {
    let (mut at, end) = (new.offset, new.offset + new.size);
    while at < end {
        // Others take memory too, so this looks before each piece.
        check_memory(file, end - at, "")?;
        let piece = PIECE.min(end - at);
        match fs::fallocate(file, FallocateFlags::empty(), at, piece) {
            Ok(()) => at += piece,
            Err(Errno::INTR) => {}
            Err(errno @ (Errno::NOSPC | Errno::NOMEM | Errno::FBIG)) => {
                return Err(no_room(new, "", &errno.to_string()));
            }
            Err(errno) => {
                let what = format!("the memory of {} cannot be allocated: {errno}", new.path.display());
                return Err(Problem::new("", what, "use a tmpfs or hugetlbfs of a current kernel"));
            }
        }
    }
    Ok(())
}

fn own_and_permit(file: &OwnedFd, new: &NewFile) -> Result<(), Problem> {
    let (owner, group) = (new.owner.map(Uid::from_raw), new.group.map(Gid::from_raw));
    let path = new.path.display();
    if owner.is_some() || group.is_some() {
        fs::fchown(file, owner, group).map_err(|errno| {
            let what = format!("{path} cannot be given to its owner and group: {errno}");
            Problem::new("", what, "run the daemon as root, or leave owner and group out")
        })?;
    }
    fs::fchmod(file, Mode::from_raw_mode(new.mode)).map_err(|errno| {
        Problem::new("", format!("the mode of {path} cannot be set: {errno}"), "run the daemon as its owner")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::fs::MetadataExt;

    const SIZE: u64 = 4 << 20;

    fn new(folder: &Path) -> NewFile {
        let (path, named) = (folder.join("web"), folder.to_owned());
        NewFile { path, named, size: SIZE, offset: 0, owner: None, group: None, mode: 0o640 }
    }

    /// What is said before the file has its name.
    struct Said<'a> {
        bytes: Vec<u8>,
        path: &'a Path,
    }

    impl Write for Said<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.bytes.extend(bytes);
            if self.bytes == ALLOCATED.as_bytes() {
                assert!(!self.path.exists(), "it has its name already");
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_file_has_its_memory_before_it_has_its_name_and_none_is_replaced() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let new = new(folder.path());
        let mut said = Said { bytes: Vec::new(), path: &new.path };
        create(&new, &mut said).unwrap();
        let mut said = said.bytes;
        assert_eq!(problem(str::from_utf8(&said).unwrap(), ""), None);
        let stat = std::fs::metadata(&new.path).unwrap();
        assert_eq!((stat.len(), stat.blocks() * 512, stat.mode() & 0o7777), (SIZE, SIZE, 0o640));
        std::fs::write(&new.path, [7]).unwrap();
        let refused = create(&new, &mut said).unwrap_err();
        assert!(refused.what.contains("exists"), "{refused}");
        assert_eq!(std::fs::read(&new.path).unwrap(), [7]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "it leaves nothing else");
    }

    #[test]
    fn what_goes_wrong_is_said_with_its_fix() {
        let nowhere = new(Path::new("/no/such/folder"));
        let refused = create(&nowhere, &mut Vec::new()).unwrap_err();
        let said = format!("{}\n{}\n", refused.what, refused.fix);
        for said in [said.clone(), format!("{ALLOCATED}{said}")] {
            let problem = problem(&said, "web").unwrap();
            assert_eq!((problem.what, problem.fix), (refused.what.clone(), refused.fix.clone()));
        }
    }

    #[test]
    fn the_command_line_says_what_to_make() {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            file: NewFile,
        }
        let all = NewFile { owner: Some(7), group: Some(8), offset: 1 << 40, ..new(Path::new("/a b")) };
        assert_eq!(Cli::parse_from(all.to_command_line()).file, all);
    }
}
