//! Finds the libraries that are loaded into programs, and sets the variables of the dynamic loader for them.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A library or folder that is named to the dynamic loader, ld.so(8).
pub struct Library {
    /// The environment variable by which the dynamic loader finds the library or folder.
    pub variable: &'static str,
    /// The characters that separate entries of this variable.
    separators: &'static [u8],
    /// The environment variable by which the user can give its path.
    path_variable: &'static str,
    /// The paths at which this command looks for it, relative to its own folder: first the path in a build folder of cargo,
    /// then the path of an installation.
    search_paths: &'static [&'static str],
    /// Its purpose, for messages.
    purpose: &'static str,
    /// Whether a path is such a library or folder.
    is_there: fn(&Path) -> bool,
}

/// The library that is loaded into programs for their connections.
pub const PRELOAD: Library = Library {
    variable: "LD_PRELOAD",
    separators: b" :",
    path_variable: "GINNEL_PRELOAD",
    search_paths: &[
        "libginnel_preload.so",
        "../lib/ginnel/libginnel-preload.so",
        "../lib/libginnel-preload.so",
    ],
    purpose: "the library that moves connections to shared memory",
    is_there: Path::is_file,
};

/// The library beside those for RDMA verbs that provides a file of each device to programs that look for one, such as
/// those with UCX.
pub const DEVICE_FILES: &str = "device-files.so";

/// The folder of the libraries that replace libibverbs and librdmacm.
pub const VERBS: Library = Library {
    variable: "LD_LIBRARY_PATH",
    separators: b":;",
    path_variable: "GINNEL_VERBS",
    search_paths: &["verbs", "../lib/ginnel/verbs"],
    purpose: "the folder of the libraries for RDMA verbs",
    is_there: |folder| ["libibverbs.so.1", DEVICE_FILES].iter().all(|file| folder.join(file).is_file()),
};

impl Library {
    /// Finds it: at the path that the user has set, or beside this command.
    pub fn find(&self) -> Result<PathBuf> {
        let Self { path_variable: variable, purpose, .. } = self;
        if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            if !(self.is_there)(&path) {
                bail!("{variable} names {}, which is not {purpose}", path.display());
            }
            return canonical(&path);
        }
        let command = std::env::current_exe().context("cannot find the path of this command")?;
        let folder = command.parent().unwrap_or(Path::new("/"));
        let paths: Vec<_> = self.search_paths.iter().map(|path| folder.join(path)).collect();
        match paths.iter().find(|path| (self.is_there)(path)) {
            Some(path) => canonical(path),
            None => bail!(
                "{purpose} is missing: it is not at {}; install it (`make install`), or set its path: \
                 {variable}=PATH",
                paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", nor at ")
            ),
        }
    }

    /// Returns the loader's variable with the library as its first entry, before the entries that it has already.
    pub fn first(&self, library: &Path, others: Option<OsString>) -> Result<OsString> {
        let between = |byte: &u8| self.separators.contains(byte);
        if library.as_os_str().as_bytes().iter().any(between) {
            bail!(
                "{} cannot name {}, because {} separate its entries; copy the library to another place, and name that \
                 in {}",
                self.variable,
                library.display(),
                if self.separators.contains(&b' ') { "spaces and colons" } else { "colons and semicolons" },
                self.path_variable
            );
        }
        let library = library.as_os_str().as_bytes();
        let others = others.unwrap_or_default();
        let rest = others.as_bytes().split(between).filter(|entry| !entry.is_empty() && *entry != library);
        let all: Vec<_> = std::iter::once(library).chain(rest).collect();
        Ok(OsStr::from_bytes(&all.join(&b':')).to_owned())
    }
}

fn canonical(path: &Path) -> Result<PathBuf> {
    path.canonicalize().with_context(|| format!("cannot find the full path of {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_the_first_and_others_stay() {
        let first = |library: &Library, others: Option<&str>| {
            let all = library.first(Path::new("/l/x.so"), others.map(OsString::from)).unwrap();
            all.into_string().unwrap()
        };
        for library in [&PRELOAD, &VERBS] {
            assert_eq!(first(library, None), "/l/x.so");
            assert_eq!(first(library, Some("")), "/l/x.so");
            assert_eq!(first(library, Some("a.so:/l/x.so")), "/l/x.so:a.so");
        }
        assert_eq!(
            first(&PRELOAD, Some("libjemalloc.so /a/b.so:c.so ")),
            "/l/x.so:libjemalloc.so:/a/b.so:c.so"
        );
        assert_eq!(first(&VERBS, Some("/a b;/c")), "/l/x.so:/a b:/c");
    }

    #[test]
    fn a_place_that_the_loader_cannot_be_told_is_an_error() {
        for (library, path) in [(PRELOAD, "/a b/x.so"), (PRELOAD, "/a:b/x.so"), (VERBS, "/a;b")] {
            let error = library.first(Path::new(path), None).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(library.path_variable), "{error}");
        }
        assert!(VERBS.first(Path::new("/a b/verbs"), None).is_ok());
    }
}
