//! What changes during a session: its connection, and the requests that are under way.

use super::reason::Reason;
use super::request::{Progress, Request};
use crate::connection::{Connection, Packet};
use crate::endpoint_state::EndpointState;
use ginnel_layout::wire::{ErrorCode, Header, Kind};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Shortest and longest pause between two attempts to reach a daemon; each is twice as long as the one before.
pub(crate) const FIRST_RETRY: Duration = Duration::from_millis(5);
pub(crate) const LAST_RETRY: Duration = Duration::from_millis(200);
/// The pause before a request is repeated that the daemon could not serve at the moment.
const AGAIN: Duration = Duration::from_millis(20);

/// Numbers of the first two requests of a connection; no others have them.
pub const HELLO: u32 = u32::MAX - 1;
pub const ATTACH: u32 = u32::MAX;

pub struct State {
    pub endpoint_state: EndpointState,
    pub connection: Option<Connection>,
    /// Whether this connection has been greeted, and attached if there is an endpoint.
    pub ready: bool,
    /// The daemon's answer to the last greeting or request to attach.
    pub welcome: Option<Packet>,
    /// The reason why the last connection ended, or failed to open.
    pub reason: Reason,
    pub requests: HashMap<u32, Request>,
    pub asked: u64,
    /// Numbers of requests that are still to be sent.
    pub outbox: VecDeque<u32>,
    /// Number of requests that were sent over this connection and are not answered.
    pub in_flight: usize,
    /// The socket has no room.
    pub full: bool,
    /// Number of answers that waiting callers have not taken.
    pub untaken: usize,
    /// Whether `Alarm::answers` is readable.
    pub shown: bool,
    pub pause: Duration,
    /// When to connect again; `None` while connected.
    pub retry_at: Option<Instant>,
    /// Requests to be repeated at `later_at`.
    pub later: Vec<u32>,
    pub later_at: Option<Instant>,
    /// The time to which the timer is set.
    pub timer_for: Option<Instant>,
    /// A parent's connection. It stays open until this process has a connection of its own, so that the endpoint always
    /// has an owner.
    pub inherited: Option<Connection>,
}

impl State {
    /// The state of a session that is to connect at once.
    pub fn new(endpoint_state: EndpointState, inherited: Option<Connection>) -> Self {
        Self {
            endpoint_state,
            connection: None,
            ready: false,
            welcome: None,
            reason: Reason::Lost(Errno::NOTCONN),
            requests: HashMap::new(),
            asked: 0,
            outbox: VecDeque::new(),
            in_flight: 0,
            full: false,
            untaken: 0,
            shown: false,
            timer_for: None,
            pause: FIRST_RETRY,
            retry_at: Some(Instant::now()),
            later: Vec::new(),
            later_at: None,
            inherited,
        }
    }

    /// Adds a request whose answer a caller takes.
    pub fn ask(&mut self, kind: Kind, body: &[u8], polled: bool) -> u32 {
        // A daemon that has refused before is asked again, and may refuse again.
        if matches!(self.reason, Reason::Refused(..) | Reason::Protocol(_)) && self.connection.is_none() {
            self.retry_at = Some(Instant::now());
        }
        let number = self.add(kind, body.to_vec(), Progress::Asked(Vec::new()));
        if let Some(request) = self.requests.get_mut(&number) {
            request.polled = polled;
        }
        number
    }

    /// Adds a request.
    pub fn add(&mut self, kind: Kind, body: Vec<u8>, progress: Progress) -> u32 {
        let number = loop {
            self.asked += 1;
            let number = (self.asked % u64::from(HELLO - 2)) as u32 + 1;
            if !self.requests.contains_key(&number) {
                break number;
            }
        };
        let request = Request {
            serial: self.asked,
            kind,
            body,
            sent: false,
            was_sent: false,
            put_off: None,
            polled: false,
            progress,
        };
        self.requests.insert(number, request);
        self.outbox.push_back(number);
        number
    }

    pub fn tell_notes(&mut self) -> bool {
        let notifications = self.endpoint_state.take_notifications();
        let some = !notifications.is_empty();
        for (kind, body) in notifications {
            self.add(kind, body, Progress::Told);
        }
        some
    }

