//! The programs of this guest that are connected.

use crate::closer::Closer;
use crate::packet::{self, Gone, Heard, PacketSocket};
use crate::pidwatch;
use crate::poller::{Interest, Poller, Ready};
use crate::user_connections::{Full, Limit, Most, UserConnections};
use crate::users::Users;
use anyhow::{Context, Result, ensure};
use ginnel_broker::allowance::Allowance;
use ginnel_broker::process::{Image, Process};
use ginnel_layout::relay;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The bytes that may wait for a program that does not read.
const OUT_LIMIT: usize = 64 << 10;
/// The first epoll token of clients.
pub const FIRST_TOKEN: u64 = 16;

/// A packet to a program, with file descriptors.
pub type Answer = (Vec<u8>, Vec<Arc<OwnedFd>>);

/// A connected program.
pub struct Client {
    socket: PacketSocket,
    /// The process that has connected. A child may have inherited the connection.
    pub process: Process,
    /// The program that the process ran then.
    pub image: Option<Image>,
    /// The user number of the process.
    pub uid: u32,
    /// The user as whose it counts ([`Users`]).
    pub user: u32,
    gid: u32,
    interest: Interest,
    /// The number of requests that the host has not answered yet.
    under_way: u32,
    /// The program has sent `HELLO`.
    pub greeted: bool,
    /// The host has been told of the program.
    pub opened: bool,
    /// The request to attach that is not answered yet.
    pub attaching: Option<Attaching>,
    /// The endpoint (number and epoch) for which the connection speaks.
    pub endpoint: Option<(u32, u32)>,
    /// The process cannot be watched.
    pub unwatched: bool,
    /// The processes that have joined over this connection and have no connection of their own.
    pub joined: BTreeSet<Process>,
    /// How many TCP connections the program may report.
    pub reports: Allowance,
    /// The number of the request in the packet that a helper has. Until the helper has answered, nothing is read from the
    /// connection, and no event of it matters.
    examined: Option<u32>,
}

/// A request to attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attaching {
    /// The number of the request.
    pub request: u32,
    /// The request is for an existing endpoint.
    pub returning: bool,
    /// The client has sent `DETACH` since.
    pub leaving: bool,
}

impl Client {
    /// Returns the message that tells the host of the program.
    pub fn open(&self) -> relay::Open {
        let Process { pid, started } = self.process;
        relay::Open { pid, uid: self.uid, gid: self.gid, reserved: 0, started }
    }

    /// Returns the next packet, if there is one.
    pub fn hear(&self, buffer: &mut [u8]) -> Result<Option<Heard>, Gone> {
        self.socket.hear(buffer)
    }

    /// Returns whether a helper has the next packet.
    pub fn is_examined(&self) -> bool {
        self.examined.is_some()
    }
}

/// All clients, by the number by which the host knows them.
pub struct Clients {
    poller: Rc<Poller>,
    closer: Closer,
    most: Most,
    all: BTreeMap<u32, Client>,
    by_user: UserConnections<u32>,
    users: Users,
    next: u32,
    /// A client has several requests under way, and has sent a request or received an answer since
    /// [`Clients::take_pipelining`] was last called.
    pipelining: bool,
    /// The last client that has sent a request since that call.
    asker: Option<u32>,
    /// The last client that has sent a request or a message at all.
    last: u32,
    /// There was no room for a program, and this was logged.
    full: bool,
}

fn token(client: u32) -> u64 {
    FIRST_TOKEN + u64::from(client)
}

impl Clients {
    /// Starts without clients; `most` limits their number.
    pub fn new(poller: Rc<Poller>, closer: Closer, most: Most) -> Self {
        Self {
            poller,
            closer,
            most,
            all: BTreeMap::new(),
            by_user: UserConnections::default(),
            users: Users::default(),
            next: 1,
            pipelining: false,
            asker: None,
            last: 0,
            full: false,
        }
    }

