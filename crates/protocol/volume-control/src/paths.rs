//! The paths of volumes' files.

use std::io;
use std::path::{Path, PathBuf};

/// The folders with the sockets and configurations of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumePaths {
    /// The folder with `NAME.sock` (vhost-user) and `NAME.ctl` (control).
    pub sockets: PathBuf,
    /// The folder with `NAME.toml`.
    pub configurations: PathBuf,
}

impl Default for VolumePaths {
    fn default() -> Self {
        Self { sockets: "/run/ginnel/volumes".into(), configurations: "/etc/ginnel/volumes".into() }
    }
}

impl VolumePaths {
    /// Returns the folders that `GINNEL_VOLUME_SOCKETS` and `GINNEL_VOLUME_CONFIGS` name. The defaults are
    /// `/run/ginnel/volumes` and `/etc/ginnel/volumes`.
    pub fn from_environment() -> Self {
        let standard = Self::default();
        let or = |name, path| std::env::var_os(name).filter(|v| !v.is_empty()).map_or(path, PathBuf::from);
        Self {
            sockets: or("GINNEL_VOLUME_SOCKETS", standard.sockets),
            configurations: or("GINNEL_VOLUME_CONFIGS", standard.configurations),
        }
    }

    /// Returns the path of a volume's vhost-user socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.join(format!("{name}.sock"))
    }

    /// Returns the path of a volume's control socket.
    pub fn control(&self, name: &str) -> PathBuf {
        self.sockets.join(format!("{name}.ctl"))
    }

    /// Returns the path of a volume's configuration.
    pub fn configuration(&self, name: &str) -> PathBuf {
        self.configurations.join(format!("{name}.toml"))
    }

    /// Returns the names of volumes that have a control socket, sorted. Some of the volumes may have died.
    ///
    /// Where systemd has made the folder of the sockets, only root may list it. Other callers learn of the volumes that have a
    /// configuration.
    pub fn running(&self) -> io::Result<Vec<String>> {
        match names(&self.sockets, "ctl") {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let mut names = self.configured()?;
                names.retain(|name| self.control(name).exists());
                Ok(names)
            }
            names => names,
        }
    }

    /// Returns the names of volumes that have a configuration, sorted.
    pub fn configured(&self) -> io::Result<Vec<String>> {
        names(&self.configurations, "toml")
    }
}

/// Returns the names of the files in a folder that have this extension, without it. A missing folder has none.
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
