//! What the daemon knows, as JSON, in pages.
//!
//! The whole is one JSON object, which may be long. It is given out in pages of about a packet each: a client asks for the next
//! when it has read the last, and says where that ended. So the daemon keeps nothing of an answer, whatever a client does, and
//! looks at a bounded number of entries for each request. What changes between two pages may be seen by half.

use super::fence::Fence;
use super::qmp::Monitor;
use super::record::{Channel, Side};
use super::reply::Refusal;
use super::requests::kind_name;
use super::server::Server;
use super::viewer::Viewer;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::relay::{Mapped, MappingKind};
use ginnel_layout::wire::{self, ErrorCode};
use ginnel_layout::{HOST_MEMBER, Name};
use serde_json::{Value, json};
use std::ops::Bound::{Excluded, Unbounded};

/// Bytes of a page, unless its only entry is longer.
const PAGE: usize = wire::MAX_PACKET - size_of::<wire::Header>() - size_of::<wire::Inspect>();
/// Entries that are looked at for a page, most of which the viewer may not see perhaps.
const LOOKS: usize = 1000;

/// Most processes of an endpoint that are shown.
const MOST: usize = 64;

/// The object's keys, in their order. A cursor's `section` counts them from 1.
const SECTIONS: [&str; 9] =
    ["blocks", "channels", "daemon", "endpoints", "limits", "listeners", "locks", "members", "segments"];

/// A page that is being written.
struct Page {
    text: String,
    looked: usize,
    /// Where it ends.
    at: wire::Inspect,
}

impl Page {
    /// Begins the next section, or ends the object.
    fn next_section(&mut self) {
        let (section, entries) = (self.at.section as usize, self.at.entries);
        match SECTIONS.get(section.wrapping_sub(1)) {
            None => self.text.push('{'),
            Some(&("daemon" | "limits")) => self.text.push(','),
            Some(key @ &("blocks" | "locks")) => self.text += &format!("],\"{key}_total\":{entries},"),
            Some(&"segments") => self.text += "]}",
            Some(_) => self.text += "],",
        }
        self.at = wire::Inspect::FIRST;
        let Some(key) = SECTIONS.get(section) else { return };
        self.at.section = section as u32 + 1;
        self.text += &format!("\"{key}\":");
        if !matches!(*key, "daemon" | "limits") {
            self.text.push('[');
        }
    }

    /// Adds a value that is no entry of a list.
    fn add(&mut self, value: &Value) -> bool {
        self.text += &value.to_string();
        true
    }

    /// Adds entries that have come after the cursor, each with its number or name; `None` is not shown. False if the page is full.
    fn fill(&mut self, entries: impl Iterator<Item = (u64, Name, Option<Value>)>) -> bool {
        for (after, name, entry) in entries {
            if self.looked == LOOKS {
                return false;
            }
            self.looked += 1;
            if let Some(entry) = entry {
                let entry = entry.to_string();
                // An entry that is too long for any page is one by itself.
                if !self.text.is_empty() && self.text.len() + 1 + entry.len() > PAGE {
                    return false;
                }
                if self.at.entries > 0 {
                    self.text.push(',');
                }
                self.text += &entry;
                self.at.entries = self.at.entries.saturating_add(1);
            }
            (self.at.after, self.at.name) = (after, name);
        }
        true
    }
}

impl Server {
    /// The page behind `from`, of what `viewer` may see, and where it ends.
    pub(super) fn inspect(
        &self,
        viewer: &Viewer,
        from: wire::Inspect,
    ) -> Result<(wire::Inspect, String), Refusal> {
        if from.section as usize > SECTIONS.len() {
            let text = format!("there is no section {} of a status: begin with zeros", from.section);
            return Err(Refusal::new(ErrorCode::PROTOCOL, text));
        }
        let mut page = Page { text: String::new(), looked: 0, at: from };
        if from.section == 0 {
            page.at = wire::Inspect::FIRST;
            page.next_section();
        }
        while self.section(viewer, &mut page) {
            page.next_section();
            if page.at.section == 0 {
                break;
            }
        }
        Ok((page.at, page.text))
    }

