//! Packets from programs, and which handler gets which request.

use crate::broker::Broker;
use crate::effects::{ClientId, Effect, Recording, World};
use crate::objects::Change;
use crate::process::Process;
use crate::reply::{self, Refusal, unrecorded};
use crate::session;
use ginnel_layout::wire::{self, ErrorCode, Kind};

impl Broker {
    /// Handles a packet from the process that has opened a connection.
    pub fn packet(&mut self, world: &mut dyn World, client: ClientId, packet: &[u8]) {
        if let Some(sender) = self.who(client).map(|who| who.process) {
            self.packet_from(world, client, sender, packet);
        }
    }

    /// Handles a packet that `sender` has sent over a connection, which it may have inherited. Whatever the packet contains, the
    /// broker either answers it or ends the connection; only `JOIN` has no answer.
    pub fn packet_from(&mut self, world: &mut dyn World, client: ClientId, sender: Process, packet: &[u8]) {
        let Some((header, body)) = wire::split(packet) else {
            let refusal = Refusal::new(
                ErrorCode::PROTOCOL,
                format!(
                    "a packet of {} bytes is shorter than a header: speak the attach protocol",
                    packet.len()
                ),
            );
            self.send(client, reply::refusal(0, &refusal), vec![]);
            self.effects.push(Effect::Disconnect(client));
            return;
        };
        let before = self.effects.len();
        if let Err(refusal) = self.request(world, client, sender, header, body) {
            if refusal.code == ErrorCode::UNRECORDED {
                // The request has changed nothing, so its effects are dropped.
                self.effects.truncate(before);
            }
            self.send(client, reply::refusal(header.request, &refusal), vec![]);
            if matches!(refusal.code, ErrorCode::VERSION) {
                self.effects.push(Effect::Disconnect(client));
            }
        }
    }

    fn request(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        sender: Process,
        header: wire::Header,
        body: &[u8],
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        // A guest's daemon answers HELLO itself.
        if header.kind != Kind::HELLO && !client.greeted && !client.who.is_relayed() {
            return Err(Refusal::new(ErrorCode::PROTOCOL, "say HELLO first"));
        }
        let request =
            Change::request(header.kind).or_else(|| session::REQUESTS.iter().find(|r| r.kind == header.kind));
        let gives = match header.kind {
            Kind::ATTACH | Kind::ADMIN => true,
            _ => request.is_some_and(|request| request.is_gift),
        };
        if self.recording == Recording::Owing && gives {
            return Err(unrecorded());
        }
        match header.kind {
            Kind::HELLO => self.hello(id, header.request, reply::body(body)?),
            Kind::ATTACH => self.attach(world, id, header.request, &reply::body(body)?),
            Kind::JOIN => {
                let []: [u8; 0] = reply::body(body)?;
                self.join(id, sender);
                Ok(())
            }
            Kind::SOCK_REPORT => self.socket_relayed(world, id, body),
            Kind::SOCK_WITHDRAW => self.socket_withdrawn(id, body),
            Kind::INSPECT => {
                let from = reply::body(body)?;
                self.effects.push(Effect::Inspect { client: id, request: header.request, from });
                Ok(())
            }
            Kind::ADMIN => {
                let text = std::str::from_utf8(body).map_err(|_| {
                    Refusal::new(ErrorCode::PROTOCOL, "ADMIN takes JSON, and this is not UTF-8")
                })?;
                let text = text.to_owned();
                self.effects.push(Effect::Admin { client: id, request: header.request, text });
                Ok(())
            }
            kind => {
                let Some(request) = request else {
                    let text = format!("kind {} is not a request of version {}", kind.0, wire::VERSION);
                    return Err(Refusal::new(ErrorCode::PROTOCOL, text));
                };
                let caller = self.caller(id, header.request, sender)?;
                if request.is_write {
                    self.may_write(&caller)?;
                }
                (request.serve)(self, world, &caller, body)
            }
        }
    }
}
