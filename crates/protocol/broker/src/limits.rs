//! The limits. There is one table of them; the configuration is read, checked and shown by it, and a test compares the manual
//! with it.

use ginnel_config::{Bytes, Period, Problem};
use ginnel_layout::ring;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::time::Duration;

/// The largest member number; the doorbell register has 16 bits for it.
pub const MAX_MEMBER: u32 = 0xffff;
/// The most segments of one VM.
pub const MAX_SEGMENTS_PER_MEMBER: usize = ginnel_layout::relay::MAX_SEGMENTS;
/// The most processes that own one endpoint.
pub const MAX_OWNERS: usize = 64;
/// The most holds of one endpoint: each of its processes may be about to hand it on.
pub const MAX_HOLDS: usize = MAX_OWNERS;
/// The most readiness boards of an endpoint: two sides of each of 65,536 channels need this many slots, and some are left.
pub const MAX_BOARDS: usize = 8;

/// The type of a limit in the configuration file.
pub trait Unit: Copy {
    /// The type of the limit in the checked configuration.
    type Value: Copy + Into<u64>;
    /// Returns the value for the checked configuration.
    fn value(self) -> Self::Value;
    /// Returns a value as it is written in the file.
    fn text(value: u64) -> String;
}

/// A number of things.
impl Unit for u32 {
    type Value = u32;

    fn value(self) -> u32 {
        self
    }

    fn text(value: u64) -> String {
        value.to_string()
    }
}

impl Unit for Bytes {
    type Value = u64;

    fn value(self) -> u64 {
        self.0
    }

    fn text(value: u64) -> String {
        Bytes(value).to_string()
    }
}

/// A time, in milliseconds when checked.
impl Unit for Period {
    type Value = u64;

