//! The eventfds of doorbells. [`ginnel_broker::vectors`] decides which vectors there are, and which are announced to which QEMU.

use super::members::new_vectors;
use super::server::Server;
use super::vm::Vm;
use ginnel_broker::record::Record;
use ginnel_broker::text::Text;
use ginnel_layout::{HOST_MEMBER, Name};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::{error, info, warn};

/// Returns the name under which the keeper holds the host's doorbells of a segment.
fn keeper_name(segment: &Name) -> String {
    format!("doorbells-{segment}")
}

impl Server {
    /// Gives a segment its vectors of each of its members.
    pub(super) fn allot_vectors(&mut self, segment: &Name) -> anyhow::Result<()> {
        let Some(books) = self.broker.books().segments.get(segment) else { return Ok(()) };
        books.members.clone().into_iter().try_for_each(|member| self.allot_vectors_of(segment, member))
    }

    /// Gives a segment its vectors of one of its members. This daemon must not have given it those of the host already.
    pub(super) fn allot_vectors_of(&mut self, segment: &Name, member: u32) -> anyhow::Result<()> {
        match member {
            HOST_MEMBER => self.allot_of_host(segment)?,
            _ => self.allot_of_vm(segment, member),
        }
        Ok(())
    }

    fn allot_of_vm(&mut self, segment: &Name, member: u32) {
        let (books, vectors) = (self.broker.books(), self.config.vectors);
        let known = books.vectors_of(segment, member);
        if !known.is_empty() && known.iter().all(|vector| (1..vectors).contains(vector)) {
            return;
        }
        let allotted = books.allot(segment, member, vectors);
        if books.allotted(member, segment).keys().any(|vector| allotted.contains(vector)) {
            warn!(%segment, member, vectors, "all doorbell vectors of this VM serve other segments: this one shares a vector with another, whose programs can swallow its rings; raise daemon.vectors");
        }
        self.broker.note(Record::Vectors { segment: Text(*segment), member, vectors: allotted });
    }

    /// Gives a segment its vectors of the host: the eventfds that the keeper has, or new ones.
    fn allot_of_host(&mut self, segment: &Name) -> anyhow::Result<()> {
        let name = keeper_name(segment);
        let known = self.broker.books().vectors_of(segment, HOST_MEMBER).to_vec();
        if let Some(held) = self.held.remove(&name)
            && held.len() == known.len()
        {
            self.members.add(HOST_MEMBER, known.into_iter().zip(held.into_iter().map(Arc::new)));
            return Ok(());
        }
        let books = self.broker.books();
        let lost = books.index.of_segment(segment).filter_map(|number| books.endpoints.get(&number));
        let lost = lost.filter(|e| e.member == HOST_MEMBER);
        let lost: Vec<(u32, u32)> = lost.map(|e| (e.number, e.epoch)).collect();
        if !lost.is_empty() {
            error!(%segment, "the host's doorbells are lost, because daemon and keeper ended at once: its programs are declared dead");
            for (endpoint, epoch) in lost {
                self.broker.endpoint_ends(endpoint, epoch);
            }
        }
        let vectors = self.broker.books().allot(segment, HOST_MEMBER, self.config.vectors);
        let fds: Vec<Arc<OwnedFd>> = new_vectors(vectors.len() as u32)?.into_iter().map(Arc::new).collect();
        self.keeper.store(&name, &fds)?;
        self.members.add(HOST_MEMBER, vectors.iter().copied().zip(fds));
        self.broker.note(Record::Vectors { segment: Text(*segment), member: HOST_MEMBER, vectors });
        Ok(())
    }

    /// Gives another keeper the host's doorbells.
    pub(super) fn store_doorbells(&mut self) -> anyhow::Result<()> {
        for segment in self.broker.books().segments.values() {
            let Some(vectors) = segment.vectors.get(&HOST_MEMBER) else { continue };
            let fds: Vec<Arc<OwnedFd>> =
                vectors.iter().filter_map(|vector| self.members.event(HOST_MEMBER, *vector)).collect();
            self.keeper.store(&keeper_name(&segment.name), &fds)?;
        }
        Ok(())
    }

    /// Drops the host's doorbells of a segment that is being removed.
    pub(super) fn drop_doorbells(&mut self, segment: &Name) {
        let vectors = self.broker.books().vectors_of(segment, HOST_MEMBER).to_vec();
        if vectors.is_empty() {
            return;
        }
        self.members.drop_vectors(HOST_MEMBER, &vectors);
        if let Err(error) = self.keeper.remove(&keeper_name(segment)) {
            warn!(
                error = format!("{error:#}"),
                "the keeper still holds descriptors that are not needed any more"
            );
        }
    }

    /// Tells a running VM of all doorbells that it may ring and has not been told of.
    pub(super) fn tell_doorbells(&mut self, member: u32) {
        let books = self.broker.books();
        let Some(qemu) = books.members.get(&member).and_then(|m| m.qemu.as_ref()) else { return };
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let told = vm.telling.as_ref().unwrap_or(&qemu.told);
        let untold = books.untold(member, told, self.config.vectors);
        if untold.is_empty() {
            return;
        }
        if !vm.is_connected() {
            info!(member, "its QEMU cannot be told of new doorbells: rings go through the daemon");
            return;
        }
        let mut told = told.clone();
        for (peer, vectors) in &untold {
            told.entry(*peer).or_default().extend(vectors);
        }
        vm.telling = Some(told);
        for (peer, vectors) in untold {
            let fds = vectors.into_iter().filter_map(|vector| self.members.event(peer, vector));
            vm.say_joined(peer, fds);
        }
        self.flush_vm(member);
    }

    /// Records that a QEMU has been told of doorbells: all messages are in its socket, where the end of this daemon does not
    /// affect them. From now on the books rely on it. If a daemon ends before that, the guest rings through the next daemon
    /// instead.
    pub(super) fn told(&mut self, member: u32) {
        let Some(told) = self.vms.get_mut(&member).and_then(|vm: &mut Vm| vm.telling.take()) else { return };
        let Some(qemu) = self.broker.books().members.get(&member).and_then(|m| m.qemu.as_ref()) else {
            return;
        };
        let process = qemu.process;
        self.broker.note(Record::joined(member, process, told));
    }
}
