//! Builds programs and libraries of other packages, for the tests that run them, in the cargo profile of the test. Each process asks
//! cargo for a file only once.
//!
//! Cargo tells the path of a program (`CARGO_BIN_EXE_NAME`) only to the tests of the program's own package.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// What cargo builds together. The packages that are built, and whether a test is among them, determine the features of their
/// dependencies. This is the selection of `scripts/unit`; with another one, cargo would build most packages a second time, and replace
/// the programs that tests running at the same time use.
const TOGETHER: [&str; 5] = ["--workspace", "--exclude", "vmtest", "--test", "header"];

/// Returns the path of a program.
pub fn program(name: &str) -> PathBuf {
    once(name, || cargo(&["--bin", name], name))
}

/// Returns the path of a library, whose file has this name.
pub fn library(file: &str) -> PathBuf {
    once(file, || cargo(&["--lib"], file))
}

/// Returns the folder of libraries that the Makefile of a package links. The path of the package is relative to that of the repository,
/// and that of the folder to that of the profile.
pub fn libraries(package: &str, folder: &str) -> PathBuf {
    once(package, || {
        let mut make = make(package);
        run(make.arg("--silent"));
        profile().join(folder)
    })
}

/// Returns the `make` that makes the first target of a package's Makefile, unless the caller adds others. While it runs, no other
/// process may use the libraries of that package, because the linker overwrites them.
pub fn make(package: &str) -> Command {
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "-C"]).arg(root().join(package));
    make.arg(format!("PROFILE={}", profile_name())).arg(format!("PACKAGES={} --lib", TOGETHER.join(" ")));
    // This must not be a sub-make of the `make` that may run this test.
    settle(make.env_remove("MAKEFLAGS").env("CARGO", env!("CARGO")));
    make
}

fn cargo(target: &[&str], file: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--profile", &profile_name()]).args(TOGETHER).args(target);
    settle(cargo.current_dir(root()));
    run(&mut cargo);
    profile().join(file)
}

/// Makes cargo build into the folder from which this test runs, whatever the test's environment says.
fn settle(command: &mut Command) {
    command.env("CARGO_TARGET_DIR", profile().parent().expect("the folder of a profile"));
    // Whoever runs the tests may set this for the test runner. Cargo would build everything anew with it.
    command.env_remove("RUSTC_BOOTSTRAP");
}

/// Returns the value that `build` returned for this key in this process. The builds of a process take turns.
fn once(key: &str, build: impl FnOnce() -> PathBuf) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(key.to_owned()).or_insert_with(build).clone()
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the folder of cargo's profile. The program of the test is PROFILE/deps/NAME.
fn profile() -> PathBuf {
    let test = std::env::current_exe().expect("this executable has a path");
    test.ancestors().nth(2).expect("a test lies in the folder of its profile").to_owned()
}

fn profile_name() -> String {
    let profile = profile();
    let folder = profile.file_name().and_then(|name| name.to_str()).expect("the name of a profile");
    // The folder of the profile `dev` is the only one with another name.
    if folder == "debug" { "dev".into() } else { folder.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_built_once_and_again_after_a_failure() {
        let broken = || once("kit's own", || panic!("on purpose"));
        assert!(std::panic::catch_unwind(broken).is_err());
        assert_eq!(once("kit's own", || "first".into()), Path::new("first"));
        assert_eq!(once("kit's own", || "second".into()), Path::new("first"));
    }
}
