//! Members and segments as an administrator declares them, in the configuration file or at run time. The journal has the latter.

use crate::limits::LimitsSpec;
use crate::memory::MemoryKind;
use ginnel_config::{Account, Bytes, Mode, words};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

words! {
    /// What the daemon does about a VM whose guest hangs.
    OnHang {
        /// `ginnel status --json` shows it, and nothing else happens.
        Nothing = "nothing",
        /// The daemon also logs it.
        #[default]
        Warn = "warn",
        /// The daemon also declares the VM's endpoints dead: others get their locks, and their blocks and channels are freed. The
        /// VM's programs find that out when the VM continues, and attach again. If the daemon can speak to the VM's QEMU, it
        /// stops the VM first.
        Fence = "fence",
    }
}

words! {
    /// Whether slices share a file.
    SliceFiles {
        /// They share a file if QEMU supports that.
        #[default]
        Auto = "auto",
        /// They share a file.
        One = "one",
        /// Each slice has a file of its own.
        Each = "each",
    }
}

/// A VM as written in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmSpec {
    /// The member number. Without it the daemon chooses one and remembers it.
    pub number: Option<u32>,
    /// The owner of the VM's ivshmem socket.
    pub user: Option<Account>,
    /// The group of the ivshmem socket.
    pub group: Option<Account>,
    /// The mode of the ivshmem socket.
    pub socket_mode: Option<Mode>,
    /// The size of the VM's home segment, which it shares only with the host.
    pub home: Option<Bytes>,
    /// The kind of device by which the home segment reaches the VM.
    pub home_memory: Option<MemoryKind>,
    /// The seconds of silence after which the guest counts as hanging. 0, the default, means never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hang_after: Option<u32>,
    /// What the daemon does about a guest that hangs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_hang: Option<OnHang>,
    /// A control socket (QMP) of the VM's QEMU that only the daemon uses: to stop the VM before it is fenced, and to learn of
    /// resets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qmp: Option<PathBuf>,
    /// The VM's own limits.
    pub limits: LimitsSpec,
}

/// A segment as written in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SegmentSpec {
    /// The requested size.
    pub size: Option<Bytes>,
    /// The members that may write: names of VMs, and `host`.
    pub members: Vec<String>,
    /// The members that may only read. None of them may be in `members`.
    pub readers: Vec<String>,
    /// The members that each get a segment `NAME.MEMBER`, shared with `members` and `readers` only, instead of this segment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<String>,
    /// Whether these slices lie in one file.
    #[serde(skip_serializing_if = "is_default")]
    pub slice_files: SliceFiles,
    /// The kind of device by which the segment reaches VMs.
    pub memory: Option<MemoryKind>,
    /// `tmpfs` (in `shm_dir`), or a folder on a hugetlbfs.
    pub backing: Option<String>,
    /// The owner of the file.
    pub owner: Option<Account>,
    /// The group of the file.
    pub group: Option<Account>,
    /// The mode of the file.
    pub mode: Option<Mode>,
    /// Users whose host programs may attach, besides root and the daemon's own user.
    pub allow_users: Vec<Account>,
    /// Groups whose members' host programs may attach.
    pub allow_groups: Vec<Account>,
    /// Whether TCP connections of programs may use the segment. The default is that they may if it has no more than two members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<bool>,
    /// Whether the members see the segment as an RDMA device.
    #[serde(skip_serializing_if = "is_default")]
    pub verbs: bool,
    /// The unit in which the segment can be mapped: 2M or 4K (4K for a BAR and for verbs).
    pub page: Option<Bytes>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The host programs that may attach to a segment, besides those of root and the daemon's own user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The users whose programs may attach.
    pub users: BTreeSet<u32>,
    /// The groups whose members' programs may attach.
    pub groups: BTreeSet<u32>,
    /// Whether TCP connections of programs may use the segment, if that is configured.
    pub sockets: Option<bool>,
    /// Whether the segment is an RDMA device.
    pub verbs: bool,
}

impl Access {
    /// Returns whether this user, if there is one, or a member of one of these groups may attach.
    pub fn admits<'a>(&self, user: Option<u32>, groups: impl IntoIterator<Item = &'a u32>) -> bool {
        user.is_some_and(|user| self.users.contains(&user))
            || groups.into_iter().any(|group| self.groups.contains(group))
    }
}
