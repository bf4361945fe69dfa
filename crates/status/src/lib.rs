//! What a daemon tells of itself in its answer to `INSPECT`: a JSON object, which the daemon writes and programs read.
//!
//! Readers take what is not there for empty, and leave alone what they do not know: the two may be of different versions.
//! Numbers of processes and users, paths and the reasons of failures are told to those only whose business they are.

use serde::{Deserialize, Serialize};
use std::fmt;

/// All of it, but the daemon's limits, for which there is no reader.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Inspect {
    /// The daemon itself.
    pub daemon: Daemon,
    /// The host and the VMs.
    pub members: Vec<Member>,
    /// Segments.
    pub segments: Vec<Segment>,
    /// Attached programs.
    pub endpoints: Vec<Endpoint>,
    /// Names at which somebody listens.
    pub listeners: Vec<Listener>,
    /// Channels.
    pub channels: Vec<Channel>,
    /// TCP connections that were reported, and whose other end was not.
    pub reports: Vec<Report>,
    /// Blocks of memory.
    pub blocks: Vec<Block>,
    /// How many there are.
    pub blocks_total: usize,
    /// Synchronisation objects.
    pub locks: Vec<Lock>,
    /// How many there are.
    pub locks_total: usize,
}

/// The daemon.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Daemon {
    /// Of the program.
    pub version: String,
    /// `host`.
    pub role: String,
    /// Its process.
    pub pid: u32,
    /// Counts its starts.
    pub generation: u64,
    /// Seconds since its start.
    pub uptime: u64,
    /// What is wrong with its configuration, in place of which the last good one counts; for administrators.
    pub config_mistake: Option<String>,
    /// Connections that it has; for administrators.
    pub connections: Option<usize>,
}

/// The host, or a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// The host is 0.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its QEMU has its control device.
    pub connected: bool,
    /// The process of its QEMU.
    pub qemu_pid: Option<u32>,
    /// Its guest daemon answers.
    pub session: bool,
    /// Nothing if it was never heard of.
    pub interrupts: Option<bool>,
    /// Of its control device.
    pub socket: Option<String>,
    /// The connection to its QEMU is open.
    pub live: bool,
    /// It gives no sign of life.
    pub hangs: bool,
    /// The daemon has stopped it because it hung.
    pub fenced: bool,
    /// QEMU's control socket for the daemon, if one is configured.
    pub qmp: Option<String>,
    /// QEMU has answered there.
    pub qmp_ready: bool,
    /// Doorbell vectors of each member.
    pub vectors: u32,
    /// Declared at run time, not by the configuration.
    pub runtime: bool,
    /// How many it has.
    pub endpoints: u32,
    /// How many its endpoints have opened.
    pub channels: u32,
    /// The memory of those, in bytes.
    pub bytes: u64,
    /// Blocks and synchronisation objects that its endpoints have made.
    pub blocks: u32,
    /// The memory of those, in bytes.
    pub block_bytes: u64,
}

/// By which kind of device a segment comes to VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// `virtio-pmem-pci`: `/dev/dax*` in the guest.
    #[default]
    Dax,
    /// `ivshmem-plain`: a PCI BAR.
    Bar,
    /// Of a later version than the reader's.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Honours the width that a table asks for.
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
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its file; on the host only.
    pub path: Option<String>,
    /// Where in that file it begins.
    pub offset: u64,
    /// Those members that may write.
    pub members: Vec<String>,
    /// Those that may only read.
    pub readers: Vec<String>,
    /// How it comes to VMs.
    pub memory: MemoryKind,
    /// Unit in which it may be mapped, in bytes.
    pub page: u64,
    /// It is an RDMA device for those who share it.
    pub verbs: bool,
    /// How often the daemon has found its DAX info block damaged.
    pub info_block_repairs: u64,
    /// The same of its header.
    pub header_repairs: u64,
    /// It is of no more use.
    pub broken: bool,
    /// Why its file could not be opened or made; on the host only.
    pub broken_why: Option<String>,
    /// Bytes of its arena.
    pub used: u64,
    /// Made at run time, not by the configuration.
    pub runtime: bool,
    /// In VMs.
    pub mappings: Vec<Mapping>,
}

impl Segment {
    /// Whether a member may only read.
    pub fn is_reader(&self, member: &str) -> bool {
        self.readers.iter().any(|reader| reader == member)
    }
}

/// How a segment is mapped in a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Mapping {
    /// The VM.
    pub member: String,
    /// `bar`, `dax`, or `none` if its device was not found.
    pub kind: String,
    /// Its kernel does by itself what the members write into the info block.
    pub trusts_members: bool,
    /// Measured; 0 if it was not.
    pub read_mb_s: u64,
    /// Measured; 0 if it was not.
    pub write_mb_s: u64,
}

