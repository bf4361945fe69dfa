//! Fencing of a VM whose guest hangs: its programs are declared dead. If the configuration names QEMU's control socket (`qmp`),
//! the VM is stopped before others get anything that its programs had.
//!
//! Only stopping cuts a guest off: once QEMU has answered, none of the VM's processors and none of QEMU's devices writes to
//! memory. Unplugging does not, because a device is removed only when the guest releases it. So the VM is stopped first, and then
//! its programs are declared dead. Then the devices that can be unplugged are asked to go, and a guest that sees this request
//! when it continues releases them at once. If QEMU does not answer in time, the programs are declared dead all the same, because
//! others that wait for their locks must not wait for ever. The VM stays stopped until an administrator lets it continue.

use super::finder::{Owner, Sought};
use super::qmp::{Command, Monitor, Qemu, Said};
use super::server::Server;
use super::token::Token;
use super::vm::{Fence, Vm};
use crate::closer::Connected;
use crate::packet;
use crate::poller::Interest;
use ginnel_broker::record::Record;
use ginnel_layout::Name;
use serde::Deserialize;
use serde_json::Value;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// The longest time that QEMU may take to stop a VM, which includes waiting for its disks.
const STOP_WITHIN: Duration = Duration::from_secs(5);
/// Why a VM is not stopped whose QEMU cannot be told to.
const UNUSABLE: &str = "QEMU's control socket cannot be used";
/// The folders of QEMU's object model that contain devices with and without names.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// The only kind of memory device that can be unplugged. QEMU never removes a virtio-pmem device.
const UNPLUGGABLE: &str = "child<ivshmem-plain>";

impl Server {
    /// Lets the control socket of a VM's QEMU be connected to, if it has one that is not connected. Waits for nothing:
    /// [`Server::find_monitors`] has the outcome. Returns false if it cannot be connected to.
    pub(super) fn open_monitor(&mut self, member: u32) -> bool {
        let Some(vm) = self.vms.get(&member) else { return false };
        let (Some(path), None) = (&vm.config.qmp, &vm.monitor) else { return true };
        let Some(qemu) = self.qemu_of(member) else { return false };
        // Whoever connected to a former daemon has the user of the process that is there.
        let user = qemu.connection.and_then(|connection| packet::peer(connection).ok()).map(|peer| peer.uid);
        let owner = user.map_or(Owner::Process(qemu.pid), Owner::User);
        match qemu.can_be_told().and_then(|()| Sought::new(path, owner).map_err(|error| error.to_string())) {
            Ok(sought) => {
                self.finders.seek(member, sought);
                true
            }
            Err(error) => {
                tell_unusable(vm, &error);
                false
            }
        }
    }

