//! Relaying between the guest's programs and the host's daemon, and the few answers that the guest's daemon gives itself.
//!
//! The guest's daemon decides nothing. It answers a `HELLO` itself, unless the program asks for features that the host must know
//! of. Everything else goes to the host's daemon, and the answer comes back. On the way to the host, the socket in a
//! `SOCK_REPORT` is replaced by what this guest's kernel says about it, which a helper finds out. On the way back, an
//! `ATTACHED` gets the file descriptors that only this guest has.

use super::clients::{self, Answer, Attaching, Client, refusal};
use super::daemon::{Daemon, Departed};
use super::owners::{Watch, owner};
use crate::control_link::{Event, SendRefused};
use crate::packet::{self, Heard, accept};
use crate::pidwatch;
use crate::strangers::{Outcome, Task};
use anyhow::{Context, Result};
use ginnel_broker::allowance::REPORTS_OF_PROCESS;
use ginnel_layout::relay::{Endpoint, RelayKind};
use ginnel_layout::wire::{
    self, Attached, ErrorCode, Fds, Header, Kind, SocketReport, SocketStays, StaysReason, features,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The events of the link, packets of one client, and new clients that are handled before others get their turn.
const TURN: usize = 64;

impl Daemon {
    // ---- to the host ----

    /// Sends a message to the host's daemon, or queues it until the ring has room. Without a session the message is dropped.
    pub(super) fn tell(&mut self, kind: RelayKind, client: u32, body: &[u8]) {
        if !self.up {
            return;
        }
        self.unanswered |= kind == RelayKind::DATA;
        if self.outbox.is_empty() && self.link.send(kind, client, body) != Err(SendRefused::Full) {
            return; // The message is sent, or the session is broken, which the next step reports.
        }
        self.outbox.push_back((kind, client, body.to_vec()));
    }

    /// Sends queued messages as far as the ring accepts them; when all are sent, the daemon reads from programs again.
    pub(super) fn send_outbox(&mut self) {
        if self.outbox.is_empty() {
            return;
        }
        while let Some((kind, client, body)) = self.outbox.front() {
            if self.link.send(*kind, *client, body) == Err(SendRefused::Full) {
                return;
            }
            self.outbox.pop_front();
        }
        self.clients.resume();
    }

    // ---- programs ----

    /// Accepts programs that have connected.
    pub(super) fn accept(&mut self) {
        for _ in 0..TURN {
            match accept(self.listener.as_fd()) {
                Ok(None) => return,
                Ok(Some(fd)) => {
                    if let Err(error) = self.admit(fd) {
                        tracing::debug!("the connection of a program was refused: {error:#}");
                    }
                }
                Err(errno) => {
                    tracing::error!("cannot accept a connection: {errno}; trying again in a second");
                    return self.set_accepting(false);
                }
            }
        }
    }

    /// Accepts a program, and ends another connection if there is no room.
    fn admit(&mut self, fd: OwnedFd) -> Result<()> {
        let peer = match packet::peer(fd.as_fd()) {
            Ok(peer) => peer,
            Err(error) => {
                self.closer.close(fd);
                return Err(error).context("cannot see who has connected");
            }
        };
        match self.clients.given_up_for(peer.uid) {
            Ok(given_up) => given_up.into_iter().for_each(|id| self.drop_client(id)),
            Err(error) => {
                let (bytes, _) = refusal(0, ErrorCode::LIMIT, &error.to_string());
                let _ = packet::send::<OwnedFd>(fd.as_fd(), &bytes, &[]);
                self.closer.close(fd);
                return Err(error);
            }
        }
        self.clients.admit(fd, &peer)
    }

    /// Handles packets of a program, or its end.
    pub(super) fn read_client(&mut self, id: u32) {
        for _ in 0..TURN {
            if !self.outbox.is_empty() {
                return self.clients.pause(id);
            }
            let Some(client) = self.clients.get(id) else { return };
            if client.is_examined() {
                return;
            }
            match client.hear(&mut self.packet) {
                Ok(None) => return,
                Ok(Some(packet)) if packet.truncated || !carries_what_it_should(&packet) => {
                    let text = format!(
                        "a packet is at most {} bytes, and carries a descriptor if it reports a socket, and none otherwise",
                        wire::MAX_PACKET
                    );
                    return self.end_client(id, refusal(0, ErrorCode::PROTOCOL, &text));
                }
                Ok(Some(packet)) => self.client_says(id, &packet),
                Err(_) => return self.drop_client(id),
            }
        }
    }

    fn client_says(&mut self, id: u32, packet: &Heard) {
        let Some(client) = self.clients.get(id) else { return };
        let Some((header, body)) = wire::split(&packet.bytes) else {
            return self.end_client(id, refusal(0, ErrorCode::PROTOCOL, "a packet shorter than its header"));
        };
        if !client.greeted || header.kind == Kind::HELLO {
            return self.greet(id, header, body, &packet.bytes);
        }
        // A child has inherited the connection. The host gets its messages in another form than those of the process that opened
        // the connection.
        let child = packet.sender.filter(|pid| *pid != client.process.pid);
        match header.kind {
            Kind::JOIN if body.is_empty() => return self.joins(id, child),
            Kind::DETACH if body.is_empty() && child.is_some() => {
                self.child_leaves(id, child);
                return self.answer(id, clients::packet(Kind::OK, header.request, &[]));
            }
            Kind::SOCK_REPORT => {
                let report = wire::body(body);
                return self.reports(id, header, report);
            }
            Kind::SOCK_WITHDRAW => {
                if self.up {
                    self.open(id);
                    self.clients.told(id);
                    self.tell(RelayKind::DATA, id, &packet.bytes);
                }
                return;
            }
            _ => {}
        }
        if !self.up {
            let text = "the host's daemon does not answer; it may be restarting (on the host: systemctl status ginneld)";
            return self.answer(id, refusal(header.request, ErrorCode::UNAVAILABLE, text));
        }
        if header.kind == Kind::ATTACH
            && let Some(attach) = wire::body::<wire::Attach>(body)
        {
            if let Some(Err(missing)) = self.segments.named(&attach.segment) {
                let text = format!("segment {}: {missing}", attach.segment);
                return self.answer(id, refusal(header.request, ErrorCode::NO_SEGMENT, &text));
            }
            if client.endpoint.is_none() {
                let returning = attach.endpoint != 0;
                client.attaching = Some(Attaching { request: header.request, returning, leaving: false });
                // The process may have executed another program and adopted what it had before, so it has not gone. If the host
                // refuses it, the host still takes it for an owner until it ends.
                self.owners.recognize(&owner(attach.endpoint, attach.epoch, client.process));
            }
        }
        if header.kind == Kind::DETACH && body.is_empty() {
            if let Some(attaching) = &mut client.attaching {
                attaching.leaving = true;
            }
            if let Some((endpoint, epoch)) = client.endpoint {
                self.owners.forget(&owner(endpoint, epoch, client.process));
                (client.image, client.unwatched) = (None, false);
                if client.joined.is_empty() {
                    client.endpoint = None;
                }
            }
        }
        self.ask(id, &packet.bytes);
    }

    /// Tells the host of a client.
    fn open(&mut self, id: u32) {
        let Some(client) = self.clients.get(id) else { return };
        if !std::mem::replace(&mut client.opened, true) {
            let who = client.open();
            self.tell(RelayKind::OPEN, id, who.as_bytes());
        }
    }

    /// Passes on a request.
    fn ask(&mut self, id: u32, packet: &[u8]) {
        self.open(id);
        self.clients.asked(id);
        self.tell(RelayKind::DATA, id, packet);
    }

    /// Handles the report of a TCP connection. A helper takes it out of the connection's queue, with the socket.
    fn reports(&mut self, id: u32, header: Header, report: Option<SocketReport>) {
        let Some(client) = self.clients.get(id) else { return };
        let Some(report) = report else {
            let text = "a report of a socket with the wrong length";
            return self.end_client(id, refusal(header.request, ErrorCode::PROTOCOL, text));
        };
        let user = client.user;
        let stays = if !client.reports.take(REPORTS_OF_PROCESS, ginnel_clock::monotonic()) {
            Some(StaysReason::TOO_MANY)
        } else if !self.up {
            Some(StaysReason::DISABLED)
        } else if self.excluded.has(&client.process) {
            Some(StaysReason::EXCLUDED)
        } else {
            None
        };
        let task = match stays {
            Some(reason) => {
                self.say_stays(id, report.key, reason);
                Task::DISCARD
            }
            None => Task::EXAMINE,
        };
        self.clients.begin_examining(id, header.request);
        let clients = &self.clients;
        self.strangers.give(&self.poller, user, id, task, |id| clients.fd(id));
    }

    /// Handles what helpers have found out, and kills those that take too long. The host is told what the kernel says about a
    /// socket, never what the program says.
    pub(super) fn step_strangers(&mut self) {
        let clients = &self.clients;
        self.strangers.end_stuck(&self.poller, |id| clients.fd(id));
        for (id, outcome) in self.strangers.take_outcomes() {
            let request = match self.clients.end_examining(id) {
                Ok(Some(request)) => request,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!("cannot watch a connection: {error}");
                    self.drop_client(id);
                    continue;
                }
            };
            match outcome {
                Outcome::Found(_, Ok(facts)) if self.up => {
                    let facts = self.syns.complete(facts);
                    let (bytes, _) = clients::packet(Kind::SOCK_REPORT, request, facts.as_bytes());
                    self.open(id);
                    self.clients.told(id);
                    self.tell(RelayKind::DATA, id, &bytes);
                }
                Outcome::Found(report, found) => {
                    self.say_stays(id, report.key, found.err().unwrap_or(StaysReason::DISABLED));
                }
                Outcome::Discarded => {}
                Outcome::Ended(code, why) => self.end_client(id, refusal(0, code, why)),
            }
        }
    }

    /// Tells a program that its connection stays on TCP.
    fn say_stays(&mut self, id: u32, key: u64, reason: StaysReason) {
        let stays = SocketStays { key, reason, reserved: 0 };
        self.answer(id, clients::packet(Kind::SOCK_STAYS, 0, stays.as_bytes()));
    }

    /// Handles a process that joins the endpoint of a connection that it has inherited. There is no answer.
    fn joins(&mut self, id: u32, child: Option<u32>) {
        let Some(client) = self.clients.get(id) else { return };
        let (Some((endpoint, epoch)), Some(child)) = (client.endpoint, child.and_then(pidwatch::process))
        else {
            return;
        };
        let joined = owner(endpoint, epoch, child);
        // A process that has ended or cannot be watched keeps the endpoint only through the connection.
        if self.owners.watch(joined, client.user) == Watch::Set {
            client.joined.insert(child);
            self.tell(RelayKind::JOIN, 0, joined.as_bytes());
        }
    }

    /// Handles a process that gives up the endpoint of a connection that it has inherited.
    fn child_leaves(&mut self, id: u32, child: Option<u32>) {
        let Some(client) = self.clients.get(id) else { return };
        let (Some((endpoint, epoch)), Some(child)) = (client.endpoint, child.and_then(pidwatch::process))
        else {
            return;
        };
        client.joined.remove(&child);
        self.owner_gone(owner(endpoint, epoch, child));
    }

    /// Handles the end of an ownership: the process has ended, or runs another program.
    pub(super) fn owner_gone(&mut self, owner: Endpoint) {
        self.owners.forget(&owner);
        self.tell(RelayKind::GONE, 0, owner.as_bytes());
    }

    fn greet(&mut self, id: u32, header: Header, body: &[u8], packet: &[u8]) {
        let Some(hello) = wire::body::<wire::Hello>(body).filter(|_| header.kind == Kind::HELLO) else {
            let text = "a connection begins with HELLO";
            return self.end_client(id, refusal(header.request, ErrorCode::PROTOCOL, text));
        };
        if hello.version != wire::VERSION {
            let text = format!("this daemon speaks version {} of the attach protocol", wire::VERSION);
            return self.end_client(id, refusal(header.request, ErrorCode::VERSION, &text));
        }
        if let Some(client) = self.clients.get(id) {
            client.greeted = true;
        }
        if self.up && hello.features & features::SOCKETS != 0 {
            return self.ask(id, packet);
        }
        let me = self.control.identity;
        let ok = wire::HelloOk { version: wire::VERSION, member: me.member, features: 0, name: me.name };
        self.answer(id, clients::packet(Kind::HELLO_OK, header.request, ok.as_bytes()));
    }

    /// Passes on which features the host supports, without those that this daemon does not know.
    fn greeted(&mut self, id: u32, header: Header, body: &[u8]) {
        let Some(ok) = wire::body::<wire::HelloOk>(body) else { return self.drop_client(id) };
        let me = self.control.identity;
        let features = ok.features & features::SOCKETS;
        let ok = wire::HelloOk { version: wire::VERSION, member: me.member, features, name: me.name };
        self.answer(id, clients::packet(Kind::HELLO_OK, header.request, ok.as_bytes()));
    }

    /// Sends an answer to a program; ends its connection if it does not read.
    fn answer(&mut self, id: u32, answer: Answer) {
        if let Err(gone) = self.clients.answer(id, answer) {
            tracing::debug!(client = id, "{gone}");
            self.drop_client(id);
        }
    }

    /// Sends a final packet and ends the connection.
    fn end_client(&mut self, id: u32, answer: Answer) {
        self.answer(id, answer);
        self.drop_client(id);
    }

    /// Ends a connection, and returns the client as it was.
    fn remove_client(&mut self, id: u32) -> Option<Client> {
        let client = self.clients.remove(id)?;
        let last = self.clients.count_of(client.user) == 0;
        self.strangers.hung_up(&self.poller, client.user, id, last);
        Some(client)
    }

    /// Ends a connection. Its process may live on, and own its endpoint.
    pub(super) fn drop_client(&mut self, id: u32) {
        let Some(client) = self.remove_client(id).filter(|client| client.opened) else { return };
        self.tell(RelayKind::CLOSE, id, &[]);
        if let Some(attaching) = client.attaching {
            let Client { process, image, user, .. } = client;
            self.departed.insert(id, Departed { process, image, user, asked: attaching });
        }
        let Some((endpoint, epoch)) = client.endpoint else { return };
        for child in client.joined {
            self.owner_gone(owner(endpoint, epoch, child));
        }
        // A process with another connection of its own is an owner, whatever program it runs now.
        if self.clients.speaks_for((endpoint, epoch), &client.process) {
            return;
        }
        let opener = owner(endpoint, epoch, client.process);
        if client.unwatched {
            self.owner_gone(opener);
        } else if let Some(image) = client.image
            && let Some(changed) = self.owners.examine(opener, image)
        {
            self.owner_gone(changed);
        }
    }

    // ---- from the host ----

    /// Handles messages from the host's daemon. Returns true if there may be more.
    pub(super) fn look_at_link(&mut self) -> bool {
        for _ in 0..TURN {
            match self.link.step() {
                Event::Idle => return false,
                Event::Up(_) => {
                    tracing::info!("session with the host's daemon");
                    self.up = true;
                }
                Event::Down => {
                    tracing::warn!("the session with the host's daemon has ended; waiting for the next");
                    (self.up, self.unanswered) = (false, false);
                    self.outbox.clear();
                    self.owners.clear(); // The next session reports them again.
                    self.departed.clear();
                    for id in self.clients.opened() {
                        self.remove_client(id); // The programs come back and say which endpoint they are.
                    }
                    self.clients.resume();
                }
                Event::Message { kind, client, body } => {
                    self.unanswered = false;
                    self.host_says(kind, client, body);
                }
            }
        }
        true
    }

    fn host_says(&mut self, kind: RelayKind, client: u32, body: Vec<u8>) {
        match kind {
            RelayKind::DATA => self.pass_to_client(client, body),
            RelayKind::CLOSE => {
                // The host has closed it, so it need not be told.
                self.remove_client(client);
            }
            RelayKind::SEGMENTS => {
                for missing in self.segments.learn(&body) {
                    self.tell(RelayKind::MAPPED, 0, missing.as_bytes());
                }
            }
            RelayKind::ENDPOINTS => {
                let (endpoints, rest) = body.as_chunks::<{ size_of::<Endpoint>() }>();
                if !rest.is_empty() {
                    tracing::error!(
                        "a list of endpoints has {} bytes; is the host's daemon another release?",
                        body.len()
                    );
                }
                endpoints.iter().for_each(|bytes| self.take_over_owner(zerocopy::transmute!(*bytes)));
            }
            RelayKind::PING => self.tell(RelayKind::PONG, 0, &[]),
            RelayKind(other) => {
                tracing::warn!("the host's daemon has sent a message of an unknown kind ({other})")
            }
        }
    }

    /// Takes over an owner of an endpoint whose connection belonged to an earlier session. The owner connects again by itself,
    /// unless it has ended.
    fn take_over_owner(&mut self, owner: Endpoint) {
        // If it has ended, so has its user.
        let user = self.clients.counted(pidwatch::user_of(owner.pid).unwrap_or_default());
        if self.owners.watch(owner, user) == Watch::Ended {
            self.owner_gone(owner);
        }
    }

    fn pass_to_client(&mut self, id: u32, bytes: Vec<u8>) {
        let Some((header, body)) = wire::split(&bytes) else { return self.drop_client(id) };
        if header.request != 0 {
            self.clients.answered(id);
        }
        let Some(client) = self.clients.get(id) else { return self.answer_to_departed(id, header, body) };
        let asked = client.attaching.take_if(|asked| asked.request == header.request);
        if header.kind == Kind::HELLO_OK {
            return self.greeted(id, header, body);
        }
        if header.kind != Kind::ATTACHED {
            return self.answer(id, (bytes, Vec::new()));
        }
        let Some(attached) = wire::body::<Attached>(body) else { return self.drop_client(id) };
        let endpoint = (attached.endpoint, attached.epoch);
        let process = client.process;
        let attacher = owner(attached.endpoint, attached.epoch, process);
        if asked.is_some_and(|asked| asked.leaving) {
            self.owners.forget(&attacher);
        } else {
            client.endpoint = Some(endpoint);
            match self.owners.watch(attacher, client.user) {
                Watch::Set => {}
                Watch::Ended => self.owner_gone(attacher),
                Watch::Impossible => client.unwatched = true,
            }
            self.clients.stands_alone(endpoint, &process);
        }
        match self.complete(attached) {
            Ok((attached, fds)) => {
                let (bytes, _) = clients::packet(Kind::ATTACHED, header.request, attached.as_bytes());
                self.answer(id, (bytes, fds));
            }
            Err(text) => {
                self.end_client(id, refusal(header.request, ErrorCode::NO_SEGMENT, &text));
                // A program that returns to its endpoint may continue with the memory that it has mapped.
                if !asked.is_some_and(|asked| asked.returning) {
                    self.owner_gone(attacher);
                }
            }
        }
    }

    /// Handles an answer to a program whose connection has ended meanwhile. The process may own an endpoint all the same.
    fn answer_to_departed(&mut self, id: u32, header: Header, body: &[u8]) {
        let Some(&Departed { process, image, user, asked }) = self.departed.get(&id) else { return };
        if asked.request != header.request {
            return;
        }
        self.departed.remove(&id);
        let Some(attached) = wire::body::<Attached>(body).filter(|_| header.kind == Kind::ATTACHED) else {
            return;
        };
        let attacher = owner(attached.endpoint, attached.epoch, process);
        if asked.leaving {
            self.owners.forget(&attacher);
        } else if self.owners.watch(attacher, user) != Watch::Set {
            self.owner_gone(attacher);
        } else if let Some(changed) = image.and_then(|image| self.owners.examine(attacher, image)) {
            self.owner_gone(changed);
        }
    }

    /// Adds this guest's descriptors to the host's answer. With the files a program can only map memory. With the event it can
    /// only wait, or ring, which harms only endpoints with the same vector.
    fn complete(&mut self, attached: Attached) -> Result<(Attached, Vec<Arc<OwnedFd>>), String> {
        let device = self.segments.with_uuid(&attached.uuid).map_err(|missing| missing.to_string())?;
        let mut attached = Attached {
            map_offset: device.offset,
            kind: device.kind,
            page: attached.page.max(device.page),
            fds: Fds(Fds::MEMORY),
            ..attached
        };
        let mut fds = vec![device.memory.clone()];
        let vector = attached.vector as usize;
        let event = self.interrupts.as_ref().and_then(|i| i.events.get(vector)).filter(|_| vector != 0);
        if let Some(event) = event {
            attached.fds.0 |= Fds::EVENT;
            fds.push(event.clone());
        }
        attached.fds.0 |= Fds::REGISTERS;
        fds.push(self.control.registers_file.clone());
        Ok((attached, fds))
    }
}

/// Returns whether a packet carries descriptors if its kind requires one, and none otherwise.
fn carries_what_it_should(packet: &Heard) -> bool {
    let is_report = wire::split(&packet.bytes).is_some_and(|(header, _)| header.kind == Kind::SOCK_REPORT);
    packet.carries_fds == is_report
}
