//! Who owns an endpoint, by which connections it is spoken for, and when it ends.
//!
//! An endpoint is owned by processes. It ends when the last of them has ended or has sent `DETACH`. The end of a connection
//! says nothing of its process, which may only have found the daemon too slow, or may return to its successor, except:
//!
//! - A process that cannot be watched (in a process namespace that cannot be seen from here, or when no descriptor is left for
//!   the watch) owns the endpoint as long as it has a connection.
//! - A process that runs another program now has lost the endpoint's memory. Its descriptors close on `exec`, so that is looked
//!   for when its connection ends.
//! - A child that has joined over an inherited connection, and has not attached by itself, owns the endpoint as long as that
//!   connection is open.
//!
//! An endpoint that no process is known to own lives as long as somebody has a connection open: a child may have inherited it
//! from a parent that has ended, and join later. And it lives as long as it is held ([`super::holds`]), so that another process
//! can adopt it.

use super::broker::{Broker, Client, ClientId, Effect};
use super::caller::Caller;
use super::config::MAX_OWNERS;
use super::record::Record;
use super::reply::Refusal;
use crate::pidwatch::Process;
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::ErrorCode;
use tracing::{debug, info, warn};

impl Broker {
    /// A connection has ended. Its process may live on.
    pub fn hung_up(&mut self, id: ClientId) {
        let Some((number, client)) = self.forget_client(id) else { return };
        let Some(endpoint) = self.books.endpoints.get(&number) else { return };
        let (epoch, process) = (endpoint.epoch, client.who.process);
        // With another connection of its own it is there, whatever program it runs now.
        if endpoint.owners.contains(&process) && !self.speaks_for(number, &process) {
            if process.pid == 0 || self.unwatched.contains(&(number, process)) {
                self.owner_ended(number, epoch, process);
            } else if let Some(image) = client.who.image {
                self.effect(Effect::Examine { endpoint: number, epoch, process, image });
            }
        }
        for child in client.joined {
            // One that has attached by itself is held by its own connection, and what is known of it.
            self.owner_ended(number, epoch, child);
        }
        self.end_if_abandoned(number);
    }

    /// A connection has ended because a daemon has. Its process will be back.
    pub fn lost(&mut self, id: ClientId) {
        if let Some((number, _)) = self.forget_client(id) {
            self.end_if_abandoned(number);
        }
    }

    /// Takes a connection out; its endpoint, if it was one.
    fn forget_client(&mut self, id: ClientId) -> Option<(u32, Client)> {
        self.forget_sockets(id);
        let client = self.clients.remove(&id)?;
        let number = client.endpoint?;
        self.unbind(number, id);
        Some((number, client))
    }

    /// The connection speaks for this endpoint from now on.
    pub(super) fn bind(&mut self, number: u32, id: ClientId) {
        self.attached.entry(number).or_default().push(id);
    }

    fn unbind(&mut self, number: u32, id: ClientId) {
        if let Some(connections) = self.attached.get_mut(&number) {
            connections.retain(|connection| *connection != id);
            if connections.is_empty() {
                self.attached.remove(&number);
            }
        }
    }

    /// The connections of an endpoint: one for each process, and those that children have inherited.
    pub(super) fn connections(&self, number: u32) -> Vec<ClientId> {
        self.attached.get(&number).cloned().unwrap_or_default()
    }

    /// Whether a process has a connection that it has opened itself.
    fn speaks_for(&self, number: u32, process: &Process) -> bool {
        self.connections(number)
            .iter()
            .any(|id| self.clients.get(id).is_some_and(|client| client.who.process == *process))
    }

    /// The connections that a process has opened for an endpoint speak for it no more, and are ended, except one. Those over
    /// which children have joined are the children's now.
    fn release(&mut self, number: u32, process: &Process, except: Option<ClientId>) {
        for id in self.connections(number) {
            if let Some(client) = self.clients.get_mut(&id)
                && client.who.process == *process
                && client.joined.is_empty()
            {
                client.endpoint = None;
                self.unbind(number, id);
                if except != Some(id) {
                    self.effect(Effect::Disconnect(id));
                }
            }
        }
    }

    /// A process that knows an endpoint's secret has connected: it has lost its connection, or owns the endpoint from now on.
    pub(super) fn owner_returns(&mut self, number: u32, process: Process) -> Result<(), Refusal> {
        for id in self.connections(number) {
            if let Some(client) = self.clients.get_mut(&id) {
                client.joined.remove(&process);
            }
        }
        if !self.owns(number, &process) {
            return self.add_owner(number, process);
        }
        // Processes that cannot be seen cannot be told apart either.
        if process.pid != 0 {
            self.release(number, &process, None);
        }
        // It may have executed another program, and come back as that.
        self.effect(Effect::Recognize { endpoint: number, process });
        debug!(endpoint = number, pid = process.pid, "endpoint is back");
        Ok(())
    }

