//! Declares and removes members and segments: from the configuration at the start, and at run time.

use super::front::Front;
use super::kept::Kept;
use super::members::{MemberFds, is_control, map_control, new_control, new_vectors};
use super::server::Server;
use super::token::Token;
use super::vm::Vm;
use super::{config, random, segments};
use crate::closer::Connected;
use crate::namer::{NewSocket, SocketKind, Unnamed};
use crate::poller::Interest;
use anyhow::Context;
use ginnel_broker::books;
use ginnel_broker::declared::{SegmentSpec, VmSpec};
use ginnel_broker::limits::MAX_MEMBER;
use ginnel_broker::memory::{FilePart, MemoryFile, MemoryKind};
use ginnel_broker::recipients::Recipients;
use ginnel_broker::record::Record;
use ginnel_broker::text::{Hex16, Text};
use ginnel_config::{Bytes, Problem};
use ginnel_layout::control::DAEMON_VECTOR;
use ginnel_layout::{HOST_MEMBER, Name, segment};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// The time between two attempts to bring back what is out of service.
const RETRY: Duration = Duration::from_secs(5);

fn vectors_name(member: u32) -> String {
    format!("vectors-{member}")
}

fn control_name(member: u32) -> String {
    format!("control-{member}")
}

impl Server {
    /// Declares the host itself as a member.
    pub(super) fn declare_host(&mut self) -> anyhow::Result<()> {
        let name = Text(Name::new(config::HOST)?);
        if !self.broker.books().members.contains_key(&HOST_MEMBER) {
            self.broker.note(Record::Member { number: HOST_MEMBER, name, runtime: None, retired: false });
        }
        // The vectors for the host's programs are added with their segments.
        let vectors = self.vectors(HOST_MEMBER, 1)?;
        self.members.insert(HOST_MEMBER, MemberFds::new(vectors, None));
        if let Some(event) = self.members.event(HOST_MEMBER, DAEMON_VECTOR) {
            self.poller.add_edge(&event, Token::HostVector.into())?;
        }
        Ok(())
    }

    /// Declares a VM with the number that was chosen for it. With `lenient` it is declared even if its socket cannot be made.
    pub(super) fn declare_vm(
        &mut self,
        vm: &config::Vm,
        number: u32,
        runtime: Option<VmSpec>,
        place: &str,
        lenient: bool,
    ) -> anyhow::Result<()> {
        let name = vm.name;
        let known = self.broker.books().members.get(&number);
        if known.is_none_or(|m| m.name != name || m.retired || m.runtime != runtime) {
            self.broker.note(Record::Member { number, name: Text(name), runtime, retired: false });
        }
        let vectors = self.vectors(number, self.config.vectors)?;
        let control = self.control(number)?;
        let memory = map_control(&control)?;
        self.members.insert(number, MemberFds::new(vectors, Some(control)));
        self.broker.set_limits(number, vm.limits);
        let listener = match self.listen_for(vm, number, place) {
            Ok(listener) => Some(listener),
            Err(problem) if lenient => {
                error!(vm = %name, "{problem}; until then this VM cannot start; it is tried again");
                None
            }
            Err(problem) => return Err(problem.into()),
        };
        self.vms.insert(number, Vm::new(vm.clone(), number, self.config.vectors, listener, memory));
        info!(vm = %name, member = number, "VM declared");
        self.more = true;
        Ok(())
    }

    /// Makes the socket for the QEMU of a VM.
    fn listen_for(&mut self, vm: &config::Vm, number: u32, place: &str) -> Result<Connected, Problem> {
        let path = self.config.vm_socket(&vm.name);
        let failed = |error: Unnamed| {
            let what = format!("the socket {} cannot be made: {error}", path.display());
            let otherwise = "remove what is there, and run the daemon as root if others own its sockets";
            Problem::new(place, what, error.fix(otherwise))
        };
        let (user, group, mode) = (vm.user, vm.group, vm.socket_mode);
        let new = NewSocket { path: path.clone(), kind: SocketKind::Stream, user, group, mode };
        let listener = self.namer.socket(&new).map_err(failed)?;
        // Connections that nobody has accepted yet are closed with it.
        let listener = Connected::new(listener, &self.closer);
        self.poller
            .add(&listener, Token::VmListener(number).into(), Interest::READ)
            .map_err(|error| failed(error.into()))?;
        Ok(listener)
    }

