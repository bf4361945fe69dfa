//! Segments whose memory is still held by somebody who has lost the right to it, until they get a new file.
//!
//! These are members that have lost their share ([`super::former`]), and users of the host who may not attach any more. The journal has
//! the users whose programs were given the memory ([`ginnel_broker::recipients`]). Such a program may have given up its endpoint, kept the
//! memory, and handed it on. So, as if the host itself had lost its share, nobody is waited for by name: the segment is out of service
//! until nobody has its file. Then, or at once if nobody uses the segment, it gets a new one. If no such user was ever given the memory,
//! nothing happens.
//!
//! Slices share a file, and a program that was given one of them has the descriptor of all. So they wait together, and get a new file
//! together. (A QEMU is trusted not to touch more of its file than its guest was given.)

use super::config;
use super::former::{Former, OF_HOST, is_missed, runs};
use super::in_use::others_have;
use super::server::Server;
use crate::at_hand;
use ginnel_broker::books;
use ginnel_broker::process::Process;
use ginnel_broker::recipients::Recipient;
use ginnel_layout::Name;
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tracing::{error, info, warn};

/// What is said of programs if the host has lost its share.
const PROGRAMS: &str = "programs of the host (stop the segment's VMs too, since nobody knows which programs these are; what is kept in it ends)";
/// How many users are named in a message.
const SHOWN: usize = 8;

/// Who may still have a segment's memory, and should not.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The processes of former members.
    processes: Former,
    /// The users who may not attach any more.
    users: BTreeSet<Recipient>,
    /// The segments that get a new file together, each with its members.
    together: BTreeMap<Name, BTreeSet<u32>>,
}

impl Kept {
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.users.is_empty()
    }

    /// Returns whether programs of the host may have the file, with all slices in it.
    fn is_with_programs(&self) -> bool {
        !self.users.is_empty() || self.processes.contains_key(&OF_HOST)
    }

    /// Returns whether the kernel may have pinned pages for somebody who has no file any more. Those who cannot be seen may be anybody.
    pub fn may_be_pinned(&self) -> bool {
        !self.users.is_empty() || self.processes.keys().any(|process| process.pid == 0 && !is_missed(process))
    }

    /// Returns the users, for a message.
    pub fn names_of_users(&self) -> String {
        let mut names: Vec<String> = self.users.iter().take(SHOWN).map(ToString::to_string).collect();
        if let Some(more) = self.users.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            names.push(format!("{more} more"));
        }
        names.join(", ")
    }

    fn names_of_processes(&self) -> String {
        let name = |(process, vm): (&Process, &Name)| {
            if *process == OF_HOST {
                PROGRAMS.to_owned()
            } else if is_missed(process) {
                format!(
                    "perhaps VM {vm} (not all processes could be looked at; the daemon looks again by itself)"
                )
            } else if *vm != Name::NONE {
                format!("VM {vm}")
            } else {
                format!("process {}", process.pid)
            }
        };
        let names: BTreeSet<String> = self.processes.iter().map(name).collect();
        names.into_iter().collect::<Vec<_>>().join(", ")
    }

    /// Says why the segment is out of service.
    fn why(&self) -> String {
        let mut why = Vec::new();
        if !self.processes.is_empty() {
            why.push(format!(
                "it has lost members, and its file is still in the memory of {}: end them; then it is in service again",
                self.names_of_processes()
            ));
        }
        if !self.users.is_empty() {
            why.push(format!(
                "{} may not attach any more, and programs may still have its memory: end them, and stop the segment's VMs, since nobody \
                 knows which programs these are; then it gets a new file, and what is kept in it ends (or allow whom you have taken out, \
                 and reload)",
                self.names_of_users()
            ));
        }
        why.join("; ")
    }
}

impl Server {
    /// Returns who may have the memory of a segment, and should not if the segment is declared like this and has these members.
    pub(super) fn kept(&self, segment: &config::Segment, members: &BTreeSet<u32>) -> Kept {
        let name = segment.name;
        let slices = self.slices_beside(segment);
        let mut processes = self.running_former(&name);
        let of_host = slices.iter().filter_map(|slice| self.running_former(slice).remove_entry(&OF_HOST));
        processes.extend(of_host);
        let all = slices.iter().chain([&name]);
        let users = all.flat_map(|slice| self.broker.excluded(slice, &segment.access)).collect();
        let mut kept = Kept { processes, users, together: BTreeMap::from([(name, members.clone())]) };
        if kept.is_with_programs() {
            let segments = &self.broker.books().segments;
            let slices = slices.into_iter().filter_map(|slice| segments.get(&slice));
            kept.together.extend(slices.map(|slice| (slice.name, slice.members.clone())));
        }
        kept
    }

    /// Returns the other slices in the file of a segment, if it is a slice.
    fn slices_beside(&self, segment: &config::Segment) -> Vec<Name> {
        let file = self.file_of_slices(&segment.name).or_else(|| segment.shared_file.clone());
        file.map_or_else(Vec::new, |file| self.slices_in(&file, &segment.name))
    }

    /// Returns the slices in a file, except this one.
    fn slices_in(&self, file: &Path, except: &Name) -> Vec<Name> {
        let is_in_it = |slice: &&books::Segment| {
            slice.name != *except && slice.part.as_ref().is_some_and(|part| part.file == file)
        };
        self.broker.books().segments.values().filter(is_in_it).map(|slice| slice.name).collect()
    }

