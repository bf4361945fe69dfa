//! Slices: a segment for each of several members that must not see each other's. They lie in one file if QEMU can
//! map a part of a file (`offset=`), so that a manager finds them side by side; otherwise each has a file of its own.

use super::{Config, HOST, Segment};
use ginnel_broker::declared::{SegmentSpec, SliceFiles};
use ginnel_config::Problem;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tracing::warn;

/// The first version of QEMU whose `memory-backend-file` has `offset=`.
const OFFSET_SINCE: Version = Version(8, 1);
/// The longest time that QEMU may take to report its version.
const PATIENCE: Duration = Duration::from_secs(5);

/// A version of QEMU: major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl Version {
    /// Parses the output of `--version`, such as `QEMU emulator version 7.2.22 (Debian ...)`.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_once("version ")?.1.split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    fn ask(qemu: &Path) -> Result<Self, String> {
        let mut command = Command::new(qemu);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let deadline = Instant::now() + PATIENCE;
        // QEMU prints a few lines, which fit into a pipe, so it ends although nobody reads them yet.
        while child.try_wait().map_err(|error| error.to_string())?.is_none() {
            if Instant::now() >= deadline {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("`--version` did not end within {} s", PATIENCE.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        Self::parse(&text)
            .ok_or_else(|| format!("`--version` says {:?}", text.lines().next().unwrap_or_default()))
    }
}

impl Config {
    /// Checks a segment of the file: the segment itself, or its slices if it has some.
    pub(super) fn segments_of(
        &self,
        name: &str,
        spec: &SegmentSpec,
        place: &str,
    ) -> Result<Vec<Segment>, Problem> {
        if spec.slices.is_empty() {
            if spec.slice_files != SliceFiles::Auto {
                let fix = "name their members: slices = [\"VM\", ...], or remove slice_files";
                return Err(Problem::new(place, "it has slice_files, and no slices", fix));
            }
            return Ok(vec![self.segment(name, spec, place)?]);
        }
        // Whoever has a slice on the host has the descriptor of its file.
        let is_one = !spec.slices.iter().any(|member| member == HOST);
        if !is_one && spec.slice_files == SliceFiles::One {
            let what = "slice_files is \"one\", and programs of the host would have the slices of the others";
            return Err(Problem::new(place, what, "leave slice_files out, or `host` out of `slices`"));
        }
        let mut slices: Vec<Segment> = Vec::new();
        for member in &spec.slices {
            if spec.members.contains(member) || spec.readers.contains(member) {
                let what = format!("{member:?} shares all slices, and has one of its own");
                return Err(Problem::new(place, what, "leave it in `slices`, or in `members` or `readers`"));
            }
            let mut one = SegmentSpec { slices: Vec::new(), slice_files: SliceFiles::Auto, ..spec.clone() };
            one.members.push(member.clone());
            let mut slice = self.segment(&format!("{name}.{member}"), &one, place)?;
            if slices.iter().any(|other| other.name == slice.name) {
                return Err(Problem::new(place, format!("{member:?} has two slices"), "remove one"));
            }
            slice.slice_files = spec.slice_files;
            if is_one && spec.slice_files != SliceFiles::Each {
                slice.shared_file = Some(slice.path.with_file_name(name));
            }
            slices.push(slice);
        }
        Ok(slices)
    }

    /// Asks QEMU for its version if that matters for some slices, and decides in which files the slices lie.
    pub(super) fn decide_slice_files(&mut self) -> Result<(), Problem> {
        if self.segments.values().all(|segment| segment.shared_file.is_none()) {
            return Ok(());
        }
        let qemu = &self.qemu;
        let version = Version::ask(qemu);
        for segment in self.segments.values_mut().filter(|segment| segment.shared_file.is_some()) {
            match (&version, segment.slice_files) {
                (Ok(version), _) if *version >= OFFSET_SINCE => {}
                (Ok(Version(major, minor)), SliceFiles::One) => {
                    let place = format!("{}: segment.{}", self.file.display(), segment.name);
                    let what =
                        format!("slice_files is \"one\", and {} is version {major}.{minor}", qemu.display());
                    let fix = "write \"each\", or name a QEMU of version 8.1 or later in host.qemu";
                    return Err(Problem::new(place, what, fix));
                }
                // The administrator has decided: the QEMU of the VMs may be in a container.
                (Err(_), SliceFiles::One) => {}
                (Ok(_), _) => segment.shared_file = None,
                (Err(error), _) => {
                    warn!(segment = %segment.name, qemu = %qemu.display(), error, "QEMU does not tell its version: this slice gets a file of its own; name QEMU in host.qemu, or write slice_files");
                    segment.shared_file = None;
                }
            }
        }
        Ok(())
    }
}

impl Segment {
    /// Returns the same segment as a part of a file, at this offset.
    pub fn at(&self, file: &Path, offset: u64) -> Self {
        Self { path: file.to_owned(), offset: Some(offset), ..self.clone() }
    }

    /// Returns the offset in its file at which it ends.
    pub fn end(&self) -> u64 {
        self.offset.unwrap_or(0).saturating_add(self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, Problem> {
        let vms = "[vm.w1]\n[vm.w2]\n";
        Config::parse(&format!("{vms}[segment.job]\nsize = \"17M\"\n{text}"), Path::new("f"))
    }

    fn names(config: &Config) -> Vec<&str> {
        config.segments.keys().map(|name| name.as_str()).collect()
    }

    #[test]
    fn each_member_gets_a_segment() {
        let config = parse("members = [\"host\"]\nslices = [\"w1\", \"w2\"]").unwrap();
        assert_eq!(names(&config), ["job.w1", "job.w2"]);
        for (name, slice) in &config.segments {
            let members: Vec<_> = slice.members.iter().map(|m| m.as_str()).collect();
            assert_eq!(members, ["host", name.as_str().strip_prefix("job.").unwrap()]);
            assert_eq!((slice.size, slice.offset), (18 << 20, None));
            assert_eq!(slice.shared_file.as_deref(), Some(Path::new("/dev/shm/ginnel/job")));
            assert_eq!(slice.path, Path::new("/dev/shm/ginnel").join(name.as_str()));
        }
        for alone in
            ["members = [\"host\"]\nslices = [\"w1\"]\nslice_files = \"each\"", "slices = [\"w1\", \"host\"]"]
        {
            assert!(
                parse(alone).unwrap().segments.values().all(|slice| slice.shared_file.is_none()),
                "{alone}"
            );
        }
    }

    #[test]
    fn impossible_slices_are_refused() {
        for (text, says) in [
            ("members = [\"host\", \"w1\"]\nslices = [\"w1\"]", "\"w1\" shares all slices"),
            ("members = [\"host\"]\nslices = [\"w1\", \"w1\"]", "\"w1\" has two slices"),
            ("slices = [\"host\", \"w1\"]\nslice_files = \"one\"", "programs of the host"),
            ("members = [\"host\"]\nslices = [\"w3\"]", "\"w3\" is not a VM"),
            ("members = [\"host\"]\nslice_files = \"one\"", "no slices"),
            ("members = [\"host\"]\nslices = [\"w1\"]\nslice_files = \"two\"", "two"),
            ("members = [\"host\"]\nslices = [\"w 1\"]", "w 1"),
            (
                "members = [\"host\"]\nslices = [\"w1\"]\n[segment.\"job.w1\"]\nsize = \"4M\"\nmembers = [\"host\"]",
                "job.w1",
            ),
        ] {
            let problem = parse(text).unwrap_err().to_string();
            assert!(problem.contains(says) && problem.contains("; "), "{says:?} is missing in {problem}");
        }
    }

    #[test]
    fn versions_are_read_and_compared() {
        let debian =
            "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022";
        assert_eq!(Version::parse(debian), Some(Version(7, 2)));
        assert_eq!(Version::parse("QEMU emulator version 11.1.3"), Some(Version(11, 1)));
        assert_eq!(Version::parse("QEMU emulator version 8.1.0-rc1"), Some(OFFSET_SINCE));
        assert!(Version(8, 0) < OFFSET_SINCE && Version(10, 0) > OFFSET_SINCE);
        for bad in ["", "version", "version x.y", "version 8", "QEMU 8.1"] {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn qemu_decides_unless_told_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let shared = |version: &str, slice_files: &str| {
            let qemu = folder.path().join("qemu");
            let script = format!("#!/bin/sh\necho '{version}'\n");
            std::fs::write(&qemu, script).unwrap();
            std::fs::set_permissions(&qemu, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let text = format!("members = [\"host\"]\nslices = [\"w1\"]\nslice_files = \"{slice_files}\"");
            let mut config = parse(&format!("{text}\n[host]\nqemu = \"{}\"", qemu.display())).unwrap();
            config.decide_slice_files().map(|()| config.segments.values().all(|s| s.shared_file.is_some()))
        };
        assert_eq!(shared("QEMU emulator version 8.1.0", "auto"), Ok(true));
        assert_eq!(shared("QEMU emulator version 7.2.22 (Debian)", "auto"), Ok(false));
        assert_eq!(shared("what?", "auto"), Ok(false));
        assert_eq!(shared("what?", "one"), Ok(true));
        assert_eq!(shared("QEMU emulator version 11.1.3", "each"), Ok(false));
        let problem = shared("QEMU emulator version 7.2.22", "one").unwrap_err().to_string();
        assert!(problem.contains("version 7.2") && problem.contains("host.qemu"), "{problem}");
    }

    #[test]
    fn a_missing_qemu_has_no_version() {
        assert!(Version::ask(Path::new("/nowhere/qemu")).is_err());
    }
}