    /// Makes the socket for programs, unless it is there. A problem says why it is not yet, or never will be.
    pub(super) fn listen_for_programs(&mut self) -> Result<(), (Unnamed, Problem)> {
        if self.clients.listener().is_some() {
            return Ok(());
        }
        let (group, mode) = (self.config.socket_group, self.config.socket_mode);
        let kind = SocketKind::PacketsOfSenders;
        let new = NewSocket { path: self.config.socket(), kind, user: None, group, mode };
        let listener = self.namer.socket(&new).and_then(|listener| Ok(self.listen(listener)?));
        listener.map_err(|error| {
            let what = format!("the socket {} cannot be made: {error}", new.path.display());
            let fix = error.fix("remove what is there, and let the daemon's user write there");
            (error, Problem::new("daemon.runtime_dir", what, fix))
        })?;
        info!(socket = %new.path.display(), "ready");
        Ok(())
    }

    /// Removes a file in the folder of the sockets.
    fn remove_socket(&mut self, path: &Path) {
        if let Err(error) = self.namer.remove(path) {
            warn!(path = %path.display(), %error, "a socket that is not needed any more is not removed yet");
        }
    }

    /// Removes all sockets, at the end.
    pub(super) fn remove_sockets(&mut self) {
        let of_vms = self.vms.values().map(|vm| self.config.vm_socket(&vm.config.name));
        for path in of_vms.chain([self.config.socket()]).collect::<Vec<_>>() {
            self.remove_socket(&path);
        }
    }

    /// Tells the VMs that share a segment of it, and of each other's doorbells.
    pub(super) fn tell_members(&mut self, segment: &Name) {
        let members = self.broker.books().segments.get(segment).map(|segment| segment.members.clone());
        for member in members.into_iter().flatten().filter(|member| *member != HOST_MEMBER) {
            self.tell_doorbells(member);
            self.send_segments(member);
        }
    }

    /// Returns the time until the next attempt to bring back what is out of service.
    pub(super) fn until_retry(&self) -> Option<Duration> {
        let any = self.keeper.is_lost()
            || !self.out_of_service.is_empty()
            || self.clients.listener().is_none()
            || self.vms.values().any(|vm| vm.listener().is_none());
        any.then(|| self.retry_at.saturating_duration_since(Instant::now()))
    }

    /// Tries again what could not be served.
    pub(super) fn retry(&mut self) {
        if self.until_retry().is_none_or(|left| !left.is_zero()) {
            return;
        }
        self.retry_at = Instant::now() + RETRY;
        // Why it is not there was said.
        if self.keeper.is_lost() && self.store_all().is_ok() {
            info!("another keeper has taken the place of the one that has died");
        }
        let _ = self.listen_for_programs();
        for number in self.vms.keys().copied().collect::<Vec<_>>() {
            let Some(vm) = self.vms.get(&number).filter(|vm| vm.listener().is_none()) else { continue };
            let config = vm.config.clone();
            if let Ok(listener) = self.listen_for(&config, number, "a VM")
                && let Some(vm) = self.vms.get_mut(&number)
            {
                vm.set_listener(listener);
                info!(vm = %config.name, "its socket exists now");
            }
        }
        if self.out_of_service.is_empty() || !self.journal.takes() {
            return;
        }
        for name in self.out_of_service.keys().copied().collect::<Vec<_>>() {
            self.retry_segment(&name);
        }
        self.look_for_missed();
    }

    /// Tries again to open a segment that is out of service. Returns false if it stays so.
    pub(super) fn retry_segment(&mut self, name: &Name) -> bool {
        let Some((segment, runtime, place)) = self.out_of_service.get(name).cloned() else { return true };
        if let Err(error) = self.declare_segment(&segment, runtime, &place, true) {
            warn!(segment = %name, error = format!("{error:#}"), "it stays out of service");
        }
        if self.out_of_service.contains_key(name) {
            return false;
        }
        info!(segment = %name, "segment is in service");
        self.tell_members(name);
        true
    }