    /// Returns the number of the user as whose this one counts.
    pub fn counted(&mut self, uid: u32) -> u32 {
        self.users.counted(uid)
    }

    /// Returns the connection that must end before another one of the user with this number is accepted, if there is no room. An
    /// error means that no other connection makes room, so the new one is refused.
    pub fn given_up_for(&mut self, uid: u32) -> Result<Option<u32>> {
        let is_attached = |id| self.all.get(&id).is_some_and(|client| client.endpoint.is_some());
        let newcomer = self.users.counted(uid);
        pidwatch::look_for(newcomer);
        ensure!(!pidwatch::is_held_up_by(newcomer), "{}", pidwatch::HELD_UP);
        let Err(Full { limit, user, given_up }) = self.by_user.room(newcomer, self.most, is_attached) else {
            self.full = false;
            return Ok(None);
        };
        let (option, limit) = match limit {
            Limit::All => ("--max-clients", self.most.all),
            Limit::PerUser => ("--clients-per-user", self.most.per_user),
        };
        if !std::mem::replace(&mut self.full, true) {
            tracing::warn!(
                user,
                "too many connections (the limit is {limit}, see {option}): those of this user that are not attached are closed first"
            );
        }
        given_up.map(Some).with_context(|| {
            format!(
                "there are {limit} connections of attached programs, which is the limit: end some, or raise {option} of \
                 ginneld guest"
            )
        })
    }

    /// Accepts the connection of a program, for which there must be room. An error means that it was refused.
    pub fn admit(&mut self, fd: OwnedFd, peer: &packet::Peer) -> Result<()> {
        let (uid, gid, user) = (peer.uid, peer.gid, self.users.counted(peer.uid));
        let socket = PacketSocket::to_program(fd, OUT_LIMIT, &self.closer);
        ensure!(peer.pid != 0, "a program in another process namespace has connected; it cannot be watched");
        let process = pidwatch::connected(socket.as_fd(), peer.pid)
            .with_context(|| format!("process {} has ended already", peer.pid))?;
        let id = self.free_number();
        let interest = Interest::READ;
        self.poller.add(&socket, token(id), interest).context("cannot watch a connection")?;
        let client = Client {
            socket,
            process,
            image: pidwatch::image_of(&process),
            uid,
            user,
            gid,
            interest,
            under_way: 0,
            greeted: false,
            opened: false,
            attaching: None,
            endpoint: None,
            unwatched: false,
            joined: BTreeSet::new(),
            reports: Allowance::new(ginnel_clock::monotonic()),
            examined: None,
        };
        self.by_user.add(user, id);
        self.all.insert(id, client);
        Ok(())
    }

    fn free_number(&mut self) -> u32 {
        loop {
            let id = self.next;
            self.next = id.checked_add(1).unwrap_or(1);
            if !self.all.contains_key(&id) {
                return id;
            }
        }
    }

    /// Returns the client with this number.
    pub fn get(&mut self, id: u32) -> Option<&mut Client> {
        self.all.get_mut(&id)
    }

