//! Listeners and connections, and the thread that receives for all of them.
//!
//! A connection is in one of these phases:
//!
//! ```text
//!     the active side                        the passive side
//!
//!     Open       (the channel exists)
//!       | request(): REQ  ---------------->
//!     Asking                                 Asked      Event::Request to the listener's owner
//!       |           <---------------- REP    | accept()
//!     Agreed     Event::Reply                Agreeing
//!       | ready(): RTU    ---------------->
//!     Established                            Established      Event::Established
//!       | disconnect(): DREQ  ------------>
//!     Leaving                                Over       Event::Disconnected
//!       |           <---------------- DREP
//!     Over       Event::Disconnected
//! ```
//!
//! Either side may disconnect. Datagrams need no RTU: the connection is over after the REP. If a side dies or drops its connection, the
//! channel ends, and the other side gets an event that depends on its phase.

use crate::cm::message::{LARGEST, Message, Reject, Reply, Request};
use crate::cm::names::PortSpace;
use crate::cm::rendezvous;
use crate::device::{Device, DeviceError};
use crate::notifier::{Waker, drain};
use ginnel::{
    ChannelOptions, Error, Listener, MessageChannel, MessageReceiver, MessageSender, ReadySet, WaitMode,
};
use ginnel_layout::verbs::QpNumber;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Reason of a rejection: invalid service ID, nobody listens there (InfiniBand Architecture Specification 1.2.1, table 109).
pub const NO_SERVICE: u16 = 8;
/// Reason of a rejection: the program (the consumer) rejects the request.
pub const CONSUMER: u16 = 28;

/// The maximum number of channels to listeners of this process on which no request has arrived yet. Beyond it, the oldest is closed.
const SILENT: usize = 256;
/// The maximum number of connections accepted from a listener, and of messages taken from a connection, in one turn. The rest is handled
/// in the next turn.
const TURN: usize = 16;
/// Time between two looks at channels for which the thread gets no wake-up.
const LOOK: Duration = Duration::from_millis(10);

const CHANNEL: ChannelOptions =
    ChannelOptions { capacity: 4096, input_capacity: 4096, patience: Duration::ZERO, backlog: 0 };

const WAKE: u64 = u64::MAX;
/// Keys with this bit belong to listeners.
const LISTENER: u64 = 1 << 63;

/// An event of a listener or a connection.
#[derive(Debug)]
pub enum Event {
    /// A peer requests a connection.
    Request(Arc<Connection>, Request),
    /// The other side accepts the request.
    Reply(Reply),
    /// The other side rejects the request.
    Reject(Reject),
    /// The other side is ready.
    Established,
    /// The connection has been disconnected.
    Disconnected,
    /// The other side ended before the connection was established.
    Unreachable,
}

/// The receiver of the events of a listener or a connection.
pub trait EventHandler: Send + Sync {
    /// Handles an event. The manager's thread calls this without holding a lock.
    fn handle_event(&self, event: Event);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Asking,
    Asked,
    Agreed,
    Agreeing,
    Established,
    Leaving,
    Over,
}

/// The connection is not in a phase that allows the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongPhase;

struct Side {
    phase: Phase,
    /// `None` once the connection is over.
    sender: Option<MessageSender>,
    owner: Option<Arc<dyn EventHandler>>,
    is_datagram: bool,
}

impl Side {
    /// Sends a message. The channel has room for more messages than a connection ever sends, so a failure means that the other side has
    /// ended.
    fn send(&mut self, message: &Message) {
        if let Some(sender) = &mut self.sender {
            let _ = sender.send(&message.encode());
        }
    }

    fn end(&mut self) {
        self.phase = Phase::Over;
        // Dropping the sender does not lose messages: the other side still reads what was sent.
        self.sender = None;
    }
}

