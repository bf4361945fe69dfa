//! The daemon's state as JSON, in pages.
//!
//! The whole state is one JSON object, which may be long. The daemon sends it in pages of about one packet each: a client asks
//! for the next page when it has read the last one, and says where that page ended. So the daemon keeps no state for an answer,
//! whatever a client does, and looks at a bounded number of entries for each request. A change between two pages may appear only
//! in part.

use super::qmp::Monitor;
use super::server::Server;
use super::viewer::Viewer;
use super::views;
use super::vm::Fence;
use ginnel_broker::books::{Books, Member};
use ginnel_broker::memory::MemoryKind;
use ginnel_broker::reply::Refusal;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::relay::{Mapped, MappingKind};
use ginnel_layout::wire::{self, ErrorCode};
use ginnel_layout::{HOST_MEMBER, Name};
use ginnel_status::{self as status, User};
use ginnel_tcp::Side;
use serde::Serialize;
use std::ops::Bound::{Excluded, Unbounded};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The bytes of a page, unless its only entry is longer.
const PAGE: usize = wire::MAX_PACKET - size_of::<wire::Header>() - size_of::<wire::Inspect>();
/// The number of entries that the daemon looks at for one page. Perhaps the viewer may not see most of them.
const LOOKS: usize = 1000;

/// The most processes of an endpoint, and the most handles and grants of a block, that are shown individually.
pub(super) const MOST: usize = 64;

/// The keys of the object, in their order. A cursor's `section` counts them from 1.
const SECTIONS: [&str; 10] = [
    "blocks",
    "channels",
    "daemon",
    "endpoints",
    "limits",
    "listeners",
    "locks",
    "members",
    "reports",
    "segments",
];

/// A page that is being written.
struct Page {
    text: String,
    looked: usize,
    /// The position at which the page ends.
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

    /// Adds a value that is not an entry of a list.
    fn add(&mut self, value: &impl Serialize) -> bool {
        self.text += &json(value);
        true
    }

