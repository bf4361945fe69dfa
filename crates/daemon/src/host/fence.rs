//! A fence around a VM whose guest hangs: its programs are declared dead, and where the configuration names QEMU's control
//! socket (`qmp`), the VM is stopped before anything of theirs is handed on.
//!
//! Stopping is what cuts a guest off: from QEMU's answer on, none of its processors and none of QEMU's devices writes to
//! memory. Unplugging does not, because a device goes only when the guest lets it go. So the VM is stopped first, then its
//! programs are declared dead, then the devices that can go are asked to, which a guest that hears of it when it goes on
//! does at once. Without an answer in time the programs are declared dead all the same: who waits for their locks
//! must not wait for ever. It stays stopped until somebody lets it go on.

use super::qmp::{Command, Monitor, Said};
use super::record::Record;
use super::server::{Server, Token};
use crate::poller::Interest;
use ginnel_layout::Name;
use serde::Deserialize;
use serde_json::Value;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// How long QEMU may take to stop a VM: it waits for its disks.
const STOP_WITHIN: Duration = Duration::from_secs(5);
/// Where QEMU keeps devices with and without names.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// The only memory device that can go. QEMU keeps virtio-pmem for ever.
const UNPLUGGABLE: &str = "child<ivshmem-plain>";

/// How far the fence around a VM is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fence {
    /// There is none.
    #[default]
    Open,
    /// QEMU is to stop the VM until then.
    Stopping(Instant),
    /// The VM is stopped.
    Shut,
}

impl Server {
    /// Connects to the control socket of a VM's QEMU, if there is one and it is not connected. False if that fails.
    pub(super) fn open_monitor(&mut self, member: u32) -> bool {
        let Some(vm) = self.vms.get_mut(&member) else { return false };
        let (Some(path), None) = (&vm.config.qmp, &vm.monitor) else { return true };
        let qemu = self.broker.books().members.get(&member).and_then(|m| m.qemu.as_ref());
        let Some(qemu) = qemu else { return false };
        let opened = Monitor::open(path, qemu.process.pid).and_then(|monitor| {
            let added = self.poller.add(&monitor, Token::VmMonitor(member).into(), Interest::READ);
            added.map(|()| monitor).map_err(|error| error.to_string())
        });
        match opened {
            Ok(monitor) => {
                vm.monitor = Some(monitor);
                true
            }
            Err(error) => {
                let path = path.display();
                warn!(vm = %vm.config.name, error, "QEMU's control socket {path} cannot be used, so the VM cannot be stopped: start QEMU with what `ginnel qemu-args` prints, and leave that socket to ginneld");
                false
            }
        }
    }

    pub(super) fn close_monitor(&mut self, member: u32) {
        if let Some(monitor) = self.vms.get_mut(&member).and_then(|vm| vm.monitor.take()) {
            self.poller.remove(&monitor);
        }
    }

    /// QEMU says something on its control socket.
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
        info!(vm = %vm.config.name, error, "QEMU's control socket has ended");
        if let Fence::Stopping(_) = vm.fence {
            self.not_stopped(member, error);
        }
    }

    /// A guest hangs, and the configuration wants it fenced.
    pub(super) fn fence(&mut self, member: u32) {
        let tally = self.broker.books().tally_of(member);
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let name = vm.config.name;
        if tally.endpoints == 0 {
            // As in a guest that shuts down. There is nothing to be cut off from.
            info!(vm = %name, "none of its programs is attached");
            return;
        }
        if vm.config.qmp.is_none() {
            warn!(vm = %name, member, "its programs are declared dead; they may store to their segments until they find out");
            self.broker.member_died(member);
            return;
        }
        vm.fence = Fence::Stopping(Instant::now() + STOP_WITHIN);
        if !self.open_monitor(member) {
            self.not_stopped(member, "QEMU's control socket cannot be used");
            return;
        }
        self.command(member, Command::Stop);
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
            Said::Reset => {
                info!(vm = %name, member, "the VM was reset: its programs are dead");
                self.guest_reset(member);
            }
            Said::Resumed if vm.fence == Fence::Shut => {
                info!(vm = %name, member, "the fenced VM goes on");
                vm.fence = Fence::Open;
            }
            Said::Resumed => {}
            Said::Answer(Command::Negotiate, Ok(_)) => debug!(vm = %name, "QEMU's control socket is ready"),
            Said::Answer(Command::Stop, Ok(_)) => {
                warn!(vm = %name, member, "the VM is stopped, and its programs are declared dead: reset it or let it go on by other means");
                vm.fence = Fence::Shut;
                self.broker.member_died(member);
                // The locks go on before anything else is thought of.
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
                info!(vm = %name, file, "its memory device was asked to go, and does when the guest lets it");
            }
            Said::Answer(Command::Unplug { file, .. }, Err(error)) => {
                info!(vm = %name, file, error, "its memory device stays");
            }
            Said::Answer(command, answer) => {
                debug!(vm = %name, ?command, ?answer, "QEMU's answer is of no use");
            }
        }
    }

    /// Whether a file is one of the segments of a member.
    fn has_file(&self, member: u32, file: &str) -> bool {
        let mine = self.broker.books().segments.values().filter(|s| s.members.contains(&member));
        let names: Vec<Name> = mine.map(|s| s.name).collect();
        names.iter().any(|name| self.segments.path(name).is_some_and(|path| path.as_os_str() == file))
    }

    fn not_stopped(&mut self, member: u32, error: &str) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        error!(vm = %vm.config.name, member, error, "the VM cannot be stopped; its programs are declared dead all the same, and may store to their segments until they find out");
        vm.fence = Fence::Open;
        self.broker.member_died(member);
    }

    /// How long it takes until [`Server::give_up_stopping`] has something to do.
    pub(super) fn until_given_up(&self) -> Option<Duration> {
        let deadlines = self.vms.values().filter_map(|vm| match vm.fence {
            Fence::Stopping(deadline) => Some(deadline),
            _ => None,
        });
        deadlines.min().map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits no longer for QEMUs that do not answer.
    pub(super) fn give_up_stopping(&mut self) {
        let now = Instant::now();
        let late = |fence| matches!(fence, Fence::Stopping(deadline) if deadline <= now);
        let late: Vec<u32> = self.vms.iter().filter(|(_, vm)| late(vm.fence)).map(|(n, _)| *n).collect();
        for member in late {
            let monitor = self.vms.get(&member).and_then(|vm| vm.monitor.as_ref());
            if monitor.is_some_and(|monitor| !monitor.is_greeted()) {
                // It would stop the VM when it greets, whenever that is.
                self.close_monitor(member);
            }
            self.not_stopped(member, &format!("QEMU does not answer within {} s", STOP_WITHIN.as_secs()));
        }
    }

    /// The kernel of a guest is no more; its QEMU goes on with another.
    fn guest_reset(&mut self, member: u32) {
        self.guest_gone(member);
        let Some(qemu) = self.broker.books().members.get(&member).and_then(|m| m.qemu.clone()) else {
            return;
        };
        // The session has ended, and no record says only that.
        self.broker.note(Record::Left { member });
        self.broker.note(Record::joined(member, qemu.process, qemu.told));
    }
}

/// The devices of a list that can be unplugged.
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