/// A connection. When it is dropped, the other side sees that it ends.
pub struct Connection {
    device: Arc<Device>,
    /// Numbers of the member and of the endpoint at the other side, as the daemon reports them.
    peer: (u32, u32),
    side: Mutex<Side>,
    shared: Weak<Shared>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).field("phase", &self.side().phase).finish()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    fn side(&self) -> MutexGuard<'_, Side> {
        locked(&self.side)
    }

    /// Returns the device that the connection uses.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the number of the member at the other side.
    pub fn peer_member(&self) -> u32 {
        self.peer.0
    }

    /// Sets the handler of all later events.
    pub fn set_owner(&self, owner: Option<Arc<dyn EventHandler>>) {
        self.side().owner = owner;
    }

    fn step(&self, from: &[Phase], step: impl FnOnce(&mut Side)) -> Result<(), WrongPhase> {
        let mut side = self.side();
        if !from.contains(&side.phase) {
            return Err(WrongPhase);
        }
        step(&mut side);
        Ok(())
    }

    /// Sends the connection request (REQ).
    pub fn request(&self, request: Request) -> Result<(), WrongPhase> {
        self.step(&[Phase::Open], |side| {
            side.phase = Phase::Asking;
            side.is_datagram = request.space.is_datagram();
            side.send(&Message::Request(request));
        })
    }

    /// Accepts a request (REP).
    pub fn accept(&self, reply: Reply) -> Result<(), WrongPhase> {
        self.step(&[Phase::Asked], |side| {
            side.phase = Phase::Agreeing;
            side.send(&Message::Reply(reply));
            if side.is_datagram {
                side.end();
            }
        })
    }

    /// Rejects a request (REJ), or a reply of the other side.
    pub fn reject(&self, reject: Reject) -> Result<(), WrongPhase> {
        self.step(&[Phase::Asked, Phase::Agreed, Phase::Agreeing], |side| {
            side.send(&Message::Reject(reject));
            side.end();
        })
    }

    /// Confirms a reply: this side is ready to use (RTU).
    pub fn ready(&self) -> Result<(), WrongPhase> {
        self.step(&[Phase::Agreed], |side| {
            side.phase = Phase::Established;
            side.send(&Message::Ready);
        })
    }

    /// Records that the other side uses its queue pair already, although its RTU has not arrived yet.
    pub fn is_in_use(&self) -> Result<(), WrongPhase> {
        self.step(&[Phase::Agreeing], |side| side.phase = Phase::Established)
    }

    /// Disconnects (DREQ). The owner gets the event once the other side knows.
    pub fn disconnect(&self) -> Result<(), WrongPhase> {
        self.step(&[Phase::Established, Phase::Agreeing, Phase::Agreed], |side| {
            side.phase = Phase::Leaving;
            side.send(&Message::Disconnect);
        })
    }

    /// Returns whether a queue pair number that the other side sent can be one of its own. The number 0 means that it has no queue pair.
    fn is_theirs(&self, queue_pair: u32) -> bool {
        queue_pair == 0 || queue_pair & !QpNumber::MASK == 0 && QpNumber(queue_pair).endpoint() == self.peer.1
    }

    /// Handles a message. Returns an error if the message is not allowed now; then nothing more is read from this side.
    fn hear(&self, message: Message) -> Result<Option<Event>, WrongPhase> {
        let mut side = self.side();
        let event = match (side.phase, message) {
            (Phase::Asking, Message::Reply(reply)) if self.is_theirs(reply.parameters.queue_pair) => {
                if side.is_datagram {
                    side.end();
                } else {
                    side.phase = Phase::Agreed;
                }
                Event::Reply(reply)
            }
            (Phase::Asking | Phase::Agreeing, Message::Reject(reject)) => {
                side.end();
                Event::Reject(reject)
            }
            // It is too late for a rejection, so it counts as a disconnection.
            (Phase::Established, Message::Reject(_)) => {
                side.end();
                Event::Disconnected
            }
            (Phase::Agreeing, Message::Ready) => {
                side.phase = Phase::Established;
                Event::Established
            }
            // The message changes nothing: the connection was already in use, or this side has disconnected meanwhile.
            (Phase::Established | Phase::Leaving, Message::Ready) => return Ok(None),
            (Phase::Agreed | Phase::Agreeing | Phase::Established, Message::Disconnect) => {
                side.send(&Message::Disconnected);
                side.end();
                Event::Disconnected
            }
            (Phase::Leaving, Message::Disconnect | Message::Disconnected) => {
                side.end();
                Event::Disconnected
            }
            (Phase::Over, _) => return Ok(None),
            _ => return Err(WrongPhase),
        };
        Ok(Some(event))
    }

    /// Handles the end of the channel.
    fn ended(&self) -> Option<Event> {
        let mut side = self.side();
        let event = match side.phase {
            Phase::Over | Phase::Open => None,
            // The kernel of a real adapter also rejects the request if the passive program ends.
            Phase::Asking => Some(Event::Reject(Reject { reason: CONSUMER, private: Vec::new() })),
            Phase::Asked | Phase::Agreeing => Some(Event::Unreachable),
            Phase::Agreed | Phase::Established | Phase::Leaving => Some(Event::Disconnected),
        };
        side.end();
        event
    }

    fn tell(&self, event: Event) {
        let owner = self.side().owner.clone();
        if let Some(owner) = owner {
            owner.handle_event(event);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            // The manager's thread drops its half of the channel.
            shared.waker.wake();
        }
    }
}

