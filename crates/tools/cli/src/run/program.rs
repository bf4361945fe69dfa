//! Predicts what the dynamic loader will do with the library in a program.

use anyhow::Result;
use rustix::fs::{Access, access, fgetxattr};
use rustix::process::{getgid, getuid};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// The folders that execvp(3) searches if there is no PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// One more than the number of nested interpreters that Linux follows.
const INTERPRETERS: usize = 6;

/// The program cannot be executed.
#[derive(Debug)]
pub struct Unusable(pub io::Error);

impl Unusable {
    /// Returns the error with the path of the program.
    pub fn at(self, program: &Path) -> anyhow::Error {
        anyhow::Error::new(self).context(format!("cannot run {}", program.display()))
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Unusable {}

/// Finds a program as execvp(3) does.
pub fn find(name: &OsStr) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return executable(&path).map_err(|error| Unusable(error).at(&path)).map(|()| path);
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from(DEFAULT_PATH));
    let mut error = io::Error::new(io::ErrorKind::NotFound, "no folder of the PATH has it");
    for folder in std::env::split_paths(&folders) {
        let path = folder.join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(found) if found.kind() == io::ErrorKind::PermissionDenied => error = found,
            Err(_) => {}
        }
    }
    Err(Unusable(error).at(Path::new(name)))
}

fn executable(path: &Path) -> io::Result<()> {
    if path.metadata()?.is_dir() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is a folder"));
    }
    Ok(access(path, Access::EXEC_OK)?)
}

/// What happens to the library in a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Fit {
    /// It is loaded and used, as far as can be told.
    Loads,
    /// The program runs as if there were no library, for this reason.
    Ignores(String),
    /// The program would not start with the library, for this reason.
    Breaks(String),
}

/// Examines a program's file, or that of its interpreter if it is a script.
pub fn look(program: &Path, library: &Path) -> Fit {
    let mut path = program.to_owned();
    for _ in 0..INTERPRETERS {
        // A file that cannot be read can still be executable.
        let Ok(file) = File::open(&path) else { return Fit::Loads };
        match interpreter(&file) {
            Some(interpreter) => path = interpreter,
            None => {
                let who = if path == program {
                    path.display().to_string()
                } else {
                    format!("{}, which runs {},", path.display(), program.display())
                };
                return match (binary(&file, library), privileges(&file)) {
                    (Fit::Loads, Some(why)) | (Fit::Ignores(why), _) => Fit::Ignores(format!("{who} {why}")),
                    (Fit::Breaks(why), _) => Fit::Breaks(format!("{who} {why}")),
                    (Fit::Loads, None) => Fit::Loads,
                };
            }
        }
    }
    Fit::Loads
}

/// Returns the first word of a script's first line: `/usr/bin/python3` for `#!/usr/bin/python3 -u`.
fn interpreter(file: &File) -> Option<PathBuf> {
    // Linux reads no more of the first line.
    let mut front = [0; 256];
    let length = read_at(file, &mut front, 0);
    let line = front[..length].strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let word = line.trim_ascii_start().split(u8::is_ascii_whitespace).next()?;
    (!word.is_empty()).then(|| OsString::from_vec(word.to_vec()).into())
}

/// Returns why the loader ignores LD_PRELOAD in a program that runs with more rights than its caller has.
fn privileges(file: &File) -> Option<String> {
    let metadata = file.metadata().ok()?;
    let (mode, user, group) = (metadata.mode(), getuid().as_raw(), getgid().as_raw());
    if mode & 0o4000 != 0 && metadata.uid() != user {
        return Some("runs as its owner (set-user-ID), so the library is not loaded".into());
    }
    if mode & 0o2010 == 0o2010 && metadata.gid() != group {
        return Some("runs as its group (set-group-ID), so the library is not loaded".into());
    }
    let has_capabilities = || fgetxattr(file, c"security.capability", &mut [0; 64]).is_ok();
    (user != 0 && has_capabilities()).then(|| "has file capabilities, so the library is not loaded".into())
}

