//! Locks of folders, each of which serves one daemon only.

use ginnel_config::Problem;
use rustix::fs::{FlockOperation, Mode, fchmod, flock, fstat};
use rustix::process::{Pid, test_kill_process};
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

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

/// Locks a folder against other daemons, as long as the file is open. With `patient`, waits for a daemon that has ended to let it go.
pub fn lock(dir: &Path, name: &str, patient: bool) -> Result<File, Refused> {
    let path = dir.join(name);
    let failed = |error: Error| {
        let what = format!("the lock cannot be taken: {error}");
        Refused::Failed(Problem::new(path.display(), what, "let the daemon's user write there"))
    };
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).clone();
    // To make a file, even one that is there, is to wait for whoever holds the lock of the folder.
    let there = File::options().read(true).write(true).open(&path);
    let file = there.or_else(|_| options.open(&path)).map_err(failed)?;
    // Whoever can open the file can lock it, and an earlier daemon may have let all users open it.
    let mode = fstat(&file).map_err(|errno| failed(errno.into()))?.st_mode & 0o777;
    if mode != 0o600 {
        fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(|errno| failed(errno.into()))?;
    }
    take(&file, patient).map_err(|pid| {
        let who = if pid.is_empty() { String::new() } else { format!(" (process {pid})") };
        let what = format!("another ginneld{who} serves {}", dir.display());
        let fix = "stop it, or give this one folders of its own";
        Refused::Taken(Problem::new(path.display(), what, fix))
    })?;
    Ok(file)
}

/// How long the lock may outlive its daemon, whose heir ([`crate::closer`]) lets it go: if that daemon is not there any more, and if it
/// still seems to be there, because nobody has waited for its end.
const PATIENCE: [Duration; 2] = [Duration::from_secs(10), Duration::from_millis(100)];

/// Takes the lock that a file stands for, as long as the file is open. The file says the number of the process that has it. Otherwise
/// returns that number, or what the file says in its place.
fn take(file: &File, patient: bool) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        if flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            break;
        }
        let mut text = [0; 16];
        let len = file.read_at(&mut text, 0).unwrap_or(0);
        let owner = String::from_utf8_lossy(&text[..len]).trim().to_owned();
        let is_there = match owner.parse().ok().and_then(Pid::from_raw) {
            Some(pid) => test_kill_process(pid) != Err(rustix::io::Errno::SRCH),
            None => false,
        };
        if !patient || begun.elapsed() > PATIENCE[usize::from(is_there)] {
            return Err(owner);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // The number is for people, and for a successor that waits, so a full disk is no reason not to serve.
    let written =
        file.set_len(0).and_then(|()| file.write_all_at(format!("{}\n", std::process::id()).as_bytes(), 0));
    // A hugetlbfs takes no bytes at all.
    if let Err(error) = written
        && error.kind() != ErrorKind::InvalidInput
    {
        tracing::warn!(%error, "the lock does not say whose it is");
    }
    Ok(())
}
