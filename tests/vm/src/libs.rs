//! Host programs that go into a guest: their bytes, and the shared libraries that they need there.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the libraries that the loader would give `program`, the loader included. A static program or a script needs none.
///
/// `provided` are the names of libraries that the guest gets in another way.
pub fn needed_by(program: &Path, provided: &[String]) -> Result<Vec<PathBuf>> {
    if !is_elf(&fs::read(program).with_context(|| format!("cannot read {}", program.display()))?) {
        return Ok(Vec::new());
    }
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd; install libc-bin")?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(errors.contains("not a dynamic"), "ldd {}: {}", program.display(), errors.trim());
        return Ok(Vec::new());
    }
    parse_ldd(&String::from_utf8_lossy(&output.stdout), provided)
        .with_context(|| format!("{} cannot run in a guest", program.display()))
}

fn parse_ldd(text: &str, provided: &[String]) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in text.lines() {
        let (name, place) = line.trim().split_once(" => ").unwrap_or(("", line.trim()));
        if place.starts_with('/') {
            let path = place.rsplit_once(" (").map_or(place, |(path, _)| path);
            libraries.push(PathBuf::from(path));
        } else if place.starts_with("not found") && !provided.iter().any(|have| have == name) {
            bail!("its library {name} is not found; give it to the VM with library()");
        }
    }
    Ok(libraries)
}

/// Returns the bytes of a host file. Big programs are returned without their debug sections, which would only fill the guest's
/// memory.
pub fn load(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if bytes.len() < 1 << 20 || !is_elf(&bytes) {
        return Ok(bytes);
    }
    let stripped = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let done = Command::new("strip").arg("--strip-debug").arg("-o").arg(stripped.path()).arg(path).output();
    match done {
        Ok(output) if output.status.success() => {
            fs::read(stripped.path()).context("cannot read strip's output")
        }
        _ => Ok(bytes), // There is no strip, or it cannot strip this file: the whole program works as well.
    }
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LDD: &str = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                       \tlibginnel.so.0 => not found\n\
                       \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

    #[test]
    fn ldd_names_libraries_and_the_loader() {
        let found = parse_ldd(LDD, &["libginnel.so.0".into()]).unwrap();
        assert_eq!(
            found,
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let error = parse_ldd(LDD, &[]).unwrap_err().to_string();
        assert!(error.contains("libginnel.so.0"), "{error}");
    }

    #[test]
    fn a_static_program_needs_nothing() {
        assert_eq!(parse_ldd("\tstatically linked\n", &[]).unwrap(), Vec::<PathBuf>::new());
    }
}