    fn value(self) -> u64 {
        u64::try_from(self.0.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
    }

    fn text(value: u64) -> String {
        Period(Duration::from_millis(value)).to_string()
    }
}

/// One limit, for the comparison with the manual.
#[derive(Debug)]
pub struct Row {
    /// Its key in the file.
    pub name: &'static str,
    /// The default as it is written in the file.
    pub default: String,
    /// Whether a VM can have its own value.
    pub of_member: bool,
}

/// Makes the types and functions below from the table of limits: first those of the daemon, then those that each VM can set for
/// itself.
macro_rules! table {
    (
        daemon {
            $($(#[$doc:meta])* $name:ident: $Unit:ident = $default:expr, $bounds:expr;)*
        }
        member {
            $($(#[$member_doc:meta])* $member:ident: $MemberUnit:ident = $member_default:expr, $member_bounds:expr;)*
        }
    ) => {
        /// The limits of a member as written in the file. A missing limit is taken from the level above: `[limits]`, then the
        /// built-in values.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitsSpec {
            $($member: Option<$MemberUnit>,)*
        }

        /// The table `[limits]`. Serde cannot both flatten a structure and refuse unknown keys, so this has all keys.
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct AllLimitsSpec {
            $($name: Option<$Unit>,)*
            $($member: Option<$MemberUnit>,)*
        }

        /// The limits of endpoints and of accounts. Those that end in `per_member` apply to one user of the host, or to one
        /// VM, in each segment.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub struct MemberLimits {
            $($(#[$member_doc])* pub $member: <$MemberUnit as Unit>::Value,)*
        }

        /// All limits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub struct Limits {
            $($(#[$doc])* pub $name: <$Unit as Unit>::Value,)*
            /// The limits of a member that has none of its own.
            #[serde(flatten)]
            pub member: MemberLimits,
        }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($name: $default,)* member: MemberLimits { $($member: $member_default,)* } }
            }
        }

        impl MemberLimits {
            /// Returns these limits with those that a table gives replaced.
            pub fn with(self, spec: &LimitsSpec, place: &str) -> Result<Self, Problem> {
                Ok(Self { $($member: chosen(spec.$member, self.$member, $member_bounds, place, stringify!($member))?,)* })
            }
        }

        impl Limits {
            fn read(spec: &AllLimitsSpec, place: &str) -> Result<Self, Problem> {
                let default = Self::default();
                let member = LimitsSpec { $($member: spec.$member,)* };
                Ok(Self {
                    $($name: chosen(spec.$name, default.$name, $bounds, place, stringify!($name))?,)*
                    member: default.member.with(&member, place)?,
                })
            }
        }

        /// Returns the table.
        pub fn rows() -> Vec<Row> {
            vec![
                $(Row { name: stringify!($name), default: <$Unit>::text($default), of_member: false },)*
                $(Row {
                    name: stringify!($member),
                    default: <$MemberUnit>::text($member_default),
                    of_member: true,
                },)*
            ]
        }
    };
}

/// The range of a limit that can have any value.
const ANY: RangeInclusive<u64> = 0..=u64::MAX;
/// The range of a limit of connections.
const SOME: RangeInclusive<u64> = 1..=1 << 20;
const RING: RangeInclusive<u64> = ring::MIN_CAPACITY as u64..=ring::MAX_CAPACITY as u64;

table! {
    daemon {
        /// Connections to the attach socket at a time.
        max_clients: u32 = 8192, SOME;
        /// Of these, connections of one user (except root).
        clients_per_user: u32 = 6144, SOME;
        /// Data bytes of a ring for which no size is requested.
        default_ring: Bytes = 256 << 10, RING;
        /// Data bytes of the largest ring.
        max_ring: Bytes = 16 << 20, RING;
        /// Connections that may wait at a listener.
        backlog: u32 = 128, SOME;
        /// Bytes that may wait for a client that does not read.
        queue: Bytes = 1 << 20, 16 << 10..=1 << 30;
        /// Milliseconds for which an endpoint without processes can be held.
        max_hold: Period = 5000, 0..=600_000;
    }
    member {
        /// Endpoints of an account at a time.
        endpoints_per_member: u32 = 4096, ANY;
        /// Holds of the endpoints of an account at a time.
        holds_per_member: u32 = 4096, ANY;
        /// Names at which an endpoint may listen.
        listeners_per_endpoint: u32 = 64, ANY;
        /// Channels that an endpoint may have, opened by either side.
        channels_per_endpoint: u32 = 1 << 16, ANY;
        /// Channels that the endpoints of an account may have opened.
        channels_per_member: u32 = 1 << 16, ANY;
        /// Bytes of the channels that an endpoint has opened.
        bytes_per_endpoint: Bytes = 1 << 30, ANY;
        /// Bytes of the channels that the endpoints of an account have opened.
        bytes_per_member: Bytes = 1 << 30, ANY;
        /// Handles of blocks and synchronisation objects that an endpoint may have open.
        handles_per_endpoint: u32 = 1 << 16, ANY;
        /// Handles that all endpoints of an account may have open.
        handles_per_member: u32 = 1 << 17, ANY;
        /// Blocks that an endpoint may own.
        blocks_per_endpoint: u32 = 1 << 16, ANY;
        /// Blocks and synchronisation objects that the endpoints of an account may have made.
        blocks_per_member: u32 = 1 << 16, ANY;
        /// Members and endpoints to which rights to one block may be granted.
        grants_per_block: u32 = 256, ANY;
        /// Bytes of the blocks that an endpoint owns.
        block_bytes_per_endpoint: Bytes = 1 << 40, ANY;
        /// Bytes of the blocks and synchronisation objects of an account.
        block_bytes_per_member: Bytes = 1 << 40, ANY;
    }
}

/// Returns the given value if it is in range, or the default if none is given.
fn chosen<U: Unit>(
    given: Option<U>,
    default: U::Value,
    bounds: RangeInclusive<u64>,
    place: &str,
    name: &str,
) -> Result<U::Value, Problem> {
    let Some(given) = given else { return Ok(default) };
    let value = given.value().into();
    if bounds.contains(&value) {
        return Ok(given.value());
    }
    let what = format!("{} is not possible", U::text(value));
    let fix = format!("choose {} to {}", U::text(*bounds.start()), U::text(*bounds.end()));
    Err(Problem::new(format!("{place}.{name}"), what, fix))
}

/// Checks the table `[limits]`, including relations between its limits.
pub fn limits(spec: &AllLimitsSpec, place: &str) -> Result<Limits, Problem> {
    let mut limits = Limits::read(spec, place)?;
    if spec.clients_per_user.is_none() {
        limits.clients_per_user = limits.clients_per_user.min(limits.max_clients);
    }
    for (key, size) in [("default_ring", limits.default_ring), ("max_ring", limits.max_ring)] {
        if !ring::valid_capacity(size) {
            let what = format!("a ring cannot have {} bytes", Bytes(size));
            let fix =
                format!("choose a power of two from {} to {}", Bytes(*RING.start()), Bytes(*RING.end()));
            return Err(Problem::new(format!("{place}.{key}"), what, fix));
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
    Ok(limits)
}
