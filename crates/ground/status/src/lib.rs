//! The state of a daemon, as its answer to `INSPECT` describes it: a JSON object, which the daemon writes and programs read.
//!
//! A reader treats a missing field as empty and ignores an unknown field, because the two sides may have different versions.
//! Process numbers, users, paths and the reasons of failures are shown only to those who are entitled to see them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The whole state, except the daemon's limits, which no program reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Inspect {
    /// The daemon itself.
    pub daemon: Daemon,
    /// The host and the VMs.
    pub members: Vec<Member>,
    /// The segments.
    pub segments: Vec<Segment>,
    /// The attached programs.
    pub endpoints: Vec<Endpoint>,
    /// The names at which endpoints listen.
    pub listeners: Vec<Listener>,
    /// The channels.
    pub channels: Vec<Channel>,
    /// TCP connections of which one end has been reported and the other end has not.
    pub reports: Vec<Report>,
    /// The blocks of memory.
    pub blocks: Vec<Block>,
    /// The number of all blocks, of which `blocks` may list only a part.
    pub blocks_total: usize,
    /// The synchronisation objects.
    pub locks: Vec<Lock>,
    /// The number of all synchronisation objects, of which `locks` may list only a part.
    pub locks_total: usize,
}

/// The daemon.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Daemon {
    /// The version of the `ginneld` program.
    pub version: String,
    /// Always `host`.
    pub role: String,
    /// The daemon's process number.
    pub pid: u32,
    /// The number of starts of the daemon so far.
    pub generation: u64,
    /// The daemon is looking for the processes that have the segments. The segments show what the last look has found. Shown to
    /// administrators only.
    pub is_looking: bool,
    /// Seconds since the daemon started.
    pub uptime: u64,
    /// The mistake in the configuration file, if there is one; the last good configuration is then in effect. Shown to
    /// administrators only.
    pub config_mistake: Option<String>,
    /// The number of connections to the daemon. Shown to administrators only.
    pub connections: Option<usize>,
}

/// A member: the host or a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// The member number. The host is 0.
    pub number: u32,
    /// The member's name.
    pub name: String,
    /// QEMU has connected, so the VM has its control device.
    pub connected: bool,
    /// The process number of the VM's QEMU.
    pub qemu_pid: Option<u32>,
    /// The guest's daemon has a session with the host's daemon.
    pub session: bool,
    /// Whether the guest receives interrupts; `None` if its daemon has never had a session.
    pub interrupts: Option<bool>,
    /// The path of the socket for the control device.
    pub socket: Option<String>,
    /// The connection to the VM's QEMU is open.
    pub live: bool,
    /// The guest's daemon does not answer.
    pub hangs: bool,
    /// The host's daemon has stopped the VM because its guest hung.
    pub fenced: bool,
    /// The path of the QMP socket that the configuration gives to the daemon, if any.
    pub qmp: Option<String>,
    /// QEMU has answered on that socket.
    pub qmp_ready: bool,
    /// The number of doorbell vectors of each member.
    pub vectors: u32,
    /// The member was declared at run time and not by the configuration.
    pub runtime: bool,
    /// The number of the member's endpoints.
    pub endpoints: u32,
    /// The number of channels that its endpoints have opened.
    pub channels: u32,
    /// The memory of those channels, in bytes.
    pub bytes: u64,
    /// The number of blocks and synchronisation objects that its endpoints have made.
    pub blocks: u32,
    /// The memory of those blocks and objects, in bytes.
    pub block_bytes: u64,
}

/// The kind of device by which a segment reaches a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// `virtio-pmem-pci`: `/dev/dax*` in the guest.
    #[default]
    Dax,
    /// `ivshmem-plain`: a PCI BAR.
    Bar,
    /// A kind that a later version has added.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `pad` honours the width that a table asks for.
        f.pad(match self {
            Self::Dax => "dax",
            Self::Bar => "bar",
            Self::Unknown => "unknown",
        })
    }
}