    fn file_of_slices(&self, name: &Name) -> Option<PathBuf> {
        self.broker.books().segments.get(name)?.part.as_ref().map(|part| part.file.clone())
    }

    /// Notes for another slice in the file of one that ends who has the descriptor of that file.
    pub(super) fn hand_on(&mut self, ended: &Name) {
        let Some(file) = self.file_of_slices(ended) else { return };
        let Some(other) = self.slices_in(&file, ended).first().copied() else { return };
        let segments = &self.broker.books().segments;
        let (Some(ended), Some(other)) = (segments.get(ended), segments.get(&other)) else { return };
        let (from, to) = (ended.recipients.clone().unwrap_or_default(), other.recipients.as_ref());
        let recipients = to.map(|to| to.and(&from)).filter(|all| to != Some(all));
        let record = recipients.map(|all| other.with_recipients(all));
        let of_host = ended.former.as_ref().and_then(|former| former.get_key_value(&OF_HOST));
        let mut former = other.former.clone().unwrap_or_default();
        let (name, has_lost) =
            (other.name, of_host.is_some_and(|(process, host)| former.insert(*process, *host).is_none()));
        if let Some(record) = record {
            self.broker.note(record);
        }
        if has_lost {
            self.note_processes(&name, former);
        }
    }

    /// Returns whether the segment could get another file without anybody's loss: no member uses it, and nothing is in it.
    pub(super) fn is_unused(&self, kept: &Kept) -> bool {
        let books = self.broker.books();
        let is_empty = |name| books.segments.get(name).is_none_or(|segment| segment.arena.used() == 0);
        kept.together.keys().all(is_empty) && !self.has_users(kept)
    }

    fn has_users(&self, kept: &Kept) -> bool {
        let books = self.broker.books();
        let running = |number: &u32| {
            let qemu = books.members.get(number).and_then(|member| member.qemu.as_ref());
            qemu.is_some_and(|qemu| runs(&qemu.process))
        };
        let has = |(name, members): (&Name, &BTreeSet<u32>)| {
            books.index.of_segment(name).next().is_some() || members.iter().any(running)
        };
        kept.together.iter().any(has)
    }

    /// Returns whether nobody has the file of a segment that no member uses, although there are still things in it. If so,
    /// nobody has to be waited for. The segment is not open after that, and neither are the slices beside it: only the first of them
    /// looks, and so opens again before the others do.
    pub(super) fn nobody_has(&mut self, name: &Name, kept: &Kept) -> bool {
        if self.has_users(kept) || kept.together.keys().next() != Some(name) {
            return false;
        }
        let Some(path) = self.segments.path(name).map(Path::to_owned) else { return false };
        for slice in kept.together.keys() {
            self.segments.forget(slice);
        }
        let file = at_hand::open(&path, OFlags::RDONLY | OFlags::NONBLOCK).ok().flatten().map(File::from);
        let others = |file: File| {
            others_have(&file).inspect_err(|error| {
                warn!(segment = %name, %error, "nobody can tell whether others have this segment's file, so it counts as if they did (is CAP_LEASE missing, or fs.leases-enable 0?)");
            })
        };
        file.is_some_and(|file| others(file).is_ok_and(|others| !others))
    }

    /// Says what ends with the memory.
    pub(super) fn tell_lost(&self, kept: &Kept) {
        let books = self.broker.books();
        for name in kept.together.keys() {
            let blocks = books.blocks.values().filter(|block| block.segment.0 == *name).count();
            let locks = books.syncs.values().filter(|sync| sync.segment.0 == *name).count();
            warn!(segment = %name, blocks, locks, "programs that may not use it any more may still have its memory pinned: what was kept in it ends");
        }
    }

    /// Puts a segment out of service as long as they may have its memory. `said` is why it was out of service before.
    pub(super) fn withhold(&mut self, name: &Name, kept: &Kept, said: Option<&str>) {
        for process in kept.processes.keys() {
            self.watch_former(*process, *name);
        }
        let why = kept.why();
        if said != Some(&why) {
            let pids: Vec<u32> =
                kept.processes.keys().map(|process| process.pid).filter(|pid| *pid != 0).collect();
            error!(segment = %name, ?pids, "segment out of service: {why}");
        }
        self.segments.withhold(name, why);
    }

    /// Ends a segment that nobody uses, so that it can be declared anew, with another file. The slices that must get a new file too end
    /// with it, and those that were declared already are declared again soon.
    pub(super) fn renew(&mut self, segment: &config::Segment, kept: &Kept) {
        let name = segment.name;
        let at_old_place = self.broker.books().segments.get(&name).is_some_and(|known| !known.own_folder);
        let file = self.file_of_slices(&name).or_else(|| segment.shared_file.clone());
        for slice in kept.together.keys() {
            info!(segment = %slice, "somebody may have its file who should not, and nobody else uses it: it gets a new one");
            let waiting = self.out_of_service.get(slice).cloned();
            if self.broker.books().segments.contains_key(slice) {
                self.end_segment(slice);
            }
            if let Some(waiting) = waiting.filter(|_| *slice != name) {
                self.out_of_service.insert(*slice, waiting);
                self.retry_at = Instant::now();
            }
        }
        if at_old_place {
            self.segments.discard(&segment.at_old_place().path);
        }
        if let Some(file) = file.filter(|_| kept.is_with_programs()) {
            self.segments.discard(&file);
        }
    }
}
