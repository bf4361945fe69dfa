//! What the daemon knows, as it answers `INSPECT`. Fields that it does not send are empty.

use anyhow::{Context, Result, anyhow};
use ginnel::Daemon;
use serde::Deserialize;

/// The daemon's answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Inspect {
    pub daemon: DaemonInfo,
    pub members: Vec<Member>,
    pub segments: Vec<Segment>,
    pub endpoints: Vec<Endpoint>,
    pub listeners: Vec<Listener>,
    pub channels: Vec<Channel>,
    pub blocks: Vec<Block>,
    /// More than are listed, if there are very many.
    pub blocks_total: usize,
    pub locks: Vec<Lock>,
    pub locks_total: usize,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct DaemonInfo {
    pub version: String,
    pub role: String,
    pub pid: u32,
    /// Counts its starts.
    pub generation: u64,
    /// Seconds.
    pub uptime: u64,
    /// What is wrong with its configuration, in place of which the last good one counts.
    pub config_mistake: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Member {
    pub number: u32,
    pub name: String,
    /// Its QEMU has its control device.
    pub connected: bool,
    /// On the host only.
    pub qemu_pid: Option<u32>,
    /// Its guest daemon answers.
    pub session: bool,
    /// Nothing if it was never heard of.
    pub interrupts: Option<bool>,
    /// No sign of life; nothing if none is waited for.
    #[serde(default)]
    pub hangs: Option<bool>,
    /// The daemon has stopped it because it hung.
    #[serde(default)]
    pub fenced: bool,
    /// Of its control device; on the host only.
    pub socket: Option<String>,
    /// QEMU's control socket for the daemon, if one is configured; on the host only.
    pub qmp: Option<String>,
    pub vectors: u32,
    pub endpoints: u64,
    pub channels: u64,
    pub bytes: u64,
}

/// By which kind of device a segment comes to VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// `virtio-pmem-pci`: `/dev/dax*` in the guest.
    #[default]
    Dax,
    /// `ivshmem-plain`: a PCI BAR.
    Bar,
    /// Of a later version than this command's.
    #[serde(other)]
    Unknown,
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Honours the width that a table asks for.
        f.pad(match self {
            Self::Dax => "dax",
            Self::Bar => "bar",
            Self::Unknown => "unknown",
        })
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Segment {
    pub name: String,
    pub size: u64,
    /// On the host only.
    pub path: Option<String>,
    /// Where in that file it begins.
    pub offset: u64,
    pub members: Vec<String>,
    /// Those members that may only read.
    pub readers: Vec<String>,
    pub memory: Memory,
    /// Unit in which it may be mapped, in bytes.
    pub page: u64,
    /// How often the daemon has found its DAX info block damaged; on the host only.
    pub info_block_repairs: u64,
    /// The same of its header.
    pub header_repairs: u64,
    pub broken: bool,
    /// Why its file could not be opened or made.
    pub broken_why: Option<String>,
    /// Bytes of its arena.
    pub used: u64,
    /// Made at run time, not by the configuration.
    pub runtime: bool,
    /// In VMs.
    pub mappings: Vec<Mapping>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Mapping {
    pub member: String,
    pub kind: String,
    /// Its kernel does by itself what the members write into the info block.
    pub trusts_members: bool,
    pub read_mb_s: u64,
    pub write_mb_s: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    pub number: u32,
    pub member: String,
    pub segment: String,
    pub name: String,
    /// Nothing if it is none of the caller's business.
    pub pid: Option<u32>,
    pub vector: u32,
    /// False while it has not come back after a restart of a daemon.
    pub attached: bool,
    pub channels: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Listener {
    pub endpoint: u32,
    pub segment: String,
    pub name: String,
    pub kind: String,
    pub waiting: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Channel {
    pub id: u64,
    pub segment: String,
    pub kind: String,
    pub capacity: u64,
    pub state: String,
    pub initiator: Side,
    pub acceptor: Side,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Side {
    pub endpoint: u32,
    pub member: String,
}

/// A block of a segment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Block {
    pub segment: String,
    /// Empty if it has none.
    pub name: String,
    /// Nobody if that endpoint has ended.
    pub owner: Option<User>,
    pub owner_member: String,
    pub size: u64,
    pub age_s: u64,
    pub persistent: bool,
    /// What those may who have not been granted anything else.
    pub others: String,
    pub grants: Vec<Grant>,
    pub handles: Vec<User>,
    /// More than are listed, if there are very many.
    pub handles_total: usize,
}

/// What a member or an endpoint may do with a block.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Grant {
    pub member: String,
    pub endpoint: Option<u32>,
    pub rights: String,
}

/// A synchronisation object of a segment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Lock {
    pub segment: String,
    pub name: String,
    pub kind: String,
    pub limit: u64,
    pub users: u64,
    pub owner: Option<User>,
    pub owner_died: bool,
    pub not_recoverable: bool,
    pub done: bool,
    pub permits: Option<u64>,
    pub readers: Vec<User>,
    pub waiters: Vec<User>,
}

/// An endpoint that has to do with a block or a lock.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct User {
    pub endpoint: u32,
    pub name: Option<String>,
    pub member: Option<String>,
    /// What its handle may do, of a block.
    pub rights: String,
    /// Seconds since it began to wait, if it sleeps.
    pub since_s: Option<f64>,
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.endpoint, self.name.as_deref().unwrap_or("?"))?;
        match &self.member {
            Some(member) => write!(f, "@{member}"),
            None => Ok(()),
        }
    }
}

impl Segment {
    /// Whether a member may only read.
    pub fn is_reader(&self, member: &str) -> bool {
        self.readers.iter().any(|reader| reader == member)
    }
}

impl Inspect {
    /// Asks the daemon.
    pub fn ask(daemon: &mut Daemon) -> Result<Self> {
        let text = daemon.inspect().context("asking the daemon for its status")?;
        Self::parse(&text)
    }

    /// Reads an answer.
    pub fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).context("the daemon's status is not what this version of `ginnel` reads")
    }

    /// A VM, by its name.
    pub fn vm(&self, name: &str) -> Result<&Member> {
        let vms = || self.members.iter().filter(|member| member.number != ginnel_layout::HOST_MEMBER);
        vms().find(|member| member.name == name).ok_or_else(|| {
            let names: Vec<_> = vms().map(|member| member.name.as_str()).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            anyhow!("there is no VM {name:?} (declared are: {known}); declare it in the configuration, or with `ginnel vm add`")
        })
    }
}