/// A segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Segment {
    /// The segment's name.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// The path of the segment's file. Shown on the host only.
    pub path: Option<String>,
    /// The position in the file at which the segment begins, in bytes.
    pub offset: u64,
    /// The names of the members that may write.
    pub members: Vec<String>,
    /// The names of the members that may only read.
    pub readers: Vec<String>,
    /// The kind of device by which the segment reaches VMs.
    pub memory: MemoryKind,
    /// The unit in which the segment can be mapped, in bytes.
    pub page: u64,
    /// The members see the segment as an RDMA device.
    pub verbs: bool,
    /// The number of times the daemon has found the DAX info block damaged.
    pub info_block_repairs: u64,
    /// The number of times the daemon has found the segment's header damaged.
    pub header_repairs: u64,
    /// The segment cannot be used any more.
    pub broken: bool,
    /// Why the file could not be opened or made. Shown on the host only.
    pub broken_why: Option<String>,
    /// The bytes of the arena that are allocated.
    pub used: u64,
    /// The segment was made at run time and not by the configuration.
    pub runtime: bool,
    /// The processes that have the segment's file and are no members, as far as the daemon has seen them. Shown to administrators only.
    pub strangers: Vec<Holder>,
    /// The segment's mappings in VMs.
    pub mappings: Vec<Mapping>,
}

impl Segment {
    /// Returns whether a member may only read.
    pub fn is_reader(&self, member: &str) -> bool {
        self.readers.iter().any(|reader| reader == member)
    }
}

/// A process that has the file of a segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// The name of the VM, if the process is or was the QEMU of one.
    pub vm: Option<String>,
    /// The process number.
    pub pid: u32,
    /// The name that the process has given itself.
    pub command: String,
}

/// The mapping of a segment in a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Mapping {
    /// The VM's name.
    pub member: String,
    /// `bar`, `dax`, or `none` if the VM's daemon has not found the device.
    pub kind: String,
    /// The guest's kernel acts on what members write into the info block.
    pub trusts_members: bool,
    /// The measured read throughput in MB/s; 0 if it was not measured.
    pub read_mb_s: u64,
    /// The measured write throughput in MB/s; 0 if it was not measured.
    pub write_mb_s: u64,
}

/// An endpoint: an attached program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// The endpoint's number.
    pub number: u32,
    /// The epoch of that number.
    pub epoch: u32,
    /// The name of the endpoint's member.
    pub member: String,
    /// The name of its segment.
    pub segment: String,
    /// The name that the program has given itself.
    pub name: String,
    /// The first of its processes.
    pub pid: Option<u32>,
    /// Its processes, or the first ones if there are very many.
    pub pids: Option<Vec<u32>>,
    /// The user number of the program.
    pub uid: Option<u32>,
    /// Its doorbell vector.
    pub vector: u32,
    /// Whether the program is connected. False after a restart of a daemon, until the program connects again.
    pub attached: bool,
    /// A hold keeps the endpoint alive after its last process ends, so that another program can adopt it.
    pub held: bool,
    /// The number of its channels, opened by either side.
    pub channels: usize,
    /// The memory of the channels that it has opened, in bytes.
    pub bytes: u64,
}

/// A name at which an endpoint listens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Listener {
    /// The listener's number.
    pub number: u32,
    /// The number of the endpoint that listens.
    pub endpoint: u32,
    /// The segment's name.
    pub segment: String,
    /// The name of the listener.
    pub name: String,
    /// The kind of its channels: `message` or `stream`.
    pub kind: String,
    /// The largest number of channels that may wait to be accepted.
    pub backlog: u32,
    /// The number of channels that wait to be accepted now.
    pub waiting: u32,
}

/// A TCP connection of a program under `ginnel run`, whose other end has not been reported yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The member in which the program runs.
    pub member: String,
    /// The program's process number in that member.
    pub pid: u32,
    /// The address of the program's end.
    pub local: String,
    /// The address of the other end.
    pub remote: String,
    /// The program's role: `connector` or `acceptor`.
    pub role: String,
}