/// An attached program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// Its number.
    pub number: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// Its member.
    pub member: String,
    /// Its segment.
    pub segment: String,
    /// What it calls itself.
    pub name: String,
    /// The first of its processes.
    pub pid: Option<u32>,
    /// Its processes, the first ones if there are very many.
    pub pids: Option<Vec<u32>>,
    /// Its user.
    pub uid: Option<u32>,
    /// Its doorbell vector.
    pub vector: u32,
    /// False while it has not come back after a restart of a daemon.
    pub attached: bool,
    /// It outlives its last process for a while, so that another one can adopt it.
    pub held: bool,
    /// How many it has, opened by either side.
    pub channels: usize,
    /// Bytes of those that it has opened.
    pub bytes: u64,
}

/// A name at which somebody listens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Listener {
    /// Its number.
    pub number: u32,
    /// Whose it is.
    pub endpoint: u32,
    /// In which segment.
    pub segment: String,
    /// The name.
    pub name: String,
    /// Of its channels: `message` or `stream`.
    pub kind: String,
    /// How many connections may wait to be accepted.
    pub backlog: u32,
    /// How many wait.
    pub waiting: u32,
}

/// A TCP connection of a program under `ginnel run` that waits for its other end to be reported.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Where the program runs.
    pub member: String,
    /// Its process there.
    pub pid: u32,
    /// Its end's address.
    pub local: String,
    /// The other end's.
    pub remote: String,
    /// `connector` or `acceptor`.
    pub role: String,
}

/// A channel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Channel {
    /// Its number.
    pub id: u64,
    /// In which segment.
    pub segment: String,
    /// `message` or `stream`.
    pub kind: String,
    /// Data bytes of the ring into which the initiator sends.
    pub capacity: u64,
    /// Data bytes of the ring into which the acceptor sends.
    pub acceptor_capacity: u64,
    /// `waiting`, `open` or `closing`.
    pub state: String,
    /// The daemon rings for one of the two.
    pub relayed: bool,
    /// Who has connected.
    pub initiator: Side,
    /// Who listens.
    pub acceptor: Side,
}

/// One end of a channel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Side {
    /// Whose it is.
    pub endpoint: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// Its member.
    pub member: String,
    /// It is closed.
    pub closed: bool,
}

/// A block of a segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Block {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: String,
    /// Empty if it has none.
    pub name: String,
    /// Nobody if that endpoint has ended.
    pub owner: Option<User>,
    /// The owner's member.
    pub owner_member: String,
    /// The owner's user.
    pub owner_uid: Option<u32>,
    /// Where in the segment.
    pub offset: u64,
    /// Its bytes, as wished for.
    pub size: u64,
    /// Its bytes, in whole pages.
    pub span: u64,
    /// The power of two that its offset is a multiple of.
    pub align: u64,
    /// Seconds since it was made.
    pub age_s: u64,
    /// It outlives its owner.
    pub persistent: bool,
    /// What those may who have not been granted anything else.
    pub others: String,
    /// What the others may, the first ones if there are very many.
    pub grants: Vec<Grant>,
    /// How many there are.
    pub grants_total: usize,
    /// Who has it open, the first ones if there are very many.
    pub handles: Vec<User>,
    /// How many there are.
    pub handles_total: usize,
}

/// What a member or an endpoint may do with a block.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Grant {
    /// The member.
    pub member: String,
    /// Nothing if all of its endpoints are meant.
    pub endpoint: Option<u32>,
    /// What it may do.
    pub rights: String,
}

/// A synchronisation object of a segment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Lock {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: String,
    /// Its name.
    pub name: String,
    /// `mutex`, `rwlock`, `condvar`, `semaphore`, `barrier` or `once`.
    pub kind: String,
    /// Semaphore: most permits. Barrier: parties.
    pub limit: u32,
    /// It stays until it is unlinked.
    pub persistent: bool,
    /// Open handles.
    pub users: usize,
    /// Who has it locked.
    pub owner: Option<User>,
    /// An owner has died in it.
    pub owner_died: bool,
    /// It is of no more use.
    pub not_recoverable: bool,
    /// Once: it has been done.
    pub done: bool,
    /// Semaphore: permits that are left.
    pub permits: Option<u64>,
    /// Who has it locked for reading.
    pub readers: Vec<User>,
    /// Who waits for it.
    pub waiters: Vec<User>,
}

/// An endpoint that has to do with a block or a lock.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct User {
    /// Its number.
    pub endpoint: u32,
    /// What it calls itself.
    pub name: Option<String>,
    /// Its member.
    pub member: Option<String>,
    /// The first of its processes.
    pub pid: Option<u32>,
    /// What its handle may do, of a block.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rights: String,
    /// What its handle may do as soon as it has heard of it, if that is less, of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
    /// Seconds since it began to wait, if it sleeps.
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