    /// Returns the eventfds of a member: those that the keeper has, or new ones.
    fn vectors(&mut self, member: u32, n: u32) -> anyhow::Result<BTreeMap<u32, Arc<OwnedFd>>> {
        let numbered = |fds: Vec<OwnedFd>| (0..).zip(fds.into_iter().map(Arc::new)).collect();
        let books = self.broker.books();
        let in_use = books.members.values().any(|m| m.qemu.is_some()) || !books.endpoints.is_empty();
        match self.held.remove(&vectors_name(member)) {
            Some(held) if held.len() == n as usize => return Ok(numbered(held)),
            // An earlier release stored all doorbells of the host under this name. The first one is the daemon's, then as now.
            Some(mut held) if member == HOST_MEMBER && !held.is_empty() => {
                held.truncate(n as usize);
                self.keeper.store(&vectors_name(member), &held)?;
                return Ok(numbered(held));
            }
            Some(held) if in_use => {
                let what = format!("{n} vectors, and {} are in use by running VMs and programs", held.len());
                let fix = "write the old number, or stop them all before the daemon is restarted";
                return Err(Problem::new(
                    format!("{}: daemon.vectors", self.config.file.display()),
                    what,
                    fix,
                )
                .into());
            }
            Some(_) => {}
            None => {
                let qemu = books.members.get(&member).is_some_and(|m| m.qemu.is_some());
                if qemu || books.endpoints.values().any(|e| e.member == member) {
                    error!(
                        member,
                        "its doorbells are lost, because daemon and keeper ended at once: its endpoints are declared dead; if it is a VM, restart it"
                    );
                    self.broker.member_died(member);
                }
            }
        }
        let vectors = new_vectors(n)?;
        self.keeper.store(&vectors_name(member), &vectors)?;
        Ok(numbered(vectors))
    }

    /// Returns the control memory of a VM: the one that the keeper has, or a new one.
    fn control(&mut self, member: u32) -> anyhow::Result<Arc<OwnedFd>> {
        let held = self.held.remove(&control_name(member)).and_then(|mut held| held.pop());
        if let Some(control) = held.filter(is_control) {
            return Ok(Arc::new(control));
        }
        let control = Arc::new(new_control()?);
        self.keeper.store(&control_name(member), &[&control])?;
        Ok(control)
    }

    /// Handles what the keeper says. If it has died, starts another one and gives it everything that this daemon has.
    pub(super) fn serve_keeper(&mut self) {
        if self.keeper.hear() {
            return;
        }
        if let Some(connection) = self.keeper.connection() {
            self.poller.remove(connection);
        }
        warn!("the keeper has died; another one takes its place");
        if let Err(error) = self.store_all() {
            error!(
                error = format!("{error:#}"),
                "no keeper: when this daemon ends, running VMs lose their doorbells; if none can be started now, it is tried again"
            );
            self.retry_at = Instant::now() + RETRY;
        }
    }

    fn store_all(&mut self) -> anyhow::Result<()> {
        self.keeper.reopen(&mut self.namer)?;
        if let Some(connection) = self.keeper.connection() {
            self.poller.add(connection, Token::Keeper.into(), Interest::READ)?;
        }
        for member in std::iter::once(HOST_MEMBER).chain(self.vms.keys().copied()) {
            let Some(fds) = self.members.get(member) else { continue };
            // The host's other vectors are stored with their segments.
            let own = fds.events().filter(|(vector, _)| member != HOST_MEMBER || *vector == DAEMON_VECTOR);
            let own: Vec<&Arc<OwnedFd>> = own.map(|(_, fd)| fd).collect();
            self.keeper.store(&vectors_name(member), &own)?;
            if let Some(control) = &fds.control {
                self.keeper.store(&control_name(member), &[control])?;
            }
        }
        self.store_doorbells()
    }

    /// Removes the declaration of a VM. Its number is remembered.
    pub(super) fn retire_vm(&mut self, number: u32) {
        let Some(member) = self.broker.books().members.get(&number) else { return };
        let name = member.name;
        if self.vms.contains_key(&number) {
            self.vm_gone(number);
        } else {
            self.broker.member_died(number);
        }
        if let Some(vm) = self.vms.remove(&number)
            && let Some(listener) = vm.listener()
        {
            self.poller.remove(listener);
        }
        self.remove_socket(&self.config.vm_socket(&name));
        self.farewell(number);
        if self.broker.books().members.get(&number).is_some_and(|m| m.qemu.is_some() || m.session.is_some()) {
            self.broker.note(Record::Left { member: number });
        }
        self.broker.note(Record::Member { number, name: Text(name), runtime: None, retired: true });
        self.members.remove(number);
        // A QEMU of that name that still runs keeps its memory; nobody else may ever get it.
        for name in [vectors_name(number), control_name(number)] {
            self.held.remove(&name);
            if let Err(error) = self.keeper.remove(&name) {
                warn!(
                    error = format!("{error:#}"),
                    "the keeper still holds descriptors that are not needed any more"
                );
            }
        }
        info!(vm = %name, member = number, "VM is not declared any more");
    }