    /// Adds the entries that follow the cursor, each with its number or name; an entry that is `None` is not shown. Returns false
    /// if the page is full.
    fn fill(&mut self, entries: impl Iterator<Item = (u64, Name, Option<impl Serialize>)>) -> bool {
        for (after, name, entry) in entries {
            if self.looked == LOOKS {
                return false;
            }
            self.looked += 1;
            if let Some(entry) = entry {
                let entry = json(&entry);
                // An entry that is too long for any page gets a page of its own.
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
    /// Returns the page that follows `from`, with what `viewer` may see, and the position at which it ends.
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

    /// Writes the rest of a section. Returns false if the page is full.
    fn section(&self, viewer: &Viewer, page: &mut Page) -> bool {
        let books = self.broker.books();
        let (after, after_name) = (page.at.after, page.at.name);
        // This is for the sections whose numbers have 32 bits.
        let after_32 = u32::try_from(after).unwrap_or(u32::MAX);
        match SECTIONS[(page.at.section as usize).saturating_sub(1)] {
            "blocks" => page.fill(books.blocks.range((Excluded(after), Unbounded)).map(|(number, block)| {
                let seen = viewer.sees(&block.segment.0);
                (*number, Name::NONE, seen.then(|| self.inspect_block(viewer, block)))
            })),
            "channels" => {
                page.fill(books.channels.range((Excluded(after), Unbounded)).map(|(number, channel)| {
                    let seen = viewer.sees(&channel.segment.0);
                    (*number, Name::NONE, seen.then(|| views::channels::channel(channel, books)))
                }))
            }
            "daemon" => page.add(&status::Daemon {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                role: "host".to_owned(),
                pid: std::process::id(),
                generation: books.generation,
                is_looking: viewer.is_administrator() && self.looks.is_looking(),
                uptime: self.started.elapsed().as_secs(),
                config_mistake: self.config.mistake.clone().filter(|_| viewer.is_administrator()),
                connections: viewer.is_administrator().then(|| self.clients.len() + self.programs.count()),
            }),
            "endpoints" => {
                page.fill(books.endpoints.range((Excluded(after_32), Unbounded)).map(|(number, endpoint)| {
                    let known = viewer.knows(endpoint.member, endpoint.uid);
                    let pids = || endpoint.owners.iter().take(MOST).map(|process| process.pid).collect();
                    let shown = viewer.sees(&endpoint.segment).then(|| status::Endpoint {
                        number: endpoint.number,
                        epoch: endpoint.epoch,
                        member: member_name(books, endpoint.member),
                        segment: endpoint.segment.to_string(),
                        name: endpoint.name.to_string(),
                        pid: known.then(|| endpoint.pid()),
                        pids: known.then(pids),
                        uid: known.then_some(endpoint.uid),
                        vector: endpoint.vector,
                        attached: self.broker.has_connection(endpoint.number),
                        held: endpoint.is_held(),
                        channels: endpoint.channels.len(),
                        bytes: endpoint.bytes,
                    });
                    (u64::from(*number), Name::NONE, shown)
                }))
            }
            "limits" => page.add(&self.config.limits),
            "listeners" => {
                page.fill(books.listeners.range((Excluded(after_32), Unbounded)).map(|(number, listener)| {
                    // A program that knows the name of a connection's listener could take the connection over.
                    let seen = viewer.sees(&listener.segment) && listener.kind != ChannelKind::SOCKET;
                    (u64::from(*number), Name::NONE, seen.then(|| views::channels::listener(listener)))
                }))
            }
            "locks" => page.fill(books.syncs.range((Excluded(after), Unbounded)).map(|(number, object)| {
                let seen = viewer.sees(&object.segment.0);
                (*number, Name::NONE, seen.then(|| self.inspect_lock(viewer, object)))
            })),
            "members" => {
                // The host's number is 0, and so is the cursor at the beginning.
                let first = if page.at.entries == 0 && after == 0 { Unbounded } else { Excluded(after_32) };
                page.fill(books.members.range((first, Unbounded)).map(|(number, member)| {
                    let shown = !member.retired && viewer.sees_member(*number);
                    (
                        u64::from(*number),
                        Name::NONE,
                        shown.then(|| self.inspect_member(viewer, *number, member)),
                    )
                }))
            }
            "reports" => page.fill(self.broker.reports(after).map(|(number, who, report)| {
                let shown = viewer.knows(who.member, who.uid).then(|| status::Report {
                    member: member_name(books, who.member),
                    pid: who.process.pid,
                    local: report.identity.local.to_string(),
                    remote: report.identity.remote.to_string(),
                    role: match report.side {
                        Side::Connector { .. } => "connector",
                        Side::Acceptor { .. } => "acceptor",
                    }
                    .to_owned(),
                });
                (number, Name::NONE, shown)
            })),
            _ => page.fill(books.segments.range((Excluded(after_name), Unbounded)).map(|(name, segment)| {
                let shown = viewer.sees(name).then(|| {
                    let repairs = self.segments.repairs(name);
                    let of_vm = |n: &u32| Some((*n, *self.vms.get(n)?.mapped.get(name)?));
                    let mappings = segment.members.iter().filter_map(of_vm);
                    let writers = segment.members.difference(&segment.readers);
                    let names = |n: &u32| member_name(books, *n);
                    status::Segment {
                        name: name.to_string(),
                        // The books have another size for a segment that has no memory.
                        size: self.out_of_service.get(name).map_or(segment.size, |(wanted, ..)| wanted.size),
                        path: self.segments.path(name).filter(|_| viewer.is_on_host()).map(text),
                        offset: segment.file_offset(),
                        members: writers.map(names).collect(),
                        readers: segment.readers.iter().map(names).collect(),
                        memory: match segment.memory {
                            MemoryKind::Dax => status::MemoryKind::Dax,
                            MemoryKind::Bar => status::MemoryKind::Bar,
                        },
                        page: segment.page.into(),
                        verbs: self.broker.is_for_verbs(name),
                        info_block_repairs: repairs.info_block,
                        header_repairs: repairs.header,
                        broken: self.segments.is_known_broken(name),
                        broken_why: self
                            .segments
                            .why_broken(name)
                            .filter(|_| viewer.is_on_host())
                            .map(Into::into),
                        used: segment.arena.used(),
                        runtime: segment.runtime.is_some(),
                        strangers: if viewer.is_administrator() {
                            self.strangers_in(segment)
                        } else {
                            Vec::new()
                        },
                        mappings: mappings.map(|(n, m)| mapping(member_name(books, n), &m)).collect(),
                    }
                });
                (0, *name, shown)
            })),
        }
    }

    fn inspect_member(&self, viewer: &Viewer, number: u32, member: &Member) -> status::Member {
        let vm = self.vms.get(&number);
        let runs = viewer.runs(number);
        let is_host = number == HOST_MEMBER;
        let seen =
            self.broker.books().accounts_of(number).filter(|(account, _)| viewer.sees(&account.segment));
        let tally =
            seen.fold(Default::default(), |sum: ginnel_broker::account::Tally, (_, tally)| sum.plus(*tally));
        status::Member {
            number,
            name: member.name.to_string(),
            connected: is_host || member.qemu.is_some(),
            qemu_pid: member.qemu.as_ref().filter(|_| runs).map(|qemu| qemu.process.pid),
            session: is_host || vm.is_some_and(|vm| vm.up),
            interrupts: if is_host { Some(true) } else { member.session.map(|s| s.interrupts) },
            socket: vm.filter(|_| runs).map(|vm| text(&self.config.vm_socket(&vm.config.name))),
            live: vm.is_some_and(|vm| vm.is_connected()),
            hangs: vm.is_some_and(|vm| vm.pulse.hangs),
            fenced: vm.is_some_and(|vm| vm.fence == Fence::Shut),
            qmp: vm.filter(|_| runs).and_then(|vm| vm.config.qmp.as_deref()).map(text),
            qmp_ready: vm.and_then(|vm| vm.monitor.as_ref()).is_some_and(Monitor::is_greeted),
            vectors: self.config.vectors,
            runtime: member.runtime.is_some(),
            endpoints: tally.endpoints,
            channels: tally.channels,
            bytes: tally.bytes,
            blocks: tally.blocks,
            block_bytes: tally.block_bytes,
        }
    }
}

/// Serialises a value for a page.
fn json(value: &impl Serialize) -> String {
    // Serialising fails only for maps whose keys are not strings, and in serializers that fail; a status has neither.
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns the name of a member; empty if there is no such member.
pub(super) fn member_name(books: &Books, number: u32) -> String {
    books.members.get(&number).map_or_else(String::new, |member| member.name.to_string())
}

/// Returns an endpoint in the form in which it is shown to people.
pub(super) fn user_of(books: &Books, viewer: &Viewer, number: u32) -> User {
    let endpoint = books.endpoints.get(&number);
    let known = endpoint.filter(|e| viewer.knows(e.member, e.uid));
    User {
        endpoint: number,
        name: endpoint.map(|e| e.name.to_string()),
        member: endpoint.and_then(|e| books.members.get(&e.member)).map(|m| m.name.to_string()),
        pid: known.map(|e| e.pid()),
        ..User::default()
    }
}

/// Returns the time since 1970.
pub(super) fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn mapping(member: String, mapped: &Mapped) -> status::Mapping {
    let kind = match mapped.kind {
        MappingKind::BAR => "bar",
        MappingKind::DAX => "dax",
        MappingKind::NONE => "none",
        _ => "unknown",
    };
    status::Mapping {
        member,
        kind: kind.to_owned(),
        trusts_members: mapped.trusts_members != 0,
        read_mb_s: mapped.read_mb_s.into(),
        write_mb_s: mapped.write_mb_s.into(),
    }
}
