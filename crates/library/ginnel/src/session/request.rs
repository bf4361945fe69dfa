//! A request to the daemon, and how far it has got.

use super::reason::Reason;
use crate::connection::Packet;
use ginnel_layout::wire::Kind;

/// The progress of a request.
pub enum Progress {
    /// A caller waits for the answer, which may come in several packets.
    Asked(Vec<Packet>),
    Answered(Vec<Packet>),
    Failed(Reason),
    /// Nobody waits for the answer, which goes to the endpoint's state.
    Told,
    /// Nobody waits any more. If the request is granted after all, the grant is undone.
    Abandoned,
}

pub struct Request {
    /// Position in the order of asking.
    pub serial: u64,
    pub kind: Kind,
    pub body: Vec<u8>,
    /// Whether it was sent over the current connection.
    pub sent: bool,
    /// Whether it was sent over any connection, so that a daemon may know of it.
    pub was_sent: bool,
    /// The daemon's last answer, if that said that it cannot serve the request at the moment.
    pub put_off: Option<Packet>,
    /// The caller polls for the answer instead of waiting in `Session::request`, so it need not be woken.
    pub polled: bool,
    pub progress: Progress,
}

impl Request {
    pub fn is_under_way(&self) -> bool {
        !matches!(self.progress, Progress::Answered(_) | Progress::Failed(_))
    }

    /// Whether the request may be sent again. An administrator's request may not, because the daemon may have executed
    /// it.
    pub fn may_be_repeated(&self) -> bool {
        self.kind != Kind::ADMIN
    }

    /// Whether the request creates something that must be undone if nobody takes it.
    pub fn makes_something(&self) -> bool {
        matches!(
            self.kind,
            Kind::LISTEN
                | Kind::CONNECT
                | Kind::SYNC_OPEN
                | Kind::BLOCK_CREATE
                | Kind::BLOCK_OPEN
                | Kind::HOLD
        )
    }
}
