//! `ginnel-cache`: see ginnel-cache(8).

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use ginnel::{AttachOptions, Endpoint};
use ginnel_cache::block::{self, Sizes};
use ginnel_cache::engine::Engine;
use ginnel_cache::flags::Flags;
use ginnel_cache::numbers::Settings;
use ginnel_cache::server::{Door, Server, listen, listen_for_channels};
use ginnel_config::LogFormat;
use ginnel_listener::{Access, Failed};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::fmt::Write;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

/// How long the daemon may take to notice that an earlier server has died.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;
/// Descriptors that the server needs in addition to those of clients.
const OTHER_FILES: u64 = 64;

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ginnel-cache: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<()> {
    start_log(flags);
    if let Some(doubt) = flags.doubt() {
        error!("{doubt}; it is obeyed nevertheless");
    }
    raise_file_limit(flags.max_connections);
    let (stop, stopper) = UnixStream::pair().context("cannot create a socket pair")?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, stopper.try_clone()?)
            .context("cannot handle signals")?;
    }
    // There is no configuration to read again.
    let nothing = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGHUP, nothing).context("cannot handle signals")?;

    let name = format!("cache.{}", flags.name);
    let mut options = AttachOptions { name: Some(name), ..AttachOptions::default() };
    options.socket = flags.socket.clone().unwrap_or(options.socket);
    let endpoint = Endpoint::attach_with(&flags.segment, &options)
        .with_context(|| format!("segment {} cannot be used", flags.segment))?;
    let sizes = Sizes {
        memory: usize::try_from(flags.memory.0)?,
        largest: usize::try_from(flags.max_item_size.0)?,
        usual: usize::try_from(flags.usual_item_size.0)?,
    };
    let (block, mut store) = block::open(&endpoint, &flags.segment, &flags.name, sizes)?;

    let mut contact = String::new();
    let mut channels = Vec::new();
    for segment in flags.channels() {
        let of_its_own = if segment == flags.segment {
            endpoint.clone()
        } else {
            Endpoint::attach_with(&segment, &options)
                .with_context(|| format!("segment {segment} cannot be used for channels"))?
        };
        let listener = listen_for_channels(&of_its_own, &format!("cache.{}", flags.name), PATIENCE)
            .with_context(|| format!("cannot listen for channels in segment {segment}"))?;
        channels.push(listener);
        writeln!(contact, "channel {segment}")?;
    }
    let mut doors = Vec::new();
    let mut unix = None;
    for address in &flags.listen {
        let listener = listen(*address)?;
        writeln!(contact, "tcp {}", listener.local_addr()?)?;
        doors.push(Door::Tcp(listener));
    }
    if let Some(path) = &flags.unix {
        doors.push(Door::Unix(bind(path, flags.unix_mode.0)?));
        unix = Some((path.clone(), file_at(path)));
        // Clients have other working directories.
        writeln!(contact, "unix {}", std::path::absolute(path)?.display())?;
    }
    if doors.is_empty() && channels.is_empty() {
        bail!("no client could reach this cache; give it --listen, --unix or --channel");
    }
    store.set_contact(&contact);
    let settings = Settings {
        place: format!("{}/{}", flags.segment, flags.name),
        item_size: sizes.largest,
        connections: flags.max_connections,
        verbosity: 0,
        listens: flags.listen.iter().map(ToString::to_string).collect(),
        unix: flags.unix.as_ref().map(|path| path.display().to_string()),
    };
    let (items, number) = (store.len(), store.server());
    let engine = Engine::new(store, settings, block::unix_time());
    let mut server = Server::new(engine, endpoint.clone(), doors, channels, &stop)?;
    info!(cache = format!("{}/{}", flags.segment, flags.name), items, server = number, "serving");
    tell_systemd("READY=1\n");
    let result = server.run();
    tell_systemd("STOPPING=1\n");
    drop(server);
    if let Some((path, file)) = unix {
        remove(&path, file);
    }
    drop(block);
    result
}

/// Returns which file is at a path.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Removes a socket, unless another server has put its own in the same place.
fn remove(path: &Path, file: Option<(u64, u64)>) {
    if file.is_some() && file_at(path) == file {
        let _ = std::fs::remove_file(path);
    }
}

/// Returns whether a server listens at a path. A server that hangs counts too, and so does one to which a connection
/// is not possible at once: this function does not wait.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?));
    // A socket of another kind, or one of another program, was not left by a dead server of this kind.
    matches!(connected, Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE | Errno::ACCESS))
}

/// Listens at a path, and replaces a socket that a dead process has left. No client can connect before the socket has
/// its mode.
fn bind(path: &Path, mode: u32) -> Result<UnixListener> {
    let place = path.display();
    if is_served(path) {
        bail!("{place}: another process listens there already; stop it first, or choose another --unix path");
    }
    let failed = |failed: Failed| anyhow!("{place}: {failed}; {}", failed.fix());
    let access = Access { mode: Mode::from_raw_mode(mode), user: None, group: None };
    let socket = ginnel_listener::bind(path, SocketType::STREAM, access).map_err(failed)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|errno| failed(Failed::Bind(errno)))?;
    Ok(socket.into())
}

/// Raises the limit of descriptors, because each client over a socket needs one.
fn raise_file_limit(connections: usize) {
    let wanted = connections as u64 + OTHER_FILES;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    limit.current = Some(limit.maximum.map_or(wanted, |most| most.min(wanted)));
    let raised = setrlimit(Resource::Nofile, limit);
    if raised.is_err() || limit.current < Some(wanted) {
        warn!(
            "{connections} clients need {wanted} file descriptors, and this process may have {}; raise its limit or lower \
             --max-connections",
            limit.current.unwrap_or(0)
        );
    }
}

/// Notifies systemd (sd_notify(3)), if it started this process.
fn tell_systemd(text: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::SocketAddr;
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || {
        let socket = UnixDatagram::unbound()?;
        let address = match path.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&path)?,
        };
        socket.send_to_addr(text.as_bytes(), &address)
    };
    // A failure to notify systemd does not matter to anything else.
    let _: io::Result<usize> = send();
}

fn start_log(flags: &Flags) {
    let filter = EnvFilter::try_from_env("GINNEL_LOG").unwrap_or_else(|_| EnvFilter::new(&flags.log));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    match flags.log_format {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_another_server_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = bind(&path, 0o700).unwrap();
        let file = file_at(&path);
        // The first socket has been removed, and another server has been started.
        std::fs::rename(&path, folder.path().join("away")).unwrap();
        let _second = bind(&path, 0o700).unwrap();
        drop(first);
        remove(&path, file);
        assert!(UnixStream::connect(&path).is_ok());
        remove(&path, file_at(&path));
        assert!(!path.exists());
    }

    #[test]
    fn a_server_that_accepts_nobody_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let hung = bind(&path, 0o700).unwrap();
        rustix::net::listen(&hung, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let error = bind(&path, 0o700).unwrap_err();
        assert!(error.to_string().contains("another process listens there already"), "{error:#}");
    }
}
