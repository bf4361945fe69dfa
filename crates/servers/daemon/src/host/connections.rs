//! The connections of programs on the host.

use crate::packet::PacketSocket;
use crate::user_connections::UserConnections;
use crate::users::Users;
use ginnel_broker::broker::ClientId;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The attach socket.
#[derive(Debug, Default)]
pub struct Clients {
    /// The listening socket; `None` until the daemon serves.
    pub(super) listener: Option<OwnedFd>,
    pub(super) connections: BTreeMap<ClientId, Connection>,
    pub(super) by_user: UserConnections<ClientId>,
    pub(super) users: Users,
    /// A descriptor that is closed for a moment when descriptors run out, so that a connection can be refused and need not wait.
    pub(super) spare: Option<File>,
    /// The number of connections that were refused since the last one that was accepted; decides whether to log.
    pub(super) refused: u64,
}

/// The connection of a program.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: PacketSocket,
    /// The user as whose it counts ([`Users`]).
    pub(super) user: u32,
    /// Something waits to be sent; until then, nothing is read from the connection.
    pub(super) blocked: bool,
    /// A helper has the next packet; until it has answered, nothing is read from the connection, and no event of it matters.
    pub(super) examined: bool,
}

impl Clients {
    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns whether the socket of a client has taken everything that was sent to it.
    pub(super) fn has_room(&self, client: ClientId) -> bool {
        self.connections.get(&client).is_some_and(|connection| !connection.blocked)
    }

    /// Returns the number of the user as whose this one counts.
    pub(super) fn counted(&mut self, uid: u32) -> u32 {
        self.users.counted(uid)
    }

    /// Returns the listening socket.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// Returns the descriptor of a client's connection.
    pub(super) fn fd(&self, client: ClientId) -> Option<BorrowedFd<'_>> {
        self.connections.get(&client).map(|connection| connection.socket.as_fd())
    }

    /// Notes a new connection.
    pub(super) fn add(&mut self, client: ClientId, connection: Connection) {
        self.by_user.add(connection.user, client);
        self.connections.insert(client, connection);
    }

    /// Forgets a connection.
    pub(super) fn remove(&mut self, client: ClientId) -> Option<Connection> {
        let connection = self.connections.remove(&client)?;
        self.by_user.remove(connection.user, client);
        Some(connection)
    }
}
