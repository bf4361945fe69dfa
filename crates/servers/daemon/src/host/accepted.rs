//! The last configuration that was accepted. If the file has a mistake while VMs need the daemon, the daemon uses this copy, so
//! that a slip in an editor harms nobody before it is fixed.
//!
//! The copy lies in the state folder, which the configuration itself names. If the file cannot be understood as a whole, the name
//! of the folder may still be readable in it; otherwise the service manager's state folder or the default is used. A copy is
//! valid only if it was made from the same file and names the folder in which it lies.

use super::config::Config;
use crate::keeper;
use ginnel_config::{Problem, from_toml};
use serde::Deserialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tracing::{error, warn};

/// The name of the copy in the state folder.
const NAME: &str = "accepted.toml";
/// The default state folder.
const DEFAULT_DIR: &str = "/var/lib/ginnel";
/// The text before the path in the first line of the copy.
const MADE_OF: &str = "# accepted from ";

/// The configuration in effect.
#[derive(Debug)]
pub struct Chosen {
    /// The configuration.
    pub config: Config,
    /// The text that the configuration was read from.
    text: String,
}

/// Reads the configuration. If it has a mistake and VMs need this daemon, returns the one that was accepted last.
pub fn choose(file: &Path) -> Result<Chosen, Problem> {
    let problem = match read(file) {
        Ok(chosen) => return Ok(chosen),
        Err(problem) => problem,
    };
    let text = std::fs::read_to_string(file).unwrap_or_default();
    for dir in state_dirs(&text) {
        let Some((mut config, text)) = copy_in(&dir, file) else { continue };
        if keeper::is_entrusted() || keeper::is_there(&config.keeper_socket()) {
            config.mistake = Some(problem.to_string());
            return Ok(Chosen { config, text });
        }
    }
    Err(problem)
}

/// Reads the configuration again for a daemon that serves, and stores it as the accepted one. What nobody can mean is a mistake here.
pub fn again(file: &Path) -> Result<Chosen, Vec<Problem>> {
    let chosen = read(file).map_err(|problem| vec![problem])?;
    let doubts = chosen.config.doubts();
    if !doubts.is_empty() {
        return Err(doubts);
    }
    chosen.accepted();
    Ok(chosen)
}

fn read(file: &Path) -> Result<Chosen, Problem> {
    let text = Config::text_of(file)?;
    Ok(Chosen { config: Config::of_text(&text, file)?, text })
}

/// Returns the folders in which the copy may be.
fn state_dirs(text: &str) -> Vec<PathBuf> {
    #[derive(Deserialize)]
    struct Line {
        state_dir: PathBuf,
    }
    let line = |line: &str| from_toml(line, Path::new(""), "").ok().map(|line: Line| line.state_dir);
    let service = std::env::var("STATE_DIRECTORY").ok();
    let service = service.iter().flat_map(|dirs| dirs.split(':')).map(PathBuf::from);
    text.lines().filter_map(line).chain(service).chain([DEFAULT_DIR.into()]).collect()
}

/// Reads the copy in a folder, if it was made from this file.
fn copy_in(dir: &Path, file: &Path) -> Option<(Config, String)> {
    let copy = std::fs::read_to_string(dir.join(NAME)).ok()?;
    let text = copy.strip_prefix(&head(file))?;
    match Config::of_text(text, file) {
        Ok(config) if config.state_dir == dir => Some((config, text.to_owned())),
        Ok(_) => None,
        Err(problem) => {
            eprintln!("ginneld: the configuration that was accepted last cannot be used either: {problem}");
            None
        }
    }
}

fn head(file: &Path) -> String {
    format!("{MADE_OF}{:?}\n", std::path::absolute(file).unwrap_or_else(|_| file.to_owned()))
}

impl Chosen {
    /// Stores this configuration as the accepted one, for the daemon's successor. If the file has a mistake, logs it instead.
    pub fn accepted(&self) {
        if let Some(mistake) = &self.config.mistake {
            error!(
                "{mistake}; the configuration that was accepted last is in effect meanwhile: fix the file, then reload or restart this daemon"
            );
            return;
        }
        if let Err(error) = self.keep() {
            let dir = self.config.state_dir.display();
            warn!(%dir, %error, "no copy of the configuration can be stored: if the file has a mistake at the next start, nobody will be served");
        }
    }

    fn keep(&self) -> io::Result<()> {
        let copy = head(&self.config.file) + &self.text;
        let (path, new) =
            (self.config.state_dir.join(NAME), self.config.state_dir.join(format!("{NAME}.new")));
        if std::fs::read_to_string(&path).is_ok_and(|there| there == copy) {
            return Ok(());
        }
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(copy.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        File::open(&self.config.state_dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_file_may_still_name_the_state_folder() {
        let text = "[daemon\n  state_dir = \"/a b\" # here\nstate_dir_of = \"/c\"\nstate_dir = 7\n";
        let dirs = state_dirs(text);
        assert_eq!((dirs.first(), dirs.last()), (Some(&"/a b".into()), Some(&DEFAULT_DIR.into())));
    }

    #[test]
    fn a_copy_is_valid_only_for_its_file_and_folder() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ginneld.toml");
        let text = |dir: &Path| format!("[daemon]\nstate_dir = {dir:?}\n");
        let chosen = |text: String| Chosen { config: Config::of_text(&text, &file).unwrap(), text };
        let good = chosen(text(dir.path()));
        good.keep().unwrap();
        good.keep().unwrap();
        assert_eq!(copy_in(dir.path(), &file), Some((good.config.clone(), good.text.clone())));
        assert_eq!(copy_in(dir.path(), &dir.path().join("other.toml")), None);
        let moved = tempfile::tempdir().unwrap();
        std::fs::copy(dir.path().join(NAME), moved.path().join(NAME)).unwrap();
        assert_eq!(copy_in(moved.path(), &file), None);
        // A half-written earlier copy does no harm, and only the daemon's user can read the new one.
        std::fs::write(dir.path().join(format!("{NAME}.new")), "x").unwrap();
        let other = chosen(text(dir.path()) + "vectors = 7\n");
        other.keep().unwrap();
        assert_eq!(copy_in(dir.path(), &file).unwrap().0.vectors, 7);
        let mode = std::os::unix::fs::MetadataExt::mode(&dir.path().join(NAME).metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600);
    }
}
