//! Programs on the host: the attach socket and its connections.

use super::connections::Connection;
use super::server::Server;
use super::token::Token;
use crate::packet::{self, Gone, Heard, PacketSocket};
use crate::poller::{Interest, Ready};
use crate::strangers::{Outcome, Task};
use crate::user_connections::{Full, Limit, Most};
use crate::watches::ROOT;
use crate::{descriptors, pidwatch};
use ginnel_broker::broker::{ClientId, Who};
use ginnel_broker::process::Process;
use ginnel_broker::reply::{self, Refusal};
use ginnel_layout::HOST_MEMBER;
use ginnel_layout::wire::{self, ErrorCode, Kind, MAX_PACKET, StaysReason};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;
use tracing::{debug, warn};

/// The requests of one client that are handled before others of its user.
const TURN: usize = 16;
/// The connections that are accepted before other events get their turn.
const ACCEPTS: usize = 64;

/// Returns whether a packet carries descriptors if its kind requires one, and none otherwise.
fn carries_what_it_should(packet: &Heard) -> bool {
    let is_report = wire::split(&packet.bytes).is_some_and(|(header, _)| header.kind == Kind::SOCK_REPORT);
    packet.carries_fds == is_report
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
        self.accept_several();
        pidwatch::look_for(ROOT);
    }

    fn accept_several(&mut self) {
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
                        self.closer.close(refused);
                    }
                    self.clients.spare = File::open("/dev/null").ok();
                    if self.clients.spare.is_none() {
                        return self.pause(Token::Listener, "the connection of a program", Errno::MFILE);
                    }
                }
                Err(errno) => return self.pause(Token::Listener, "the connection of a program", errno),
            }
        }
    }

    fn accept_client(&mut self, fd: OwnedFd) {
        let Ok(peer) = packet::peer(fd.as_fd()) else { return self.closer.close(fd) };
        let queue = self.config.limits.queue as usize;
        let is_last = peer.uid != 0 && descriptors::is_kept_for_root(&fd);
        let mut socket = PacketSocket::to_program(fd, queue, &self.closer);
        if is_last {
            if self.clients.refused == 0 {
                warn!(
                    user = peer.uid,
                    pid = peer.pid,
                    "a connection is refused: the last open files are kept for root and for VMs; raise LimitNOFILE= or lower max_clients"
                );
            }
            self.clients.refused += 1;
            let text = "the daemon has no more open files for ordinary users: raise its LimitNOFILE=";
            let _ = socket.send(reply::refusal(0, &Refusal::new(ErrorCode::LIMIT, text)), vec![]);
            return;
        }
        let limits = self.config.limits;
        let most = Most { all: limits.max_clients as usize, per_user: limits.clients_per_user as usize };
        let newcomer = self.clients.users.counted(peer.uid);
        pidwatch::look_for(newcomer);
        if pidwatch::is_held_up_by(newcomer) {
            let _ =
                socket.send(reply::refusal(0, &Refusal::new(ErrorCode::LIMIT, pidwatch::HELD_UP)), vec![]);
            return;
        }
        let room = self.clients.by_user.room(newcomer, most, |id| self.broker.is_attached(id));
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
        let process =
            pidwatch::connected(socket.as_fd(), peer.pid).unwrap_or(Process { pid: peer.pid, started: 0 });
        let mut groups = peer.groups;
        groups.push(peer.gid);
        let image = pidwatch::image_of(&process);
        self.broker.connected(id, Who { member: HOST_MEMBER, process, image, uid: peer.uid, groups });
        self.clients.add(id, Connection { socket, user: newcomer, blocked: false, examined: false });
    }

    /// Lets a client wait for its turn.
    pub(super) fn client_ready(&mut self, id: ClientId, ready: Ready) {
        if let Some(connection) = self.clients.connections.get(&id) {
            self.turns.add(connection.user, id, ready);
        }
    }

    /// Gives each user with clients that wait one turn.
    pub(super) fn serve_clients(&mut self) {
        for _ in 0..self.turns.users() {
            let Some((user, end)) = self.turns.begin() else { return };
            pidwatch::look_for(user);
            while let Some((id, ready)) = self.turns.next_of(user) {
                self.serve_client(id, ready, end);
                self.run_effects();
                if Instant::now() >= end {
                    break;
                }
            }
            self.turns.end(user, end);
            pidwatch::look_for(ROOT);
        }
    }

    /// Handles a connection that has something to read, has room to write, or has ended. What is left to read at the end of the turn
    /// is an event again.
    fn serve_client(&mut self, id: ClientId, ready: Ready, end: Instant) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        if ready.writable || connection.blocked {
            if connection.socket.flush().is_err() {
                self.end_client(id);
                return;
            }
            self.set_interest(id);
        }
        for turn in 0..TURN {
            if turn > 0 && Instant::now() >= end {
                return;
            }
            let Some(connection) = self.clients.connections.get(&id) else { return };
            if connection.blocked || connection.examined {
                return;
            }
            match connection.socket.hear(&mut self.packet) {
                Ok(None) => return,
                Ok(Some(packet)) if packet.truncated || !carries_what_it_should(&packet) => {
                    let text = format!(
                        "a packet over {MAX_PACKET} bytes, or with descriptors that its kind does not take, or without those \
                         that it takes: neither is in the protocol"
                    );
                    self.refuse_client(id, ErrorCode::PROTOCOL, &text);
                    return;
                }
                Ok(Some(packet)) => {
                    if packet.carries_fds {
                        self.client_reports(id, &packet.bytes);
                    } else {
                        self.client_says(id, &packet);
                    }
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

    /// Ends a connection after a last packet that says why.
    fn refuse_client(&mut self, id: ClientId, code: ErrorCode, why: &str) {
        self.send_client(id, vec![(reply::refusal(0, &Refusal::new(code, why)), vec![])]);
        self.end_client(id);
    }

    fn client_says(&mut self, id: ClientId, packet: &Heard) {
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

    /// Handles a report of a TCP connection. A helper takes it out of the connection's queue, with the socket.
    fn client_reports(&mut self, id: ClientId, packet: &[u8]) {
        let report = self.broker.socket_packet(&mut self.segments, id, packet);
        let excluded = self.broker.who(id).is_some_and(|who| self.config.sockets.exclude.has(&who.process));
        let task = match report {
            Some(report) if excluded => {
                self.broker.socket_found(&mut self.segments, id, report.key, Err(StaysReason::EXCLUDED));
                Task::DISCARD
            }
            Some(_) => Task::EXAMINE,
            None => Task::DISCARD,
        };
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        connection.examined = true;
        // The end of the connection would be reported again and again.
        self.poller.remove(&connection.socket);
        let (user, clients) = (connection.user, &self.clients);
        self.strangers.give(&self.poller, user, id, task, |id| clients.fd(id));
    }

    /// Handles what helpers have found out, and kills those that take too long.
    pub(super) fn step_strangers(&mut self) {
        let clients = &self.clients;
        self.strangers.end_stuck(&self.poller, |id| clients.fd(id));
        for (id, outcome) in self.strangers.take_outcomes() {
            let Some(connection) = self.clients.connections.get_mut(&id) else { continue };
            connection.examined = false;
            let interest = Interest { read: !connection.blocked, write: connection.blocked };
            if self.poller.add(&connection.socket, Token::Client(id).into(), interest).is_err() {
                self.end_client(id);
                continue;
            }
            match outcome {
                Outcome::Found(report, found) => {
                    let found = found.map(|facts| self.syns.complete(facts));
                    self.broker.socket_found(&mut self.segments, id, report.key, found);
                }
                Outcome::Discarded => {}
                Outcome::Ended(code, why) => self.refuse_client(id, code, why),
            }
            self.run_effects();
        }
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
                warn!(client = id.0, user = connection.user, %error, "connection given up");
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
        if connection.examined {
            return; // It is not in the poller.
        }
        let interest = Interest { read: !blocked, write: blocked };
        if self.poller.modify(&connection.socket, Token::Client(id).into(), interest).is_err() {
            self.end_client(id);
        }
    }

    /// Ends a connection.
    pub(super) fn end_client(&mut self, id: ClientId) {
        if let Some(connection) = self.clients.remove(id) {
            self.poller.remove(&connection.socket);
            let last = self.clients.by_user.count(connection.user) == 0;
            self.strangers.hung_up(&self.poller, connection.user, id, last);
        }
        // The caller performs the effects that follow, or is just doing so.
        self.broker.hung_up(id);
    }
}
