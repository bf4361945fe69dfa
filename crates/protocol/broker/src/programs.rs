//! Programs in VMs: their connections, for which the VMs' daemons speak.
//!
//! A guest's daemon numbers the programs that are connected to it, and forwards what they send under these numbers. It may say
//! anything: numbers that it has not opened or that another program has, processes that do not exist, contents of any length.
//! Whatever it says concerns its own VM only. Nothing here makes a system call, so tests and the fuzzer use it as the server does.

use crate::broker::{Broker, ClientId, Who, World};
use crate::process::Process;
use crate::record::Record;
use crate::text::Hex16;
use ginnel_layout::relay::{self, RelayKind};
use std::collections::BTreeMap;
use tracing::{debug, info};
use zerocopy::FromBytes;

/// The connections of a guest in addition to its endpoints: those of programs that only ask for something.
const SPARE: usize = 64;

/// The programs of all VMs.
#[derive(Debug, Default)]
pub struct Programs {
    /// The connections of each VM, by the number that its daemon has given to the program.
    clients: BTreeMap<u32, BTreeMap<u32, ClientId>>,
    /// The VM and the number of each connection.
    places: BTreeMap<ClientId, (u32, u32)>,
}

/// A message from a guest's daemon about one of its programs.
#[derive(Clone, Copy, Debug)]
pub struct Message<'m> {
    /// The VM.
    pub member: u32,
    /// The kind of message.
    pub kind: RelayKind,
    /// The number that the daemon has given to the program.
    pub number: u32,
    /// The contents.
    pub body: &'m [u8],
}

/// The guest's daemon must be told that there is no connection of the number in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotOpen;

impl Programs {
    /// Returns the number of connections.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Returns the VM of a connection, and the number that the VM's daemon has given to it. `None` if the client is not in a VM.
    pub fn place(&self, client: ClientId) -> Option<(u32, u32)> {
        self.places.get(&client).copied()
    }

    /// Returns the connection to which a VM's daemon has given a number.
    pub fn client(&self, member: u32, number: u32) -> Option<ClientId> {
        self.clients.get(&member)?.get(&number).copied()
    }

    /// Returns the connections of a VM.
    fn of_member(&self, member: u32) -> Vec<ClientId> {
        self.clients.get(&member).into_iter().flat_map(BTreeMap::values).copied().collect()
    }

    /// Handles a message. If it opens a connection, the connection gets the number `new`.
    pub fn hear(
        &mut self,
        broker: &mut Broker,
        world: &mut dyn World,
        new: ClientId,
        message: Message,
    ) -> Result<(), NotOpen> {
        let Message { member, kind, number, body } = message;
        match kind {
            RelayKind::OPEN => return self.open(broker, new, message),
            RelayKind::DATA => {
                let client = self.client(member, number).ok_or(NotOpen)?;
                broker.packet(world, client, body);
            }
            RelayKind::CLOSE => self.close(broker, member, number),
            RelayKind::GONE | RelayKind::JOIN => {
                let Ok(told) = relay::Endpoint::read_from_bytes(body) else { return Ok(()) };
                let relay::Endpoint { endpoint, epoch, pid, started, .. } = told;
                // The host trusts a guest's daemon only about its own VM.
                if broker.books().endpoints.get(&endpoint).is_none_or(|e| e.member != member) {
                    return Ok(());
                }
                let process = Process { pid, started };
                match kind {
                    RelayKind::GONE => broker.owner_ended(endpoint, epoch, process),
                    _ => broker.owner_joined(endpoint, epoch, process),
                }
            }
            RelayKind(kind) => debug!(member, kind, "an unknown relay message"),
        }
        Ok(())
    }

    fn open(&mut self, broker: &mut Broker, new: ClientId, message: Message) -> Result<(), NotOpen> {
        let Message { member, number, body, .. } = message;
        self.close(broker, member, number);
        let Ok(open) = relay::Open::read_from_bytes(body) else {
            debug!(member, "an OPEN of the wrong length");
            return Ok(());
        };
        // The VM may have as many connections as endpoints, and some more for programs that only ask for something.
        let segments = broker.books().segments.values().filter(|s| s.members.contains(&member)).count();
        let endpoints = segments.saturating_mul(broker.limits_of(member).endpoints_per_member as usize);
        let open_now = self.clients.get(&member).map_or(0, BTreeMap::len);
        if open_now >= endpoints.saturating_add(SPARE) {
            debug!(member, "more connections from this VM than it may have endpoints");
            return Err(NotOpen);
        }
        let process = Process { pid: open.pid, started: open.started };
        let groups = vec![open.gid];
        broker.connected(new, Who { member, process, image: None, uid: open.uid, groups });
        self.clients.entry(member).or_default().insert(number, new);
        self.places.insert(new, (member, number));
        Ok(())
    }

    fn close(&mut self, broker: &mut Broker, member: u32, number: u32) {
        if let Some(client) = self.client(member, number) {
            self.remove(client);
            broker.hung_up(client);
        }
    }

    /// Removes a connection that the broker has ended. Returns its place, if the client is in a VM.
    pub fn remove(&mut self, client: ClientId) -> Option<(u32, u32)> {
        let (member, number) = self.places.remove(&client)?;
        if let Some(clients) = self.clients.get_mut(&member) {
            clients.remove(&number);
            if clients.is_empty() {
                self.clients.remove(&member);
            }
        }
        Some((member, number))
    }

    /// Handles the end of a guest's daemon. The programs live on, and come back when their daemon does.
    pub fn daemon_ended(&mut self, broker: &mut Broker, member: u32) {
        for client in self.of_member(member) {
            self.remove(client);
            broker.lost(client);
        }
    }

    /// Handles the end of a guest's kernel: all endpoints of the VM are dead.
    pub fn guest_ended(&mut self, broker: &mut Broker, member: u32) {
        for client in self.of_member(member) {
            self.remove(client);
            broker.hung_up(client);
        }
        broker.member_died(member);
    }
}

impl Broker {
    /// Handles the begin of a session with a guest's daemon. If the guest's kernel is another than before, the endpoints of the
    /// earlier one are dead.
    pub fn session_begins(&mut self, member: u32, boot_id: Hex16, interrupts: bool) {
        let known = self.books().members.get(&member).and_then(|m| m.session);
        if known.is_some_and(|known| known.boot_id != boot_id) {
            info!(member, "the VM has rebooted: the endpoints of its earlier boot are dead");
            self.member_died(member);
        }
        if known.is_none_or(|known| known.boot_id != boot_id || known.interrupts != interrupts) {
            self.note(Record::Session { member, boot_id, interrupts });
        }
    }
}
