//! Where volumes are found.

use std::io;
use std::path::{Path, PathBuf};

/// Where the sockets and configurations of volumes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumePaths {
    /// Holds `NAME.sock` (vhost-user) and `NAME.ctl` (control).
    pub sockets: PathBuf,
    /// Holds `NAME.toml`.
    pub configurations: PathBuf,
}

impl Default for VolumePaths {
    fn default() -> Self {
        Self { sockets: "/run/ginnel/volumes".into(), configurations: "/etc/ginnel/volumes".into() }
    }
}

impl VolumePaths {
    /// `GINNEL_VOLUME_SOCKETS` and `GINNEL_VOLUME_CONFIGS` if they are set, else `/run/ginnel/volumes` and
    /// `/etc/ginnel/volumes`.
    pub fn from_environment() -> Self {
        let standard = Self::default();
        let or = |name, path| std::env::var_os(name).filter(|v| !v.is_empty()).map_or(path, PathBuf::from);
        Self {
            sockets: or("GINNEL_VOLUME_SOCKETS", standard.sockets),
            configurations: or("GINNEL_VOLUME_CONFIGS", standard.configurations),
        }
    }

    /// Where a volume listens for its VM.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.join(format!("{name}.sock"))
    }

    /// Where a volume listens for its operators.
    pub fn control(&self, name: &str) -> PathBuf {
        self.sockets.join(format!("{name}.ctl"))
    }

    /// Where a volume's configuration is.
    pub fn configuration(&self, name: &str) -> PathBuf {
        self.configurations.join(format!("{name}.toml"))
    }

    /// Volumes that have a control socket, in the order of their names. Some of them may have died.
    pub fn running(&self) -> io::Result<Vec<String>> {
        names(&self.sockets, "ctl")
    }

    /// Volumes that have a configuration, in the order of their names.
    pub fn configured(&self) -> io::Result<Vec<String>> {
        names(&self.configurations, "toml")
    }
}

/// The names of the files in a folder with that ending. A folder that is not there has none.
fn names(folder: &Path, ending: &str) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == ending)
            && let Some(name) = path.file_stem().and_then(|s| s.to_str())
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_found_by_their_files() {
        let folder = tempfile::tempdir().unwrap();
        for file in ["b.ctl", "a.ctl", "a.sock", "a.toml", "ctl"] {
            std::fs::write(folder.path().join(file), "").unwrap();
        }
        let paths = VolumePaths { sockets: folder.path().into(), configurations: folder.path().into() };
        assert_eq!(paths.running().unwrap(), ["a", "b"]);
        assert_eq!(paths.configured().unwrap(), ["a"]);
        let nowhere = VolumePaths { sockets: folder.path().join("x"), ..paths };
        assert_eq!(nowhere.running().unwrap(), Vec::<String>::new());
    }
}