/// A channel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Channel {
    /// The channel's number.
    pub id: u64,
    /// The segment's name.
    pub segment: String,
    /// The kind: `message` or `stream`.
    pub kind: String,
    /// Data bytes of the ring into which the initiator sends.
    pub capacity: u64,
    /// Data bytes of the ring into which the acceptor sends.
    pub acceptor_capacity: u64,
    /// The state: `waiting`, `open` or `closing`.
    pub state: String,
    /// The daemon relays the doorbell of at least one side.
    pub relayed: bool,
    /// The side that connected.
    pub initiator: Side,
    /// The side that listens.
    pub acceptor: Side,
}

/// One side of a channel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Side {
    /// The number of the side's endpoint.
    pub endpoint: u32,
    /// The epoch of that number.
    pub epoch: u32,
    /// The name of the endpoint's member.
    pub member: String,
    /// The endpoint has closed this side.
    pub closed: bool,
}

/// A block of a segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Block {
    /// The block's number.
    pub number: u64,
    /// The segment's name.
    pub segment: String,
    /// The block's name; empty if it has none.
    pub name: String,
    /// The endpoint that owns the block; `None` if that endpoint has ended.
    pub owner: Option<User>,
    /// The member of the owner.
    pub owner_member: String,
    /// The user number of the owner.
    pub owner_uid: Option<u32>,
    /// The offset in the segment, in bytes.
    pub offset: u64,
    /// The size that was requested, in bytes.
    pub size: u64,
    /// The size in whole pages, in bytes.
    pub span: u64,
    /// The alignment of the offset: a power of two, in bytes.
    pub align: u64,
    /// Seconds since the block was allocated.
    pub age_s: u64,
    /// The block outlives its owner.
    pub persistent: bool,
    /// The rights of everybody without a grant.
    pub others: String,
    /// The grants, or the first ones if there are very many.
    pub grants: Vec<Grant>,
    /// The number of all grants.
    pub grants_total: usize,
    /// The endpoints that have the block open, or the first ones if there are very many.
    pub handles: Vec<User>,
    /// The number of all open handles.
    pub handles_total: usize,
}

/// A grant: what a member or an endpoint may do with a block.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Grant {
    /// The member's name.
    pub member: String,
    /// The number of the endpoint; `None` if the grant is for all endpoints of the member.
    pub endpoint: Option<u32>,
    /// The rights.
    pub rights: String,
}

/// A synchronisation object of a segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Lock {
    /// The object's number.
    pub number: u64,
    /// The segment's name.
    pub segment: String,
    /// The object's name.
    pub name: String,
    /// The kind: `mutex`, `rwlock`, `condvar`, `semaphore`, `barrier` or `once`.
    pub kind: String,
    /// The most permits of a semaphore, or the parties of a barrier.
    pub limit: u32,
    /// The object stays until it is unlinked.
    pub persistent: bool,
    /// The number of open handles.
    pub users: usize,
    /// The endpoint that holds the lock.
    pub owner: Option<User>,
    /// An owner has died while it held the lock.
    pub owner_died: bool,
    /// The lock cannot be used any more, because nobody has recovered it after an owner died.
    pub not_recoverable: bool,
    /// For a once: it has been done.
    pub done: bool,
    /// For a semaphore: the permits that are left.
    pub permits: Option<u64>,
    /// The endpoints that hold the lock for reading.
    pub readers: Vec<User>,
    /// The endpoints that wait for the object.
    pub waiters: Vec<User>,
}

/// An endpoint that uses a block or a synchronisation object.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct User {
    /// The endpoint's number.
    pub endpoint: u32,
    /// The name that the program has given itself.
    pub name: Option<String>,
    /// The endpoint's member.
    pub member: Option<String>,
    /// The first of the endpoint's processes.
    pub pid: Option<u32>,
    /// For a block: the rights of the endpoint's handle.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rights: String,
    /// For a block: the rights that the handle keeps once the endpoint has learnt of a revocation, if they are less than
    /// `rights`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
    /// Seconds since the endpoint began to wait, if it sleeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_s: Option<f64>,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.endpoint, self.name.as_deref().unwrap_or("?"))?;
        match &self.member {
            Some(member) => write!(f, "@{member}"),
            None => Ok(()),
        }
    }
}
