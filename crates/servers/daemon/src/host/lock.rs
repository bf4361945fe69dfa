//! Locks of folders, each of which serves one daemon only.

use crate::locked;
use ginnel_config::Problem;
use std::fs::{File, OpenOptions};
use std::io::Error;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Why a folder is not locked.
#[derive(Debug)]
pub enum Refused {
    /// Another daemon has it.
    Taken(Problem),
    /// It cannot be used now.
    Failed(Problem),
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let (Refused::Taken(problem) | Refused::Failed(problem)) = refused;
        problem
    }
}

/// Locks a folder against other daemons, as long as the file is open.
pub fn lock(dir: &Path, name: &str) -> Result<File, Refused> {
    let path = dir.join(name);
    let failed = |error: Error| {
        let what = format!("the lock cannot be taken: {error}");
        Refused::Failed(Problem::new(path.display(), what, "let the daemon's user write there"))
    };
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).clone();
    let file = options.open(&path).map_err(failed)?;
    locked::take(&file).map_err(|pid| {
        let who = if pid.is_empty() { String::new() } else { format!(" (process {pid})") };
        let what = format!("another ginneld{who} serves {}", dir.display());
        let fix = "stop it, or give this one folders of its own";
        Refused::Taken(Problem::new(path.display(), what, fix))
    })?;
    Ok(file)
}