    /// Returns the QEMU of a VM, if there is one.
    fn qemu_of(&self, member: u32) -> Option<Qemu<'_>> {
        let pid = self.broker.books().members.get(&member)?.qemu.as_ref()?.process.pid;
        let connection = self.vms.get(&member)?.connection.as_ref().map(AsFd::as_fd);
        Some(Qemu { pid, connection })
    }

    /// Takes the connections that finders have made.
    pub(super) fn find_monitors(&mut self) {
        self.finders.step(&self.poller, &self.closer);
        for (member, found) in self.finders.take_found() {
            match found {
                Ok(connection) => self.monitor_found(member, connection),
                Err(error) => self.monitor_not_found(member, &error.to_string(), error.is_tried_again()),
            }
        }
    }

    fn monitor_found(&mut self, member: u32, connection: Connected) {
        let Some(qemu) = self.qemu_of(member) else { return };
        let opened = Monitor::new(connection, qemu).and_then(|monitor| {
            let added = self.poller.add(&monitor, Token::VmMonitor(member).into(), Interest::READ);
            added.map(|()| monitor).map_err(|error| error.to_string())
        });
        let Some(vm) = self.vms.get_mut(&member) else { return };
        match opened {
            Ok(monitor) => {
                vm.monitor = Some(monitor);
                if let Fence::Stopping(_) = vm.fence {
                    self.command(member, Command::Stop);
                }
            }
            Err(error) => self.monitor_not_found(member, &error, false),
        }
    }

    fn monitor_not_found(&mut self, member: u32, error: &str, is_tried_again: bool) {
        let Some(vm) = self.vms.get(&member) else { return };
        tell_unusable(vm, error);
        // Otherwise it may still be found before QEMU's time is over.
        if let (Fence::Stopping(_), false) = (vm.fence, is_tried_again) {
            self.not_stopped(member, UNUSABLE);
        }
    }

    pub(super) fn close_monitor(&mut self, member: u32) {
        self.finders.forget(&self.poller, member);
        if let Some(monitor) = self.vms.get_mut(&member).and_then(|vm| vm.monitor.take()) {
            self.poller.remove(&monitor);
        }
    }

    /// Handles what QEMU says on its control socket.
    pub(super) fn serve_monitor(&mut self, member: u32) {
        let Some(monitor) = self.vms.get_mut(&member).and_then(|vm| vm.monitor.as_mut()) else { return };
        match monitor.hear() {
            Ok(said) => {
                for said in said {
                    self.heard_qemu(member, said);
                }
            }
            Err(error) => self.monitor_lost(member, &error.to_string()),
        }
    }

    fn monitor_lost(&mut self, member: u32, error: &str) {
        self.close_monitor(member);
        let Some(vm) = self.vms.get(&member) else { return };
        info!(vm = %vm.config.name, error, "the connection to QEMU's control socket has ended");
        if let Fence::Stopping(_) = vm.fence {
            self.not_stopped(member, error);
        }
    }

    /// Fences a VM whose guest hangs.
    pub(super) fn fence(&mut self, member: u32) {
        let tally = self.broker.books().tally_of(member);
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let name = vm.config.name;
        if tally.endpoints == 0 {
            // This may be a guest that is shutting down. There is nothing to cut it off from.
            info!(vm = %name, "none of its programs is attached");
            return;
        }
        if vm.config.qmp.is_none() {
            warn!(vm = %name, member, "its programs are declared dead; they may write to their segments until they notice");
            self.broker.member_died(member);
            return;
        }
        vm.fence = Fence::Stopping(Instant::now() + STOP_WITHIN);
        if vm.monitor.is_some() {
            self.command(member, Command::Stop);
        } else if !self.open_monitor(member) {
            self.not_stopped(member, UNUSABLE);
        }
    }

    fn command(&mut self, member: u32, command: Command) {
        let Some(monitor) = self.vms.get_mut(&member).and_then(|vm| vm.monitor.as_mut()) else { return };
        if let Err(error) = monitor.command(command) {
            self.monitor_lost(member, &format!("QEMU does not read: {error}"));
        }
    }

    fn heard_qemu(&mut self, member: u32, said: Said) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let name = vm.config.name;
        match said {
            Said::Reset => vm.resets.report(Instant::now()),
            Said::Resumed if vm.fence == Fence::Shut => {
                info!(vm = %name, member, "the fenced VM continues");
                vm.fence = Fence::Open;
            }
            Said::Resumed => {}
            Said::Answer(Command::Negotiate, Ok(_)) => debug!(vm = %name, "QEMU's control socket is ready"),
            Said::Answer(Command::Stop, Ok(_)) => {
                warn!(vm = %name, member, "the VM is stopped, and its programs are declared dead: reset it, or let it continue by other means");
                vm.fence = Fence::Shut;
                self.broker.member_died(member);
                // The locks are handed on before anything else happens.
                self.run_effects();
                for folder in DEVICES {
                    self.command(member, Command::List(folder));
                }
            }
            Said::Answer(Command::Stop, Err(error)) => self.not_stopped(member, &error),
            Said::Answer(Command::List(folder), Ok(list)) => {
                for device in devices(folder, list) {
                    self.command(member, Command::MemoryOf { device });
                }
            }
            Said::Answer(Command::MemoryOf { device }, Ok(Value::String(memory))) => {
                self.command(member, Command::FileOf { memory, device });
            }
            Said::Answer(Command::FileOf { device, .. }, Ok(Value::String(file))) => {
                if self.has_file(member, &file) {
                    self.command(member, Command::Unplug { device, file });
                }
            }
            Said::Answer(Command::Unplug { file, .. }, Ok(_)) => {
                info!(vm = %name, file, "its memory device is to be unplugged, which happens when the guest releases it");
            }
            Said::Answer(Command::Unplug { file, .. }, Err(error)) => {
                info!(vm = %name, file, error, "its memory device cannot be unplugged");
            }
            Said::Answer(command, answer) => {
                debug!(vm = %name, ?command, ?answer, "QEMU's answer cannot be used");
            }
        }
    }

    /// Returns whether a file is one of the segments of a member.
    fn has_file(&self, member: u32, file: &str) -> bool {
        let mine = self.broker.books().segments.values().filter(|s| s.members.contains(&member));
        let names: Vec<Name> = mine.map(|s| s.name).collect();
        names.iter().any(|name| self.segments.path(name).is_some_and(|path| path.as_os_str() == file))
    }

    fn not_stopped(&mut self, member: u32, error: &str) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        error!(vm = %vm.config.name, member, error, "the VM cannot be stopped; its programs are declared dead all the same, and may write to their segments until they notice");
        vm.fence = Fence::Open;
        self.broker.member_died(member);
    }

    /// Returns the time until [`Server::give_up_stopping`] has something to do.
    pub(super) fn until_given_up(&self) -> Option<Duration> {
        let deadlines = self.vms.values().filter_map(|vm| match vm.fence {
            Fence::Stopping(deadline) => Some(deadline),
            _ => None,
        });
        deadlines.min().map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Stops waiting for QEMUs that do not answer in time.
    pub(super) fn give_up_stopping(&mut self) {
        let now = Instant::now();
        let late = |fence| matches!(fence, Fence::Stopping(deadline) if deadline <= now);
        let late: Vec<u32> = self.vms.iter().filter(|(_, vm)| late(vm.fence)).map(|(n, _)| *n).collect();
        for member in late {
            let monitor = self.vms.get(&member).and_then(|vm| vm.monitor.as_ref());
            if monitor.is_some_and(|monitor| !monitor.is_greeted()) {
                // Otherwise QEMU would stop the VM when it greets, however late that is.
                self.close_monitor(member);
            }
            self.not_stopped(member, &format!("QEMU does not answer within {} s", STOP_WITHIN.as_secs()));
        }
    }

    /// Returns the time until [`Server::handle_resets`] has something to do.
    pub(super) fn until_reset(&self) -> Option<Duration> {
        let due = self.vms.values().filter_map(|vm| vm.resets.due()).min();
        due.map(|due| due.saturating_duration_since(Instant::now()))
    }

    /// Handles the ends of guests' kernels whose QEMUs continue with others.
    pub(super) fn handle_resets(&mut self) {
        if self.vms.values().all(|vm| vm.resets.due().is_none()) {
            return; // This returns without reading the clock, which is slow in many VMs.
        }
        let now = Instant::now();
        let due = self.vms.iter_mut().filter_map(|(member, vm)| vm.resets.take_due(now).then_some(*member));
        for member in due.collect::<Vec<_>>() {
            self.guest_reset(member);
        }
    }

    fn guest_reset(&mut self, member: u32) {
        let Some(vm) = self.vms.get(&member) else { return };
        info!(vm = %vm.config.name, member, "the VM was reset: its programs are dead");
        self.guest_gone(member);
        let known = self.broker.books().members.get(&member).filter(|known| known.session.is_some());
        let Some(qemu) = known.and_then(|known| known.qemu.clone()) else { return };
        // The session has ended, and there is no record for that alone.
        self.broker.note(Record::Left { member });
        self.broker.note(Record::joined(member, qemu.process, qemu.told));
    }
}

fn tell_unusable(vm: &Vm, error: &str) {
    let path = vm.config.qmp.as_deref().unwrap_or(Path::new("")).display();
    warn!(vm = %vm.config.name, error, "QEMU's control socket {path} cannot be used, so the VM cannot be stopped: start QEMU with what `ginnel qemu-args` prints, and leave that socket to ginneld");
}

/// Returns the devices of a list that can be unplugged.
fn devices(folder: &str, list: Value) -> Vec<String> {
    #[derive(Deserialize)]
    struct Entry {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let list: Vec<Entry> = serde_json::from_value(list).unwrap_or_default();
    let devices = list.iter().filter(|entry| entry.kind == UNPLUGGABLE);
    devices.map(|entry| format!("{folder}/{}", entry.name)).collect()
}
