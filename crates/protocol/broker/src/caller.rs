//! The caller of a request. It is looked up once for each request, so that the handlers need not do so.

use crate::account::Account;
use crate::books::{Books, Endpoint, Segment};
use crate::broker::Broker;
use crate::effects::{ClientId, FdRef};
use crate::process::Process;
use crate::reply::{self, Refusal};
use ginnel_layout::Name;
use ginnel_layout::wire::{ErrorCode, Kind};

/// An endpoint that has sent a request.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The connection over which the request came, and over which the answer goes.
    pub client: ClientId,
    /// The number of the request.
    pub request: u32,
    /// The process that sent the request, over a connection that it may have inherited.
    pub sender: Process,
    /// The endpoint is older than this connection.
    pub returned: bool,
    /// The number of the endpoint.
    pub endpoint: u32,
    /// The epoch of that number.
    pub epoch: u32,
    /// The number of the endpoint's member.
    pub member: u32,
    /// The name of the endpoint's segment.
    pub segment: Name,
    /// The user number of the endpoint.
    pub uid: u32,
}

impl Caller {
    /// Returns the account that is charged for what the endpoint makes.
    pub fn account(&self) -> Account {
        Account::new(self.member, self.segment, self.uid)
    }
}

impl Books {
    /// Returns the endpoint with this number.
    pub(crate) fn endpoint(&self, number: u32) -> Result<&Endpoint, Refusal> {
        self.endpoints.get(&number).ok_or_else(|| {
            Refusal::new(ErrorCode::STALE, format!("there is no endpoint {number} (any more)"))
        })
    }
}

impl Broker {
    /// Returns the caller of a request over this connection. Refuses a connection that has not attached.
    pub(crate) fn caller(&self, client: ClientId, request: u32, sender: Process) -> Result<Caller, Refusal> {
        let attached = self.clients.get(&client).and_then(|client| Some((client.endpoint?, client.returned)));
        let Some((number, returned)) = attached else {
            return Err(Refusal::new(
                ErrorCode::PROTOCOL,
                "this connection is not attached: send ATTACH first",
            ));
        };
        let &Endpoint { epoch, member, segment, uid, .. } = self.books.endpoint(number)?;
        Ok(Caller { client, request, sender, returned, endpoint: number, epoch, member, segment, uid })
    }

    /// Returns the caller's endpoint.
    pub(crate) fn endpoint_of(&self, caller: &Caller) -> Result<&Endpoint, Refusal> {
        self.books.endpoint(caller.endpoint)
    }

    /// Returns the caller's segment.
    pub(crate) fn segment_of(&self, caller: &Caller) -> Result<&Segment, Refusal> {
        let missing =
            || Refusal::new(ErrorCode::NO_SEGMENT, format!("there is no segment {}", caller.segment));
        self.books.segments.get(&caller.segment).ok_or_else(missing)
    }

    /// Refuses the request if the caller's member may only read the segment.
    pub(crate) fn may_write(&self, caller: &Caller) -> Result<(), Refusal> {
        if !self.segment_of(caller)?.access(caller.member).is_read_only() {
            return Ok(());
        }
        let own = self.books.members.get(&caller.member).map_or(Name::NONE, |m| m.name);
        let text = format!(
            "{own} may only read segment {0}, and channels, locks and blocks of its own need write access: move it from \
             `readers` to `members` of [segment.{0}]",
            caller.segment
        );
        Err(Refusal::new(ErrorCode::READ_ONLY, text))
    }

    /// Sends an answer to the caller.
    pub(crate) fn answer(
        &mut self,
        caller: &Caller,
        kind: Kind,
        body: &[u8],
        fds: Vec<FdRef>,
    ) -> Result<(), Refusal> {
        self.send(caller.client, reply::packet(kind, caller.request, body), fds);
        Ok(())
    }

    /// Answers that the request has been performed.
    pub(crate) fn ok(&mut self, caller: &Caller) -> Result<(), Refusal> {
        self.answer(caller, Kind::OK, &[], vec![])
    }
}
