//! Members that have lost their share in a segment, or the right to write in it.
//!
//! Nobody can take the memory away from a process that has it. So, as long as such a process runs, the segment is out of service, and
//! its endpoints have ended: nothing that the present members write may get to the process, and nothing of it to them. When none runs any
//! more, the members have their segment back, with what is in it. If no member uses the segment, it need not wait: then it gets a new file
//! at once, and the processes keep the old one, which has no name any more.
//!
//! The journal has these processes, because nothing else tells the next daemon of them. They are the QEMUs that were
//! connected, and those that a look finds ([`super::holders`]). If the look was not completed, there may be others, until one is.
//!
//! Programs of the host can hide, and hand the memory on. So if the host itself has lost its share, nobody is waited for by name: the
//! segment is out of service until nobody has its file. Then it gets a new file, and what was kept in it ends: the kernel may have pinned
//! pages of the old one for a program (`io_uring`, `vmsplice`) that has neither the file nor a mapping any more. QEMU and its user are
//! trusted not to do such things, as they are with the memory of their guests.

use super::config;
use super::holders::{Found, Holder, PATIENCE, WAIT};
use super::server::Server;
use crate::pidwatch;
use ginnel_broker::books;
use ginnel_broker::process::Process;
use ginnel_broker::record::Record;
use ginnel_broker::text::Text;
use ginnel_layout::{HOST_MEMBER, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;
use tracing::{info, warn};

/// Stands for any program of the host, the end of which cannot be seen. (A QEMU of another process namespace has the time 0.)
pub(super) const OF_HOST: Process = Process { pid: 0, started: 1 };

/// Stands for a process of this member that a look may have missed, because it was not completed.
fn missed(member: u32) -> Process {
    Process { pid: 0, started: OF_HOST.started + 1 + u64::from(member) }
}

pub(super) fn is_missed(process: &Process) -> bool {
    process.pid == 0 && process.started > OF_HOST.started
}

/// The processes of former members, with the names of their VMs.
pub(super) type Former = BTreeMap<Process, Name>;

pub(super) fn runs(process: &Process) -> bool {
    process.pid == 0 || pidwatch::is_alive(process)
}

/// Returns the members that keep less than they had, if a segment of the books is declared like this. A VM is known by its name.
fn losers(known: &books::Segment, wanted: &config::Segment, books: &books::Books) -> BTreeSet<u32> {
    let loses = |number: &&u32| {
        let Some(member) = books.members.get(number) else { return false };
        let reads = wanted.readers.contains(&member.name);
        let shares = reads || wanted.sharers().any(|name| *name == member.name);
        !shares || (reads && !known.readers.contains(number))
    };
    known.members.iter().filter(loses).copied().collect()
}

impl Server {
    /// Notes which segments have lost members since the last daemon, and which processes may still have them. Must be called before any
    /// VM is declared or forgotten: the books know their QEMUs until then.
    pub(super) fn note_former(&mut self) {
        let books = self.broker.books();
        let (mut shrunk, mut returned) = (BTreeMap::new(), Vec::new());
        for known in books.segments.values() {
            let at_run_time = |spec| self.config.segment(known.name.as_str(), spec, "").ok();
            let declared = self.config.segments.get(&known.name).cloned();
            let Some(wanted) = declared.or_else(|| known.runtime.as_ref().and_then(at_run_time)) else {
                continue;
            };
            let mut former = known.former.clone().unwrap_or_default();
            former.retain(|process, vm| !self.may_have_it_again(process, vm, &wanted));
            if known.former.as_ref().is_some_and(|known| known.len() > former.len()) {
                returned.push((known.name, former));
            }
            let losers = losers(known, &wanted, books);
            if !losers.is_empty() {
                shrunk.insert(known.name, (losers, file_of(known, &wanted)));
            }
        }
        for (name, former) in returned {
            self.note_processes(&name, former);
        }
        if shrunk.is_empty() {
            return;
        }
        let files = shrunk.iter().map(|(name, (_, path))| (*name, path.clone())).collect();
        let found = self.looks.look(&self.poller, files).cloned().unwrap_or_else(|error| {
            warn!(%error, "which processes have the segments that have lost members is only known from the journal");
            Found::new()
        });
        let complete = self.looks.take_complete();
        for (name, (losers, _)) in shrunk {
            let Some(known) = self.broker.books().segments.get(&name) else { continue };
            let mut former = known.former.clone().unwrap_or_default();
            former.extend(self.processes_of(&losers));
            if !complete.contains(&name) {
                let members = &self.broker.books().members;
                let lost = losers.iter().filter(|number| **number != HOST_MEMBER);
                let lost = lost.filter_map(|number| members.get(number));
                former.extend(lost.map(|member| (missed(member.number), member.name)));
            }
            let holders = found.get(&name).into_iter().flatten();
            let strangers = holders.filter(|holder| self.is_stranger(known, &losers, holder));
            former.extend(
                strangers.map(|holder| (holder.process, self.vm_of(&holder.process).unwrap_or(Name::NONE))),
            );
            self.note_processes(&name, former);
        }
        // Without these records, the next daemon would not know whom to wait for.
        self.run_effects();
    }

    pub(super) fn note_processes(&mut self, name: &Name, former: Former) {
        let processes = former.into_iter().map(|(process, vm)| (Text(vm), process)).collect();
        self.broker.note(Record::SegmentFormer { name: Text(*name), processes: Some(processes) });
    }

    /// Returns whether a process of a former member is one of a member again, which may write.
    fn may_have_it_again(&self, process: &Process, vm: &Name, wanted: &config::Segment) -> bool {
        let is_its = *process == OF_HOST || is_missed(process) || self.vm_of(process) == Some(*vm);
        wanted.members.contains(vm) && is_its
    }

    /// Returns the processes that have a segment as these members, as far as the books know them.
    fn processes_of(&self, losers: &BTreeSet<u32>) -> Former {
        let books = self.broker.books();
        let mut all = Former::new();
        for member in losers.iter().filter_map(|number| books.members.get(number)) {
            if member.number == HOST_MEMBER {
                all.insert(OF_HOST, member.name);
            } else if let Some(qemu) = member.qemu.as_ref().filter(|qemu| runs(&qemu.process)) {
                all.insert(qemu.process, member.name);
            }
        }
        all
    }

    fn vm_of(&self, process: &Process) -> Option<Name> {
        let is_its =
            |member: &&books::Member| member.qemu.as_ref().is_some_and(|qemu| qemu.process == *process);
        self.broker.books().members.values().find(is_its).map(|member| member.name)
    }

    /// Returns whether a process that has the file of a segment should not. Where the host is a member, any process may have it, except a
    /// QEMU.
    fn is_stranger(&self, segment: &books::Segment, losers: &BTreeSet<u32>, holder: &Holder) -> bool {
        let books = self.broker.books();
        if segment.former.as_ref().is_some_and(|former| former.contains_key(&holder.process)) {
            return true;
        }
        // Whoever has one slice of a file has opened the file for it.
        let file = |segment: &books::Segment| segment.part.as_ref().map(|part| part.file.clone());
        let others = books.segments.values().filter(|other| {
            other.name != segment.name && file(other).is_some() && file(other) == file(segment)
        });
        let others: BTreeSet<u32> = others.flat_map(|other| other.members.iter().copied()).collect();
        let shares = |member: &u32| {
            others.contains(member) || (segment.members.contains(member) && !losers.contains(member))
        };
        if let Some(vm) = self.vm_of(&holder.process).and_then(|vm| books.member_named(&vm)) {
            return !shares(&vm.number);
        }
        let is_endpoint = books
            .endpoints
            .values()
            .any(|endpoint| shares(&endpoint.member) && endpoint.owners.contains(&holder.process));
        !is_endpoint && (holder.is_qemu || !shares(&HOST_MEMBER))
    }

    /// Returns the former members' processes of a segment that still run.
    pub(super) fn running_former(&self, name: &Name) -> Former {
        let former = self.broker.books().segments.get(name).and_then(|segment| segment.former.as_ref());
        let former = former.into_iter().flatten().filter(|(process, _)| runs(process));
        former.map(|(process, vm)| (*process, *vm)).collect()
    }

    /// Notes that no former member has the segment any more.
    pub(super) fn forget_former(&mut self, name: &Name) {
        self.broker.note(Record::SegmentFormer { name: Text(*name), processes: None });
        info!(segment = %name, "no former member has its file any more");
    }

    /// Looks for the processes that have segments, for a status.
    pub(super) fn look_for_holders(&mut self) {
        let segments = self.broker.books().segments.keys();
        let files = segments.filter_map(|name| Some((*name, self.segments.path(name)?.to_owned()))).collect();
        self.looks.begin(&self.poller, files, WAIT);
    }

    /// Looks again for the processes that a look may have missed, and that keep segments out of service.
    pub(super) fn look_for_missed(&mut self) {
        let segments = self.broker.books().segments.values().filter(|segment| self.waits_for_missed(segment));
        let files =
            segments.filter_map(|s| Some((s.name, self.segments.path(&s.name)?.to_owned()))).collect();
        self.looks.begin(&self.poller, files, PATIENCE);
    }

    fn waits_for_missed(&self, segment: &books::Segment) -> bool {
        let is_missing = segment.former.as_ref().is_some_and(|former| former.keys().any(is_missed));
        is_missing && self.segments.is_withheld(&segment.name)
    }

    /// Notes who was missed, or that nobody was, if a look has seen everything.
    pub(super) fn end_look(&mut self) {
        self.looks.give_up(&self.poller);
        for name in self.looks.take_complete() {
            let known = self.broker.books().segments.get(&name);
            let Some(known) = known.filter(|known| self.waits_for_missed(known)) else { continue };
            let mut former = known.former.clone().unwrap_or_default();
            former.retain(|process, _| !is_missed(process));
            let holders = self.looks.found.get(&name).into_iter().flatten();
            let strangers = holders.filter(|holder| self.is_stranger(known, &BTreeSet::new(), holder));
            for holder in strangers {
                former
                    .entry(holder.process)
                    .or_insert_with(|| self.vm_of(&holder.process).unwrap_or(Name::NONE));
            }
            self.note_processes(&name, former);
            self.retry_at = Instant::now();
        }
    }

    /// Returns who has the file of a segment and is no member, as far as the last look has seen it.
    pub(super) fn strangers_in(&self, segment: &books::Segment) -> Vec<ginnel_status::Holder> {
        let holders = self.looks.found.get(&segment.name).into_iter().flatten();
        let strangers = holders.filter(|holder| self.is_stranger(segment, &BTreeSet::new(), holder));
        let shown = strangers.map(|holder| {
            let former = segment.former.as_ref().and_then(|former| former.get(&holder.process));
            let vm = former.copied().filter(|vm| *vm != Name::NONE).or_else(|| self.vm_of(&holder.process));
            ginnel_status::Holder {
                vm: vm.map(|vm| vm.to_string()),
                pid: holder.process.pid,
                command: holder.command.clone(),
            }
        });
        shown.collect()
    }
}

/// Returns the file of a segment.
fn file_of(known: &books::Segment, wanted: &config::Segment) -> PathBuf {
    match &known.part {
        Some(part) => part.file.clone(),
        None if known.own_folder => wanted.path.clone(),
        None => wanted.at_old_place().path,
    }
}
