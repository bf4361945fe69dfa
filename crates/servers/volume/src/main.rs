//! `ginnel-volume`: see ginnel-volume(8).

use anyhow::{Context, Result};
use clap::Parser;
use ginnel_config::{LogFormat, Mode, Problem};
use ginnel_volume::backend::{Backend, Controllers, ImageError, Stores};
use ginnel_volume::flags::Flags;
use ginnel_volume::holder::registers::Shape;
use ginnel_volume::holder::{Holder, Lifetime, Sockets};
use ginnel_volume::nvme::attachment::Attachment;
use ginnel_volume::ownership::Ownership;
use ginnel_volume::sandbox::{self, Identity, Role};
use ginnel_volume::server::{Server, Signals};
use ginnel_volume::sockets::{self, Access, Notify};
use ginnel_volume::turn::Turn;
use ginnel_volume::{attach, control, start_holder};
use ginnel_volume_control::VolumePaths;
use ginnel_volume_control::config::{BackendKind, Config, Device};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// How long to wait for the lock of an image that a predecessor may still hold. The kernel closes the files of an
/// io_uring some time after the end of its process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait if the predecessor was killed: the kernel first finishes the requests that the predecessor had
/// begun, however long the disk takes (more than five seconds were seen on a busy disk). This is less than systemd
/// waits for a service to start.
const LOCK_TIMEOUT_AFTER_KILL: Duration = Duration::from_secs(60);

