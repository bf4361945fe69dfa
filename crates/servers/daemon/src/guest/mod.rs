//! The guest role: finds the VM's devices and serves the attach protocol to the VM's programs, on behalf of the host's daemon.
//!
//! | module | what it does |
//! |---|---|
//! | `pci` | ivshmem functions in sysfs |
//! | `control` | the control device: control memory and doorbells |
//! | `dax` | virtio-pmem devices and what the kernel makes of them |
//! | `memory_device`, `segments`, `speed` | which device is which segment, and how fast it is |
//! | `vfio` | interrupts |
//! | `clients`, `owners`, `relay`, `daemon` | connections, processes, what is relayed for them, the event loop |
//! | `policy` | whether the daemon preempts the programs |

mod clients;
mod control;
mod daemon;
mod dax;
mod memory_device;
mod owners;
mod pci;
mod policy;
mod relay;
mod segments;
mod speed;
mod vfio;

use crate::closer::Closer;
use crate::folder_lock::lock;
use crate::hangup::Hangup;
use crate::keeper::{self, Held, Keeper};
use crate::namer::{Namer, NewSocket, SocketKind};
use crate::user_connections::Most;
use crate::{logging, pidwatch};
use anyhow::{Context, Result, anyhow, ensure};
use control::Control;
use daemon::Daemon;
use dax::Kernel;
use ginnel_config::{Account, Mode, Problem, SOCKET_PATH_MAX};
use segments::Segments;
use std::fs;
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use vfio::Interrupts;

/// Arguments of `ginneld guest`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of the attach socket and the keeper's socket.
    #[arg(long, value_name = "DIR", default_value = "/run/ginnel")]
    pub runtime_dir: PathBuf,
    /// Permissions of the attach socket, octal: a user who may write to it may attach.
    #[arg(long, value_name = "MODE", default_value = "0660")]
    pub socket_mode: Mode,
    /// Group of the attach socket: a name or a number.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<Account>,
    /// Programs that may be connected at a time, 1 to 65536. Each may use three open files of the daemon.
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub max_clients: u32,
    /// Of these, programs of one user other than root; the default is all of them.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub clients_per_user: Option<u32>,
    /// Programs whose TCP connections stay on TCP, separated by commas: their names as in /proc/PID/comm. An empty text: none.
    #[arg(long, value_name = "NAMES", default_value = "sshd,sshd-session", value_delimiter = ',')]
    pub exclude: Vec<String>,
    /// Use no interrupts even if there is an IOMMU: waiting programs poll.
    #[arg(long)]
    pub poll: bool,
    /// Level of the log: error, warn, info, debug, trace. GINNEL_LOG overrides it.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,
    /// Log as JSON, one event per line.
    #[arg(long)]
    pub log_json: bool,
}

impl Args {
    /// Returns what nobody can mean.
    fn doubt(&self) -> Option<Problem> {
        self.socket_mode.doubt_of_socket("--socket-mode", "only root's programs can attach")
    }

    fn most(&self) -> Most {
        let per_user = self.clients_per_user.unwrap_or(self.max_clients);
        Most { all: self.max_clients as usize, per_user: per_user as usize }
    }
}

/// The descriptors for each program: its connection, and the watches of its process and of a child.
const FDS_EACH: u64 = 3;
/// The descriptors of the daemon itself: its devices, one for each vector, and the segments.
const FDS_OWN: u64 = 512;

/// Raises the limit of open files to what this many programs need.
fn provide_open_files(most: Most) -> Result<()> {
    let needed = FDS_EACH * most.all as u64 + FDS_OWN;
    let limit = keeper::provide_open_files(needed);
    ensure!(
        limit >= needed,
        "--max-clients {} takes {needed} open files, and {limit} are allowed: raise LimitNOFILE= of the unit (ulimit -n), or \
         give --max-clients {}",
        most.all,
        (limit.saturating_sub(FDS_OWN) / FDS_EACH).max(1),
    );
    Ok(())
}