    /// Writes the rest of a section. False if the page is full.
    fn section(&self, viewer: &Viewer, page: &mut Page) -> bool {
        let books = self.broker.books();
        let (after, after_name) = (page.at.after, page.at.name);
        // Those with numbers of 32 bits.
        let after_32 = u32::try_from(after).unwrap_or(u32::MAX);
        let member_name = |number: u32| books.members.get(&number).map(|m| m.name.as_str());
        match SECTIONS[(page.at.section as usize).saturating_sub(1)] {
            "blocks" => page.fill(books.blocks.range((Excluded(after), Unbounded)).map(|(number, block)| {
                let seen = viewer.sees(&block.segment.0);
                (*number, Name::NONE, seen.then(|| self.inspect_block(viewer, block)))
            })),
            "channels" => {
                page.fill(books.channels.range((Excluded(after), Unbounded)).map(|(number, channel)| {
                    let side = |side: &Side| {
                        json!({
                            "endpoint": side.endpoint,
                            "epoch": side.epoch,
                            "member": member_name(side.member),
                            "closed": side.closed,
                        })
                    };
                    let shown = viewer.sees(&channel.segment.0).then(|| {
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
                    });
                    (*number, Name::NONE, shown)
                }))
            }
            "daemon" => page.add(&json!({
                "version": env!("CARGO_PKG_VERSION"),
                "role": "host",
                "pid": std::process::id(),
                "generation": books.generation,
                "uptime": self.started.elapsed().as_secs(),
                "config_mistake": self.config.mistake.as_ref().filter(|_| viewer.is_administrator()),
                "connections": viewer.is_administrator().then(|| self.clients.len() + self.relayed.len()),
            })),
            "endpoints" => {
                page.fill(books.endpoints.range((Excluded(after_32), Unbounded)).map(|(number, endpoint)| {
                    let known = viewer.knows(endpoint.member, endpoint.uid);
                    let shown = viewer.sees(&endpoint.segment).then(|| {
                        json!({
                            "number": endpoint.number,
                            "epoch": endpoint.epoch,
                            "member": member_name(endpoint.member),
                            "segment": endpoint.segment.as_str(),
                            "name": endpoint.name.as_str(),
                            "pid": known.then(|| endpoint.pid()),
                            "pids": known.then(|| endpoint.owners.iter().take(MOST).map(|process| process.pid).collect::<Vec<_>>()),
                            "uid": known.then_some(endpoint.uid),
                            "vector": endpoint.vector,
                            "attached": self.broker.has_connection(endpoint.number),
                            "channels": endpoint.channels.len(),
                            "bytes": endpoint.bytes,
                        })
                    });
                    (u64::from(*number), Name::NONE, shown)
                }))
            }
            "limits" => page.add(&json!(self.config.limits)),
            "listeners" => {
                page.fill(books.listeners.range((Excluded(after_32), Unbounded)).map(|(number, listener)| {
                    let shown = viewer.sees(&listener.segment).then(|| {
                        json!({
                            "number": listener.number,
                            "endpoint": listener.endpoint,
                            "segment": listener.segment.as_str(),
                            "name": listener.name.as_str(),
                            "kind": kind_name(listener.kind),
                            "backlog": listener.backlog,
                            "waiting": listener.waiting,
                        })
                    });
                    (u64::from(*number), Name::NONE, shown)
                }))
            }
            "locks" => page.fill(books.syncs.range((Excluded(after), Unbounded)).map(|(number, object)| {
                let seen = viewer.sees(&object.segment.0);
                (*number, Name::NONE, seen.then(|| self.inspect_lock(viewer, object)))
            })),
            "members" => {
                // The host's number is 0, as is the cursor at the beginning.
                let first = if page.at.entries == 0 && after == 0 { Unbounded } else { Excluded(after_32) };
                page.fill(books.members.range((first, Unbounded)).map(|(number, member)| {
                    let shown = !member.retired && viewer.sees_member(*number);
                    (u64::from(*number), Name::NONE, shown.then(|| self.inspect_member(viewer, *number)))
                }))
            }
            _ => page.fill(books.segments.range((Excluded(after_name), Unbounded)).map(|(name, segment)| {
                let shown = viewer.sees(name).then(|| {
                    let repairs = self.segments.repairs(name);
                    let of_vm = |n: &u32| Some((*n, *self.vms.get(n)?.mapped.get(name)?));
                    let mappings = segment.members.iter().filter_map(of_vm);
                    let writers = segment.members.difference(&segment.readers);
                    json!({
                        "name": name.as_str(),
                        "size": segment.size,
                        "path": self.segments.path(name).filter(|_| viewer.is_on_host()),
                        "offset": segment.file_offset(),
                        "members": writers.map(|n| member_name(*n)).collect::<Vec<_>>(),
                        "readers": segment.readers.iter().map(|n| member_name(*n)).collect::<Vec<_>>(),
                        "memory": segment.memory,
                        "page": segment.page,
                        "info_block_repairs": repairs.info_block,
                        "header_repairs": repairs.header,
                        "broken": self.segments.is_known_broken(name),
                        "broken_why": self.segments.why_broken(name).filter(|_| viewer.is_on_host()),
                        "used": segment.arena.used(),
                        "runtime": segment.runtime.is_some(),
                        "mappings": mappings.map(|(n, m)| mapping(member_name(n), &m)).collect::<Vec<_>>(),
                    })
                });
                (0, *name, shown)
            })),
        }
    }

    fn inspect_member(&self, viewer: &Viewer, number: u32) -> Value {
        let books = self.broker.books();
        let Some(member) = books.members.get(&number) else { return Value::Null };
        let vm = self.vms.get(&number);
        let runs = viewer.runs(number);
        let is_host = number == HOST_MEMBER;
        let seen = books.accounts_of(number).filter(|(account, _)| viewer.sees(&account.segment));
        let tally = seen.fold(Default::default(), |sum: super::account::Tally, (_, tally)| sum.plus(*tally));
        json!({
            "number": number,
            "name": member.name.as_str(),
            "connected": is_host || member.qemu.is_some(),
            "qemu_pid": member.qemu.as_ref().filter(|_| runs).map(|qemu| qemu.process.pid),
            "session": is_host || vm.is_some_and(|vm| vm.up),
            "interrupts": if is_host { Some(true) } else { member.session.map(|s| s.interrupts) },
            "socket": vm.filter(|_| runs).map(|vm| self.config.vm_socket(&vm.config.name)),
            "live": vm.is_some_and(|vm| vm.is_connected()),
            "hangs": vm.is_some_and(|vm| vm.pulse.hangs),
            "fenced": vm.is_some_and(|vm| vm.fence == Fence::Shut),
            "qmp": vm.filter(|_| runs).and_then(|vm| vm.config.qmp.as_ref()),
            "qmp_ready": vm.and_then(|vm| vm.monitor.as_ref()).is_some_and(Monitor::is_greeted),
            "vectors": self.config.vectors,
            "runtime": member.runtime.is_some(),
            "endpoints": tally.endpoints,
            "channels": tally.channels,
            "bytes": tally.bytes,
            "blocks": tally.blocks,
            "block_bytes": tally.block_bytes,
        })
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
    json!({
        "member": member,
        "kind": kind,
        "trusts_members": mapped.trusts_members != 0,
        "read_mb_s": mapped.read_mb_s,
        "write_mb_s": mapped.write_mb_s,
    })
}