/// Examines an ELF file: elf(5).
fn binary(file: &File, library: &Path) -> Fit {
    let Some(header) = Header::of(file) else { return Fit::Loads };
    if let Some(ours) = File::open(library).ok().as_ref().and_then(Header::of)
        && ours.kind != header.kind
    {
        return Fit::Ignores("is for another kind of processor than the library".into());
    }
    let Some(loader) = header.part(file, PT_INTERP) else {
        return Fit::Ignores("is statically linked, so no library can be loaded".into());
    };
    // musl's loader ends a program for which it lacks a library, and the preload library needs glibc.
    let name = loader.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    if name.starts_with(b"ld-musl") {
        return Fit::Breaks("is linked with musl, and the library with glibc".into());
    }
    // The Go toolchain leaves a note of this name in each program.
    if header.part(file, PT_NOTE).is_some_and(|notes| notes.windows(4).any(|name| name == b"Go\0\0")) {
        return Fit::Ignores("is written in Go, and calls the kernel without any library".into());
    }
    Fit::Loads
}

const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;

/// The front of a 64-bit ELF file, and its program headers.
struct Header {
    /// Class, byte order and processor.
    kind: [u8; 4],
    programs: Vec<u8>,
}

/// The size of a program header, in bytes.
const PROGRAM: usize = 56;

impl Header {
    /// Returns `None` if the file is not an ELF file.
    fn of(file: &File) -> Option<Self> {
        let mut front = [0; 64];
        if read_at(file, &mut front, 0) < front.len() || !front.starts_with(b"\x7fELF") {
            return None;
        }
        let kind = [front[4], front[5], front[18], front[19]];
        let at = u64::from_ne_bytes(front[32..40].try_into().ok()?);
        let count = u16::from_ne_bytes(front[56..58].try_into().ok()?);
        let mut programs = vec![0; usize::from(count) * PROGRAM];
        let length = read_at(file, &mut programs, at);
        programs.truncate(length);
        Some(Self { kind, programs })
    }

    /// Returns the first kilobyte of each part of a kind, joined together, or `None` if there is no such part.
    fn part(&self, file: &File, kind: u32) -> Option<Vec<u8>> {
        let mut all = None;
        for program in self.programs.chunks_exact(PROGRAM) {
            if program[..4] != kind.to_ne_bytes() {
                continue;
            }
            let at = u64::from_ne_bytes(program[8..16].try_into().ok()?);
            let size = u64::from_ne_bytes(program[32..40].try_into().ok()?);
            let mut part = vec![0; size.min(1024) as usize];
            let length = read_at(file, &mut part, at);
            all.get_or_insert_with(Vec::new).extend(&part[..length]);
        }
        all
    }
}

