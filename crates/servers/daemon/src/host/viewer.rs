//! Access to the daemon's state: which client may see what.
//!
//! | client | sees |
//! |---|---|
//! | root, the daemon's user and the admin group, on the host | everything |
//! | another user of the host | the segments that it may attach to, and those of the VMs whose sockets belong to it; the members of these; its own processes |
//! | a program in a VM | the VM's segments; their members; the processes of its own user in that VM, or all of the VM's if it is root there |
//!
//! Nobody sees secrets: tokens and uuids.

use super::server::Server;
use ginnel_broker::broker::{ClientId, Who};
use ginnel_layout::{HOST_MEMBER, Name};
use std::collections::BTreeSet;

/// What one client may see.
#[derive(Clone, Debug, Default)]
pub struct Viewer {
    member: u32,
    uid: u32,
    /// The client may see everything.
    all: bool,
    segments: BTreeSet<Name>,
    /// The members that share these segments.
    members: BTreeSet<u32>,
    /// The VMs whose QEMU the client may run.
    own_vms: BTreeSet<u32>,
}

impl Viewer {
    /// Returns whether the client is an administrator.
    pub fn is_administrator(&self) -> bool {
        self.all
    }

    /// Returns whether the client is on the host.
    pub fn is_on_host(&self) -> bool {
        self.member == HOST_MEMBER
    }

    /// Returns the segments that the client may see.
    pub fn segments(&self) -> impl Iterator<Item = &Name> {
        self.segments.iter()
    }

    /// Returns whether the client may see this segment and what is in it.
    pub fn sees(&self, segment: &Name) -> bool {
        self.segments.contains(segment)
    }

    /// Returns whether the client may see this member.
    pub fn sees_member(&self, member: u32) -> bool {
        self.all || self.members.contains(&member)
    }

    /// Returns whether the client may see which processes this user of a member has.
    pub fn knows(&self, member: u32, uid: u32) -> bool {
        self.all || self.member == member && (self.uid == uid || (self.uid == 0 && !self.is_on_host()))
    }

    /// Returns whether the client may run the QEMU of this VM.
    pub fn runs(&self, member: u32) -> bool {
        self.all || self.own_vms.contains(&member)
    }
}

impl Server {
    /// Returns whether a client may change members and segments.
    pub(super) fn is_administrator(&self, who: &Who) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let in_group = self.config.admin_group.is_some_and(|group| who.groups.contains(&group));
        who.member == HOST_MEMBER && (who.uid == 0 || who.uid == own || in_group)
    }

    /// Returns what a client may see; nothing if the client has gone.
    pub(super) fn viewer(&self, client: ClientId) -> Viewer {
        let Some(who) = self.broker.who(client) else { return Viewer::default() };
        let books = self.broker.books();
        let all = self.is_administrator(who);
        let owns = |user: Option<u32>, group: Option<u32>| {
            user == Some(who.uid) || group.is_some_and(|group| who.groups.contains(&group))
        };
        let vms = self
            .vms
            .iter()
            .filter(|(_, vm)| who.member == HOST_MEMBER && owns(vm.config.user, vm.config.group));
        let own_vms: BTreeSet<u32> = vms.map(|(member, _)| *member).collect();
        let mut viewer = Viewer { member: who.member, uid: who.uid, all, own_vms, ..Viewer::default() };
        for segment in books.segments.values() {
            let shares = segment.members.contains(&who.member);
            let attaches = match who.member {
                HOST_MEMBER => shares && self.broker.may_attach(&segment.name, who.uid, &who.groups),
                _ => shares,
            };
            if all || attaches || !viewer.own_vms.is_disjoint(&segment.members) {
                viewer.segments.insert(segment.name);
                viewer.members.extend(&segment.members);
            }
        }
        viewer.members.insert(who.member);
        viewer.members.extend(&viewer.own_vms);
        viewer
    }
}
