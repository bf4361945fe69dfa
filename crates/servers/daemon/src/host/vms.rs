//! VMs: the connection to their QEMU, the control link to their daemon, and the programs for which that daemon speaks.

use super::ivshmem::{self, Connection, Heard};
use super::pulse::Pulse;
use super::server::Server;
use super::token::Token;
use super::vm::Fence;
use crate::control_link::{Event, PeerInfo, SendRefused};
use crate::poller::{Interest, Ready};
use crate::watches::ROOT;
use crate::{packet, pidwatch};
use ginnel_broker::broker::ClientId;
use ginnel_broker::process::Process;
use ginnel_broker::programs::{Message, NotOpen};
use ginnel_broker::record::Record;
use ginnel_broker::reply::{self, Refusal};
use ginnel_broker::text::Hex16;
use ginnel_broker::vectors::Told;
use ginnel_layout::control::{ControlHeader, DAEMON_VECTOR};
use ginnel_layout::relay::{self, MappingKind, RelayKind};
use ginnel_layout::wire::{self, ErrorCode};
use ginnel_shmem::SharedMemory;
use rustix::process::geteuid;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};
use zerocopy::{FromBytes, IntoBytes};

/// How often the fronts of a VM's segments may be checked because the VM reports a segment as missing.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The messages of one guest that are handled before others get their turn.
const TURN: usize = 64;
/// The pages of the daemon's state that one guest is sent before others get their turn.
const PAGES: usize = 4;

impl Server {
    /// Handles a new connection to a VM's socket.
    pub(super) fn accept_vm(&mut self, member: u32) {
        let Some(vm) = self.vms.get(&member) else { return };
        let Some(listener) = &vm.listener else { return };
        let fd = match packet::accept(listener.as_fd()) {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(errno) => {
                let whose = format!("the QEMU of VM {}", vm.config.name);
                return self.pause(Token::VmListener(member), &whose, errno);
            }
        };
        let Ok(peer) = packet::peer(fd.as_fd()) else { return self.closer.close(fd) };
        if peer.uid == geteuid().as_raw() && self.finders.has(peer.pid) {
            // Another VM's QEMU has put a symbolic link to this socket where its own control socket is sought.
            return self.closer.close(fd);
        }
        pidwatch::look_for(peer.uid);
        let process =
            pidwatch::connected(fd.as_fd(), peer.pid).unwrap_or(Process { pid: peer.pid, started: 0 });
        pidwatch::look_for(ROOT);
        let name = vm.config.name;
        if let Some(qemu) = self.broker.books().members.get(&member).and_then(|m| m.qemu.as_ref()) {
            let old = qemu.process;
            if pidwatch::is_alive(&old) || (old.pid == 0 && vm.is_connected()) {
                if old == process {
                    self.closer.close(fd);
                    // In the middle of a session, QEMU would misunderstand the greeting.
                    warn!(vm = %name, pid = process.pid, "QEMU connects a second time and is refused: leave out reconnect= on its ivshmem chardev");
                } else {
                    warn!(vm = %name, pid = process.pid, other = old.pid, "a second QEMU is refused: this VM runs already");
                    let mut connection = Connection::new(fd, &self.closer);
                    connection.say([ivshmem::refusal()]);
                    let _ = connection.flush(); // This is eight bytes, into an empty socket.
                }
                return;
            }
            self.vm_gone(member);
        }
        if process.pid == 0 {
            warn!(vm = %name, "this QEMU is in a process namespace that is not visible from here: after a restart of the daemon its end is not noticed");
        }
        if !self.journal.takes() {
            // A successor would believe that the VM does not run, and that its memory is free.
            error!(vm = %name, pid = process.pid, "its QEMU is refused, because the journal cannot record that it runs; make room in daemon.state_dir and start the VM again");
            let mut connection = Connection::new(fd, &self.closer);
            connection.say([ivshmem::refusal()]);
            let _ = connection.flush();
            return;
        }
        // The guest's kernel is going to read them.
        self.check_fronts(Some(member));
        let Some(own) = self.members.get(member) else { return self.closer.close(fd) };
        let mut connection = Connection::new(fd, &self.closer);
        connection.say(ivshmem::greeting(member, own));
        if let Err(error) = self.poller.add(&connection, Token::VmConnection(member).into(), Interest::READ) {
            warn!(vm = %name, %error, "its QEMU cannot be watched");
            return;
        }
        info!(vm = %name, member, pid = process.pid, "VM joined");
        self.broker.note(Record::joined(member, process, Told::new()));
        if let Some(vm) = self.vms.get_mut(&member) {
            (vm.connection, vm.telling) = (Some(connection), None);
        }
        // The record must be in the journal before QEMU has any of its messages, so that a running VM is known to run.
        self.run_effects();
        self.flush_vm(member);
        self.tell_doorbells(member);
        self.open_monitor(member);
    }