    /// Returns the descriptor of a client's connection.
    pub fn fd(&self, id: u32) -> Option<BorrowedFd<'_>> {
        self.all.get(&id).map(|client| client.socket.as_fd())
    }

    /// Returns the number of connections of a user.
    pub fn count_of(&self, user: u32) -> usize {
        self.by_user.count(user)
    }

    /// Notes that a helper has the next packet of this client, which has a request with this number.
    pub fn begin_examining(&mut self, id: u32, request: u32) {
        if let Some(client) = self.all.get_mut(&id) {
            client.examined = Some(request);
            // The end of the connection would be reported again and again.
            self.poller.remove(&client.socket);
        }
    }

    /// Notes that the helper is done, and returns the number of the request. `None` if the client is gone. On an error the client
    /// must be removed.
    pub fn end_examining(&mut self, id: u32) -> io::Result<Option<u32>> {
        let Some(client) = self.all.get_mut(&id) else { return Ok(None) };
        let request = client.examined.take();
        if request.is_some() {
            self.poller.add(&client.socket, token(id), client.interest)?;
        }
        Ok(request)
    }

    /// Returns whether there are no clients.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the numbers of those that the host knows.
    pub fn opened(&self) -> Vec<u32> {
        self.all.iter().filter(|(_, client)| client.opened).map(|(id, _)| *id).collect()
    }

    /// Returns whether a process has a connection that speaks for an endpoint.
    pub fn speaks_for(&self, endpoint: (u32, u32), process: &Process) -> bool {
        self.all.values().any(|client| client.endpoint == Some(endpoint) && client.process == *process)
    }

    /// Notes that a process, which may have joined an endpoint over another's connection, has a connection of its own.
    pub fn stands_alone(&mut self, endpoint: (u32, u32), process: &Process) {
        for client in self.all.values_mut().filter(|client| client.endpoint == Some(endpoint)) {
            client.joined.remove(process);
        }
    }

    /// Ends a connection, and returns the client as it was.
    pub fn remove(&mut self, id: u32) -> Option<Client> {
        let client = self.all.remove(&id)?;
        self.poller.remove(&client.socket);
        self.by_user.remove(client.user, id);
        Some(client)
    }

    /// Sends a packet, or queues it. On an error the client must be removed.
    pub fn answer(&mut self, id: u32, (bytes, fds): Answer) -> Result<(), Gone> {
        let Some(client) = self.all.get_mut(&id) else { return Ok(()) };
        client.socket.send(bytes, fds)?;
        client.watch_for_room(id, &self.poller);
        Ok(())
    }

    /// Sends what is queued, now that there is room.
    pub fn flush(&mut self, id: u32) -> Result<(), Gone> {
        let Some(client) = self.all.get_mut(&id) else { return Ok(()) };
        client.socket.flush()?;
        client.watch_for_room(id, &self.poller);
        Ok(())
    }

    /// Notes that a request of this client was passed on.
    pub fn asked(&mut self, id: u32) {
        (self.asker, self.last) = (Some(id), id);
        self.count(id, 1);
    }

    /// Notes that a message without an answer was passed on for this client.
    pub fn told(&mut self, id: u32) {
        self.last = id;
    }

    /// Notes that the host has answered a request of this client.
    pub fn answered(&mut self, id: u32) {
        self.count(id, -1);
    }

    fn count(&mut self, id: u32, more: i32) {
        if let Some(client) = self.all.get_mut(&id) {
            client.under_way = client.under_way.saturating_add_signed(more);
            self.pipelining |= client.under_way >= 2;
        }
    }

    /// Returns whether, since the last call, a client has sent a request without waiting for an answer: it has several requests
    /// under way, or has not read the answers that it got.
    pub fn take_pipelining(&mut self) -> bool {
        let asker = self.asker.take().and_then(|id| self.all.get(&id));
        std::mem::take(&mut self.pipelining) || asker.is_some_and(|client| client.socket.has_unread())
    }

    /// Puts events in the order in which clients get their turn, which begins after the client that sent a request last. So a
    /// client that fills the link whenever there is room does not keep others out.
    pub fn in_turn(&self, ready: &mut [Ready]) {
        ready.sort_by_key(|event| event.token.wrapping_sub(token(self.last) + 1));
    }

    /// Stops reading from this client until [`Clients::resume`].
    pub fn pause(&mut self, id: u32) {
        if let Some(client) = self.all.get_mut(&id) {
            client.set_interest(id, Interest { read: false, ..client.interest }, &self.poller);
        }
    }

    /// Reads from all clients again.
    pub fn resume(&mut self) {
        for (id, client) in &mut self.all {
            client.set_interest(*id, Interest { read: true, ..client.interest }, &self.poller);
        }
    }
}

impl Client {
    fn watch_for_room(&mut self, id: u32, poller: &Poller) {
        self.set_interest(id, Interest { write: self.socket.queued() > 0, ..self.interest }, poller);
    }

