//! Determines which kernel modules go into a guest: the wanted ones and those that they need, according to `modules.dep`.

use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The modules of one kernel, as depmod describes them.
pub struct ModuleTree {
    root: PathBuf,
    /// By module name, the path below the root and the paths of the modules that it needs.
    entries: BTreeMap<String, (String, Vec<String>)>,
    builtin: BTreeSet<String>,
}

impl ModuleTree {
    /// Reads `modules.dep` and `modules.builtin` of a folder such as `/lib/modules/6.1.0`.
    pub fn read(root: &Path) -> Result<ModuleTree> {
        let path = root.join("modules.dep");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let builtin = fs::read_to_string(root.join("modules.builtin")).unwrap_or_default();
        ModuleTree::parse(root, &text, &builtin)
    }

    fn parse(root: &Path, dep: &str, builtin: &str) -> Result<ModuleTree> {
        let mut entries = BTreeMap::new();
        for line in dep.lines().filter(|line| !line.trim().is_empty()) {
            let Some((path, needs)) = line.split_once(':') else {
                bail!("{}/modules.dep: no colon in the line '{line}'", root.display());
            };
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            entries.insert(name_of(path), (path.trim().to_owned(), needs));
        }
        let builtin = builtin.lines().map(name_of).collect();
        Ok(ModuleTree { root: root.to_owned(), entries, builtin })
    }

    /// Returns the names of `wanted` and of all modules that they need. Each module comes after those that it needs itself.
    ///
    /// Modules that are built into the kernel are left out.
    pub fn closure<'a>(&self, wanted: impl IntoIterator<Item = &'a str>) -> Result<Vec<String>> {
        let mut order = Vec::new();
        let mut path = Vec::new();
        for name in wanted {
            self.visit(&name_of(name), &mut path, &mut order)?;
        }
        Ok(order)
    }

    fn visit(&self, name: &str, path: &mut Vec<String>, order: &mut Vec<String>) -> Result<()> {
        if self.builtin.contains(name) || order.iter().any(|done| done == name) {
            return Ok(());
        }
        ensure!(
            !path.iter().any(|open| open == name),
            "modules.dep: {name} needs itself ({})",
            path.join(" -> ")
        );
        let Some((_, needs)) = self.entries.get(name) else {
            let for_whom = path.last().map(|by| format!(", which {by} needs")).unwrap_or_default();
            bail!("the kernel of {} has no module {name}{for_whom}", self.root.display());
        };
        path.push(name.to_owned());
        for need in needs {
            self.visit(&name_of(need), path, order)?;
        }
        path.pop();
        order.push(name.to_owned());
        Ok(())
    }

    /// Returns whether the kernel has this module, as a file or built in.
    pub fn has(&self, name: &str) -> bool {
        let name = name_of(name);
        self.builtin.contains(&name) || self.entries.contains_key(&name)
    }

    /// Returns the path of a module's file below the root, without the ending of a compression.
    pub fn guest_path(&self, name: &str) -> Option<&str> {
        self.entries.get(name).map(|(path, _)| plain(path))
    }

    /// Returns the content of the module's file, decompressed.
    pub fn load(&self, name: &str) -> Result<Vec<u8>> {
        let (path, _) = self.entries.get(name).with_context(|| format!("no module {name}"))?;
        let file = self.root.join(path);
        let unpack = match file.extension().and_then(|e| e.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            Some("gz") => "gzip",
            _ => return fs::read(&file).with_context(|| format!("cannot read {}", file.display())),
        };
        let output = Command::new(unpack)
            .arg("-dc")
            .arg(&file)
            .output()
            .with_context(|| format!("cannot run {unpack} to unpack kernel modules; install it"))?;
        ensure!(output.status.success(), "{unpack} cannot unpack {}", file.display());
        Ok(output.stdout)
    }

    /// Returns a `modules.dep` for these modules only, for the guest's modprobe.
    pub fn dep_file(&self, names: &[String]) -> String {
        let mut text = String::new();
        for name in names {
            if let Some((path, needs)) = self.entries.get(name) {
                let needs: String = needs.iter().map(|need| format!(" {}", plain(need))).collect();
                text += &format!("{}:{needs}\n", plain(path));
            }
        }
        text
    }

    /// Returns the lines of `modules.alias` for these modules only. The kernel requests modules by such names.
    pub fn alias_file(&self, names: &[String]) -> String {
        let all = fs::read_to_string(self.root.join("modules.alias")).unwrap_or_default();
        let of_ours = |line: &&str| {
            line.rsplit_once(' ').is_some_and(|(_, name)| names.iter().any(|ours| *ours == name_of(name)))
        };
        all.lines().filter(of_ours).map(|line| format!("{line}\n")).collect()
    }
}