    /// Chooses a number for a VM: the requested one, or one of the daemon's choice. `taken` are the numbers that others have
    /// requested.
    pub(super) fn choose_number(
        &mut self,
        vm: &config::Vm,
        taken: &BTreeSet<u32>,
        place: &str,
    ) -> Result<u32, Problem> {
        let books = self.broker.books();
        let idle = |number: &u32| {
            books.members.get(number).is_none_or(|m| m.qemu.is_none() && !books.has_accounts(*number))
        };
        let old = books.member_named(&vm.name).map(|m| m.number);
        let Some(number) = vm.number else {
            return books.number_for(&vm.name, taken).ok_or_else(|| {
                Problem::new(
                    place,
                    format!("all numbers up to {MAX_MEMBER} are taken"),
                    "remove VMs that are not used",
                )
            });
        };
        if old == Some(number) {
            return Ok(number);
        }
        let mut forget = Vec::new();
        if let Some(old) = old {
            if !idle(&old) {
                let what = format!("its number is {old} while it runs, and cannot become {number}");
                return Err(Problem::new(place, what, "stop the VM first, or keep its number"));
            }
            forget.push(old);
        }
        if let Some(other) = books.members.get(&number) {
            if !idle(&number) || self.vms.contains_key(&number) {
                let what = format!("number {number} belongs to {}", other.name);
                return Err(Problem::new(place, what, "choose another, or stop and remove that VM first"));
            }
            forget.push(number);
        }
        for number in forget {
            self.held.remove(&vectors_name(number));
            self.held.remove(&control_name(number));
            self.broker.note(Record::MemberForgotten { number });
        }
        Ok(number)
    }

