//! From a configuration and a journal to a running daemon.

use super::broker::Broker;
use super::clients::Clients;
use super::config::{self, Bytes, Config, Problem};
use super::journal::Journal;
use super::members::{MemberFds, Members, new_vectors};
use super::record::{Hex16, Record, Text};
use super::segments::{self, Identity, Segments};
use super::server::Server;
use crate::packet;
use anyhow::Context;
use ginnel_layout::{HOST_MEMBER, Name};
use rustix::net::SocketType;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use tracing::info;

/// Whether the daemon could start with this configuration. Changes nothing.
pub fn check(config: &Config) -> anyhow::Result<()> {
    for segment in config.segments.values() {
        segments::check(segment, &place(config, &segment.name))?;
        if segment.size != segment.wished {
            println!(
                "segment {}: size {} is rounded up to {}",
                segment.name,
                Bytes(segment.wished),
                Bytes(segment.size)
            );
        }
    }
    println!("{}: good: {} VMs, {} segments", config.file.display(), config.vms.len(), config.segments.len());
    Ok(())
}

fn place(config: &Config, segment: &Name) -> String {
    format!("{}: segment.{segment}", config.file.display())
}

/// Serves until the daemon is told to end.
pub fn run(config: Config) -> anyhow::Result<()> {
    make_dir(&config.runtime_dir, 0o755, "daemon.runtime_dir")?;
    make_dir(&config.state_dir, 0o700, "daemon.state_dir")?;
    let books = Journal::read(&config.state_dir)?.books;
    let own_uid = rustix::process::geteuid().as_raw();
    let mut broker = Broker::new(books, config.limits, config.vectors, own_uid);
    broker.note(Record::Start {
        boot_id: Hex16::default(),
        generation: 1,
        next_epoch: 1,
        next_listener: 1,
        next_channel: 1,
    });
    let host = Name::new(config::HOST)?;
    broker.note(Record::Member { number: HOST_MEMBER, name: Text(host), runtime: None, retired: false });
    let mut members = Members::default();
    let vectors = new_vectors(config.vectors)?.into_iter().map(Arc::new).collect();
    members.insert(HOST_MEMBER, MemberFds { vectors, control: None });
    let mut files = Segments::default();
    for segment in config.segments.values() {
        files.open(segment, &place(&config, &segment.name), true)?;
        let uuid = segments::random();
        files.write_header(&segment.name, segment.page, Identity { uuid, generation: 1 });
        broker.note(Record::Segment {
            name: Text(segment.name),
            uuid: Hex16(uuid),
            size: segment.size,
            members: [0].into(),
            runtime: None,
        });
        broker.set_access(segment.name, segment.access.clone(), segment.page);
    }
    broker.take_effects();
    let journal = Journal::create(&config.state_dir, broker.books())?;
    let socket = config.socket();
    let listener =
        packet::listen_at(&socket, SocketType::SEQPACKET).with_context(|| format!("{}", socket.display()))?;
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(config.socket_mode))?;
    let (read, write) = std::os::unix::net::UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    let mut server = Server::new(config, broker, journal, files, members, Clients::new(listener))?;
    info!("ready");
    server.serve(&OwnedFd::from(read))?;
    let _ = std::fs::remove_file(&socket);
    Ok(())
}

fn make_dir(path: &Path, mode: u32, key: &str) -> Result<(), Problem> {
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(|error| {
        let what = format!("{} cannot be created: {error}", path.display());
        Problem::new(key, what, "create it, or name another")
    })
}
