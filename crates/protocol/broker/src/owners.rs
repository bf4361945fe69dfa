//! The owners of an endpoint, the connections that speak for it, and when it ends.
//!
//! Processes own an endpoint. It ends when the last of them has ended or has sent `DETACH`. The end of a connection says nothing
//! about its process, which may only have found the daemon too slow, or may connect to the daemon's successor. There are
//! exceptions:
//!
//! - A process that cannot be watched (because its process namespace is not visible from here, or because no descriptor is left
//!   for the watch) owns the endpoint as long as it has a connection.
//! - A process that runs another program now has lost the endpoint's memory. Its descriptors close on `exec`, so the daemon
//!   checks for that when a connection ends.
//! - A child that has joined over an inherited connection, and has not attached by itself, owns the endpoint as long as that
//!   connection is open.
//!
//! An endpoint without a known owner lives as long as a connection to it is open: a child may have inherited the connection from
//! a parent that has ended, and may join later. It also lives as long as it is held ([`super::holds`]), so that another process
//! can adopt it.

use crate::broker::{Broker, Client, ClientId, Effect};
use crate::caller::Caller;
use crate::limits::MAX_OWNERS;
use crate::process::Process;
use crate::record::Record;
use crate::reply::Refusal;
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::ErrorCode;
use tracing::{debug, info, warn};

impl Broker {
    /// Handles the end of a connection. Its process may live on.
    pub fn hung_up(&mut self, id: ClientId) {
        let Some((number, client)) = self.forget_client(id) else { return };
        let Some(endpoint) = self.books.endpoints.get(&number) else { return };
        let (epoch, process) = (endpoint.epoch, client.who.process);
        // A process with another connection of its own is an owner, whatever program it runs now.
        if endpoint.owners.contains(&process) && !self.speaks_for(number, &process) {
            if process.pid == 0 || self.unwatched.contains(&(number, process)) {
                self.owner_ended(number, epoch, process);
            } else if let Some(image) = client.who.image {
                self.effect(Effect::Examine { endpoint: number, epoch, process, image });
            }
        }
        for child in client.joined {
            // A child that has attached by itself is judged by its own connection instead.
            self.owner_ended(number, epoch, child);
        }
        self.end_if_abandoned(number);
    }

    /// Removes a connection that has ended because a guest's daemon has. Its process will connect again.
    pub fn lost(&mut self, id: ClientId) {
        if let Some((number, _)) = self.forget_client(id) {
            self.end_if_abandoned(number);
        }
    }

    /// Removes a connection. Returns its endpoint, if it had attached.
    fn forget_client(&mut self, id: ClientId) -> Option<(u32, Client)> {
        self.forget_sockets(id);
        let client = self.clients.remove(&id)?;
        let number = client.endpoint?;
        self.unbind(number, id);
        Some((number, client))
    }

