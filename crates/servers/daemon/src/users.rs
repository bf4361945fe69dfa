//! Who counts as one user, where users share something: connections, turns, helpers.
//!
//! An ordinary user may have ranges of **subordinate** user numbers (`/etc/subuid`, see `subuid(5)`), and in a user namespace of his own he
//! starts programs with any of them. They all count as his. Root gives ranges to containers that do not trust each other, usually in
//! blocks of 65,536 numbers, so what is subordinate to root counts by blocks.
//!
//! Names are looked up in `/etc/passwd` only, because other sources may not answer for a long time. The ranges of an owner who is not
//! there count as a user each.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Numbers that root gives to one container.
const BLOCK: u32 = 1 << 16;

/// The ranges of subordinate numbers, as long as the file with them does not change.
#[derive(Debug)]
pub struct Users {
    subuid: PathBuf,
    passwd: PathBuf,
    version: Option<Version>,
    ranges: Vec<Range>,
}

/// What is different when a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    first: u32,
    last: u32,
    /// The number of the user to whom root has given it.
    owner: u32,
}

impl Default for Users {
    fn default() -> Self {
        Self::read_from("/etc/subuid".into(), "/etc/passwd".into())
    }
}

impl Users {
    fn read_from(subuid: PathBuf, passwd: PathBuf) -> Self {
        Self { subuid, passwd, version: None, ranges: Vec::new() }
    }

    /// Returns the number of the user as whose this one counts.
    pub fn counted(&mut self, uid: u32) -> u32 {
        if uid == 0 {
            return 0;
        }
        let version = version(&self.subuid);
        if version != self.version {
            self.version = version;
            let text = |path: &Path| std::fs::read(path).unwrap_or_default();
            let (subuid, passwd) = (text(&self.subuid), text(&self.passwd));
            self.ranges = ranges(&String::from_utf8_lossy(&subuid), &String::from_utf8_lossy(&passwd));
        }
        match self.ranges.iter().find(|range| (range.first..=range.last).contains(&uid)) {
            Some(Range { owner: 0, first, .. }) => uid - (uid - first) % BLOCK,
            Some(range) => range.owner,
            None => uid,
        }
    }
}

fn version(path: &Path) -> Option<Version> {
    let file = path.metadata().ok()?;
    Some(Version {
        inode: file.ino(),
        size: file.size(),
        seconds: file.mtime(),
        nanoseconds: file.mtime_nsec(),
    })
}

fn ranges(subuid: &str, passwd: &str) -> Vec<Range> {
    let number_of = |name: &str| {
        passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
        })
    };
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let (owner, first, count) = (fields.next()?, fields.next()?, fields.next()?);
        let first = first.parse().ok().filter(|first| *first != 0)?;
        let last = count.parse::<u32>().ok()?.checked_sub(1)?.saturating_add(first);
        let owner = owner.parse().ok().or_else(|| number_of(owner)).unwrap_or(first);
        Some(Range { first, last, owner })
    };
    subuid.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";

    fn users(dir: &Path, subuid: &str) -> Users {
        std::fs::write(dir.join("passwd"), PASSWD).unwrap();
        std::fs::write(dir.join("subuid"), subuid).unwrap();
        Users::read_from(dir.join("subuid"), dir.join("passwd"))
    }

    #[test]
    fn subordinate_numbers_count_as_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let mut users = users(dir.path(), "ann:100000:65536\n1001:200000:10\n");
        let counted = [1000, 100_000, 165_535, 165_536, 200_009, 200_010, 0].map(|uid| users.counted(uid));
        assert_eq!(counted, [1000, 1000, 1000, 165_536, 1001, 200_010, 0]);
    }

    #[test]
    fn containers_of_root_count_by_blocks_and_never_as_root() {
        let dir = tempfile::tempdir().unwrap();
        let mut users = users(dir.path(), "root:1000000:1000000000\n");
        let counted = [1_000_000, 1_065_535, 1_065_536, 1_200_000].map(|uid| users.counted(uid));
        assert_eq!(counted, [1_000_000, 1_000_000, 1_065_536, 1_196_608]);
    }

    #[test]
    fn an_owner_who_is_not_known_here_has_one_user_for_each_range() {
        let dir = tempfile::tempdir().unwrap();
        let mut users = users(dir.path(), "ldap:300000:5\nldap:400000:5\n");
        assert_eq!([300_004, 400_001].map(|uid| users.counted(uid)), [300_000, 400_000]);
    }

    #[test]
    fn a_change_of_the_file_counts_at_once_and_bad_lines_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut users = users(dir.path(), "");
        assert_eq!(users.counted(100_000), 100_000);
        let bad = "# x\n\nann\nann:x:1\nann:5:0\nann:0:9\nann:4294967295:9\n:7:1\nann:100000:1\n";
        std::fs::write(dir.path().join("subuid"), bad).unwrap();
        assert_eq!([100_000, 5, 8, u32::MAX, 7].map(|uid| users.counted(uid)), [1000, 5, 8, 1000, 7]);
        std::fs::remove_file(dir.path().join("subuid")).unwrap();
        assert_eq!(users.counted(100_000), 100_000);
    }
}