/// A name at which this process listens.
struct Listening {
    listener: Listener<MessageChannel>,
    device: Arc<Device>,
    space: PortSpace,
    owner: Arc<dyn EventHandler>,
    is_watched: bool,
}

/// The receiving half of a connection.
struct ReceivingHalf {
    receiver: MessageReceiver,
    to: Destination,
    is_registered: bool,
    is_pending: bool,
}

enum Destination {
    /// No request has arrived yet.
    Silent(Box<Silent>),
    Connection(Weak<Connection>),
}

struct Silent {
    sender: Option<MessageSender>,
    device: Arc<Device>,
    space: PortSpace,
    owner: Arc<dyn EventHandler>,
}

#[derive(Default)]
struct State {
    last: u64,
    listening: BTreeMap<u64, Listening>,
    halves: BTreeMap<u64, ReceivingHalf>,
}

struct Shared {
    state: Mutex<State>,
    waker: Waker,
    is_over: AtomicBool,
}

/// All listeners and connections of this process. It can be used from several threads.
pub struct Manager {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that started the thread. After a fork, the child does not have the thread.
    process: u32,
}

/// Addresses at which this process listens. Dropping this value frees them.
pub struct Listeners {
    shared: Arc<Shared>,
    keys: Vec<u64>,
}

impl Drop for Listeners {
    fn drop(&mut self) {
        let mut state = locked(&self.shared.state);
        let gone: Vec<_> = self.keys.iter().filter_map(|key| state.listening.remove(key)).collect();
        drop(state);
        // This asks the daemon, so it must happen without the lock.
        drop(gone);
    }
}

fn failed(source: std::io::Error) -> Error {
    Error::System { what: "starting a thread for connections", source }
}

