//! The files of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the repository's folder.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("this package lies in tests/architecture")
}

/// Returns the paths of the files that git knows or would add, from the repository's folder. Without git, for example in an
/// unpacked archive, these are all files except those that were built.
pub fn files() -> Vec<PathBuf> {
    let mut files = git_files().unwrap_or_else(|| {
        let mut found = Vec::new();
        walk(root(), &mut found);
        found
    });
    // A file that was deleted and not yet removed from the index is not there.
    files.retain(|path| root().join(path).is_file());
    files.sort();
    files.dedup();
    files
}

fn git_files() -> Option<Vec<PathBuf>> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .ok()?;
    let names = String::from_utf8(git.stdout).ok()?;
    git.status.success().then(|| names.split_terminator('\0').map(PathBuf::from).collect())
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = folder.read_dir().unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let entry = entry.expect("an entry of a folder");
        let is_folder = entry.file_type().expect("a type").is_dir();
        let is_built = [".git", "target", "node_modules"].iter().any(|name| entry.file_name() == *name);
        if is_folder && !is_built {
            walk(&entry.path(), found);
        } else if !is_folder {
            found.push(entry.path().strip_prefix(root()).expect("a path in the repository").into());
        }
    }
}

#[test]
fn this_file_is_found_with_and_without_git() {
    let this = Path::new("tests/architecture/src/tree.rs");
    let mut walked = Vec::new();
    walk(root(), &mut walked);
    assert!(files().iter().any(|path| path == this), "{:?}", files());
    assert!(walked.iter().any(|path| path == this), "{walked:?}");
    assert!(!walked.iter().any(|path| path.starts_with("target")), "{walked:?}");
}