    /// Handles events on the connection to a QEMU.
    pub(super) fn serve_vm(&mut self, member: u32, ready: Ready) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let Some(connection) = &mut vm.connection else { return };
        if ready.hung_up {
            return self.vm_gone(member);
        }
        if ready.readable {
            match connection.hear() {
                Heard::Nothing => {}
                Heard::Noise => {
                    warn!(vm = %vm.config.name, "its QEMU sends something, which no QEMU does; it is ignored");
                    return self.flush_vm(member);
                }
                Heard::End => return self.vm_gone(member),
            }
        }
        if ready.writable {
            self.flush_vm(member);
        }
    }

    pub(super) fn flush_vm(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let Some(connection) = &mut vm.connection else { return };
        match connection.flush() {
            Ok(blocked) => {
                let interest = Interest { read: !connection.talks(), write: blocked };
                if let Err(error) =
                    self.poller.modify(&*connection, Token::VmConnection(member).into(), interest)
                {
                    warn!(vm = %vm.config.name, %error, "its QEMU cannot be watched");
                }
                if !blocked {
                    self.told(member);
                }
            }
            Err(error) => {
                warn!(vm = %vm.config.name, %error, "its QEMU cannot be told of doorbells");
                self.vm_gone(member);
            }
        }
    }

    /// Handles the end of a VM's QEMU: all endpoints of the VM are dead.
    pub(super) fn vm_gone(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        info!(vm = %vm.config.name, member, "VM gone");
        if let Some(connection) = vm.connection.take() {
            self.poller.remove(&connection);
        }
        vm.fence = Fence::default();
        vm.resets.forget();
        vm.telling = None;
        if let Some(process) = vm.watched.take() {
            self.unwatch_qemu(member, &process);
        }
        self.close_monitor(member);
        self.guest_gone(member);
        // Perhaps nobody has the old file of a segment any more.
        self.retry_at = Instant::now();
        if self.broker.books().members.get(&member).is_some_and(|m| m.qemu.is_some() || m.session.is_some()) {
            self.broker.note(Record::Left { member });
        }
    }

    /// Handles the end of a guest's kernel: all endpoints of the VM are dead, and its session is over.
    pub(super) fn guest_gone(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        // Nobody uses this memory any more. The next guest must not find an old session in it.
        vm.memory.write(0, &[0; size_of::<ControlHeader>()]);
        vm.restart_link(member);
        vm.mapped.clear();
        self.programs.guest_ended(&mut self.broker, member);
    }

    /// Finds out, after a restart of the daemon, whether the QEMU that was there before is still running.
    pub(super) fn resume_vm(&mut self, member: u32) {
        let Some(qemu) = self.broker.books().members.get(&member).and_then(|m| m.qemu.clone()) else {
            return;
        };
        if qemu.process.pid == 0 {
            return;
        }
        match self.watch_qemu(member, qemu.process) {
            Ok(false) => self.vm_gone(member),
            watched => {
                match watched {
                    Ok(_) => {
                        if let Some(vm) = self.vms.get_mut(&member) {
                            vm.watched = Some(qemu.process);
                        }
                    }
                    Err(error) => warn!(member, %error, "a QEMU cannot be watched: raise LimitNOFILE="),
                }
                self.open_monitor(member);
            }
        }
    }

    /// Tells running VMs that a member has gone.
    pub(super) fn farewell(&mut self, gone: u32) {
        let members: Vec<u32> = self.vms.keys().copied().collect();
        for member in members {
            let Some(mut qemu) = self.broker.books().members.get(&member).and_then(|m| m.qemu.clone()) else {
                continue;
            };
            if let Some(telling) = self.vms.get_mut(&member).and_then(|vm| vm.telling.as_mut()) {
                telling.remove(&gone);
            }
            if qemu.told.remove(&gone).is_none() {
                continue;
            }
            self.broker.note(Record::joined(member, qemu.process, qemu.told));
            if let Some(connection) = self.vms.get_mut(&member).and_then(|vm| vm.connection.as_mut()) {
                connection.say([ivshmem::left(gone)]);
                self.flush_vm(member);
            }
        }
    }

    /// Handles a ring of the host's daemon vector. Nobody reads that: QEMUs hold it too, and could make a read block.
    pub(super) fn host_rung(&mut self) {
        self.broker.relay_rings();
        self.step_links();
    }

    /// Handles the messages on all links. Sets `more` if there are more messages than one call handles.
    pub(super) fn step_links(&mut self) {
        self.more = false;
        let members: Vec<u32> = self.vms.keys().copied().collect();
        for member in members {
            self.step_link(member);
            self.run_effects();
        }
    }

    fn step_link(&mut self, member: u32) {
        for turn in 0.. {
            self.flush_link(member);
            if turn == 0 {
                self.send_pages(member);
            }
            let Some(vm) = self.vms.get_mut(&member) else { return };
            if turn == TURN {
                self.more = true;
                break;
            }
            match vm.link.step() {
                Event::Idle => break,
                Event::Up(guest) => self.session_up(member, guest),
                Event::Down => self.session_down(member),
                Event::Message { kind, client, body } => {
                    self.heard_of(member);
                    self.relay_message(member, kind, client, &body);
                    // Its effects are performed before the next message is handled, so that answers keep their order.
                    self.run_effects();
                }
            }
        }
        self.ring_daemon(member);
    }

    pub(super) fn ring_daemon(&mut self, member: u32) {
        if self.vms.get_mut(&member).is_some_and(|vm| vm.link.take_ring()) {
            self.members.ring(member, DAEMON_VECTOR);
        }
    }

    fn session_up(&mut self, member: u32, guest: PeerInfo) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        (vm.up, vm.pulse) = (true, Pulse::new());
        info!(vm = %vm.config.name, member, interrupts = guest.interrupts, "the VM's daemon is there");
        self.open_monitor(member);
        self.broker.session_begins(member, Hex16(guest.boot_id), guest.interrupts);
        self.run_effects();
        // The guest's kernel has read them; it reads them again when it reboots.
        self.check_fronts(Some(member));
        self.send_segments(member);
        let mut all = Vec::new();
        let books = self.broker.books();
        let endpoints = books.index.of_member(member).filter_map(|number| books.endpoints.get(&number));
        for endpoint in endpoints.filter(|e| !e.is_ending) {
            let (number, epoch) = (endpoint.number, endpoint.epoch);
            for &Process { pid, started } in &endpoint.owners {
                let entry = relay::Endpoint { endpoint: number, epoch, pid, reserved: 0, started };
                all.extend_from_slice(entry.as_bytes());
            }
        }
        let most = wire::MAX_PACKET / size_of::<relay::Endpoint>() * size_of::<relay::Endpoint>();
        // At least one message is sent, even if there are no segments, because it also says that.
        let mut rest = all.as_slice();
        loop {
            let (now, later) = rest.split_at(rest.len().min(most));
            self.send_relay(member, RelayKind::ENDPOINTS, 0, now.to_vec());
            if later.is_empty() {
                return;
            }
            rest = later;
        }
    }

    /// Tells a VM's daemon which segments the VM has.
    pub(super) fn send_segments(&mut self, member: u32) {
        let mut body = Vec::new();
        for segment in self.broker.books().segments.values().filter(|s| s.members.contains(&member)) {
            let entry = relay::Segment {
                name: segment.name,
                uuid: segment.uuid.0,
                size: segment.size,
                kind: segment.memory.kind(),
                page: segment.page,
                access: segment.access(member),
                reserved: 0,
            };
            body.extend_from_slice(entry.as_bytes());
        }
        self.send_relay(member, RelayKind::SEGMENTS, 0, body);
    }

    fn session_down(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        info!(vm = %vm.config.name, member, "the VM's daemon is away");
        (vm.up, vm.queued) = (false, 0);
        vm.queue.clear();
        vm.asked.clear();
        self.programs.daemon_ended(&mut self.broker, member);
    }

    fn relay_message(&mut self, member: u32, kind: RelayKind, number: u32, body: &[u8]) {
        match kind {
            // The message has no contents: its arrival is the sign of life.
            RelayKind::PONG => return,
            RelayKind::MAPPED => return self.mapped(member, body),
            RelayKind::DATA => self.ask_journal(),
            _ => {}
        }
        let new = self.new_client();
        let message = Message { member, kind, number, body };
        if let Err(NotOpen) = self.programs.hear(&mut self.broker, &mut self.segments, new, message) {
            self.send_relay(member, RelayKind::CLOSE, number, Vec::new());
        }
    }

    /// Handles a guest daemon's message about how a segment is mapped in the guest.
    fn mapped(&mut self, member: u32, body: &[u8]) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        let Ok(mapped) = relay::Mapped::read_from_bytes(body) else { return };
        let segment = self.broker.books().segments.get(&mapped.name);
        if segment.is_some_and(|s| s.members.contains(&member)) {
            vm.mapped.insert(mapped.name, mapped);
            // A damaged info block may be the reason; if it is repaired, the guest looks again. The interval limits the
            // lines in the log.
            let now = Instant::now();
            if mapped.kind == MappingKind::NONE
                && vm.missed.is_none_or(|last| now.saturating_duration_since(last) >= LOOK_AGAIN)
            {
                vm.missed = Some(now);
                self.check_fronts(Some(member));
            }
        }
    }

    /// Sends a packet to a program in a VM.
    pub(super) fn send_relayed(&mut self, id: ClientId, packets: Vec<Vec<u8>>) {
        let Some((member, number)) = self.programs.place(id) else { return };
        for packet in packets {
            self.send_relay(member, RelayKind::DATA, number, packet);
        }
    }

    /// Ends the connection of a program in a VM. Returns false if the client is not in a VM.
    pub(super) fn end_relayed(&mut self, id: ClientId) -> bool {
        let Some((member, number)) = self.programs.remove(id) else { return false };
        self.broker.hung_up(id);
        self.send_relay(member, RelayKind::CLOSE, number, Vec::new());
        true
    }

    pub(super) fn send_relay(&mut self, member: u32, kind: RelayKind, client: u32, body: Vec<u8>) {
        let limit = self.config.limits.queue as usize;
        let Some(vm) = self.vms.get_mut(&member).filter(|vm| vm.up) else { return };
        if vm.queued > limit {
            error!(vm = %vm.config.name, bytes = vm.queued, "the VM's daemon does not read: its session is ended and begins anew");
            vm.restart_link(member);
            self.session_down(member);
            self.ring_daemon(member);
            return;
        }
        vm.queued += body.len() + 64;
        vm.queue.push_back((kind, client, body));
        self.flush_link(member);
        self.ring_daemon(member);
    }

    /// Queues the request of a program in a VM for a page of the daemon's state. Returns false if the client is on the host.
    pub(super) fn inspect_later(&mut self, id: ClientId, request: u32, from: wire::Inspect) -> bool {
        let Some((member, _)) = self.programs.place(id) else { return false };
        let Some(vm) = self.vms.get_mut(&member) else { return true };
        if vm.asked.iter().any(|(asked, ..)| *asked == id) {
            let text = "this connection waits for an answer to INSPECT already: ask for the next page when that has come";
            let refusal = Refusal::new(ErrorCode::BUSY, text);
            self.send_relayed(id, vec![reply::refusal(request, &refusal)]);
            return true;
        }
        vm.asked.push_back((id, request, from));
        self.send_pages(member);
        true
    }

    /// Answers requests for pages, one whenever the link has taken everything that there was to send. So at most one page waits,
    /// however many programs have asked.
    fn send_pages(&mut self, member: u32) {
        for turn in 0.. {
            let Some(vm) = self.vms.get_mut(&member).filter(|vm| vm.up && vm.queue.is_empty()) else {
                return;
            };
            if turn == PAGES {
                self.more |= !vm.asked.is_empty();
                return;
            }
            let Some((id, request, from)) = vm.asked.pop_front() else { return };
            if self.programs.place(id).is_some() {
                self.send_page(id, request, from);
            }
        }
    }

    fn flush_link(&mut self, member: u32) {
        let Some(vm) = self.vms.get_mut(&member) else { return };
        while let Some((kind, client, body)) = vm.queue.front() {
            match vm.link.send(*kind, *client, body) {
                Ok(()) => {}
                Err(SendRefused::Full) => return,
                Err(SendRefused::Down) => {
                    // The session is about to end, which the next step reports.
                    self.more |= vm.up;
                    return;
                }
                Err(SendRefused::TooLong(len)) => error!(len, "a relay message too long; please report this"),
            }
            vm.queued -= body.len() + 64;
            vm.queue.pop_front();
        }
    }
}
