//! Bounds.

use ginnel_config::{Bytes, Problem};
use ginnel_layout::ring;
use serde::{Deserialize, Serialize};

/// Bounds, in the file. What is not given is taken from the level above: `[limits]`, then the built-in values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSpec {
    endpoints_per_member: Option<u32>,
    listeners_per_endpoint: Option<u32>,
    channels_per_endpoint: Option<u32>,
    channels_per_member: Option<u32>,
    bytes_per_endpoint: Option<Bytes>,
    bytes_per_member: Option<Bytes>,
    handles_per_endpoint: Option<u32>,
    handles_per_member: Option<u32>,
    blocks_per_endpoint: Option<u32>,
    blocks_per_member: Option<u32>,
    block_bytes_per_endpoint: Option<Bytes>,
    block_bytes_per_member: Option<Bytes>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AllLimitsSpec {
    max_clients: Option<u32>,
    clients_per_user: Option<u32>,
    default_ring: Option<Bytes>,
    max_ring: Option<Bytes>,
    backlog: Option<u32>,
    queue: Option<Bytes>,
    // As in `LimitsSpec`; serde cannot flatten and refuse unknown keys at once.
    endpoints_per_member: Option<u32>,
    listeners_per_endpoint: Option<u32>,
    channels_per_endpoint: Option<u32>,
    channels_per_member: Option<u32>,
    bytes_per_endpoint: Option<Bytes>,
    bytes_per_member: Option<Bytes>,
    handles_per_endpoint: Option<u32>,
    handles_per_member: Option<u32>,
    blocks_per_endpoint: Option<u32>,
    blocks_per_member: Option<u32>,
    block_bytes_per_endpoint: Option<Bytes>,
    block_bytes_per_member: Option<Bytes>,
}

/// Bounds of endpoints, and of accounts: those that end in `per_member` hold for one user of the host, or for one VM, in each
/// segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemberLimits {
    /// Endpoints of an account at a time.
    pub endpoints_per_member: u32,
    /// Names that an endpoint may listen at.
    pub listeners_per_endpoint: u32,
    /// Channels that an endpoint may have, opened by either side.
    pub channels_per_endpoint: u32,
    /// Channels that the endpoints of an account may have opened.
    pub channels_per_member: u32,
    /// Bytes of the channels that an endpoint has opened.
    pub bytes_per_endpoint: u64,
    /// Bytes of the channels that the endpoints of an account have opened.
    pub bytes_per_member: u64,
    /// Handles of blocks and synchronisation objects that an endpoint may have open.
    pub handles_per_endpoint: u32,
    /// Handles that all endpoints of a member may have open.
    pub handles_per_member: u32,
    /// Blocks that an endpoint may own.
    pub blocks_per_endpoint: u32,
    /// Blocks and synchronisation objects that the endpoints of an account may have made.
    pub blocks_per_member: u32,
    /// Bytes of the blocks that an endpoint owns.
    pub block_bytes_per_endpoint: u64,
    /// Bytes of the blocks and synchronisation objects of an account.
    pub block_bytes_per_member: u64,
}

impl MemberLimits {
    pub(super) fn with(mut self, spec: &LimitsSpec) -> Self {
        fn set<T: Copy>(value: &mut T, given: Option<T>) {
            *value = given.unwrap_or(*value);
        }
        set(&mut self.endpoints_per_member, spec.endpoints_per_member);
        set(&mut self.listeners_per_endpoint, spec.listeners_per_endpoint);
        set(&mut self.channels_per_endpoint, spec.channels_per_endpoint);
        set(&mut self.channels_per_member, spec.channels_per_member);
        set(&mut self.bytes_per_endpoint, spec.bytes_per_endpoint.map(|b| b.0));
        set(&mut self.bytes_per_member, spec.bytes_per_member.map(|b| b.0));
        set(&mut self.handles_per_endpoint, spec.handles_per_endpoint);
        set(&mut self.handles_per_member, spec.handles_per_member);
        set(&mut self.blocks_per_endpoint, spec.blocks_per_endpoint);
        set(&mut self.blocks_per_member, spec.blocks_per_member);
        set(&mut self.block_bytes_per_endpoint, spec.block_bytes_per_endpoint.map(|b| b.0));
        set(&mut self.block_bytes_per_member, spec.block_bytes_per_member.map(|b| b.0));
        self
    }
}

