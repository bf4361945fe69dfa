//! Finds a stock kernel with its modules, or downloads the one of the distribution.

use crate::cache;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kernel to boot in guests.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The path of the bzImage.
    pub image: PathBuf,
    /// The folder that contains `modules.dep`; its name is the release.
    pub modules: PathBuf,
    /// The release, which `uname -r` prints in the guest.
    pub release: String,
}

impl Kernel {
    /// Finds a kernel. These are tried in order: the one that `GINNEL_KERNEL` names (with `GINNEL_MODULES`, if its modules are
    /// not beside it), an installed one, one in the cache, and the distribution's, which is downloaded into the cache.
    ///
    /// Blocks as long as a download takes (some 70 MB).
    pub fn find() -> Result<Kernel> {
        if let Some(image) = std::env::var_os("GINNEL_KERNEL") {
            let image = PathBuf::from(image);
            let modules = match std::env::var_os("GINNEL_MODULES") {
                Some(modules) => PathBuf::from(modules),
                None => modules_beside(&image)?,
            };
            return Kernel::at(image, modules);
        }
        if let Some(kernel) = Kernel::newest("/boot".as_ref(), "/lib/modules".as_ref()) {
            return Ok(kernel);
        }
        let _lock = cache::lock()?;
        let kept = cache::dir()?.join("kernel");
        let in_cache = || Kernel::newest(&kept.join("boot"), &kept.join("lib/modules"));
        if in_cache().is_none() {
            download(&kept).context("no kernel to boot (GINNEL_KERNEL= and GINNEL_MODULES= name another)")?;
        }
        in_cache().with_context(|| format!("the downloaded package has no kernel in {}", kept.display()))
    }

    fn at(image: PathBuf, modules: PathBuf) -> Result<Kernel> {
        ensure!(image.is_file(), "there is no kernel {}", image.display());
        ensure!(
            modules.join("modules.dep").is_file(),
            "{} has no modules.dep; `depmod -b FOLDER RELEASE` makes it, with FOLDER the one that has lib/modules",
            modules.display()
        );
        let release =
            modules.file_name().and_then(|name| name.to_str()).context("GINNEL_MODULES has no name")?;
        let release = release.to_owned();
        Ok(Kernel { image, modules, release })
    }

    /// Returns the newest `vmlinuz-RELEASE` that can be read and has its modules.
    fn newest(boot: &Path, modules: &Path) -> Option<Kernel> {
        let mut found: Vec<Kernel> = fs::read_dir(boot)
            .ok()?
            .flatten()
            .filter_map(|entry| {
                let release = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned();
                fs::File::open(entry.path()).ok()?;
                Kernel::at(entry.path(), modules.join(release)).ok()
            })
            .collect();
        found.sort_by_key(|kernel| release_key(&kernel.release));
        found.pop()
    }
}

/// Returns the modules of `FOLDER/boot/vmlinuz-RELEASE` at the place where a package has them: `FOLDER/lib/modules/RELEASE`.
fn modules_beside(image: &Path) -> Result<PathBuf> {
    let image = image.canonicalize().with_context(|| format!("there is no kernel {}", image.display()))?;
    let release =
        image.file_name().and_then(|name| name.to_str()?.split_once('-')).map(|(_, release)| release);
    let folder = image.parent().and_then(Path::parent);
    let modules = folder.zip(release).map(|(folder, release)| folder.join("lib/modules").join(release));
    modules.filter(|modules| modules.is_dir()).with_context(|| {
        format!(
            "the modules of GINNEL_KERNEL={} are not in ../lib/modules; set GINNEL_MODULES to their folder, the one \
             that is named after the kernel's release",
            image.display()
        )
    })
}

/// Makes a key that sorts 6.1.0-9 before 6.1.0-10.
fn release_key(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

fn download(to: &Path) -> Result<()> {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("no Debian kernel is known for {other}"),
    };
    let meta = format!("linux-image-{arch}");
    let depends = said(Command::new("apt-cache").args(["depends", &meta])).unwrap_or_default();
    let package = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .with_context(|| {
            format!("apt-cache does not know {meta}; run `apt-get update`, or install a kernel")
        })?;

    let parent = to.parent().context("the cache folder has no parent")?;
    let work = tempfile::tempdir_in(parent).context("cannot make a folder in the cache")?;
    eprintln!("downloading the kernel package {package}");
    said(
        Command::new("apt-get")
            .args(["-qq", "-o", "APT::Sandbox::User=root", "download", package])
            .current_dir(work.path()),
    )?;
    let deb = fs::read_dir(work.path())?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .with_context(|| format!("apt-get downloaded no package for {package}"))?;
    let unpacked = work.path().join("unpacked");
    said(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&unpacked))?;
    for release in fs::read_dir(unpacked.join("lib/modules"))?.flatten() {
        depmod(&unpacked, &release.file_name().to_string_lossy())?;
    }
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::rename(&unpacked, to).with_context(|| format!("cannot move the kernel to {}", to.display()))
}

/// Makes `modules.dep`, which a package does not contain because it is made at installation.
fn depmod(root: &Path, release: &str) -> Result<()> {
    let mut result = Ok(String::new());
    for program in [&["depmod"][..], &["busybox", "depmod"]] {
        result = said(Command::new(program[0]).args(&program[1..]).arg("-b").arg(root).arg(release));
        if result.is_ok() {
            return Ok(());
        }
    }
    result.map(drop).context("depmod is needed; install kmod or busybox-static")
}

/// Runs a program and returns what it wrote, or why it failed.
fn said(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} failed ({}): {}", output.status, errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_complete_kernel_wins() {
        let dir = tempfile::tempdir().unwrap();
        let (boot, modules) = (dir.path().join("boot"), dir.path().join("modules"));
        fs::create_dir_all(&boot).unwrap();
        for (release, complete) in [("6.1.0-9", true), ("6.1.0-10", true), ("6.1.0-11", false)] {
            fs::write(boot.join(format!("vmlinuz-{release}")), "").unwrap();
            fs::create_dir_all(modules.join(release)).unwrap();
            if complete {
                fs::write(modules.join(release).join("modules.dep"), "").unwrap();
            }
        }
        assert_eq!(Kernel::newest(&boot, &modules).unwrap().release, "6.1.0-10");
        assert!(Kernel::newest(&modules, &boot).is_none());
    }

    #[test]
    fn a_kernel_out_of_a_package_has_its_modules_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let (boot, modules) = (dir.path().join("boot"), dir.path().join("lib/modules/7.2.12+deb13-amd64"));
        fs::create_dir_all(&boot).unwrap();
        let image = boot.join("vmlinuz-7.2.12+deb13-amd64");
        let error = modules_beside(&image).unwrap_err().to_string();
        assert!(error.contains("there is no kernel"), "{error}");
        fs::write(&image, "").unwrap();
        let error = modules_beside(&image).unwrap_err().to_string();
        assert!(error.contains("set GINNEL_MODULES"), "{error}");
        fs::create_dir_all(&modules).unwrap();
        assert_eq!(modules_beside(&image).unwrap(), modules.canonicalize().unwrap());
    }
}
