//! Programs on the host: the attach socket and its connections.

use super::server::{Server, Token};
use super::sockets;
use crate::closer::{HELD_UP, NOBODY};
use crate::packet::{self, Gone, MAX_FDS, Packet, PacketSocket};
use crate::poller::{Interest, Ready};
use crate::user_connections::{Full, Limit, Most, UserConnections};
use crate::{loan, pidwatch};
use ginnel_broker::broker::{ClientId, Who};
use ginnel_broker::process::Process;
use ginnel_broker::reply::{self, Refusal};
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::{self, ErrorCode, Kind, MAX_PACKET, StaysReason};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use tracing::{debug, warn};

/// The requests of one client that are handled before others get their turn.
const TURN: usize = 16;
/// The connections that are accepted before other events get their turn.
const ACCEPTS: usize = 64;

/// The attach socket.
#[derive(Debug, Default)]
pub struct Clients {
    /// The listening socket; `None` until the daemon serves.
    listener: Option<OwnedFd>,
    connections: BTreeMap<ClientId, Connection>,
    by_user: UserConnections<ClientId>,
    /// A descriptor that is closed for a moment when descriptors run out, so that a connection can be refused and need not wait.
    spare: Option<File>,
    /// The number of connections that were refused since the last one that was accepted; decides whether to log.
    refused: u64,
}

#[derive(Debug)]
struct Connection {
    socket: PacketSocket,
    uid: u32,
    /// Something waits to be sent; until then, nothing is read from the connection.
    blocked: bool,
}

/// Returns whether a packet has as many descriptors as its kind requires: one for a report, none for others.
fn takes_descriptors(packet: &Packet) -> bool {
    let is_report = wire::split(&packet.bytes).is_some_and(|(header, _)| header.kind == Kind::SOCK_REPORT);
    packet.fds.len() == usize::from(is_report)
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

    fn add(&mut self, client: ClientId, connection: Connection) {
        self.by_user.add(connection.uid, client);
        self.connections.insert(client, connection);
    }

    fn remove(&mut self, client: ClientId) -> Option<Connection> {
        let connection = self.connections.remove(&client)?;
        self.by_user.remove(connection.uid, client);
        Some(connection)
    }
}

impl Server {
    /// Serves this socket from now on.
    pub fn listen(&mut self, listener: OwnedFd) -> io::Result<()> {
        self.poller.add(&listener, Token::Listener.into(), Interest::READ)?;
        self.clients.spare = File::open("/dev/null").ok();
        self.clients.listener = Some(listener);
        Ok(())
    }

    /// Accepts new connections.
    pub(super) fn accept_clients(&mut self) {
        for _ in 0..ACCEPTS {
            let Some(listener) = &self.clients.listener else { return };
            match packet::accept(listener.as_fd()) {
                Ok(None) => return,
                Ok(Some(fd)) => self.accept_client(fd),
                Err(Errno::MFILE | Errno::NFILE) => {
                    if self.clients.refused == 0 {
                        warn!(
                            "no more open files: a connection is refused; raise LimitNOFILE= or lower max_clients"
                        );
                    }
                    self.clients.refused += 1;
                    self.clients.spare = None;
                    if let Ok(Some(refused)) = packet::accept(listener.as_fd()) {
                        self.closer.close(NOBODY, [refused]);
                    }
                    self.clients.spare = File::open("/dev/null").ok();
                    if self.clients.spare.is_none() {
                        return;
                    }
                }
                Err(errno) => {
                    warn!(%errno, "a connection cannot be accepted");
                    return;
                }
            }
        }
    }

    fn accept_client(&mut self, fd: OwnedFd) {
        let Ok(peer) = packet::peer(fd.as_fd()) else { return self.closer.close(NOBODY, [fd]) };
        let queue = self.config.limits.queue as usize;
        let mut socket = PacketSocket::to_program(fd, queue, &self.closer, peer.uid);
        if self.closer.is_held_up_by(peer.uid) {
            let _ = socket.send(reply::refusal(0, &Refusal::new(ErrorCode::PROTOCOL, HELD_UP)), vec![]);
            return;
        }
        let limits = self.config.limits;
        let most = Most { all: limits.max_clients as usize, per_user: limits.clients_per_user as usize };
        let room = self.clients.by_user.room(peer.uid, most, |id| self.broker.is_attached(id));
        if let Err(Full { limit, user, given_up }) = room {
            let (key, limit) = match limit {
                Limit::All => ("max_clients", limits.max_clients),
                Limit::PerUser => ("clients_per_user", limits.clients_per_user),
            };
            if self.clients.refused == 0 {
                warn!(
                    key,
                    limit,
                    user,
                    pid = peer.pid,
                    "too many connections: those of this user that are not attached are closed first"
                );
            }
            self.clients.refused += 1;
            match given_up {
                Some(oldest) => self.end_client(oldest),
                None => {
                    let text = format!(
                        "there are {limit} connections of attached programs, which is the limit: end some, or raise {key}"
                    );
                    let refusal = Refusal::new(ErrorCode::LIMIT, text);
                    let _ = socket.send(reply::refusal(0, &refusal), vec![]);
                    return;
                }
            }
        } else {
            self.clients.refused = 0;
        }
        let id = self.new_client();
        if let Err(error) = self.poller.add(&socket, Token::Client(id).into(), Interest::READ) {
            warn!(%error, "a connection cannot be watched");
            return;
        }
        let process = pidwatch::process(peer.pid).unwrap_or(Process { pid: peer.pid, started: 0 });
        let mut groups = peer.groups;
        groups.push(peer.gid);
        let image = pidwatch::image_of(&process);
        self.broker.connected(id, Who { member: HOST_MEMBER, process, image, uid: peer.uid, groups });
        self.clients.add(id, Connection { socket, uid: peer.uid, blocked: false });
    }

