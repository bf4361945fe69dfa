//! Guests that hang: QEMU runs, but the guest's daemon does not answer.
//!
//! A VM that is paused, or that a debugger has stopped, looks the same, so the daemon does nothing unless the configuration asks
//! for it. A guest that shuts down or reboots is silent too; but then it has no endpoints, or QEMU has reported the reset.

use super::pulse::Pulse;
use super::server::Server;
use super::vm::{Fence, Vm};
use ginnel_broker::declared::OnHang;
use ginnel_layout::relay::RelayKind;
use std::time::Duration;
use tracing::{info, warn};

impl Server {
    /// Notes that a guest's daemon has sent something.
    pub(super) fn heard_of(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        if vm.fence == Fence::Shut && vm.monitor.is_none() {
            vm.fence = Fence::Open; // No QEMU will report that the VM continues.
        }
        if std::mem::replace(&mut vm.pulse, Pulse::new()).hangs {
            info!(vm = %vm.config.name, member, "the VM's daemon answers again");
        }
    }

    /// Returns the time until [`Server::beat`] has something to do.
    pub(super) fn until_beat(&self) -> Option<Duration> {
        let waits = self.waited_for().map(|(_, vm, after)| vm.pulse.until_due(after));
        waits.min()
    }

    /// Returns the VMs whose daemon should send something, and how long each may be silent. This includes VMs from which
    /// only an earlier daemon of the host has received something.
    fn waited_for(&self) -> impl Iterator<Item = (u32, &Vm, Duration)> {
        let members = &self.broker.books().members;
        self.vms.iter().filter_map(move |(number, vm)| {
            let known = members.get(number).is_some_and(|m| m.session.is_some());
            (known && !vm.pulse.hangs).then_some((*number, vm, vm.config.hang_after?))
        })
    }

    /// Asks guests that have been silent, and does what the configuration says about those that do not answer.
    pub(super) fn beat(&mut self) {
        let silent = self.waited_for().filter(|(_, vm, after)| vm.pulse.is_weak(*after));
        let silent = silent.map(|(member, vm, after)| (member, vm.pulse.silence() >= after));
        for (member, hangs) in silent.collect::<Vec<_>>() {
            if hangs {
                self.hangs(member);
            } else if let Some(vm) = self.vms.get_mut(&member)
                && vm.pulse.ask()
            {
                self.send_relay(member, RelayKind::PING, 0, Vec::new());
                self.ring_daemon(member);
            }
        }
    }

    fn hangs(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        vm.pulse.hangs = true;
        let (name, silence) = (vm.config.name, vm.pulse.silence().as_secs());
        match vm.config.on_hang {
            OnHang::Nothing => {}
            OnHang::Warn => warn!(vm = %name, member, silence, "the VM hangs: its daemon does not answer"),
            OnHang::Fence => {
                warn!(vm = %name, member, silence, "the VM hangs: its daemon does not answer; it is fenced");
                self.fence(member);
            }
        }
    }
}
