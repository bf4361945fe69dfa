//! What another configuration changes while the daemon serves (SIGHUP).
//!
//! A setting is obeyed at once if nobody can have relied on the old one. Otherwise it stays as it is, and the log says why. Nothing is ever
//! taken from somebody who uses it.

use super::config::{self, Config};
use super::server::Server;
use crate::logging;
use anyhow::Context;
use ginnel_broker::limits::MAX_SEGMENTS_PER_MEMBER;
use ginnel_broker::memory::MemoryFile;
use ginnel_config::Bytes;
use ginnel_layout::{HOST_MEMBER, Name};
use sd_notify::NotifyState;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;
use std::time::Instant;
use tracing::{error, info, warn};

const RESTART: &str = "it changes when the daemon is restarted";

/// What was reloaded and what was not, as numbers of lines in the log.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    done: usize,
    left: usize,
}

impl Outcome {
    pub fn done(&mut self, what: impl Display) {
        self.done += 1;
        info!("reloaded: {what}");
    }

    pub fn left(&mut self, what: impl Display, why: impl Display) {
        self.left += 1;
        warn!("not reloaded: {what}: {why}");
    }
}

impl Server {
    /// Begins to read the configuration again.
    pub(super) fn reread(&mut self) {
        if !self.rereading.may_begin() {
            return;
        }
        info!(config = %self.config.file.display(), "SIGHUP: the configuration is read again");
        let now = NotifyState::monotonic_usec_now().ok();
        let states: Vec<_> = [NotifyState::Reloading].into_iter().chain(now).collect();
        let _ = sd_notify::notify(false, &states);
        if let Err(error) = self.rereading.begin(self.config.file.clone()) {
            error!(%error, "no thread can be started to read the configuration: nothing was reloaded; reload again");
            self.tell_reloaded("serving");
        }
    }

    /// Obeys the configuration that has been read.
    pub(super) fn reread_done(&mut self) {
        self.rereading.hear();
        while let Some(read) = self.rereading.take() {
            match read {
                Ok(chosen) => {
                    let status = self.reload(chosen.config);
                    self.tell_reloaded(&status);
                }
                Err(problems) => {
                    for problem in &problems {
                        error!("{problem}; nothing was reloaded");
                    }
                    let mistake = problems.first().map(ToString::to_string).unwrap_or_default();
                    self.tell_reloaded(&mistake);
                    self.config.mistake = Some(mistake);
                }
            }
            if self.rereading.take_again() {
                self.reread();
            }
        }
    }

