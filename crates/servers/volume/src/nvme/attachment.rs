//! How an engine attaches to its holder.

use crate::attach::{EngineEnd, FromHolder, Gone, Terms};
use crate::turn::Turn;
use ginnel_config::Problem;
use ginnel_layout::nvme_attach::{Reason, VERSION};
use ginnel_shmem::{Mapping, Protection};
use ginnel_volume_control::config::Config;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::fstat;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an engine waits for a holder that is about to start.
const PATIENCE: Duration = Duration::from_secs(5);

/// The interval at which it looks.
const AGAIN: Duration = Duration::from_millis(20);

/// An engine's connection to its holder, and what the holder has handed over.
pub struct Attachment {
    /// The connection. Ranges of memory, vectors and changes of the registers come next.
    pub end: EngineEnd,
    /// The file with the state, whole.
    pub state: Mapping,
    /// The file with the doorbells, whole.
    pub doorbells: Mapping,
    /// Number of interrupt vectors.
    pub vectors: u16,
    /// The eventfds that the holder writes when it has seen a doorbell, by the number of the queue.
    pub kicks: Vec<Arc<OwnedFd>>,
}

impl Attachment {
    /// Attaches to the holder of a volume. Waits some seconds for one to start. Must be called before the sandbox is
    /// entered, and with the turn taken: the kernel has finished all requests of the predecessor.
    pub fn new(config: &Config, turn: &Turn) -> Result<Self, Problem> {
        let path = config.attach_socket();
        let problem = |what: &dyn Display, fix: &str| Problem::new(path.display(), what, fix);
        let failed = |what: &dyn Display| {
            problem(
                what,
                "see the holder's log, and start this volume again; leave the holder running while its VM runs",
            )
        };
        let end = connect(&path).map_err(|error| {
            let fix = "start the holder first (ginnel-volume-holder@NAME, or `ginnel-volume --holder` with the same \
                       configuration), or use `ginnel volume serve`";
            problem(&format_args!("no holder of an NVMe volume answers: {error}"), fix)
        })?;
        let witness = turn
            .witness()
            .and_then(|file| file.ok_or(io::ErrorKind::NotFound.into()))
            .map_err(|e| failed(&format_args!("the lock of this process cannot be shown to it: {e}")))?;
        let kick = |_| Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let kicks: Vec<Arc<OwnedFd>> = (0..=config.queues)
            .map(kick)
            .collect::<io::Result<_>>()
            .map_err(|e| failed(&format_args!("no eventfd: {e}")))?;
        end.hello(witness.as_fd(), &kicks).map_err(|e| failed(&e))?;
        let (terms, state, doorbells) = match end.receive(true) {
            Ok(Some(FromHolder::Welcome { terms, state, doorbells })) => (terms, state, doorbells),
            Ok(Some(FromHolder::Refused { reason, have })) => return Err(refused(&path, reason, have)),
            Ok(_) => return Err(failed(&Gone::Refused("it does not begin with a welcome".to_owned()))),
            Err(gone) => return Err(failed(&gone)),
        };
        let fix = "stop the VM, restart the holder, then this volume";
        check(&terms, config).map_err(|what| problem(&what, fix))?;
        let map = |what: &str, file: &OwnedFd| {
            map(file).map_err(|e| failed(&format_args!("its {what} cannot be mapped: {e}")))
        };
        let (state, doorbells) = (map("state", &state)?, map("doorbells", &doorbells)?);
        let vectors = u16::try_from(terms.vectors).map_err(|e| failed(&e))?;
        Ok(Self { end, state, doorbells, vectors, kicks })
    }
}

fn connect(path: &std::path::Path) -> io::Result<EngineEnd> {
    let begin = Instant::now();
    loop {
        match EngineEnd::connect(path) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
                    && begin.elapsed() < PATIENCE =>
            {
                std::thread::sleep(AGAIN);
            }
            other => return other,
        }
    }
}

fn refused(path: &std::path::Path, reason: Reason, have: u32) -> Problem {
    let (what, fix) = match reason {
        Reason::VERSION => (
            format!("the holder speaks version {have}, and this process version {VERSION}"),
            "run the volume from the holder's release until the VM is off, then restart both",
        ),
        Reason::QUEUES => (
            format!("the holder has {have} queues, and this configuration another number"),
            "write the holder's number, or restart the holder when the VM is off",
        ),
        Reason::BUSY => ("another process serves this volume".to_owned(), "stop that one first"),
        Reason(other) => (format!("the holder refuses this process: reason {other}"), "see its log"),
    };
    Problem::new(path.display(), what, fix)
}

/// Checks what the holder has decided against this process's configuration.
fn check(terms: &Terms, config: &Config) -> Result<(), String> {
    if terms.mapped != config.are_doorbells_mapped() {
        let how = if terms.mapped { "poll" } else { "sleep" };
        return Err(format!("the holder was started for threads that {how}, and `wait` says something else"));
    }
    // The holder has told the guest how long its queues may be (CAP.MQES).
    if terms.slots != u32::from(config.queue_size) {
        let (slots, size) = (terms.slots, config.queue_size);
        return Err(format!(
            "the holder was started for queues of up to {slots} entries, and `queue-size` says {size}"
        ));
    }
    Ok(())
}

fn map(file: &OwnedFd) -> io::Result<Mapping> {
    let len = usize::try_from(fstat(file)?.st_size).map_err(io::Error::other)?;
    Mapping::of_file(file, 0, len, Protection::ReadWrite)
}