    /// Queues all unanswered requests for a new connection.
    pub fn again(&mut self) {
        self.requests.retain(|_, request| match request.progress {
            // If it creates nothing, there is nothing to undo.
            Progress::Abandoned => request.makes_something(),
            _ => true,
        });
        let mut numbers: Vec<(u64, u32)> = Vec::new();
        for (number, request) in &mut self.requests {
            if request.is_under_way() {
                request.sent = false;
                if let Progress::Asked(packets) = &mut request.progress {
                    packets.clear();
                }
                numbers.push((request.serial, *number));
            }
        }
        numbers.sort_unstable();
        self.outbox = numbers.into_iter().map(|(_, number)| number).collect();
        self.later.clear();
        self.later_at = None;
        self.in_flight = 0;
    }

    pub fn answered(&mut self, number: u32, packet: Packet) {
        let Some(request) = self.requests.get_mut(&number).filter(|request| request.sent) else { return };
        // A page of a status ends with a packet of kind `PAGE`.
        let more = packet.header.kind == Kind::TEXT
            && (packet.header.flags & Header::MORE != 0 || request.kind == Kind::INSPECT);
        if !more {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        // Before `ATTACHED`, an error only means that the endpoint is not attached yet.
        if packet.is_unavailable() || !self.ready {
            request.sent = false;
            request.put_off = Some(packet).filter(Packet::is_unavailable);
            self.later.push(number);
            self.later_at.get_or_insert(Instant::now() + AGAIN);
            return;
        }
        match &mut request.progress {
            Progress::Asked(packets) => {
                packets.push(packet);
                if !more {
                    request.progress = Progress::Answered(std::mem::take(packets));
                    self.untaken += usize::from(!request.polled);
                }
            }
            Progress::Answered(_) | Progress::Failed(_) => {}
            Progress::Told | Progress::Abandoned if more => {}
            Progress::Told => {
                if let Some(request) = self.requests.remove(&number) {
                    self.endpoint_state.answered(request.kind, &request.body, packet);
                    self.tell_notes();
                }
            }
            Progress::Abandoned => {
                if let Some(request) = self.requests.remove(&number) {
                    self.endpoint_state.unclaimed(request.kind, &request.body, &packet);
                    self.tell_notes();
                }
            }
        }
    }

    pub fn fail(&mut self, number: u32, reason: Reason) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        match request.progress {
            Progress::Asked(_) => {
                request.progress = Progress::Failed(reason);
                self.untaken += usize::from(!request.polled);
            }
            Progress::Told | Progress::Abandoned => drop(self.requests.remove(&number)),
            Progress::Answered(_) | Progress::Failed(_) => {}
        }
    }

    /// Fails all waiting requests, because the daemon refuses this session. If the daemon does not know the endpoint
    /// any more, drops the other requests too.
    pub fn give_up(&mut self, reason: &Reason) {
        let stale = matches!(reason, Reason::Refused(ErrorCode::STALE, _));
        let numbers: Vec<u32> = self.requests.keys().copied().collect();
        for number in numbers {
            let asked = self.requests.get(&number).is_some_and(|r| matches!(r.progress, Progress::Asked(_)));
            if asked || stale {
                self.fail(number, reason.clone());
            }
        }
    }

    /// Takes the result of a request, if there is one.
    pub fn take(&mut self, number: u32) -> Option<Result<Vec<Packet>, Reason>> {
        if self.requests.get(&number).is_some_and(Request::is_under_way) {
            return None;
        }
        // In the child of a fork, the parent's requests are not in this table.
        let Some(request) = self.requests.remove(&number) else {
            return Some(Err(Reason::Lost(Errno::NOTCONN)));
        };
        self.untaken -= usize::from(!request.polled);
        match request.progress {
            Progress::Answered(packets) => Some(Ok(packets)),
            Progress::Failed(reason) => Some(Err(reason)),
            Progress::Asked(_) | Progress::Told | Progress::Abandoned => None,
        }
    }
}