    fn tell_reloaded(&self, status: &str) {
        let _ = sd_notify::notify(false, &[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// Obeys another configuration as far as that is possible now. Returns a status for the service manager.
    pub(super) fn reload(&mut self, new: Config) -> String {
        self.config.mistake = None;
        let mut outcome = Outcome::default();
        if !self.journal.takes() {
            outcome.left(
                "anything",
                "the journal cannot record it; make room in daemon.state_dir, then reload again",
            );
        } else if !self.moves(&new, &mut outcome) {
            self.reload_settings(&new, &mut outcome);
            // Removed first, so that what they had is free; then VMs, because segments name them.
            self.remove_segments(&new, &mut outcome);
            self.reload_vms(&new, &mut outcome);
            self.reload_segments(&new, &mut outcome);
            self.run_effects();
        }
        match outcome {
            Outcome { done: 0, left: 0 } => {
                info!("the configuration was read again, and nothing has changed");
                "serving".to_owned()
            }
            Outcome { done, left } => {
                info!(reloaded = done, not_reloaded = left, "the configuration was read again");
                match left {
                    0 => "serving".to_owned(),
                    left => {
                        format!("serving; {left} changes of the configuration are not in effect, see the log")
                    }
                }
            }
        }
    }

    /// Returns whether the folders would be others. Everything else depends on them.
    fn moves(&self, new: &Config, outcome: &mut Outcome) -> bool {
        let old = &self.config;
        let all: [(&str, &Path, &Path); 3] = [
            ("daemon.runtime_dir", &old.runtime_dir, &new.runtime_dir),
            ("daemon.state_dir", &old.state_dir, &new.state_dir),
            ("daemon.shm_dir", &old.shm_dir, &new.shm_dir),
        ];
        let moved = all.iter().filter(|(_, old, new)| old != new);
        let moved: Vec<_> = moved.map(|(key, old, _)| (*key, old.display().to_string())).collect();
        for (key, old) in &moved {
            let why = format!(
                "the daemon is in {old}; {RESTART}, and so does everything else in the file, which depends on it"
            );
            outcome.left(key, why);
        }
        !moved.is_empty()
    }

    /// Obeys the settings of the daemon itself.
    fn reload_settings(&mut self, new: &Config, outcome: &mut Outcome) {
        let old = &mut self.config;
        for (key, changed) in [
            ("daemon.socket_mode", old.socket_mode != new.socket_mode),
            ("daemon.socket_group", old.socket_group != new.socket_group),
            ("daemon.log_format", old.log_format != new.log_format),
        ] {
            if changed {
                outcome.left(key, RESTART);
            }
        }
        if old.vectors != new.vectors {
            let why = format!("{} stay: stop all VMs, then restart the daemon", old.vectors);
            outcome.left("daemon.vectors", why);
        }
        if old.log != new.log {
            match logging::set_level(&new.log) {
                true => outcome.done(format!("daemon.log is {}", new.log)),
                false => outcome.left("daemon.log", "the variable GINNEL_LOG says what is logged"),
            }
            old.log.clone_from(&new.log);
        }
        if old.admin_group != new.admin_group {
            old.admin_group = new.admin_group;
            outcome.done("daemon.admin_group");
        }
        if old.qemu != new.qemu {
            old.qemu.clone_from(&new.qemu);
            outcome.done("host.qemu");
        }
        if old.sockets != new.sockets {
            old.sockets = new.sockets.clone();
            self.broker.set_sockets(new.sockets.enabled);
            outcome.done("sockets");
        }
        if self.config.limits != new.limits {
            self.config.limits = new.limits;
            self.broker.set_all_limits(new.limits);
            self.reload_limits_of_runtime();
            outcome.done("limits; what somebody has beyond a lower limit stays");
        }
    }

    /// Gives VMs that were declared at run time the limits that follow from those of the file.
    fn reload_limits_of_runtime(&mut self) {
        for (number, vm) in &mut self.vms {
            let member = self.broker.books().members.get(number);
            let Some(spec) = member.and_then(|member| member.runtime.as_ref()) else { continue };
            if let Ok(limits) = self.config.limits.member.with(&spec.limits, "a VM") {
                vm.config.limits = limits;
                self.broker.set_limits(*number, limits);
            }
        }
    }

    fn reload_vms(&mut self, new: &Config, outcome: &mut Outcome) {
        let gone: Vec<Name> =
            self.config.vms.keys().filter(|name| !new.vms.contains_key(*name)).copied().collect();
        for name in gone {
            match self.why_stays(&name) {
                Some(why) => outcome.left(format!("vm.{name}, which is to go"), why),
                None => {
                    self.config.vms.remove(&name);
                    if let Some(number) = self.number_of(&name) {
                        self.retire_vm(number);
                    }
                    outcome.done(format!("vm.{name} is not declared any more"));
                }
            }
        }
        let taken: BTreeSet<u32> = new.vms.values().filter_map(|vm| vm.number).collect();
        // VMs with a configured number come first, so that no other VM gets it.
        let mut vms: Vec<&config::Vm> = new.vms.values().collect();
        vms.sort_by_key(|vm| vm.number.is_none());
        for vm in vms {
            let known = self.config.vms.get(&vm.name).cloned();
            match (known, self.number_of(&vm.name)) {
                (Some(old), Some(number)) if old != *vm => self.change_vm(&old, vm, number, outcome),
                (Some(_), Some(_)) => {}
                (None, Some(_)) => outcome.left(format!("vm.{}", vm.name), DECLARED_AT_RUN_TIME),
                (_, None) => self.add_vm(vm, &taken, outcome),
            }
        }
    }

    /// Returns the number of a VM that is declared.
    fn number_of(&self, name: &Name) -> Option<u32> {
        self.broker.books().member_named(name).filter(|member| !member.retired).map(|member| member.number)
    }

    /// Returns why a VM cannot be removed now.
    fn why_stays(&self, name: &Name) -> Option<String> {
        let books = self.broker.books();
        let member = self.number_of(name).and_then(|number| books.members.get(&number))?;
        if let Some(qemu) = &member.qemu {
            return Some(format!(
                "it runs (QEMU is process {}); stop it, then reload again",
                qemu.process.pid
            ));
        }
        let segment = books.segments.values().find(|segment| segment.members.contains(&member.number))?;
        Some(format!("it is a member of segment {}; that must go first", segment.name))
    }

    fn add_vm(&mut self, vm: &config::Vm, taken: &BTreeSet<u32>, outcome: &mut Outcome) {
        let (what, place) = (format!("vm.{}", vm.name), self.place_of("vm", &vm.name));
        let number = match self.choose_number(vm, taken, &place) {
            Ok(number) => number,
            Err(problem) => return outcome.left(what, problem),
        };
        match self.declare_vm(vm, number, None, &place, true) {
            Ok(()) => {
                self.config.vms.insert(vm.name, vm.clone());
                outcome.done(what);
            }
            Err(error) => {
                self.retire_vm(number);
                outcome.left(what, format!("{error:#}"));
            }
        }
    }

    fn change_vm(&mut self, old: &config::Vm, new: &config::Vm, number: u32, outcome: &mut Outcome) {
        let what = |key: &str| format!("vm.{}.{key}", new.name);
        let mut new = new.clone();
        if new.number.is_some_and(|new| new != number) {
            outcome.left(what("number"), format!("it is {number}; stop the VM, then restart the daemon"));
            new.number = old.number;
        }
        if old.limits != new.limits {
            self.broker.set_limits(number, new.limits);
            outcome.done(what("limits"));
        }
        if (old.hang_after, old.on_hang) != (new.hang_after, new.on_hang) {
            outcome.done(what("hang_after and on_hang"));
        }
        let Some(vm) = self.vms.get_mut(&number) else { return };
        vm.config = new.clone();
        self.config.vms.insert(new.name, new.clone());
        if old.qmp != new.qmp {
            self.close_monitor(number);
            self.open_monitor(number);
            outcome.done(what("qmp"));
        }
        let access = |vm: &config::Vm| (vm.user, vm.group, vm.socket_mode);
        if access(old) != access(&new) {
            self.listen_again(number);
            outcome.done(what("user, group and socket_mode"));
        }
    }

    /// Removes segments that nobody uses.
    fn remove_segments(&mut self, new: &Config, outcome: &mut Outcome) {
        let gone = self.config.segments.keys().filter(|name| !new.segments.contains_key(*name));
        for name in gone.copied().collect::<Vec<_>>() {
            if let Some(why) = self.why_used(&name) {
                outcome.left(format!("segment.{name}, which is to go"), why);
                continue;
            }
            self.config.segments.remove(&name);
            if self.broker.books().segments.contains_key(&name) {
                self.end_segment(&name);
            }
            outcome.done(format!("segment.{name} is not declared any more; its file stays where it is"));
        }
    }

    /// Returns why a segment cannot be removed now.
    fn why_used(&self, name: &Name) -> Option<String> {
        if self.pending_segments.contains(name) {
            return Some(BEING_MADE.to_owned());
        }
        let books = self.broker.books();
        let segment = books.segments.get(name)?;
        let running = |number: &u32| books.members.get(number).is_some_and(|member| member.qemu.is_some());
        if let Some(vm) = segment.members.iter().find(|number| running(number)) {
            let vm = books.members.get(vm).map_or(String::new(), |member| member.name.to_string());
            return Some(format!("VM {vm} runs and may have it as a device; stop it, then reload again"));
        }
        let programs = books.index.of_segment(name).count();
        (programs > 0).then(|| format!("{programs} programs are attached; end them, then reload again"))
    }

    fn reload_segments(&mut self, new: &Config, outcome: &mut Outcome) {
        for segment in new.segments.values() {
            let known = self.broker.books().segments.contains_key(&segment.name);
            match self.config.segments.get(&segment.name).cloned() {
                Some(old) if known && old != *segment => self.change_segment(&old, segment, outcome),
                Some(_) if known || self.pending_segments.contains(&segment.name) => {}
                None if known => outcome.left(format!("segment.{}", segment.name), DECLARED_AT_RUN_TIME),
                _ => self.add_segment(segment, outcome),
            }
        }
    }

    fn add_segment(&mut self, segment: &config::Segment, outcome: &mut Outcome) {
        let what = format!("segment.{}", segment.name);
        if self.pending_segments.contains(&segment.name) {
            return outcome.left(what, BEING_MADE);
        }
        if segment.shared_file.is_some() {
            return outcome.left(what, "slices that share a file are added when the daemon is restarted");
        }
        if let Err(why) = self.room_for(segment, &BTreeSet::new()) {
            return outcome.left(what, why);
        }
        match self.make_segment(segment) {
            Ok(()) => {
                self.config.segments.insert(segment.name, segment.clone());
                outcome.done(what);
            }
            Err(why) => outcome.left(what, why),
        }
    }

    /// Checks that the members of a segment exist, and that those that are not `old` members may have one more.
    fn room_for(&self, segment: &config::Segment, old: &BTreeSet<u32>) -> Result<(), String> {
        for name in segment.sharers() {
            let Some(number) = self.number_of(name) else { return Err(format!("there is no VM {name}")) };
            let segments = self.broker.books().segments.values();
            let n = segments.filter(|segment| segment.members.contains(&number)).count();
            if number != HOST_MEMBER && !old.contains(&number) && n >= MAX_SEGMENTS_PER_MEMBER {
                return Err(format!(
                    "VM {name} has {n} segments, which is the limit; share fewer and larger ones"
                ));
            }
        }
        Ok(())
    }

    fn change_segment(&mut self, old: &config::Segment, new: &config::Segment, outcome: &mut Outcome) {
        let what = format!("segment.{}", new.name);
        let goes = |name: &&Name| !new.sharers().any(|new| new == *name);
        let lost = old.members.difference(&new.members).chain(old.readers.iter().filter(goes)).next();
        let known = self.broker.books().segments.get(&new.name);
        let had_memory = known.is_some_and(|known| known.file != MemoryFile::Unknown);
        if let Some(lost) = lost.filter(|_| had_memory) {
            let why = format!(
                "{lost} is to lose rights, and who has the segment's memory keeps it for as long as it runs, \
                 so this is not done while the daemon serves; stop {lost}, then restart the daemon"
            );
            return outcome.left(what, why);
        }
        // Nobody uses it, so anything else may change.
        if self.out_of_service.contains_key(&new.name) {
            let place = self.place_of("segment", &new.name);
            self.out_of_service.insert(new.name, (new.clone(), None, place));
            self.retry_at = Instant::now();
            self.config.segments.insert(new.name, new.clone());
            return outcome.done(format!("{what}, which is out of service and is tried again"));
        }
        let fixed = fixed(old, new);
        if !fixed.is_empty() {
            return outcome
                .left(what, format!("{}: stop all its users, then restart the daemon", fixed.join(", ")));
        }
        if let Some(writer) = old.readers.intersection(&new.members).next() {
            let why = format!("{writer} may write from now on; restart the daemon, and then {writer}");
            return outcome.left(what, why);
        }
        let known = self.broker.books().segments.get(&new.name).map(|known| known.members.clone());
        if let Err(why) = self.room_for(new, &known.unwrap_or_default()) {
            return outcome.left(what, why);
        }
        if old.access != new.access && self.change_access(new, outcome) {
            return;
        }
        let joining = new.sharers().filter(|name| !old.sharers().any(|old| old == *name));
        let joining: Vec<&str> = joining.map(Name::as_str).collect();
        self.config.segments.insert(new.name, new.clone());
        if joining.is_empty() {
            return;
        }
        match self.share(new) {
            Ok(()) => {
                let joining = joining.join(", ");
                outcome.done(format!(
                    "{what}: {joining} may use it; a VM needs the device too (ginnel qemu-args)"
                ));
            }
            Err(error) => outcome.left(what, format!("{error:#}")),
        }
    }

    /// Sets who may attach to a segment. Returns true if it is declared anew, because nobody uses it, and users who may not attach any more
    /// were given its memory.
    fn change_access(&mut self, new: &config::Segment, outcome: &mut Outcome) -> bool {
        let what = format!("segment.{}", new.name);
        let known = self.broker.books().segments.get(&new.name);
        let members = known.map(|known| known.members.clone()).unwrap_or_default();
        let is_slice = known.is_some_and(|known| known.part.is_some());
        let kept = self.kept(new, &members);
        if kept.is_empty() || is_slice || !self.is_unused(&kept) {
            self.broker.set_access(new.name, new.access.clone());
            outcome.done(format!("{what}: who may attach; programs that are attached stay"));
            if !kept.is_empty() {
                let why = "programs may still have it, and see what the others write until the daemon is restarted. Then the segment is \
                           out of service until nobody has its file, and what is kept in it ends: stop these programs and the segment's \
                           VMs, and restart the daemon";
                outcome.left(format!("{what}, of which {} was given the memory", kept.names_of_users()), why);
            }
            return false;
        }
        self.renew(new, &kept);
        self.config.segments.insert(new.name, new.clone());
        match self.make_segment(new) {
            Ok(()) => outcome.done(format!(
                "{what}: who may attach; {} had its memory, and nobody uses it, so it gets a new file",
                kept.names_of_users()
            )),
            Err(why) => outcome.left(what, format!("{why:#}; reload again")),
        }
        true
    }

    /// Makes the socket for the QEMU of a VM anew, because others may connect to it now. A QEMU that is connected stays.
    fn listen_again(&mut self, number: u32) {
        let Some(vm) = self.vms.get_mut(&number) else { return };
        if let Some(listener) = vm.take_listener() {
            self.poller.remove(&listener);
        }
        // The next attempt makes it.
        self.retry_at = Instant::now();
    }

    /// Gives members of the configuration that a segment did not have a share in it. Those that it had stay as they are.
    fn share(&mut self, segment: &config::Segment) -> anyhow::Result<()> {
        let books = self.broker.books();
        let known = books.segments.get(&segment.name).context("it is not there")?.clone();
        let (mut members, mut readers) = (known.members.clone(), known.readers.clone());
        for name in segment.sharers() {
            let member = books.member_named(name).filter(|member| !member.retired);
            let number = member.with_context(|| format!("there is no VM {name}"))?.number;
            if members.insert(number) && segment.readers.contains(name) {
                readers.insert(number);
            }
        }
        self.broker.note(known.with_members(members.clone(), readers));
        for member in members.difference(&known.members) {
            self.allot_vectors_of(&segment.name, *member)?;
        }
        self.tell_members(&segment.name);
        Ok(())
    }

    /// Returns where in the configuration something is declared.
    pub(super) fn place_of(&self, kind: &str, name: &Name) -> String {
        format!("{}: {kind}.{name}", self.config.file.display())
    }
}

const BEING_MADE: &str = "its file is being made; reload again when that is done";
const DECLARED_AT_RUN_TIME: &str =
    "it was declared at run time; the file takes precedence when the daemon is restarted";

/// Returns what differs between two declarations of a segment and cannot change while it may be in use.
fn fixed(old: &config::Segment, new: &config::Segment) -> Vec<String> {
    let size = (old.size != new.size).then(|| format!("its size is {}", Bytes(old.size)));
    let differing = [
        ("memory", old.memory != new.memory),
        ("page", old.page != new.page),
        ("backing", old.path != new.path || old.folder != new.folder),
        ("slice_files", old.slice_files != new.slice_files || old.shared_file != new.shared_file),
        ("owner", old.owner != new.owner),
        ("group", old.group != new.group),
        ("mode", old.mode != new.mode),
        ("verbs", old.access.verbs != new.access.verbs),
    ];
    let differing = differing.into_iter().filter(|(_, differs)| *differs);
    size.into_iter().chain(differing.map(|(key, _)| format!("its {key} is another one"))).collect()
}
