//! The configuration that was accepted last. A daemon whose file has a mistake while VMs need it serves from that, so that a
//! slip in an editor costs nobody anything before somebody mends it.
//!
//! The copy lies in the state folder, which the configuration itself names. A file that cannot be understood as a whole may
//! still say where that is; else it is where the service manager, or the default, has it. A copy counts only if it was made of
//! the same file and names the folder in which it lies.

use super::config::Config;
use crate::keeper;
use ginnel_config::{Problem, from_toml};
use serde::Deserialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tracing::{error, warn};

/// The copy, in the state folder.
const NAME: &str = "accepted.toml";
/// Where the state folder is if nobody says.
const DEFAULT_DIR: &str = "/var/lib/ginnel";
/// What stands before the path in the first line of the copy.
const MADE_OF: &str = "# accepted from ";

/// A configuration to serve by.
#[derive(Debug)]
pub struct Chosen {
    /// The configuration.
    pub config: Config,
    /// Its text.
    text: String,
}

/// Reads the configuration; if it has a mistake and VMs need this daemon, the one that was accepted last.
pub fn choose(file: &Path) -> Result<Chosen, Problem> {
    let read =
        Config::text_of(file).and_then(|text| Ok(Chosen { config: Config::of_text(&text, file)?, text }));
    let Err(problem) = read else { return read };
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

/// Where the copy may be.
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

/// The copy in a folder, if it is one of this file.
fn copy_in(dir: &Path, file: &Path) -> Option<(Config, String)> {
    let copy = std::fs::read_to_string(dir.join(NAME)).ok()?;
    let text = copy.strip_prefix(&head(file))?;
    match Config::of_text(text, file) {
        Ok(config) if config.state_dir == dir => Some((config, text.to_owned())),
        Ok(_) => None,
        Err(problem) => {
            eprintln!("ginneld: nor can the configuration be used that was accepted last: {problem}");
            None
        }
    }
}

fn head(file: &Path) -> String {
    format!("{MADE_OF}{:?}\n", std::path::absolute(file).unwrap_or_else(|_| file.to_owned()))
}

impl Chosen {
    /// The daemon serves by this configuration: it is kept for a successor. If the file has a mistake, says so.
    pub fn accepted(&self) {
        if let Some(mistake) = &self.config.mistake {
            error!(
                "{mistake}; the configuration that was accepted last is served meanwhile: mend the file, then restart this daemon"
            );
            return;
        }
        if let Err(error) = self.keep() {
            let dir = self.config.state_dir.display();
            warn!(%dir, %error, "the configuration cannot be kept: should the file have a mistake at the next start, nobody will be served");
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
    fn a_file_that_makes_no_sense_may_still_say_where_the_state_is() {
        let text = "[daemon\n  state_dir = \"/a b\" # here\nstate_dir_of = \"/c\"\nstate_dir = 7\n";
        let dirs = state_dirs(text);
        assert_eq!((dirs.first(), dirs.last()), (Some(&"/a b".into()), Some(&DEFAULT_DIR.into())));
    }

    #[test]
    fn a_copy_counts_for_its_file_and_folder_only() {
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
        // One that was half written before is no hindrance, and the mode is for the daemon alone.
        std::fs::write(dir.path().join(format!("{NAME}.new")), "x").unwrap();
        let other = chosen(text(dir.path()) + "vectors = 7\n");
        other.keep().unwrap();
        assert_eq!(copy_in(dir.path(), &file).unwrap().0.vectors, 7);
        let mode = std::os::unix::fs::MetadataExt::mode(&dir.path().join(NAME).metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600);
    }
}
