//! Builds this project's own programs and libraries for a test that puts them into a guest.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Builds this workspace in the profile of the test, and returns the path of `file`: a program such as `ginneld`, or a library
/// such as `libginnel.so`.
///
/// A test that only looked into the target folder would run whatever was built there last, or find nothing. Blocks while cargo
/// builds; if everything is up to date this takes a moment, once per process. The whole workspace is built, as `make build`
/// does, because cargo compiles the dependencies of a single package anew if that package alone needs fewer of their features.
pub fn artifact(file: &str) -> Result<PathBuf> {
    static BUILT: Mutex<Option<Vec<PathBuf>>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if built.is_none() {
        *built = Some(build()?);
    }
    let found = built.iter().flatten().find(|path| path.file_name().is_some_and(|name| name == file));
    found.cloned().with_context(|| format!("the workspace builds no {file}"))
}

fn build() -> Result<Vec<PathBuf>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--message-format=json", "--workspace"]);
    command.arg("--manifest-path").arg(manifest).stderr(Stdio::inherit());
    // Whoever runs the tests may set this for the test runner. Cargo would build everything anew with it.
    command.env_remove("RUSTC_BOOTSTRAP");
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    let output = command.output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the workspace does not build");
    let messages = String::from_utf8_lossy(&output.stdout);
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let files = artifacts.flat_map(|message| match message["filenames"].as_array() {
        Some(names) => names.iter().filter_map(|name| name.as_str().map(PathBuf::from)).collect(),
        None => Vec::new(),
    });
    Ok(files.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_built_and_found() {
        let agent = artifact("vm-agent").unwrap();
        assert!(std::fs::read(agent).unwrap().starts_with(b"\x7fELF"));
        let error = artifact("no-such-program").unwrap_err().to_string();
        assert!(error.contains("builds no no-such-program"), "{error}");
    }
}