    /// Handles a connection that has something to read, has room to write, or has ended.
    pub(super) fn serve_client(&mut self, id: ClientId, ready: Ready) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        if ready.writable || connection.blocked {
            if connection.socket.flush().is_err() {
                self.end_client(id);
                return;
            }
            self.set_interest(id);
        }
        for _ in 0..TURN {
            let Some(connection) = self.clients.connections.get(&id) else { return };
            if connection.blocked {
                return;
            }
            let uid = connection.uid;
            if self.closer.is_held_up_by(uid) {
                self.send_client(
                    id,
                    vec![(reply::refusal(0, &Refusal::new(ErrorCode::PROTOCOL, HELD_UP)), vec![])],
                );
                self.end_client(id);
                return;
            }
            // This accepts all descriptors that come, because the kernel would close the others in this call, which may block.
            match connection.socket.receive_from(&mut self.packet, MAX_FDS) {
                Ok(None) => return,
                Ok(Some(packet)) if packet.truncated || !takes_descriptors(&packet) => {
                    self.closer.close(uid, packet.fds);
                    let text = format!(
                        "a packet over {MAX_PACKET} bytes, or with descriptors that its kind does not take: neither is in the \
                         protocol"
                    );
                    let packet = reply::refusal(0, &Refusal::new(ErrorCode::PROTOCOL, text));
                    self.send_client(id, vec![(packet, vec![])]);
                    self.end_client(id);
                    return;
                }
                Ok(Some(mut packet)) => {
                    let rest = loan::open(&mut packet.fds);
                    self.client_says(id, &packet);
                    self.closer.close(uid, packet.fds);
                    self.closer.close_later(uid, rest);
                    self.run_effects();
                }
                Err(Gone::Closed) => {
                    self.end_client(id);
                    return;
                }
                Err(error) => {
                    debug!(client = id.0, %error, "connection lost");
                    self.end_client(id);
                    return;
                }
            }
        }
    }

    fn client_says(&mut self, id: ClientId, packet: &Packet) {
        if let [socket] = &packet.fds[..] {
            return self.client_reports(id, socket, &packet.bytes);
        }
        self.ask_journal();
        let opener = self.broker.who(id).map(|who| who.process);
        let other = packet.sender.filter(|pid| opener.is_some_and(|opener| opener.pid != *pid));
        match other {
            None => self.broker.packet(&mut self.segments, id, &packet.bytes),
            // The sender is a child that has inherited the connection. It may have ended since.
            Some(pid) => {
                let sender = pidwatch::process(pid).unwrap_or(Process { pid, started: 0 });
                self.broker.packet_from(&mut self.segments, id, sender, &packet.bytes);
            }
        }
    }

    /// Handles a report of a TCP connection.
    fn client_reports(&mut self, id: ClientId, socket: &OwnedFd, packet: &[u8]) {
        let Some(report) = self.broker.socket_packet(&mut self.segments, id, packet) else { return };
        let excluded = self.broker.who(id).is_some_and(|who| self.config.sockets.exclude.has(&who.process));
        let found = match excluded {
            true => Err(StaysReason::EXCLUDED),
            false => sockets::read(&mut self.syns, socket, &report),
        };
        self.broker.socket_found(&mut self.segments, id, report.key, found);
    }

    /// Sends packets that belong together. Ends the connection of a client that does not read.
    pub(super) fn send_client(
        &mut self,
        id: ClientId,
        packets: Vec<(Vec<u8>, Vec<std::sync::Arc<OwnedFd>>)>,
    ) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        match connection.socket.send_all(packets) {
            Ok(()) => self.set_interest(id),
            Err(error) => {
                warn!(client = id.0, uid = connection.uid, %error, "connection given up");
                self.end_client(id);
            }
        }
    }

    fn set_interest(&mut self, id: ClientId) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        let blocked = connection.socket.queued() > 0;
        if blocked == connection.blocked {
            return;
        }
        connection.blocked = blocked;
        let interest = Interest { read: !blocked, write: blocked };
        if self.poller.modify(&connection.socket, Token::Client(id).into(), interest).is_err() {
            self.end_client(id);
        }
    }

    /// Ends a connection.
    pub(super) fn end_client(&mut self, id: ClientId) {
        if let Some(connection) = self.clients.remove(id) {
            self.poller.remove(&connection.socket);
        }
        // The caller performs the effects that follow, or is just doing so.
        self.broker.hung_up(id);
    }
}