    fn owns(&self, number: u32, process: &Process) -> bool {
        self.books.endpoints.get(&number).is_some_and(|e| e.owners.contains(process))
    }

    fn add_owner(&mut self, number: u32, process: Process) -> Result<(), Refusal> {
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        if endpoint.owners.len() >= MAX_OWNERS {
            let text = format!(
                "endpoint {number} is owned by {MAX_OWNERS} processes, which is the limit: have children attach anew"
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        let (epoch, member) = (endpoint.epoch, endpoint.member);
        self.record(Record::OwnerJoined { endpoint: number, process })?;
        info!(endpoint = number, epoch, pid = process.pid, "a process joined the endpoint");
        if member == HOST_MEMBER {
            self.effect(Effect::Watch { endpoint: number, epoch, process });
        }
        Ok(())
    }

    /// A process says over an inherited connection that it owns the endpoint too. Nobody waits for an answer.
    pub(super) fn join(&mut self, id: ClientId, process: Process) {
        let Some(number) = self.clients.get(&id).and_then(|client| client.endpoint) else { return };
        if self.owns(number, &process) {
            return;
        }
        match self.add_owner(number, process) {
            Ok(()) => {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.joined.insert(process);
                }
            }
            Err(refusal) => warn!(endpoint = number, pid = process.pid, "{}", refusal.text),
        }
    }

    /// A guest's daemon says that a process of its own owns an endpoint of its own.
    pub fn owner_joined(&mut self, number: u32, epoch: u32, process: Process) {
        if !self
            .books
            .endpoints
            .get(&number)
            .is_some_and(|e| e.epoch == epoch && !e.is_ending && !e.owners.contains(&process))
        {
            return;
        }
        if let Err(refusal) = self.add_owner(number, process) {
            warn!(endpoint = number, pid = process.pid, "{}", refusal.text);
        }
    }

    /// The server cannot watch this process. Its connection has to do.
    pub fn owner_unwatched(&mut self, number: u32, epoch: u32, process: Process) {
        if self.books.endpoints.get(&number).is_some_and(|e| e.epoch == epoch && e.owners.contains(&process))
        {
            self.unwatched.insert((number, process));
        }
    }

    /// A process owns an endpoint no more, because it has ended or runs another program.
    pub fn owner_ended(&mut self, number: u32, epoch: u32, process: Process) {
        if self.books.endpoints.get(&number).is_some_and(|e| e.epoch == epoch) {
            let connected = self.has_connection(number);
            self.remove_owner(number, process, connected);
        }
    }

    /// Takes a process out of an endpoint's owners. If it is the last, the endpoint ends, unless a connection or a hold keeps it.
    fn remove_owner(&mut self, number: u32, process: Process, connected: bool) {
        if !self.owns(number, &process) {
            return;
        }
        if !connected
            && self.books.endpoints.get(&number).is_some_and(|e| e.owners.len() == 1 && !e.is_held())
        {
            self.die(number);
            return;
        }
        self.unwatched.remove(&(number, process));
        self.effect(Effect::Unwatch { endpoint: number, process });
        info!(endpoint = number, pid = process.pid, "a process owns the endpoint no more");
        // Known to be there, so this cannot be refused.
        let _ = self.record(Record::OwnerGone { endpoint: number, process });
    }

    /// The process that has sent the request gives an endpoint up, over one of its connections.
    pub(super) fn detach(&mut self, caller: &Caller) -> Result<(), Refusal> {
        let (number, id, sender) = (caller.endpoint, caller.client, caller.sender);
        if sender.pid != 0 {
            // The answer goes over this one, which the process ends when it likes.
            self.release(number, &sender, Some(id));
        } else if let Some(client) = self.clients.get_mut(&id) {
            // Processes that cannot be seen cannot be told apart: each connection is an owner.
            client.endpoint = None;
            self.unbind(number, id);
        }
        if sender.pid != 0 || !self.speaks_for(number, &sender) {
            // Whoever holds a connection open when the last owner goes has not joined in time.
            self.remove_owner(number, sender, false);
        }
        self.end_if_abandoned(number);
        self.ok(caller)
    }

    /// Ends an endpoint that no process owns, and no connection or hold keeps.
    pub(super) fn end_if_abandoned(&mut self, number: u32) {
        let owned = self.books.endpoints.get(&number).is_none_or(|e| !e.owners.is_empty() || e.is_held());
        if !owned && !self.has_connection(number) {
            self.die(number);
        }
    }

    /// After a restart of the daemon nobody has a connection, so an endpoint without a known owner is dead unless it is held.
    pub fn end_abandoned(&mut self) {
        for number in self.books.endpoints.keys().copied().collect::<Vec<_>>() {
            self.end_if_abandoned(number);
        }
    }
}