impl Manager {
    /// Starts the manager's thread by calling `spawn`.
    pub fn start(
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> std::io::Result<JoinHandle<()>>,
    ) -> Result<Self, DeviceError> {
        let mut set = ReadySet::new()?;
        set.set_mode(WaitMode::Interrupt);
        let (waker, wake_socket) = UnixStream::pair().map_err(failed)?;
        waker.set_nonblocking(true).map_err(failed)?;
        wake_socket.set_nonblocking(true).map_err(failed)?;
        set.watch(&wake_socket, WAKE)?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            waker: Waker::new(waker),
            is_over: AtomicBool::new(false),
        });
        let thread = {
            let shared = shared.clone();
            spawn(Box::new(move || run(&shared, set, wake_socket))).map_err(failed)?
        };
        Ok(Self { shared, thread: Some(thread), process: process::id() })
    }

    /// Listens at each of the addresses on each of the devices. None of them may be an unspecified address. The first address must be
    /// free on all devices; any other that is in use is left out.
    pub fn listen(
        &self,
        devices: &[Arc<Device>],
        space: PortSpace,
        addresses: &[SocketAddr],
        namespace: u64,
        owner: &Arc<dyn EventHandler>,
    ) -> Result<Listeners, DeviceError> {
        let found = rendezvous::listen(devices, space, addresses, namespace, &CHANNEL)?;
        let mut state = locked(&self.shared.state);
        let mut keys = Vec::new();
        for (listener, device) in found {
            state.last += 1;
            let key = state.last;
            let owner = owner.clone();
            let listening = Listening { listener, device, space, owner, is_watched: false };
            state.listening.insert(key, listening);
            keys.push(key);
        }
        drop(state);
        self.shared.waker.wake();
        Ok(Listeners { shared: self.shared.clone(), keys })
    }

    /// Opens a channel to the listener of an address; returns `None` if nobody listens there. Asks the daemon.
    pub fn connect(
        &self,
        device: &Arc<Device>,
        space: PortSpace,
        address: SocketAddr,
        namespace: u64,
    ) -> Result<Option<Arc<Connection>>, DeviceError> {
        let reached = rendezvous::connect::<MessageChannel>(device, space, address, namespace, &CHANNEL)?;
        let Some(channel) = reached else { return Ok(None) };
        let (sender, mut receiver) = channel.split();
        receiver.set_nonblocking(true);
        let connection = self.shared.connection(device.clone(), Phase::Open, sender);
        let to = Destination::Connection(Arc::downgrade(&connection));
        locked(&self.shared.state).add(ReceivingHalf {
            receiver,
            to,
            is_registered: false,
            is_pending: true,
        });
        self.shared.waker.wake();
        Ok(Some(connection))
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.process != process::id() {
            std::mem::forget(thread);
            return;
        }
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.waker.wake();
        let _ = thread.join();
    }
}

impl State {
    fn add(&mut self, half: ReceivingHalf) {
        self.last += 1;
        self.halves.insert(self.last, half);
    }

    /// Accepts the channels that peers have opened.
    fn accept(&mut self) {
        let mut came = Vec::new();
        for listening in self.listening.values() {
            let accepted = std::iter::from_fn(|| listening.listener.try_accept().ok()).take(TURN);
            came.extend(accepted.map(|channel| {
                (channel, listening.device.clone(), listening.space, listening.owner.clone())
            }));
        }
        for (channel, device, space, owner) in came {
            let (sender, mut receiver) = channel.split();
            receiver.set_nonblocking(true);
            let to = Destination::Silent(Box::new(Silent { sender: Some(sender), device, space, owner }));
            self.add(ReceivingHalf { receiver, to, is_registered: false, is_pending: true });
        }
        let silent = |half: &ReceivingHalf| matches!(half.to, Destination::Silent(_));
        let surplus = self.halves.values().filter(|half| silent(half)).count().saturating_sub(SILENT);
        let oldest: Vec<_> =
            self.halves.iter().filter(|(_, half)| silent(half)).map(|(key, _)| *key).take(surplus).collect();
        for key in oldest {
            self.halves.remove(&key);
        }
    }
}

/// An event that has to be delivered, after the lock has been released.
enum Delivery {
    Listener(Arc<dyn EventHandler>, Arc<Connection>, Request),
    Connection(Arc<Connection>, Event),
}

impl Shared {
    fn connection(
        self: &Arc<Self>,
        device: Arc<Device>,
        phase: Phase,
        mut sender: MessageSender,
    ) -> Arc<Connection> {
        sender.set_nonblocking(true);
        let peer = &sender.info().peer;
        let peer = (peer.member, peer.endpoint);
        let side = Side { phase, sender: Some(sender), owner: None, is_datagram: false };
        Arc::new(Connection { device, peer, side: Mutex::new(side), shared: Arc::downgrade(self) })
    }

    /// Takes some of the messages of a receiving half. Returns false if the channel has ended.
    fn hear(self: &Arc<Self>, half: &mut ReceivingHalf, told: &mut Vec<Delivery>) -> bool {
        half.is_pending = false;
        let mut buffer = [0; LARGEST];
        for _ in 0..TURN {
            let message = match half.receiver.recv_into(&mut buffer) {
                Ok(len) => buffer.get(..len).and_then(Message::decode),
                Err(Error::WouldBlock) => return true,
                Err(_) => {
                    if let Destination::Connection(connection) = &half.to
                        && let Some(connection) = connection.upgrade()
                        && let Some(event) = connection.ended()
                    {
                        told.push(Delivery::Connection(connection, event));
                    }
                    return false;
                }
            };
            if !self.take(&mut half.to, message, told) {
                return false;
            }
        }
        half.is_pending = true;
        true
    }

