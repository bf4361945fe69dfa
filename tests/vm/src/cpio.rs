//! Writes the archive format that the kernel unpacks into its first root file system ("newc" cpio).
//!
//! Several archives may follow one another in one initrd; a file in a later archive replaces one of the same path in an earlier
//! archive.

use std::collections::BTreeSet;
use std::io::{self, Write};

/// An archive that is being written. Parent directories are added as they are needed.
pub struct Archive<W: Write> {
    out: W,
    written: u64,
    inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// Begins an archive that is written to `out`.
    pub fn new(out: W) -> Archive<W> {
        Archive { out, written: 0, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds a directory and its parents. Does nothing for a directory that exists.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/');
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let parent = &path[..end];
            if !parent.is_empty() && self.directories.insert(parent.to_owned()) {
                self.entry(parent, 0o040755, &[])?;
            }
        }
        Ok(())
    }

    /// Adds a file with these permissions.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, 0o100000 | mode & 0o7777, content)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, 0o120777, target.as_bytes())
    }

    /// Ends the archive and returns the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, &[])?;
        // The kernel expects the next archive at a multiple of 4 bytes; cpio itself pads to a block.
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((parent, _)) => self.directory(parent),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let path = path.trim_matches('/');
        let size = u32::try_from(content.len()).map_err(|_| {
            io::Error::new(io::ErrorKind::FileTooLarge, format!("{path}: cpio holds files below 4 GiB"))
        })?;
        self.inode += 1;
        let links = if mode & 0o170000 == 0o040000 { 2 } else { 1 };
        let name_size = path.len() as u32 + 1;
        // inode, mode, uid, gid, links, mtime, size, device (major, minor), device number of a special file (major, minor),
        // length of the name, checksum
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header += &format!("{field:08x}");
        }
        self.bytes(header.as_bytes())?;
        self.bytes(path.as_bytes())?;
        self.bytes(&[0])?;
        self.pad(4)?;
        self.bytes(content)?;
        self.pad(4)
    }

    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        let missing = self.written.next_multiple_of(to) - self.written;
        self.bytes(&[0; 512][..missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn cpio_unpacks_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::new(Vec::new());
        archive.file("/etc/deep/er/one", 0o640, b"12345").unwrap();
        archive.file("etc/deep/empty", 0o755, b"").unwrap();
        archive.link("/bin/sh", "busybox").unwrap();
        archive.directory("/proc/").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);

        let mut cpio = Command::new("cpio")
            .args(["-idm", "--quiet", "--no-absolute-filenames"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("the program cpio is needed (package cpio)");
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(cpio.wait().unwrap().success());

        let at = |path: &str| dir.path().join(path);
        let mode = |path: &str| {
            use std::os::unix::fs::PermissionsExt;
            std::fs::metadata(at(path)).unwrap().permissions().mode() & 0o7777
        };
        assert_eq!(std::fs::read(at("etc/deep/er/one")).unwrap(), b"12345");
        assert_eq!(std::fs::read(at("etc/deep/empty")).unwrap(), b"");
        assert_eq!((mode("etc/deep/er/one"), mode("etc/deep/empty")), (0o640, 0o755));
        assert_eq!(std::fs::read_link(at("bin/sh")).unwrap().to_str(), Some("busybox"));
        assert!(at("proc").is_dir());
    }

    #[test]
    fn each_directory_is_written_once() {
        let mut archive = Archive::new(Vec::new());
        for name in ["a/b/x", "a/b/y", "a/z"] {
            archive.file(name, 0o644, b"").unwrap();
        }
        let bytes = archive.finish().unwrap();
        let count = |name: &[u8]| bytes.windows(name.len()).filter(|w| *w == name).count();
        assert_eq!(count(b"a\0"), 1);
        assert_eq!(count(b"a/b\0"), 1);
    }
}