/// The exit status for an invalid configuration, as for an invalid command line: starting again is of no use.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let complain = |error: &anyhow::Error| eprintln!("ginnel-volume: {error:#}");
    let config = match flags.config(&VolumePaths::from_environment()) {
        Ok(config) => config,
        Err(problem) => {
            complain(&problem.into());
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match run(config, &flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Runs the holder of an NVMe volume.
fn hold(config: &Config, lifetime: Lifetime, clients: Access, identity: Option<Identity>) -> Result<()> {
    // Two holders that start at the same time must not take each other's sockets away. The lock ends with the process.
    let mut place = config.socket.clone().into_os_string();
    place.push(".holder");
    let _turn = Turn::take(place.as_ref(), Duration::ZERO, |_| false).context(
        "no second holder of this volume can start, and to stop the first one takes the disk from its VM",
    )?;
    let shape =
        Shape { queues: config.queues, slots: config.queue_size, mapped: config.are_doorbells_mapped() };
    let mut holder = Holder::new(shape).context("no controller")?;
    let clients = sockets::bind(&config.socket, clients)?;
    clients.set_nonblocking(true)?;
    let engines = attach::listen(&config.attach_socket(), identity.map(Identity::ids))?;
    let notify = Notify::from_environment();
    let stop = stop_signals()?;

    sandbox::leave_root(identity, config.sandbox)?;
    let held = sandbox::enter(config.sandbox, Role::Holder, &config.name)?;
    info!(volume = config.name, socket = %config.socket.display(), sandbox = held.word(), "holding");
    notify.ready();
    let sockets = Sockets { clients: &clients, engines: engines.as_fd(), stop: stop.as_fd() };
    let result = holder.run(sockets, lifetime);
    notify.stopping();
    Ok(result?)
}

/// Returns a socket that is readable once the process is asked to end.
fn stop_signals() -> Result<UnixStream> {
    let (stop, stopper) = UnixStream::pair().context("no sockets")?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, stopper.try_clone()?).context("no signals")?;
    }
    Ok(stop)
}

fn run(config: Config, flags: &Flags) -> Result<()> {
    let front_ends = Access::find(&config.front_ends, "socket")?;
    let operators = Access::find(&config.operators, "control")?;
    let identity =
        config.user.as_ref().map(|user| Identity::find(user, config.group.as_ref())).transpose()?;
    if flags.check {
        return doubts(&config).next().map_or(Ok(()), |doubt| Err(doubt.into()));
    }
    if flags.transient {
        // Ctrl-C in the terminal of its engine is not for the holder. This fails if a shell has started the holder as a
        // job of its own, and then Ctrl-C is for it.
        let _ = rustix::process::setsid();
    }
    start_log(&config);
    // A VM may need the disk.
    doubts(&config).for_each(|doubt| warn!("{doubt}; it is obeyed nevertheless"));
    if flags.holder {
        let lifetime = if flags.transient { Lifetime::WhileUsed } else { Lifetime::Unlimited };
        return hold(&config, lifetime, front_ends, identity);
    }
    if flags.start_holder && config.device == Device::Nvme {
        start_holder::start(&config)?;
    }
    if flags.create {
        config.disks.iter().try_for_each(Backend::create)?;
    }
    let mut controllers = Controllers::default();
    let opened: Vec<_> = config
        .disks
        .iter()
        .map(|disk| Backend::open(disk, config.threads, &mut controllers))
        .collect::<Result<_, ImageError>>()?;
    drop(controllers);
    let disks = config.disks.iter().zip(opened.iter().map(|(backend, _)| backend));
    // An NVMe volume has a holder, which listens at the socket in its place.
    let is_attached = config.device == Device::Nvme;
    let served = if is_attached { &config.control } else { &config.socket };
    let was_killed = Turn::is_taken(&config.socket) && !sockets::is_served(served);
    let patience = if was_killed { LOCK_TIMEOUT_AFTER_KILL } else { LOCK_TIMEOUT };
    let ownership = Ownership::new(disks, patience)?;
    let served = |socket: &Path| !is_attached && sockets::is_served(socket);
    let turn = Turn::take(&config.socket, LOCK_TIMEOUT_AFTER_KILL, served)?;

    let front = match is_attached {
        true => Front::Holder(Attachment::new(&config, &turn)?),
        false => Front::Listener(sockets::bind(&config.socket, front_ends)?),
    };
    let operators = sockets::bind(&config.control, operators)?;
    let notify = Notify::from_environment();
    let stop = stop_signals()?;
    let (hangup, hung_up) = UnixStream::pair().context("no sockets")?;
    // A volume that was started in a terminal ends with it, as other programs do.
    if !std::io::stderr().is_terminal() {
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, hung_up.try_clone()?)
            .context("no signals")?;
    }

    sandbox::leave_root(identity, config.sandbox)?;
    let backends: Vec<_> = opened.iter().map(|(backend, _)| backend.clone()).collect();
    let held = Some(turn.file().as_fd());
    let stores =
        (0..config.threads).map(|worker| Stores::new(&backends, worker, held)).collect::<Result<_, _>>()?;
    let drives = config.disks.iter().any(|disk| disk.backend == BackendKind::Vfio);
    let role = if drives { Role::Driver } else { Role::Volume };
    let held = sandbox::enter(config.sandbox, role, &config.name)?;

    let (name, socket) = (config.name.clone(), config.socket.clone());
    let server = Server::new(config, opened, stores, ownership)?;
    server.set_sandbox(held.word());
    let operators = control::serve(operators, server.handler()).context("no control thread")?;
    info!(volume = name, socket = %socket.display(), sandbox = held.word(), "serving");
    notify.ready();
    let signals = Signals { stop: stop.as_fd(), hangup: &hangup };
    let result = match front {
        Front::Listener(front_ends) => server.run(&front_ends, signals),
        Front::Holder(attachment) => server.run_attached(attachment, signals),
    };
    notify.stopping();
    // Whoever waits for the turn finds that nobody listens.
    operators.end();
    // After an error, requests may still be under way, so the turn is not given up.
    if result.is_ok() {
        backends.iter().for_each(Backend::end);
        turn.end();
    }
    Ok(result?)
}

/// Where a volume gets its VM from.
enum Front {
    /// The socket for QEMU.
    Listener(UnixListener),
    /// The holder of an NVMe volume.
    Holder(Attachment),
}

/// Returns what nobody can mean.
fn doubts(config: &Config) -> impl Iterator<Item = Problem> {
    let doubt = |mode: Mode, place, closed, open: &str| {
        let open = (mode.0 & 0o002 != 0).then(|| {
            let what = format!("{:04o}: every user of this host could {open}", mode.0);
            Problem::new(place, what, "write 0660, and the user or group who may")
        });
        open.or_else(|| mode.doubt_of_socket(place, closed))
    };
    let front_ends = doubt(
        config.front_ends.mode,
        "socket-mode",
        "only root's QEMU can connect",
        "read and write the disk",
    );
    let operators = doubt(config.operators.mode, "control-mode", "only root can ask it", "change the volume");
    front_ends.into_iter().chain(operators)
}

fn start_log(config: &Config) {
    let filter = EnvFilter::try_from_env("GINNEL_LOG").unwrap_or_else(|_| EnvFilter::new(&config.log));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match config.log_format {
        LogFormat::Json => builder.json().init(),
        LogFormat::Text => {
            let builder = builder.with_ansi(false);
            match std::env::var_os("JOURNAL_STREAM") {
                Some(_) => builder.without_time().init(),
                None => builder.init(),
            }
        }
    }
}