    /// Handles a message; `None` stands for one that could not be decoded. Returns false if nothing more is to be read from this side.
    fn take(
        self: &Arc<Self>,
        to: &mut Destination,
        message: Option<Message>,
        told: &mut Vec<Delivery>,
    ) -> bool {
        match to {
            Destination::Silent(silent) => {
                let (Some(Message::Request(request)), Some(sender)) = (message, silent.sender.take()) else {
                    return false;
                };
                // The listener determines the port space of a connection.
                if request.space != silent.space {
                    return false;
                }
                let connection = self.connection(silent.device.clone(), Phase::Asked, sender);
                if !connection.is_theirs(request.parameters.queue_pair) {
                    return false;
                }
                connection.side().is_datagram = request.space.is_datagram();
                let owner = silent.owner.clone();
                *to = Destination::Connection(Arc::downgrade(&connection));
                told.push(Delivery::Listener(owner, connection, request));
                true
            }
            Destination::Connection(connection) => {
                let Some(connection) = connection.upgrade() else { return false };
                let heard = message.ok_or(WrongPhase).and_then(|message| connection.hear(message));
                let is_good = heard.is_ok();
                let event = heard.unwrap_or_else(|_| connection.ended());
                if let Some(event) = event {
                    told.push(Delivery::Connection(connection, event));
                }
                is_good
            }
        }
    }
}

fn run(shared: &Arc<Shared>, mut set: ReadySet, mut wake_socket: UnixStream) {
    let mut keys = Vec::new();
    while !shared.is_over.load(Ordering::Acquire) {
        let mut told = Vec::new();
        let timeout = turn(shared, &mut set, &keys, &mut told);
        for telling in told {
            match telling {
                Delivery::Listener(owner, connection, request) => {
                    owner.handle_event(Event::Request(connection, request))
                }
                Delivery::Connection(connection, event) => connection.tell(event),
            }
        }
        if set.wait(&mut keys, timeout).is_err() {
            // The ready set does not work any more, so nothing wakes this thread and it has to poll.
            std::thread::sleep(Duration::from_millis(1));
        }
        if keys.contains(&WAKE) {
            drain(&mut wake_socket);
        }
    }
}

/// Handles everything that has arrived. Returns how long the thread may sleep afterwards.
fn turn(
    shared: &Arc<Shared>,
    set: &mut ReadySet,
    keys: &[u64],
    told: &mut Vec<Delivery>,
) -> Option<Duration> {
    let mut state = locked(&shared.state);
    let mut is_hidden = false;
    for (key, listening) in &mut state.listening {
        if !listening.is_watched {
            listening.is_watched = set.watch(&listening.listener, LISTENER | key).is_ok();
            is_hidden |= !listening.is_watched;
        }
    }
    let mut ended = Vec::new();
    for (key, half) in &mut state.halves {
        if matches!(&half.to, Destination::Connection(connection) if connection.strong_count() == 0) {
            ended.push(*key);
            continue;
        }
        if !half.is_registered {
            // Where there is no room for another registration, the thread polls from time to time.
            half.is_registered = half.receiver.register(set, *key).is_ok();
            half.is_pending = true;
        }
        let is_due = !half.is_registered || half.is_pending || keys.contains(key);
        if is_due && !shared.hear(half, told) {
            ended.push(*key);
        }
    }
    let gone: Vec<_> = ended.iter().filter_map(|key| state.halves.remove(key)).collect();
    // Known channels are handled before new ones are accepted, because accepting may close the oldest that are still silent.
    state.accept();
    let is_pending = state.halves.values().any(|half| half.is_pending);
    is_hidden |= state.halves.values().any(|half| !half.is_registered);
    drop(state);
    // This tells the daemon, so it must happen without the lock.
    drop(gone);
    match (is_pending, is_hidden) {
        (true, _) => Some(Duration::ZERO),
        (_, true) => Some(LOOK),
        _ => None,
    }
}
