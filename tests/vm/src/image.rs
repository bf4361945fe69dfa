//! Makes the guest's file system: a cached base that all VMs share, and a small archive with the files of each VM.

use crate::cpio::Archive;
use crate::kernel::Kernel;
use crate::modules::ModuleTree;
use crate::{cache, libs};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules that the agent needs.
const NEEDED: [&str; 2] = ["virtio_pci", "virtio_console"];

/// Modules that `modprobe` can load, if the kernel has them.
const OFFERED: [&str; 16] = [
    "virtio_net",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "9pnet_virtio",
    "9p",
    "vfio_pci",
    "vfio_iommu_type1",
    "libnvdimm",
    "virtio_pmem",
    "nd_pmem",
    "dax_pmem",
    "device_dax",
    "kmem",
    "nfit",
    "nvme",
];

/// The modules that `VmBuilder::dax` loads, in this order.
pub const DAX: [&str; 5] = ["libnvdimm", "virtio_pmem", "nd_pmem", "dax_pmem", "device_dax"];

const AGENT: &[u8] = include_bytes!(env!("VM_AGENT"));
const INIT: &str = include_str!("init.sh");

/// Returns the base image for a kernel: busybox, the agent, modules. It comes from the cache if nothing in it has changed.
pub fn base(kernel: &Kernel) -> Result<PathBuf> {
    let busybox = which("busybox", "busybox-static")?;
    let mut hasher = DefaultHasher::new();
    (AGENT, INIT, NEEDED, OFFERED, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
    for path in [&busybox, &kernel.image, &kernel.modules.join("modules.dep")] {
        let meta = fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
        (path, meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    }
    let _lock = cache::lock()?;
    let dir = cache::dir()?;
    let name = format!("base-{:016x}.cpio", hasher.finish());
    let path = dir.join(&name);
    if !path.exists() {
        for stale in fs::read_dir(&dir)?.flatten() {
            if stale.file_name().to_string_lossy().starts_with("base-") {
                fs::remove_file(stale.path())?;
            }
        }
        let file = tempfile::NamedTempFile::new_in(&dir).context("cannot write to the cache folder")?;
        write_base(kernel, &busybox, BufWriter::new(file.as_file())).context("cannot make the base image")?;
        file.persist(&path)?;
    }
    Ok(path)
}

fn write_base(kernel: &Kernel, busybox: &Path, out: impl Write) -> Result<()> {
    let mut image = Image::new(out);
    image.program(busybox, "/bin/busybox", &[])?;
    let applets = Command::new(busybox).arg("--list-full").output().context("cannot run busybox")?;
    ensure!(applets.status.success(), "{} --list-full failed", busybox.display());
    for applet in String::from_utf8_lossy(&applets.stdout).lines().filter(|name| *name != "bin/busybox") {
        image.archive.link(applet, "/bin/busybox")?;
    }
    image.archive.file("/bin/vm-agent", 0o755, AGENT)?;
    image.archive.file("/init", 0o755, INIT.as_bytes())?;
    image.archive.file("/etc/inittab", 0o644, b"::respawn:/bin/vm-agent\n")?;
    image.archive.file(
        "/etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    )?;
    image.archive.file("/etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n")?;
    for dir in ["/proc", "/sys", "/dev", "/mnt", "/root", "/usr/local/bin", "/usr/local/lib", "/var/tmp"] {
        image.archive.directory(dir)?;
    }
    let tree = ModuleTree::read(&kernel.modules)?;
    image.modules(kernel, &tree, &base_modules(&tree)?)?;
    image.archive.finish()?;
    Ok(())
}

fn base_modules(tree: &ModuleTree) -> Result<Vec<String>> {
    // A kernel for clouds may lack some. A test that asks for a missing one with VmBuilder::module gets an error.
    tree.closure(NEEDED.into_iter().chain(OFFERED.into_iter().filter(|name| tree.has(name))))
}

/// What one VM has in addition to the base image.
#[derive(Clone, Default)]
pub struct Overlay {
    /// Host programs, which go to `/usr/local/bin`.
    pub programs: Vec<PathBuf>,
    /// Host libraries, which go to `/usr/local/lib`.
    pub libraries: Vec<PathBuf>,
    /// Host files and their paths in the guest. Programs among them bring their libraries.
    pub files: Vec<(PathBuf, String)>,
    /// Files with given contents: path in the guest, mode, bytes.
    pub contents: Vec<(String, u32, Vec<u8>)>,
    /// Kernel modules in addition to those of the base.
    pub modules: Vec<String>,
}

impl Overlay {
    /// Writes the whole initrd of a VM: the base, followed by this overlay.
    pub fn write_initrd(&self, kernel: &Kernel, to: &Path) -> Result<()> {
        let base = base(kernel)?;
        let mut out = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
        io::copy(&mut File::open(&base)?, &mut out)
            .with_context(|| format!("cannot copy {}", base.display()))?;
        let mut image = Image::new(BufWriter::new(out));
        self.fill(kernel, &mut image)?;
        image.archive.finish()?;
        Ok(())
    }

    fn fill(&self, kernel: &Kernel, image: &mut Image<impl Write>) -> Result<()> {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let provided: Vec<String> = self.libraries.iter().filter_map(|path| name(path)).collect();
        for (folder, paths) in [("/usr/local/lib", &self.libraries), ("/usr/local/bin", &self.programs)] {
            for path in paths {
                let name = name(path).with_context(|| format!("{} has no name", path.display()))?;
                image.program(path, &format!("{folder}/{name}"), &provided)?;
            }
        }
        for (host, guest) in &self.files {
            image.program(host, guest, &provided)?;
        }
        for (guest, mode, bytes) in &self.contents {
            image.archive.file(guest, *mode, bytes)?;
        }
        if !self.modules.is_empty() {
            let tree = ModuleTree::read(&kernel.modules)?;
            let in_base = base_modules(&tree)?;
            let all = tree.closure(in_base.iter().chain(&self.modules).map(String::as_str))?;
            image.modules(kernel, &tree, &all)?;
        }
        Ok(())
    }
}

struct Image<W: Write> {
    archive: Archive<W>,
    libraries: BTreeSet<PathBuf>,
}

impl<W: Write> Image<W> {
    fn new(out: W) -> Image<W> {
        Image { archive: Archive::new(out), libraries: BTreeSet::new() }
    }

    /// Adds a host file. If it is a program, also adds the libraries that it needs, at the paths that they have on the host.
    fn program(&mut self, host: &Path, guest: &str, provided: &[String]) -> Result<()> {
        let mode = fs::metadata(host).with_context(|| format!("cannot look at {}", host.display()))?;
        self.archive.file(guest, mode.permissions().mode(), &libs::load(host)?)?;
        for library in libs::needed_by(host, provided)? {
            if self.libraries.insert(library.clone()) {
                self.archive.file(&library.to_string_lossy(), 0o755, &libs::load(&library)?)?;
            }
        }
        Ok(())
    }

    fn modules(&mut self, kernel: &Kernel, tree: &ModuleTree, names: &[String]) -> Result<()> {
        let folder = format!("/lib/modules/{}", kernel.release);
        for name in names {
            let path = tree.guest_path(name).with_context(|| format!("no module {name}"))?;
            self.archive.file(&format!("{folder}/{path}"), 0o644, &tree.load(name)?)?;
        }
        self.archive.file(&format!("{folder}/modules.dep"), 0o644, tree.dep_file(names).as_bytes())?;
        self.archive.file(&format!("{folder}/modules.alias"), 0o644, tree.alias_file(names).as_bytes())?;
        Ok(())
    }
}

/// Returns the path of a program. The error says which package has it.
pub fn which(program: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
        .with_context(|| format!("the program {program} is needed; install the package {package}"))
}