    /// Lets the connection speak for this endpoint from now on.
    pub(crate) fn bind(&mut self, number: u32, id: ClientId) {
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

    /// Returns the connections of an endpoint: one for each process, and those that children have inherited.
    pub(crate) fn connections(&self, number: u32) -> Vec<ClientId> {
        self.attached.get(&number).cloned().unwrap_or_default()
    }

    /// Returns whether a process has a connection to the endpoint that it has opened itself.
    fn speaks_for(&self, number: u32, process: &Process) -> bool {
        self.connections(number)
            .iter()
            .any(|id| self.clients.get(id).is_some_and(|client| client.who.process == *process))
    }

    /// Releases the connections that a process has opened for an endpoint, except one, and ends them. Those over
    /// which children have joined stay open, because the children own them now.
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

    /// Handles a process that knows an endpoint's token and has connected: it has lost its connection, or becomes an owner now.
    pub(crate) fn owner_returns(&mut self, number: u32, process: Process) -> Result<(), Refusal> {
        self.forget_joined(number, &process);
        if !self.owns(number, &process) {
            return self.add_owner(number, process);
        }
        // Processes in an invisible process namespace all have number 0 and cannot be told apart.
        if process.pid != 0 {
            self.release(number, &process, None);
        }
        // The process may have executed another program, and come back as that.
        self.effect(Effect::Recognize { endpoint: number, process });
        debug!(endpoint = number, pid = process.pid, "endpoint is back");
        Ok(())
    }

    /// Forgets over which inherited connection a process has joined, because it has a connection of its own or is no owner any more.
    /// Otherwise a program that forks over and over would fill the memory, and its connection could not be released.
    fn forget_joined(&mut self, number: u32, process: &Process) {
        for id in self.attached.get(&number).into_iter().flatten() {
            if let Some(client) = self.clients.get_mut(id) {
                client.joined.remove(process);
            }
        }
    }

    fn owns(&self, number: u32, process: &Process) -> bool {
        self.books.endpoints.get(&number).is_some_and(|e| e.owners.contains(process))
    }

    fn add_owner(&mut self, number: u32, process: Process) -> Result<(), Refusal> {
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        if endpoint.owners.len() >= MAX_OWNERS {
            let text = format!(
                "endpoint {number} is owned by {MAX_OWNERS} processes, which is the limit: let children attach as endpoints of their own"
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

    /// Makes a process an owner that joins over an inherited connection. There is no answer.
    pub(crate) fn join(&mut self, id: ClientId, process: Process) {
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

    /// Handles a guest daemon's message that a process of its guest owns an endpoint of its VM.
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

    /// Notes that the server cannot watch this process, so that only its connection counts.
    pub fn owner_unwatched(&mut self, number: u32, epoch: u32, process: Process) {
        if self.books.endpoints.get(&number).is_some_and(|e| e.epoch == epoch && e.owners.contains(&process))
        {
            self.unwatched.insert((number, process));
        }
    }

    /// Handles the end of an ownership: the process has ended or runs another program.
    pub fn owner_ended(&mut self, number: u32, epoch: u32, process: Process) {
        if self.books.endpoints.get(&number).is_some_and(|e| e.epoch == epoch) {
            let connected = self.has_connection(number);
            self.remove_owner(number, process, connected);
        }
    }

    /// Removes a process from an endpoint's owners. If it is the last, the endpoint ends, unless a connection or a hold keeps it.
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
        self.forget_joined(number, &process);
        let epoch = self.books.endpoints.get(&number).map_or(0, |e| e.epoch);
        self.effect(Effect::Unwatch { endpoint: number, epoch, process });
        info!(endpoint = number, pid = process.pid, "a process does not own the endpoint any more");
        // The owner is in the books, so they cannot refuse this record.
        let _ = self.record(Record::OwnerGone { endpoint: number, process });
    }

    /// Handles `DETACH`: the process that sent it gives the endpoint up, over one of its connections.
    pub(crate) fn detach(&mut self, caller: &Caller) -> Result<(), Refusal> {
        let (number, id, sender) = (caller.endpoint, caller.client, caller.sender);
        if sender.pid != 0 {
            // The answer goes over this connection, which the process closes itself.
            self.release(number, &sender, Some(id));
        } else if let Some(client) = self.clients.get_mut(&id) {
            // Processes in an invisible process namespace cannot be told apart, so each connection counts as an owner.
            client.endpoint = None;
            client.joined.clear();
            self.unbind(number, id);
        }
        if sender.pid != 0 || !self.speaks_for(number, &sender) {
            // A process that holds a connection open when the last owner leaves has not joined in time.
            self.remove_owner(number, sender, false);
        }
        self.end_if_abandoned(number);
        self.ok(caller)
    }

    /// Ends an endpoint that no process owns, and that no connection or hold keeps.
    pub(crate) fn end_if_abandoned(&mut self, number: u32) {
        let owned = self.books.endpoints.get(&number).is_none_or(|e| !e.owners.is_empty() || e.is_held());
        if !owned && !self.has_connection(number) {
            self.die(number);
        }
    }

    /// Ends the endpoints without a known owner after a restart of the daemon, unless they are held: nobody has a connection
    /// then.
    pub fn end_abandoned(&mut self) {
        for number in self.books.endpoints.keys().copied().collect::<Vec<_>>() {
            self.end_if_abandoned(number);
        }
    }
}