    fn set_interest(&mut self, id: u32, interest: Interest, poller: &Poller) {
        if self.interest != interest {
            self.interest = interest;
            // This fails only when memory is short; then the client waits until another event occurs on it.
            let _: io::Result<()> = poller.modify(&self.socket, token(id), interest);
        }
    }
}

/// Makes a packet with a body.
pub fn packet(kind: Kind, request: u32, body: &[u8]) -> Answer {
    let header = Header { kind, flags: 0, request };
    ([header.as_bytes(), body].concat(), Vec::new())
}

/// Makes a packet that refuses a request.
pub fn refusal(request: u32, code: ErrorCode, text: &str) -> Answer {
    packet(Kind::ERROR, request, &[wire::Error { code, reserved: 0 }.as_bytes(), text.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    const ONE: u32 = 1;
    const TWO: u32 = 2;

    /// Returns two clients and their ends of the connections.
    fn two() -> (Clients, [PacketSocket; 2]) {
        let mut clients = Clients::new(
            Rc::new(Poller::new().unwrap()),
            Closer::start().unwrap(),
            Most { all: 8, per_user: 8 },
        );
        let me = packet::Peer { pid: std::process::id(), uid: 0, gid: 0, groups: Vec::new() };
        let ends = [ONE, TWO].map(|id| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            clients.admit(near, &me).unwrap();
            assert!(clients.get(id).is_some());
            PacketSocket::new(far, OUT_LIMIT)
        });
        (clients, ends)
    }

    #[test]
    fn a_client_with_several_requests_under_way_is_noticed() {
        let (mut clients, _ends) = two();
        assert!(!clients.take_pipelining());
        clients.asked(ONE);
        clients.asked(TWO);
        assert!(!clients.take_pipelining(), "each has one request under way");
        clients.asked(ONE);
        assert!(clients.take_pipelining());
        assert!(!clients.take_pipelining(), "no client has sent a request since");
        clients.asked(TWO);
        clients.answered(TWO);
        clients.answered(TWO);
        assert!(clients.take_pipelining(), "for a while it had two under way");
        clients.answered(ONE);
        clients.answered(ONE);
        clients.answered(ONE); // There are more answers than requests.
        assert!(!clients.take_pipelining());
        clients.asked(ONE);
        assert!(!clients.take_pipelining(), "one under way again");
    }

    #[test]
    fn a_client_that_asks_before_reading_its_answer_is_noticed() {
        let (mut clients, [one, _two]) = two();
        let answer = || (b"answer".to_vec(), Vec::new());
        clients.asked(ONE);
        clients.answered(ONE);
        clients.answer(ONE, answer()).unwrap();
        clients.asked(ONE);
        assert!(clients.take_pipelining());
        assert!(one.receive(100, 0).unwrap().is_some());
        clients.answered(ONE);
        clients.asked(ONE);
        assert!(!clients.take_pipelining());
    }

    #[test]
    fn a_client_that_has_gone_pipelines_no_more() {
        let (mut clients, [one, _two]) = two();
        clients.answer(ONE, (b"unread".to_vec(), Vec::new())).unwrap();
        clients.asked(ONE);
        drop(one);
        assert!(clients.remove(ONE).is_some());
        clients.asked(ONE);
        clients.answered(ONE);
        assert!(!clients.take_pipelining());
    }

    #[test]
    fn turns_begin_after_the_client_that_asked_last() {
        let (mut clients, _ends) = two();
        let event = |token| Ready { token, readable: true, writable: false, hung_up: false };
        let order = |clients: &Clients| {
            let mut ready = [event(token(ONE)), event(token(TWO))];
            clients.in_turn(&mut ready);
            ready.map(|event| event.token)
        };
        assert_eq!(order(&clients), [token(ONE), token(TWO)]);
        clients.asked(ONE);
        assert_eq!(order(&clients), [token(TWO), token(ONE)]);
        clients.asked(TWO);
        assert_eq!(order(&clients), [token(ONE), token(TWO)]);
    }
}
