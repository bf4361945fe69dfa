//! Starts the holder of an `nvme` volume, for a user who runs the engine without systemd.
//!
//! The holder is a process of its own, because it must outlive the engine: QEMU does not connect again. It ends by itself when
//! neither QEMU nor an engine is there. The units start it themselves: a holder that an engine's unit had started would end with
//! that unit.

use crate::attach::EngineEnd;
use ginnel_config::Problem;
use ginnel_volume_control::config::Config;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a new holder may take until engines can attach. It opens no disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// The interval at which its socket is tried.
const AGAIN: Duration = Duration::from_millis(10);

/// The option that does not reach the holder.
const OPTION: &str = "--start-holder";

/// Starts a holder with the arguments of this process if none serves this volume. Blocks until an engine can attach to it, for at
/// most 10 seconds. Must be called before the process gives up rights that the holder needs.
pub fn start(config: &Config) -> Result<(), Problem> {
    let path = config.attach_socket();
    if is_served(&path) {
        return Ok(());
    }
    let problem = |what: String, fix: &str| Problem::new(path.display(), what, fix);
    let mut holder = Command::new("/proc/self/exe")
        .arg0("ginnel-volume")
        .args(["--holder", "--transient"])
        .args(of_the_holder(std::env::args_os()))
        .stdin(Stdio::null())
        // It is the engine that says when the volume is ready.
        .env_remove("NOTIFY_SOCKET")
        .spawn()
        .map_err(|error| problem(format!("no holder can be started: {error}"), "start one with --holder"))?;
    let begin = Instant::now();
    loop {
        let ended = holder.try_wait().ok().flatten();
        // Another engine may have started a holder at the same time, and then this one ends.
        if is_served(&path) {
            return Ok(());
        }
        if let Some(status) = ended {
            return Err(problem(
                format!("its holder has ended: {status}"),
                "mend what the holder says above",
            ));
        }
        if begin.elapsed() >= PATIENCE {
            let what = format!("its holder, process {}, does not listen", holder.id());
            return Err(problem(what, "end that process, and look at its log"));
        }
        thread::sleep(AGAIN);
    }
}

/// Returns the arguments of a holder from those of its engine.
fn of_the_holder(arguments: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    arguments.skip(1).filter(|argument| argument != OPTION)
}

/// Returns whether a holder listens. It sees an engine that says nothing and goes.
fn is_served(path: &Path) -> bool {
    EngineEnd::connect(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

    #[test]
    fn a_holder_has_the_arguments_of_its_engine() {
        let arguments = ["ginnel-volume", OPTION, "--nvme", "web"].map(OsString::from).into_iter();
        assert_eq!(of_the_holder(arguments).collect::<Vec<_>>(), ["--nvme", "web"]);
    }

    #[test]
    fn a_holder_is_found_by_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock.engine");
        assert!(!is_served(&path));
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(!is_served(&path));
        listen(&socket, 1).unwrap();
        assert!(is_served(&path));
        drop(socket);
        assert!(!is_served(&path), "its holder is dead");
    }
}