/// Returns a module's name as the kernel writes it: no folder, no ending, `_` where the file may have `-`.
fn name_of(path: &str) -> String {
    let file = path.trim().rsplit('/').next().unwrap_or_default();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

fn plain(path: &str) -> &str {
    path.find(".ko").map_or(path, |at| &path[..at + 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/vfio/vfio-pci.ko.xz: kernel/vfio/vfio-pci-core.ko.xz kernel/vfio/vfio.ko.xz\n\
                       kernel/vfio/vfio-pci-core.ko.xz: kernel/virt/irqbypass.ko.xz kernel/vfio/vfio.ko.xz\n\
                       kernel/vfio/vfio.ko.xz:\n\
                       kernel/virt/irqbypass.ko.xz:\n";

    fn tree(dep: &str) -> ModuleTree {
        ModuleTree::parse(Path::new("/lib/modules/x"), dep, "kernel/drivers/tty/serial/8250.ko\n").unwrap()
    }

    #[test]
    fn a_module_comes_after_what_it_needs() {
        let order = tree(DEP).closure(["vfio-pci", "vfio"]).unwrap();
        assert_eq!(order, ["irqbypass", "vfio", "vfio_pci_core", "vfio_pci"]);
    }

    #[test]
    fn names_with_dash_and_underscore_are_the_same() {
        assert_eq!(tree(DEP).closure(["vfio_pci"]).unwrap(), tree(DEP).closure(["vfio-pci"]).unwrap());
    }

    #[test]
    fn built_in_drivers_need_no_module() {
        assert_eq!(tree(DEP).closure(["8250"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn an_unknown_module_is_an_error_that_names_it_and_who_needs_it() {
        let error = tree(DEP).closure(["nvme"]).unwrap_err().to_string();
        assert!(error.contains("no module nvme"), "{error}");
        let error = tree("k/a.ko: k/b.ko\n").closure(["a"]).unwrap_err().to_string();
        assert!(error.contains("no module b, which a needs"), "{error}");
    }

    #[test]
    fn a_circle_is_an_error() {
        let error = tree("k/a.ko: k/b.ko\nk/b.ko: k/a.ko\n").closure(["a"]).unwrap_err().to_string();
        assert!(error.contains("a needs itself"), "{error}");
    }

    #[test]
    fn a_line_without_colon_is_an_error() {
        assert!(ModuleTree::parse(Path::new("/x"), "kernel/a.ko\n", "").is_err());
    }

    #[test]
    fn the_guest_gets_plain_files_and_their_list() {
        let tree = tree(DEP);
        assert_eq!(tree.guest_path("vfio_pci_core"), Some("kernel/vfio/vfio-pci-core.ko"));
        let list = tree.dep_file(&["vfio".into(), "vfio_pci_core".into()]);
        assert_eq!(
            list,
            "kernel/vfio/vfio.ko:\n\
             kernel/vfio/vfio-pci-core.ko: kernel/virt/irqbypass.ko kernel/vfio/vfio.ko\n"
        );
    }
}
