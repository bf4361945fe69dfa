//! A VM, as the daemon has it: its sockets, its control memory, and what waits to be sent to its daemon.

use super::config;
use super::ivshmem::{self, Connection};
use super::pulse::Pulse;
use super::qmp::Monitor;
use super::resets::Resets;
use crate::closer::Connected;
use crate::control_link::HostLink;
use ginnel_broker::broker::ClientId;
use ginnel_broker::process::Process;
use ginnel_broker::vectors::Told;
use ginnel_layout::relay::{self, RelayKind};
use ginnel_layout::{Name, wire};
use ginnel_shmem::Mapping;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// The state of the fence around a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fence {
    /// There is no fence.
    #[default]
    Open,
    /// QEMU has been told to stop the VM, and must answer by this time.
    Stopping(Instant),
    /// The VM is stopped.
    Shut,
}

/// A VM.
pub struct Vm {
    pub(super) config: config::Vm,
    /// The socket for QEMU; `None` if it cannot be made now.
    pub(super) listener: Option<Connected>,
    pub(super) connection: Option<Connection>,
    /// The QEMU that was connected to an earlier daemon and is watched.
    pub(super) watched: Option<Process>,
    /// The control socket of the VM's QEMU.
    pub(super) monitor: Option<Monitor>,
    pub(super) fence: Fence,
    pub(super) resets: Resets,
    pub(super) memory: Mapping,
    pub(super) link: HostLink,
    /// Messages that the link does not take now.
    pub(super) queue: VecDeque<(RelayKind, u32, Vec<u8>)>,
    pub(super) queued: usize,
    /// Requests of the VM's programs for pages of the daemon's state. The pages are made when the link has taken everything else.
    pub(super) asked: VecDeque<(ClientId, u32, wire::Inspect)>,
    pub(super) up: bool,
    pub(super) pulse: Pulse,
    pub(super) mapped: BTreeMap<Name, relay::Mapped>,
    /// The time at which the guest last reported a missing segment and the segment's front was therefore checked.
    pub(super) missed: Option<Instant>,
    pub(super) vectors: u32,
    /// The doorbells that the VM's QEMU will know once everything in its socket's queue has been sent.
    pub(super) telling: Option<Told>,
}

impl Vm {
    /// Makes a VM from its declaration, with its sockets and memory ready.
    pub fn new(
        config: config::Vm,
        member: u32,
        vectors: u32,
        listener: Option<Connected>,
        memory: Mapping,
    ) -> Self {
        let link = HostLink::new(memory.clone(), member, vectors, config.name);
        Self {
            config,
            listener,
            connection: None,
            watched: None,
            monitor: None,
            fence: Fence::default(),
            resets: Resets::default(),
            memory,
            link,
            queue: VecDeque::new(),
            queued: 0,
            asked: VecDeque::new(),
            up: false,
            pulse: Pulse::new(),
            mapped: BTreeMap::new(),
            missed: None,
            vectors,
            telling: None,
        }
    }

    /// Tells the VM's QEMU of vectors of a member.
    pub(super) fn say_joined(&mut self, member: u32, vectors: impl IntoIterator<Item = Arc<OwnedFd>>) {
        if let Some(connection) = &mut self.connection {
            connection.say(ivshmem::joined(member, vectors));
        }
    }

    /// Returns the socket for the VM's QEMU.
    pub fn listener(&self) -> Option<&Connected> {
        self.listener.as_ref()
    }

    /// Takes the socket for the VM's QEMU away.
    pub fn take_listener(&mut self) -> Option<Connected> {
        self.listener.take()
    }

    /// Sets the socket for the VM's QEMU.
    pub fn set_listener(&mut self, listener: Connected) {
        self.listener = Some(listener);
    }

    /// Returns whether there is no session, or whether the messages that the link has not taken exceed a quarter of `limit` bytes.
    /// Messages that can wait should wait then.
    pub(super) fn is_backed_up(&self, limit: usize) -> bool {
        !self.up || self.queued > limit / 4
    }

    /// Returns whether the connection to the VM's QEMU is open.
    pub fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Begins a new session of the link, without what the last one has not taken.
    pub(super) fn restart_link(&mut self, member: u32) {
        self.link = HostLink::new(self.memory.clone(), member, self.vectors, self.config.name);
        (self.up, self.queued) = (false, 0);
        self.queue.clear();
        self.asked.clear();
    }
}
