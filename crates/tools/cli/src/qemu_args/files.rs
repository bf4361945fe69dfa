//! Checks whether the files of a VM's segments are as QEMU needs them.

use crate::inspect::MemoryKind;
use crate::vm_devices::{Devices, MemoryDevice};
use ginnel_config::Bytes;
use rustix::fs::{self, Access, AtFlags, FileType};
use rustix::io::Errno;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Returns all problems, each on one line. Checks only the access of this process's user: QEMU may run as another user.
pub fn problems(devices: &Devices) -> Vec<String> {
    let socket = &devices.socket;
    let is_socket =
        fs::stat(socket).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
    let control = (!is_socket).then(|| {
        format!(
            "VM {}: its socket {} does not exist: restart the host's daemon",
            devices.vm,
            socket.display()
        )
    });
    control.into_iter().chain(devices.memory.iter().filter_map(problem)).collect()
}

fn problem(memory: &MemoryDevice) -> Option<String> {
    let path = memory.file.display();
    let told = |what: String, fix: &str| Some(format!("segment {}: {path} {what}: {fix}", memory.segment));
    if let Some(why) = &memory.why {
        return Some(format!("segment {} is out of service: {why}", memory.segment));
    }
    if memory.broken {
        let fix = "stop its VMs and programs, remove the file, and restart the host's daemon";
        return told("was truncated or replaced".into(), fix);
    }
    let stat = match fs::stat(&memory.file) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return told("is missing".into(), "restart the host's daemon, which creates it"),
        Err(errno) => {
            return told(format!("cannot be examined ({errno})"), "let QEMU's user reach its folder");
        }
    };
    let mut wanted = Access::READ_OK;
    if !memory.read_only {
        wanted |= Access::WRITE_OK;
    }
    if let Err(errno) = fs::accessat(fs::CWD, &memory.file, wanted, AtFlags::EACCESS) {
        let what = format!(
            "cannot be opened ({errno}); it belongs to user {}, mode {:04o}",
            stat.st_uid,
            stat.st_mode & 0o777
        );
        return told(what, "run QEMU as that user, or name its user as the segment's `owner`");
    }
    let (has, needs) = (u64::try_from(stat.st_size).unwrap_or(0), memory.offset.saturating_add(memory.size));
    if has < needs {
        let what = format!("has {}, and {} are needed", Bytes(has), Bytes(needs));
        return told(what, "stop all programs that use it, remove it, and restart the host's daemon");
    }
    // QEMU would accept any file, but the kernel would write the pages of a file on a disk back to it again and again.
    if let Ok(kind) = fs::statfs(&memory.file)
        && ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(kind.f_type as u64))
    {
        let fix = "name such a folder in daemon.shm_dir, or as the segment's backing";
        return told("is neither on a tmpfs nor on a hugetlbfs".into(), fix);
    }
    if memory.kind == MemoryKind::Bar && !memory.size.is_power_of_two() {
        let what = format!("has {}, which is not a power of two, as a BAR must be", Bytes(memory.size));
        return told(what, "choose another size, or memory = \"dax\"");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_devices::tests::devices;
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    /// Returns a VM with a segment of 4 MiB in this folder, and its socket.
    fn one(folder: &Path, file_size: u64) -> (Devices, UnixListener) {
        let mut devices = devices();
        devices.socket = folder.join("vm.sock");
        let listener = UnixListener::bind(&devices.socket).unwrap();
        devices.memory.truncate(1);
        devices.memory[0].size = 4 << 20;
        devices.memory[0].file = folder.join("file");
        std::fs::File::create(folder.join("file")).unwrap().set_len(file_size).unwrap();
        (devices, listener)
    }

    fn only(devices: &Devices) -> String {
        let problems = problems(devices);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].lines().count(), 1);
        problems[0].clone()
    }

    #[test]
    fn each_problem_is_one_line() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut devices, listener) = one(folder.path(), 4 << 20);
        assert!(problems(&devices).is_empty(), "{:?}", problems(&devices));
        devices.memory[0].offset = 4 << 20;
        assert!(only(&devices).contains("has 4M, and 8M are needed"));
        devices.memory[0].offset = 0;
        devices.memory[0].broken = true;
        assert!(only(&devices).contains("truncated or replaced"));
        devices.memory[0].why = Some("segment.web: 256M of memory are to be allocated".into());
        assert!(only(&devices).contains("is out of service: segment.web: 256M"));
        devices.memory[0].why = None;
        devices.memory[0].broken = false;
        devices.memory[0].kind = MemoryKind::Bar;
        devices.memory[0].size = 3 << 20;
        assert!(only(&devices).contains("not a power of two"));
        std::fs::remove_file(&devices.memory[0].file).unwrap();
        assert!(only(&devices).contains("is missing"));
        drop(listener);
        std::fs::remove_file(&devices.socket).unwrap();
        assert_eq!(problems(&devices).len(), 2);
    }

    #[test]
    fn a_disk_is_no_memory() {
        // In the build's folder. If that is a tmpfs, there is nothing to check.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (devices, _listener) = one(folder.path(), 4 << 20);
        if fs::statfs(folder.path()).unwrap().f_type as u64 != TMPFS_MAGIC {
            assert!(only(&devices).contains("neither on a tmpfs nor on a hugetlbfs"));
        }
    }
}
