//! What the daemon knows, as JSON.

use super::broker::ClientId;
use super::fence::Fence;
use super::qmp::Monitor;
use super::record::{Channel, Side};
use super::requests::kind_name;
use super::server::Server;
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::relay::{Mapped, MappingKind};
use serde_json::{Value, json};

/// Most blocks, and most synchronisation objects, that are shown one by one: beyond, their number has to do. Those in a VM are
/// fewer, because a long answer goes through its control ring.
const MOST: usize = 10_000;
const MOST_IN_VM: usize = 500;

impl Server {
    /// All that this client may see: on the host everything, in a VM the segments that it has a share in. Secrets
    /// (tokens, uuids) are not in it.
    pub(super) fn inspect(&self, client: ClientId) -> String {
        let viewer = self.broker.who(client).map_or(HOST_MEMBER, |who| who.member);
        let host = viewer == HOST_MEMBER;
        let books = self.broker.books();
        let neighbours = books.neighbours(viewer);
        let most = if host { MOST } else { MOST_IN_VM };
        let seen = |segment: &_| {
            host || books.segments.get(segment).is_some_and(|segment| segment.members.contains(&viewer))
        };
        let member_name = |number: &u32| books.members.get(number).map(|m| m.name.as_str());

        let members = books.members.values().filter(|m| !m.retired);
        let members = members.filter(|m| host || m.number == viewer || neighbours.contains(&m.number));
        let members: Vec<Value> = members
            .map(|member| {
                let vm = self.vms.get(&member.number);
                let is_host = member.number == HOST_MEMBER;
                json!({
                    "number": member.number,
                    "name": member.name.as_str(),
                    "connected": is_host || member.qemu.is_some(),
                    "qemu_pid": member.qemu.as_ref().filter(|_| host).map(|qemu| qemu.process.pid),
                    "session": is_host || vm.is_some_and(|vm| vm.up),
                    "interrupts": if is_host { Some(true) } else { member.session.map(|s| s.interrupts) },
                    "socket": vm.filter(|_| host).map(|vm| self.config.vm_socket(&vm.config.name)),
                    "live": vm.is_some_and(|vm| vm.is_connected()),
                    "hangs": vm.is_some_and(|vm| vm.pulse.hangs),
                    "fenced": vm.is_some_and(|vm| vm.fence == Fence::Shut),
                    "qmp": vm.filter(|_| host).and_then(|vm| vm.config.qmp.as_ref()),
                    "qmp_ready": vm.and_then(|vm| vm.monitor.as_ref()).is_some_and(Monitor::is_greeted),
                    "vectors": self.config.vectors,
                    "runtime": member.runtime.is_some(),
                    "endpoints": member.tally.endpoints,
                    "channels": member.tally.channels,
                    "bytes": member.tally.bytes,
                    "blocks": member.tally.blocks,
                    "block_bytes": member.tally.block_bytes,
                })
            })
            .collect();
        let segments: Vec<Value> = books
            .segments
            .values()
            .filter(|s| seen(&s.name))
            .map(|segment| {
                let repairs = self.segments.repairs(&segment.name);
                let of_vm = |n: &u32| Some((*n, *self.vms.get(n)?.mapped.get(&segment.name)?));
                let mappings: Vec<Value> = segment
                    .members
                    .iter()
                    .filter_map(of_vm)
                    .map(|(n, m)| mapping(member_name(&n), &m))
                    .collect();
                json!({
                    "name": segment.name.as_str(),
                    "size": segment.size,
                    "path": self.segments.path(&segment.name).filter(|_| host),
                    "offset": segment.file_offset(),
                    "members": segment.members.difference(&segment.readers).map(member_name).collect::<Vec<_>>(),
                    "readers": segment.readers.iter().map(member_name).collect::<Vec<_>>(),
                    "memory": segment.memory,
                    "page": segment.page,
                    "info_block_repairs": repairs.info_block,
                    "header_repairs": repairs.header,
                    "broken": self.segments.is_known_broken(&segment.name),
                    "used": segment.arena.used(),
                    "runtime": segment.runtime.is_some(),
                    "mappings": mappings,
                })
            })
            .collect();
        let endpoints: Vec<Value> = books
            .endpoints
            .values()
            .filter(|e| seen(&e.segment))
            .map(|endpoint| {
                json!({
                    "number": endpoint.number,
                    "epoch": endpoint.epoch,
                    "member": member_name(&endpoint.member),
                    "segment": endpoint.segment.as_str(),
                    "name": endpoint.name.as_str(),
                    "pid": endpoint.process.pid,
                    "uid": endpoint.uid,
                    "vector": endpoint.vector,
                    "attached": self.broker.has_connection(endpoint.number),
                    "channels": endpoint.channels.len(),
                    "bytes": endpoint.bytes,
                })
            })
            .collect();
        let listeners: Vec<Value> = books
            .listeners
            .values()
            .filter(|l| seen(&l.segment))
            .map(|listener| {
                json!({
                    "number": listener.number,
                    "endpoint": listener.endpoint,
                    "segment": listener.segment.as_str(),
                    "name": listener.name.as_str(),
                    "kind": kind_name(listener.kind),
                    "backlog": listener.backlog,
                    "waiting": listener.waiting,
                })
            })
            .collect();
        let side = |side: &Side| {
            json!({
                "endpoint": side.endpoint,
                "epoch": side.epoch,
                "member": member_name(&side.member),
                "closed": side.closed,
            })
        };
        let channels: Vec<Value> = books
            .channels
            .values()
            .filter(|c| seen(&c.segment.0))
            .map(|channel| {
                json!({
                    "id": channel.number,
                    "segment": channel.segment.0.as_str(),
                    "kind": kind_name(ChannelKind(channel.kind)),
                    "capacity": channel.capacity,
                    "state": state(channel),
                    "relayed": channel.relayed,
                    "initiator": side(&channel.initiator),
                    "acceptor": side(&channel.acceptor),
                })
            })
            .collect();
        json!({
            "daemon": {
                "version": env!("CARGO_PKG_VERSION"),
                "role": "host",
                "pid": std::process::id(),
                "generation": books.generation,
                "uptime": self.started.elapsed().as_secs(),
                "connections": self.clients.len() + self.relayed.len(),
            },
            "members": members,
            "segments": segments,
            "endpoints": endpoints,
            "listeners": listeners,
            "channels": channels,
            "blocks": self.inspect_blocks(seen, most),
            "blocks_total": books.blocks.values().filter(|b| seen(&b.segment.0)).count(),
            "locks": self.inspect_locks(seen, most),
            "locks_total": books.syncs.values().filter(|s| seen(&s.segment.0)).count(),
            "limits": self.config.limits,
        })
        .to_string()
    }
}

fn state(channel: &Channel) -> &'static str {
    match (channel.accepted, channel.initiator.closed || channel.acceptor.closed) {
        (_, true) => "closing",
        (false, false) => "waiting",
        (true, false) => "open",
    }
}

fn mapping(member: Option<&str>, mapped: &Mapped) -> Value {
    let kind = match mapped.kind {
        MappingKind::BAR => "bar",
        MappingKind::DAX => "dax",
        MappingKind::NONE => "none",
        _ => "unknown",
    };
    json!({ "member": member, "kind": kind, "read_mb_s": mapped.read_mb_s, "write_mb_s": mapped.write_mb_s })
}