    /// Declares a segment. All of its members must be declared already. With `lenient` it is declared even if its file cannot be
    /// used: then it is out of service, and the daemon tries again.
    pub(super) fn declare_segment(
        &mut self,
        segment: &config::Segment,
        runtime: Option<SegmentSpec>,
        place: &str,
        lenient: bool,
    ) -> anyhow::Result<()> {
        let name = segment.name;
        let (mut members, mut readers) = (BTreeSet::new(), BTreeSet::new());
        for member in segment.sharers() {
            let found = self.broker.books().member_named(member).filter(|m| !m.retired);
            let number =
                found.map(|m| m.number).with_context(|| format!("{place}: there is no VM {member}"))?;
            members.insert(number);
            if segment.readers.contains(member) {
                readers.insert(number);
            }
        }
        let known = self.broker.books().segments.get(&name).cloned();
        let declared = segment;
        let mut kept = self.kept(declared, &members);
        let said = self.segments.why_broken(&name).map(str::to_owned);
        if !kept.is_empty() || known.as_ref().is_some_and(|known| known.former.is_some()) {
            if self.is_unused(&kept) {
                self.renew(declared, &kept);
                return self.declare_segment(declared, runtime, place, lenient);
            }
            if !kept.is_empty() && self.nobody_has(&name, &kept) {
                if kept.may_be_pinned() {
                    self.tell_lost(&kept);
                    self.renew(declared, &kept);
                    return self.declare_segment(declared, runtime, place, lenient);
                }
                kept = Kept::default();
            } else if !kept.is_empty() && self.segments.is_withheld(&name) {
                return Ok(()); // It is open, and somebody may still have it.
            }
        }
        let books = self.broker.books();
        // Slices share a file. Nobody has memory of a file that the books do not know.
        let slices = books.segments.values().filter(|other| {
            let file = other.part.as_ref().map(|part| &part.file);
            other.name == name || (file.is_some() && file == segment.shared_file.as_ref())
        });
        let own = slices.map(|slice| slice.file).find(|file| *file != MemoryFile::Unknown);
        let own = own.unwrap_or(MemoryFile::Unknown);
        // Somebody has the file's memory, and would not share another file with this daemon.
        let in_use = own != MemoryFile::Unknown
            && known.as_ref().is_some_and(|known| {
                let running = |n: &u32| books.members.get(n).is_some_and(|m| m.qemu.is_some());
                known.members.iter().any(running)
                    || known.arena.used() > 0
                    || books.endpoints.values().any(|e| e.segment == name)
            });
        // While the segment is in use, it may be smaller than what a VM accepts by DAX: an earlier release made it, or only the
        // host shared it.
        let small = segment::usable_size(segment.requested, segment.memory == MemoryKind::Bar);
        let size = match &known {
            Some(known) if in_use && small == Some(known.size) => known.size,
            _ => segment.size,
        };
        let wanted = &config::Segment { size, ..segment.clone() };
        let at_old_place = known.as_ref().is_some_and(|known| !known.own_folder);
        let segment = &if at_old_place { of_older_daemon(wanted, in_use) } else { wanted.clone() };
        let own_folder = segment.folder.is_some();
        if segment.size != segment.requested {
            info!(segment = %name, requested = %Bytes(segment.requested), size = %Bytes(segment.size), "its size is rounded up to what its kind of memory device takes");
        }
        let prepared = self.segments.prepare(segment, place);
        let located =
            prepared.and_then(|()| self.located(segment, known.as_ref().map(|known| (known, in_use)), place));
        let opened = located.and_then(|segment| {
            if known.is_none() {
                self.segments.remove_leftover(&segment, place)?;
            }
            let cuts = known.as_ref().is_some_and(|known| known.size == segment.size);
            let made = self.segments.open(&segment, own, place, !in_use, cuts)?;
            Ok((made, segment.offset.map(|offset| FilePart { file: segment.path, offset })))
        });
        let (made, part) = match opened {
            Ok(opened) => {
                self.out_of_service.remove(&name);
                self.places.retain(|(_, chosen), _| *chosen != name);
                opened
            }
            Err(problem) if in_use || lenient => {
                let why = problem.to_string();
                if self.segments.why_broken(&name) != Some(&why) {
                    error!(segment = %name, "segment out of service: {why}");
                }
                self.segments.open_broken(segment, why);
                // The programs that have the memory of a missing file must end first.
                if !in_use {
                    self.out_of_service.insert(name, (wanted.clone(), runtime.clone(), place.to_owned()));
                }
                (false, known.as_ref().and_then(|known| known.part.clone()))
            }
            Err(problem) => {
                self.places.retain(|(_, chosen), _| *chosen != name);
                return Err(problem.into());
            }
        };
        if !kept.is_empty() {
            self.broker.segment_ends(&name);
            self.run_effects();
            if self.is_unused(&kept) {
                self.renew(declared, &kept);
                return self.declare_segment(declared, runtime, place, lenient);
            }
        }
        let uuid = known.as_ref().map_or_else(|| Hex16(random::bytes()), |known| known.uuid);
        let size = match (&known, in_use) {
            (Some(known), true) => known.size,
            // There is nothing to allocate, and the books of a segment that is far too large are large themselves.
            _ if self.out_of_service.contains_key(&name) => 2 * segment::RESERVED,
            _ => segment.size,
        };
        let (mut memory, mut page) = (segment.memory, segment.page);
        if let Some(known) = &known
            && in_use
            && (known.memory, known.page) != (memory, page)
        {
            // The running VMs have the segment in its old form, so the daemon must continue to describe it to them like that.
            (memory, page) = (known.memory, known.page);
            warn!(segment = %name, memory = memory.word(), page, "{place}: `memory` and `page` stay as they are while programs or VMs use it: stop them all, then restart the daemon");
        }
        let was = known.as_ref().map_or(MemoryFile::Unknown, |known| known.file);
        let file = self.segments.memory_file(&name).unwrap_or(was);
        let new = made
            || known
                .as_ref()
                .is_none_or(|k| (k.memory, k.page, k.size, &k.part) != (memory, page, size, &part));
        let recipients = match &known {
            // An earlier daemon has not noted to whom it gave the memory.
            Some(known) if !made || known.file == file => {
                Some(known.recipients.clone().unwrap_or_else(|| Recipients::all(&segment.access)))
            }
            _ => Some(Recipients::default()),
        };
        let unchanged = known.as_ref().is_some_and(|k| {
            !new && k.members == members
                && k.readers == readers
                && k.runtime == runtime
                && k.own_folder == own_folder
                && k.file == file
                && k.recipients == recipients
        });
        if let Some(known) = &known {
            // The endpoints of members that have no share in the segment any more.
            let strangers: Vec<(u32, u32)> = self
                .broker
                .books()
                .endpoints
                .values()
                .filter(|e| e.segment == known.name)
                // A writer that has become a reader may have channels.
                .filter(|e| {
                    !members.contains(&e.member)
                        || (readers.contains(&e.member) && !known.readers.contains(&e.member))
                })
                .map(|e| (e.number, e.epoch))
                .collect();
            for (endpoint, epoch) in strangers {
                self.broker.endpoint_ends(endpoint, epoch);
            }
        }
        if !unchanged {
            let name = Text(name);
            self.broker.note(Record::Segment {
                name,
                uuid,
                size,
                members,
                readers,
                memory,
                page,
                part,
                own_folder,
                file,
                recipients,
                runtime: runtime.clone(),
            });
        }
        self.allot_vectors(&name)?;
        self.broker.set_access(name, segment.access.clone());
        let generation = self.broker.books().generation;
        self.segments.write_front(Front { name, uuid: uuid.0, size, memory, page, generation }, new);
        if !kept.is_empty() {
            self.withhold(&name, &kept, said.as_deref());
            self.out_of_service.insert(name, (wanted.clone(), runtime, place.to_owned()));
        } else if known.as_ref().is_some_and(|known| known.former.is_some()) {
            self.forget_former(&name);
        }
        if known.is_some_and(|known| known.cut) {
            if !in_use {
                self.broker.note(Record::SegmentCut { name: Text(name), cut: false });
            } else if !self.segments.is_known_broken(&name) {
                error!(segment = %name, "segment broken: its file was truncated while an earlier daemon ran; stop its VMs and programs, then restart the daemon");
                self.segments.was_cut(&name);
                self.tell_cut(&name);
            }
        }
        Ok(())
    }