/// Reads as much as there is, and returns its length. A file that cannot be read counts as empty.
fn read_at(file: &File, into: &mut [u8], at: u64) -> usize {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    kit::test_that_skips_are_seen!();

    /// Returns an ELF file with these parts, for this processor.
    fn elf(class: u8, parts: &[(u32, &[u8])]) -> Vec<u8> {
        let mut file = vec![0x7f, b'E', b'L', b'F', class, 1, 1, 0];
        file.resize(64, 0);
        file[16..20].copy_from_slice(&[3, 0, 62, 0]);
        file[32..40].copy_from_slice(&64_u64.to_le_bytes());
        file[56..58].copy_from_slice(&(parts.len() as u16).to_le_bytes());
        let mut at = 64 + parts.len() * PROGRAM;
        for (kind, part) in parts {
            let mut program = [0; PROGRAM];
            program[..4].copy_from_slice(&kind.to_le_bytes());
            program[8..16].copy_from_slice(&(at as u64).to_le_bytes());
            program[32..40].copy_from_slice(&(part.len() as u64).to_le_bytes());
            file.extend(program);
            at += part.len();
        }
        file.extend(parts.iter().flat_map(|(_, part)| *part));
        file
    }

    const GLIBC: (u32, &[u8]) = (PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0");
    const GO: &[u8] = b"\x04\0\0\0\x04\0\0\0\x04\0\0\0Go\0\0abcd";

    /// Returns the result for a program with this content, beside a library for this processor.
    fn of(content: &[u8]) -> Fit {
        let folder = tempfile::tempdir().unwrap();
        let (program, library) = (folder.path().join("p"), folder.path().join("l"));
        fs::write(&program, content).unwrap();
        fs::write(&library, elf(2, &[])).unwrap();
        look(&program, &library)
    }

    fn ignores(fit: &Fit, why: &str) -> bool {
        matches!(fit, Fit::Ignores(text) if text.contains(why))
    }

    #[test]
    fn programs_that_would_ignore_or_break_are_recognised() {
        assert_eq!(of(&elf(2, &[(1, b"x"), GLIBC, (PT_NOTE, b"GNU\0")])), Fit::Loads);
        assert!(ignores(&of(&elf(2, &[(1, b"x")])), "statically linked"));
        assert!(ignores(&of(&elf(1, &[GLIBC])), "another kind of processor"));
        assert!(ignores(&of(&elf(2, &[GLIBC, (PT_NOTE, b"GNU\0"), (PT_NOTE, GO)])), "written in Go"));
        let musl = of(&elf(2, &[(PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0")]));
        assert!(matches!(&musl, Fit::Breaks(why) if why.contains("musl")), "{musl:?}");
    }

    #[test]
    fn files_of_any_content_are_looked_at() {
        assert_eq!(of(b""), Fit::Loads);
        assert_eq!(of(b"echo a script without a first line\n"), Fit::Loads);
        let good = elf(2, &[GLIBC, (PT_NOTE, GO)]);
        let mut random = 1_u64;
        for _ in 0..2_000 {
            let mut bytes = good.clone();
            for _ in 0..3 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (random >> 33) as usize % bytes.len();
                bytes[at] = (random >> 24) as u8;
            }
            bytes.truncate((random >> 20) as usize % (bytes.len() + 1));
            let _ = Header::of(&written(&bytes)).map(|header| header.part(&written(&bytes), PT_INTERP));
        }
    }

    fn written(content: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    }

    #[test]
    fn the_interpreter_of_a_script_counts() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("static"), elf(2, &[])).unwrap();
        fs::write(at("inner"), format!("#!\t{} -u x\n", at("static").display())).unwrap();
        fs::write(at("outer"), format!("#!{}", at("inner").display())).unwrap();
        fs::write(at("circle"), format!("#!{}\n", at("circle").display())).unwrap();
        let fit = look(&at("outer"), &at("none"));
        let who = format!("{}, which runs {}, is static", at("static").display(), at("outer").display());
        assert!(ignores(&fit, &who), "{fit:?}");
        assert_eq!(look(&at("circle"), &at("none")), Fit::Loads, "the kernel refuses it");
    }

    #[test]
    fn more_rights_than_its_caller_has_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p");
        fs::write(&path, elf(2, &[GLIBC])).unwrap();
        let look = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            look(&path, Path::new("/none"))
        };
        assert_eq!(look(0o6755), Fit::Loads, "it has the same user and group");
        kit::require!(getuid().is_root(), "only root can make a program of another user");
        std::os::unix::fs::chown(&path, Some(65_534), Some(65_534)).unwrap();
        assert!(ignores(&look(0o4755), "set-user-ID"));
        assert!(ignores(&look(0o2755), "set-group-ID"));
        assert_eq!(look(0o2745), Fit::Loads, "a group that may not execute it: mandatory locking");
    }

    #[test]
    fn programs_are_found_as_the_kernel_would() {
        let found = |name: &str| find(OsStr::new(name));
        assert!(found("sh").unwrap().ends_with("sh"));
        assert_eq!(found("/bin/sh").unwrap(), Path::new("/bin/sh"));
        let kind = |name: &str| found(name).unwrap_err().downcast::<Unusable>().unwrap().0.kind();
        assert_eq!(kind("no-such-program-anywhere"), io::ErrorKind::NotFound);
        assert_eq!(kind("/no/such/program"), io::ErrorKind::NotFound);
        assert_eq!(kind("/etc/passwd"), io::ErrorKind::PermissionDenied);
        assert_eq!(kind("/etc/"), io::ErrorKind::PermissionDenied);
    }
}
