//! Programs of an ordinary user that hold locks of the kernel for ever, beside a daemon that must serve others meanwhile.

use super::Daemon;
use crate::hold::{self, SilentFile, become_user};
use crate::process::Process;
use crate::wait::{WATCHDOG, wait_for};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::Instant;

/// The user.
pub const NOBODY: u32 = 65534;
/// The line that says that everything is held.
const HELD: &str = "held\n";

/// Makes this process an ordinary user's, with a file system that does not answer. If that is impossible, says why.
pub fn silent_file() -> Option<SilentFile> {
    become_user(NOBODY);
    let path = |name| std::path::PathBuf::from(std::env::var_os(name).unwrap());
    SilentFile::mount(&path("TEST_FUSE"), &path("TEST_PLACE")).map_err(|why| println!("{why}")).ok()
}

/// Says that everything is held, and holds it as long as the test wants.
pub fn stay() {
    print!("{HELD}");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Starts a holder; `None` if the machine does not let it hold anything.
pub fn start_holder<F: Fn()>(daemon: &Daemon, program: F) -> Option<Process> {
    let place = daemon.dir.path().join("silent");
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::create_dir_all(&place).unwrap();
    for dir in [daemon.dir.path(), &place] {
        std::fs::set_permissions(dir, Clone::clone(&all)).unwrap();
    }
    // Where only root may open the device, root may still make another node of it.
    let own = tempfile::tempdir().unwrap();
    std::fs::set_permissions(&own, all).unwrap();
    let device = hold::device(own.path());
    let mut command = daemon.program(program);
    command.env("TEST_PLACE", &place).env("TEST_FUSE", device).stdout(Stdio::piped());
    let mut child = Process(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line != HELD {
        assert!(!line.is_empty(), "the holder has failed");
        crate::skip!("no FUSE in a user namespace: {}", line.trim());
        return None;
    }
    Some(child)
}

/// Checks that others are served in time, with the segment `web`.
pub fn serves(daemon: &mut Daemon) {
    let before = Instant::now();
    for _ in 0..20 {
        daemon.attach("web", "honest");
    }
    assert!(daemon.is_running());
    assert!(before.elapsed() < WATCHDOG / 4, "served, but late: {:?}", before.elapsed());
}

/// Returns when a thread that does this waits in the kernel, where no signal ends the wait.
pub fn until_it_waits(call: impl FnOnce() + Send + 'static) {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tell.send(rustix::thread::gettid()).unwrap();
        call();
    });
    let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
    wait_for("a thread that holds the lock", || {
        std::fs::read_to_string(&stat).unwrap().contains(") D ").then_some(())
    });
}