    /// Returns the segment with its place in the file that it shares with other slices. `known` is the segment in the books, and
    /// whether it is in use.
    fn located(
        &mut self,
        segment: &config::Segment,
        known: Option<(&books::Segment, bool)>,
        place: &str,
    ) -> Result<config::Segment, Problem> {
        let part = known.and_then(|(known, _)| known.part.as_ref());
        match (known, part, &segment.shared_file) {
            // The running VMs have the slice where it was.
            (Some((known, true)), Some(part), _) => {
                if known.size == segment.size {
                    return Ok(segment.at(&part.file, part.offset));
                }
                let what = format!("its size is {} while it is in use", Bytes(known.size));
                Err(Problem::new(
                    place,
                    what,
                    "write that size, or stop all its users, then restart the daemon",
                ))
            }
            (Some((_, true)), None, _) | (_, _, None) => Ok(segment.clone()),
            (Some((known, false)), Some(part), Some(file))
                if part.file == *file && known.size == segment.size =>
            {
                Ok(segment.at(file, part.offset))
            }
            (_, _, Some(file)) => {
                // A place that was chosen earlier, when the file could not grow so far at once.
                if let Some(&(offset, size)) = self.places.get(&(file.clone(), segment.name))
                    && size == segment.size
                {
                    return Ok(segment.at(file, offset));
                }
                let others = self.broker.books().segments.values();
                let others =
                    others.filter(|other| other.part.as_ref().is_some_and(|part| part.file == *file));
                let ends = others.map(|other| other.file_offset().saturating_add(other.size));
                let chosen = self.places.iter().filter(|((other, _), _)| other == file);
                let chosen = chosen.map(|(_, (offset, size))| offset.saturating_add(*size));
                let offset = segments::next_place(file, ends.chain(chosen));
                self.places.insert((file.clone(), segment.name), (offset, segment.size));
                Ok(segment.at(file, offset))
            }
        }
    }

    /// Removes a segment from the books, and leaves its file.
    pub(super) fn end_segment(&mut self, name: &Name) {
        self.out_of_service.remove(name);
        self.places.retain(|(_, chosen), _| chosen != name);
        self.broker.segment_ends(name);
        // The endpoints learn of this through the segment's memory, so it must still be mapped.
        self.run_effects();
        self.hand_on(name);
        let members = self.broker.books().segments.get(name).map(|s| s.members.clone()).unwrap_or_default();
        self.drop_doorbells(name);
        self.broker.note(Record::SegmentRemoved { name: Text(*name) });
        self.segments.forget(name);
        info!(segment = %name, "segment is not declared any more");
        for member in members {
            self.send_segments(member);
        }
    }
}

/// Returns a segment of the journal with its file where an older daemon made it, as long as the file is there: whoever has it stays with
/// it, and the next QEMU finds it under the name that is in its arguments.
fn of_older_daemon(segment: &config::Segment, in_use: bool) -> config::Segment {
    let old = segment.at_old_place();
    if in_use || segments::is_there(&old) { old } else { segment.clone() }
}