/// Runs until the daemon is told to end.
pub fn run(mut args: Args) -> Result<()> {
    // The namer works in another folder.
    args.runtime_dir = std::path::absolute(&args.runtime_dir).context("--runtime-dir")?;
    keeper::keep_to_itself();
    let most = args.most();
    // The heir looks at as many descriptors as there may be.
    provide_open_files(most)?;
    let closer = Closer::start_for_life().context("cannot start the closer of connections")?;
    pidwatch::look_from_elsewhere().context("cannot start the process that looks at others")?;
    logging::start(&args.log, args.log_json);
    if let Some(doubt) = args.doubt() {
        tracing::error!("{doubt}; it is obeyed nevertheless");
    }
    let (sysfs, dev) = (Path::new("/sys"), Path::new("/dev"));
    let group = args.socket_group.as_ref().map(|group| group.group("--socket-group")).transpose()?;
    let dir = &args.runtime_dir;
    // Whoever can list a folder can hold its lock, and so the making of sockets there.
    let mut namer = Namer::default();
    namer.folder(dir, 0o711).with_context(|| format!("cannot make {}", dir.display()))?;
    let locked = dir.join("ginneld.lock");
    namer.file(&locked).with_context(|| format!("cannot make {}", locked.display()))?;
    // This is not a mistake in the command line, so it is tried again.
    let _lock = lock(dir, "ginneld.lock", true).map_err(|refused| anyhow!("{}", Problem::from(refused)))?;
    let stop = stop_signals()?;
    let hangup = Hangup::register().context("cannot handle signals")?;

    let control = Control::find(sysfs)?;
    let me = control.identity;
    tracing::info!(member = me.member, "this VM is {}, its control device is {}", me.name, control.function);
    if let Err(error) = control.check_position() {
        tracing::error!("doorbells will not reach their programs: {error:#}");
    }
    let (interrupts, keeper) = interrupts(&args, &control, sysfs, dev, &mut namer);
    let path = dir.join("ginnel.sock");
    let new = NewSocket {
        path: path.clone(),
        kind: SocketKind::PacketsOfSenders,
        user: None,
        group,
        mode: args.socket_mode.0,
    };
    let listener = namer.socket(&new).with_context(|| {
        format!("cannot listen at {} (a path of at most {} bytes)", path.display(), SOCKET_PATH_MAX)
    })?;
    let segments = Segments::new(Kernel::default());
    // It is not dropped: the heir ends what is left open, which may take as long as a program likes.
    let mut daemon = ManuallyDrop::new(Daemon::new(
        listener,
        most,
        args.exclude.into(),
        &stop,
        control,
        interrupts,
        keeper,
        namer,
        boot_id()?,
        segments,
        closer,
    )?);
    notify(sd_notify::NotifyState::Ready);
    tracing::info!("listening at {}", path.display());
    let result = daemon.run(&hangup);
    notify(sd_notify::NotifyState::Stopping);
    let _ = daemon.namer.remove(&path);
    tracing::info!("stopped");
    result
}

/// Returns the interrupts and the keeper that holds them, or a line that says why there are none and what to do.
fn interrupts(
    args: &Args,
    control: &Control,
    sysfs: &Path,
    dev: &Path,
    namer: &mut Namer,
) -> (Option<Interrupts>, Option<Keeper>) {
    if args.poll {
        tracing::info!("no interrupts, as requested: waiting programs poll");
        return (None, None);
    }
    let (function, vectors) = (&control.function, control.identity.vectors);
    let (mut keeper, mut held) = (None, Held::new());
    if function.pci.iommu_group().is_some() {
        match Keeper::open(&args.runtime_dir.join("keeper.sock"), namer) {
            Ok((found, holds)) => (keeper, held) = (Some(found), holds),
            Err(error) => tracing::error!("interrupts will end with this daemon: {error:#}"),
        }
    }
    if let Some(kept) = held.remove(KEPT)
        && let Some(interrupts) = Interrupts::take_over(kept, vectors)
    {
        tracing::info!("{vectors} interrupt vectors, as the earlier daemon had them");
        return (Some(interrupts), keeper);
    }
    // Descriptors that are held without being used would keep the device busy.
    for name in held.into_keys().chain([KEPT.to_owned()]) {
        if let Some(Err(error)) = keeper.as_mut().map(|keeper| keeper.remove(&name)) {
            tracing::warn!("{error:#}");
        }
    }
    match Interrupts::set_up(function, vectors, sysfs, dev) {
        Ok(interrupts) => {
            tracing::info!("{vectors} interrupt vectors");
            if let Some(keeper) = &mut keeper {
                keep(keeper, &interrupts);
            }
            (Some(interrupts), keeper)
        }
        Err(error) => {
            tracing::warn!("no interrupts, so waiting programs poll: {error:#}");
            if let Some(Err(error)) = keeper.map(|mut keeper| keeper.stop()) {
                tracing::warn!("{error:#}");
            }
            (None, None)
        }
    }
}

/// The name of the interrupts at the keeper.
const KEPT: &str = "interrupts";

/// Stores the interrupts at the keeper, so that they outlive this daemon.
fn keep(keeper: &mut Keeper, interrupts: &Interrupts) {
    match keeper.store(KEPT, &interrupts.to_keep()) {
        Ok(()) => tracing::info!("the keeper holds the interrupts"),
        Err(error) => tracing::error!("interrupts will end with this daemon: {error:#}"),
    }
}

/// Returns a socket that becomes readable when SIGTERM or SIGINT has come.
fn stop_signals() -> Result<UnixStream> {
    let (read, write) = UnixStream::pair().context("cannot make a socket pair")?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let write = write.try_clone().context("cannot duplicate a descriptor")?;
        signal_hook::low_level::pipe::register(signal, write).context("cannot handle signals")?;
    }
    Ok(read)
}

fn boot_id() -> Result<[u8; 16]> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    parse_uuid(text.trim()).with_context(|| format!("{path} says '{}', which is not a uuid", text.trim()))
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then(|| number.to_be_bytes())
}

fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!("cannot notify systemd: {error}");
    }
}

#[cfg(test)]
mod tests;