/// All bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Connections to the attach socket at a time.
    pub max_clients: u32,
    /// Of these, connections of one user (root excepted).
    pub clients_per_user: u32,
    /// Data bytes of a ring when nobody wishes anything.
    pub default_ring: u64,
    /// Data bytes of the largest ring.
    pub max_ring: u64,
    /// Connections that may wait at a listener.
    pub backlog: u32,
    /// Bytes that may wait for a client that does not read.
    pub queue: u64,
    /// Bounds of a member that has none of its own.
    #[serde(flatten)]
    pub member: MemberLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_clients: 8192,
            clients_per_user: 6144,
            default_ring: 256 << 10,
            max_ring: 16 << 20,
            backlog: 128,
            queue: 1 << 20,
            member: MemberLimits {
                endpoints_per_member: 4096,
                listeners_per_endpoint: 64,
                channels_per_endpoint: 1 << 16,
                channels_per_member: 1 << 16,
                bytes_per_endpoint: 1 << 30,
                bytes_per_member: 1 << 30,
                handles_per_endpoint: 1 << 16,
                handles_per_member: 1 << 17,
                blocks_per_endpoint: 1 << 16,
                blocks_per_member: 1 << 16,
                block_bytes_per_endpoint: 1 << 40,
                block_bytes_per_member: 1 << 40,
            },
        }
    }
}

/// Checks the table `[limits]`.
pub(super) fn limits(spec: &AllLimitsSpec, place: &str) -> Result<Limits, Problem> {
    let default = Limits::default();
    let member = LimitsSpec {
        endpoints_per_member: spec.endpoints_per_member,
        listeners_per_endpoint: spec.listeners_per_endpoint,
        channels_per_endpoint: spec.channels_per_endpoint,
        channels_per_member: spec.channels_per_member,
        bytes_per_endpoint: spec.bytes_per_endpoint,
        bytes_per_member: spec.bytes_per_member,
        handles_per_endpoint: spec.handles_per_endpoint,
        handles_per_member: spec.handles_per_member,
        blocks_per_endpoint: spec.blocks_per_endpoint,
        blocks_per_member: spec.blocks_per_member,
        block_bytes_per_endpoint: spec.block_bytes_per_endpoint,
        block_bytes_per_member: spec.block_bytes_per_member,
    };
    let max_clients = spec.max_clients.unwrap_or(default.max_clients);
    let limits = Limits {
        max_clients,
        clients_per_user: spec.clients_per_user.unwrap_or(default.clients_per_user.min(max_clients)),
        default_ring: spec.default_ring.map_or(default.default_ring, |b| b.0),
        max_ring: spec.max_ring.map_or(default.max_ring, |b| b.0),
        backlog: spec.backlog.unwrap_or(default.backlog),
        queue: spec.queue.map_or(default.queue, |b| b.0),
        member: default.member.with(&member),
    };
    for (key, size) in [("default_ring", limits.default_ring), ("max_ring", limits.max_ring)] {
        if !ring::valid_capacity(size) {
            let fix = format!(
                "choose a power of two from {} to {}",
                Bytes(ring::MIN_CAPACITY as u64),
                Bytes(ring::MAX_CAPACITY as u64)
            );
            return Err(Problem::new(
                format!("{place}.{key}"),
                format!("a ring cannot have {} bytes", Bytes(size)),
                fix,
            ));
        }
    }
    if limits.default_ring > limits.max_ring {
        let what = format!(
            "default_ring {} is larger than max_ring {}",
            Bytes(limits.default_ring),
            Bytes(limits.max_ring)
        );
        return Err(Problem::new(place, what, "make it smaller, or max_ring larger"));
    }
    for (key, value) in [
        ("max_clients", limits.max_clients),
        ("clients_per_user", limits.clients_per_user),
        ("backlog", limits.backlog),
    ] {
        if !(1..=1 << 20).contains(&value) {
            return Err(Problem::new(
                format!("{place}.{key}"),
                format!("{value} is not possible"),
                "choose 1 to 1048576",
            ));
        }
    }
    if !(16 << 10..=1 << 30).contains(&limits.queue) {
        return Err(Problem::new(
            format!("{place}.queue"),
            format!("{} is not possible", Bytes(limits.queue)),
            "choose 16K to 1G",
        ));
    }
    Ok(limits)
}
