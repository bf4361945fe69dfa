//! The server: the event loop for all clients and listeners, and the ticks of the cache's clock.

use crate::block::{boot_time, unix_time};
use crate::connection::{Connection, Either, Next, Scratch, Socket};
use crate::engine::Engine;
use crate::peers::Peers;
use anyhow::{Context, Result};
use ginnel::{Endpoint, Error, Listener, ReadySet, StreamChannel, WaitMode};
use ginnel_shmem::SharedMemory;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, sockopt};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;
use tracing::{debug, info, warn};

/// The longest time between two ticks of the cache's clock. If the clock stands still for two seconds, readers assume that
/// the server is dead.
const TICK: Duration = Duration::from_millis(250);
/// Milliseconds for which no client is accepted after the file descriptors were exhausted.
const SHUT: u64 = 250;
/// The shortest time between two ticks of the clock, in milliseconds. Readers read the clock, and after each tick they
/// have to fetch its cache line again.
const LEAST_TICK: u64 = 10;
/// Milliseconds between two checks whether the segment still exists. The server handles the daemon's events at the same
/// time.
const LOOK_AROUND: u64 = 1000;
/// How long the ready set polls channels before it sleeps.
const LOOK: Duration = Duration::from_micros(50);
/// The most socket events that one call handles.
const EVENTS: usize = 256;
/// The most clients that are accepted from one listener at once.
const ACCEPTS: usize = 64;
/// The most connections that may wait at a listener to be accepted.
const BACKLOG: u32 = 1024;

/// The first key of the ready set that is not for a connection. The two halves of each channel have keys below this.
const OTHERS: u64 = 1 << 48;
/// The key of the epoll instance that watches all sockets.
const SOCKETS: u64 = OTHERS;
/// The key of the descriptor that tells the server to stop.
const STOP: u64 = OTHERS + 1;
/// The key of the first listener for channels. The other listeners for channels have the keys after it.
const CHANNELS: u64 = OTHERS + 2;
/// In the epoll instance of the sockets: the key of the first listening socket. Smaller keys are indexes of clients.
const LISTENERS: u64 = OTHERS;

/// A listening socket for clients.
pub enum Door {
    /// A TCP listener.
    Tcp(TcpListener),
    /// A listener on a Unix stream socket.
    Unix(UnixListener),
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// Listens for TCP connections at an address.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    let failed = || {
        format!(
            "{address}: cannot listen at this address; stop the process that uses it, or choose another --listen address"
        )
    };
    // The standard library sets SO_REUSEADDR, so a successor can bind the same address at once.
    let listener = TcpListener::bind(address).with_context(failed)?;
    rustix::net::listen(&listener, BACKLOG as i32).with_context(failed)?;
    Ok(listener)
}

/// Listens for channels in a segment, at the name of the cache's block. Waits up to `patience` while the name is in use.
pub fn listen_for_channels(
    endpoint: &Endpoint,
    name: &str,
    patience: Duration,
) -> Result<Listener<StreamChannel>, Error> {
    let options = ginnel::ChannelOptions { backlog: BACKLOG, ..Default::default() };
    let until = std::time::Instant::now() + patience;
    loop {
        match endpoint.listen_with(name, &options) {
            // The daemon has not noticed yet that the previous server has died.
            Err(error)
                if error.code() == Some(ginnel::ErrorCode::IN_USE) && std::time::Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

struct Client {
    connection: Connection<Either>,
    /// The events for which the client's socket is watched.
    interest: epoll::EventFlags,
    /// Whether the client is in [`Server::due`].
    is_due: bool,
    /// The client's address, if it has connected over TCP.
    peer: Option<SocketAddr>,
}

/// The server, which serves all clients in one thread.
pub struct Server<M> {
    engine: Engine<M>,
    set: ReadySet,
    sockets: OwnedFd,
    doors: Vec<Door>,
    channels: Vec<Listener<StreamChannel>>,
    clients: Vec<Option<Client>>,
    free: Vec<usize>,
    /// Indexes of clients that have more to do now and get another turn.
    due: Vec<usize>,
    scratch: Scratch,
    /// The endpoint in the segment that contains the items.
    endpoint: Endpoint,
    ticked: u64,
    looked_around: u64,
    /// Whether the listening sockets are not watched, because the limit of clients is reached or the file descriptors are
    /// exhausted.
    is_full: bool,
    /// The time (CLOCK_BOOTTIME in milliseconds) from which the listening sockets are watched again even if no client has
    /// left, provided that the limit of clients is not reached.
    open_at: u64,
    /// Whether the log already has the warning about exhausted file descriptors.
    is_warned: bool,
}

impl<M: SharedMemory> Server<M> {
    /// Creates a server for the clients of these listeners. The server stops once `stop` is readable.
    pub fn new(
        engine: Engine<M>,
        endpoint: Endpoint,
        doors: Vec<Door>,
        channels: Vec<Listener<StreamChannel>>,
        stop: impl AsFd,
    ) -> Result<Self> {
        let mut set = ReadySet::new()?;
        let sockets =
            epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot create an epoll instance")?;
        set.watch(&sockets, SOCKETS)?;
        set.watch(stop, STOP)?;
        for (key, listener) in (CHANNELS..).zip(&channels) {
            set.watch(listener, key)?;
        }
        for (key, door) in (LISTENERS..).zip(&doors) {
            rustix::io::ioctl_fionbio(door, true).context("a listener cannot be used")?;
            epoll::add(&sockets, door, epoll::EventData::new_u64(key), epoll::EventFlags::IN)
                .context("a listener cannot be watched")?;
        }
        Ok(Self {
            engine,
            set,
            sockets,
            doors,
            channels,
            clients: Vec::new(),
            free: Vec::new(),
            due: Vec::new(),
            scratch: Scratch::new(),
            endpoint,
            ticked: 0,
            looked_around: 0,
            is_full: false,
            open_at: 0,
            is_warned: false,
        })
    }

    /// Serves clients until the server is told to stop, or until an error makes further work impossible.
    pub fn run(&mut self) -> Result<()> {
        let mut keys = Vec::new();
        let mut is_tidy = true;
        self.set.set_mode(WaitMode::Interrupt);
        loop {
            let timeout = if self.due.is_empty() && is_tidy { TICK } else { Duration::ZERO };
            self.set.wait(&mut keys, Some(timeout))?;
            self.tick();
            self.look_around()?;
            // One call handles only a few items, so no client waits until everything is tidy.
            is_tidy = !self.engine.store().tidy();
            let mut channels_work = false;
            for &key in &keys {
                match key {
                    SOCKETS => self.look_at_sockets()?,
                    STOP => return Ok(()),
                    CHANNELS.. => self.accept_channels((key - CHANNELS) as usize),
                    half => {
                        channels_work = true;
                        self.step((half / 2) as usize);
                    }
                }
            }
            for index in std::mem::take(&mut self.due) {
                if let Some(client) = &mut self.clients[index] {
                    client.is_due = false;
                }
                self.step(index);
            }
            if channels_work {
                // A channel that was busy a moment ago will probably be busy again.
                self.set.set_mode(WaitMode::Adaptive { budget: LOOK });
            } else if !keys.is_empty() {
                // The set does not notice sockets while it polls channels.
                self.set.set_mode(WaitMode::Interrupt);
            }
        }
    }

    fn tick(&mut self) {
        let now = boot_time();
        if now >= self.ticked + LEAST_TICK || now < self.ticked {
            self.ticked = now;
            self.engine.tick(now, unix_time());
            // Descriptors may become free although no client has left, because something else in the system may have
            // used them up.
            if self.is_full && now >= self.open_at && self.has_room() {
                self.watch_doors(true);
            }
        }
    }

    fn look_around(&mut self) -> Result<()> {
        let now = boot_time();
        if now >= self.looked_around + LOOK_AROUND || now < self.looked_around {
            self.looked_around = now;
            // This tells a restarted daemon that this server is alive.
            self.endpoint.process_events();
            self.endpoint.check().context("the segment of the cache can no longer be used")?;
        }
        Ok(())
    }

    fn look_at_sockets(&mut self) -> Result<()> {
        let empty = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [empty; EVENTS];
        let count = match epoll::wait(&self.sockets, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Err(Errno::INTR) => 0,
            count => count.context("sockets cannot be watched")?,
        };
        for event in &events[..count] {
            match event.data.u64() {
                door @ LISTENERS.. => self.accept_sockets((door - LISTENERS) as usize),
                index => self.step(index as usize),
            }
        }
        Ok(())
    }

    /// Gives a client its turn, and then watches for whatever the client needs next.
    fn step(&mut self, index: usize) {
        // Many busy clients take a long time. The clock must go on meanwhile, or readers assume that the server is dead.
        self.tick();
        let Some(client) = self.clients.get_mut(index).and_then(Option::as_mut) else { return };
        let next = client.connection.step(&mut self.engine, &mut self.scratch);
        let interest = match next {
            Next::Read => epoll::EventFlags::IN,
            Next::Write => epoll::EventFlags::OUT,
            Next::Again => {
                if !std::mem::replace(&mut client.is_due, true) {
                    self.due.push(index);
                }
                return;
            }
            Next::Close => return self.close(index),
        };
        let Either::Socket(socket) = &client.connection.transport else { return };
        if interest != client.interest {
            client.interest = interest;
            let data = epoll::EventData::new_u64(index as u64);
            if let Err(error) = epoll::modify(&self.sockets, socket, data, interest) {
                warn!("a client cannot be watched: {error}");
                self.close(index);
            }
        }
    }

    fn close(&mut self, index: usize) {
        let Some(client) = self.clients[index].take() else { return };
        self.free.push(index);
        self.engine.numbers.connections -= 1;
        if let Some(peer) = client.peer {
            self.engine.peers.leave(peer);
        }
        if let Either::Channel(_) = client.connection.transport {
            self.engine.numbers.channels -= 1;
        }
        // Closing the socket removes it from the epoll instance.
        drop(client);
        if self.is_full {
            self.watch_doors(true);
        }
    }

    /// Starts or stops watching the listening sockets. While they are not watched, new clients wait in the backlog.
    fn watch_doors(&mut self, watched: bool) {
        self.is_full = !watched;
        let flags = if watched { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (key, door) in (LISTENERS..).zip(&self.doors) {
            if let Err(error) = epoll::modify(&self.sockets, door, epoll::EventData::new_u64(key), flags) {
                warn!("a listener cannot be watched: {error}");
            }
        }
    }

    fn has_room(&self) -> bool {
        self.engine.numbers.connections < self.engine.settings.connections
    }

    fn accept_sockets(&mut self, door: usize) {
        for _ in 0..ACCEPTS {
            if !self.has_room() {
                self.watch_doors(false);
                return;
            }
            let Some(door) = self.doors.get(door) else { return };
            let (socket, peer) = match acceptfrom_with(door, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.engine.numbers.rejected_connections += 1;
                    if !std::mem::replace(&mut self.is_warned, true) {
                        warn!("there are too few file descriptors for another client; raise LimitNOFILE=");
                    }
                    self.open_at = boot_time() + SHUT;
                    self.watch_doors(false);
                    return;
                }
                // The client has closed the connection already.
                Err(_) => continue,
            };
            if let Door::Tcp(_) = door {
                // Without TCP_NODELAY, answers are delayed. Without keepalive, the server never notices a client whose
                // machine has lost power.
                let _ = sockopt::set_tcp_nodelay(&socket, true);
                let _ = sockopt::set_socket_keepalive(&socket, true);
            }
            let index = self.vacancy();
            let data = epoll::EventData::new_u64(index as u64);
            let interest = epoll::EventFlags::IN;
            if let Err(error) = epoll::add(&self.sockets, &socket, data, interest) {
                warn!("a client cannot be watched: {error}");
                self.free.push(index);
                return;
            }
            self.is_warned = false;
            let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok()).map(Peers::plain);
            self.enter(index, Either::Socket(Socket(socket)), interest, peer);
        }
    }

    fn accept_channels(&mut self, listener: usize) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.channels.get(listener) else { return };
            let channel = match listener.try_accept() {
                Ok(channel) => channel,
                Err(Error::WouldBlock) => return,
                Err(error) => {
                    debug!("a channel cannot be accepted: {error}");
                    return;
                }
            };
            if !self.has_room() {
                // If the channel stayed in the backlog, the set would report the listener again and again.
                self.engine.numbers.rejected_connections += 1;
                continue;
            }
            let index = self.vacancy();
            let keys = [index as u64 * 2, index as u64 * 2 + 1];
            match Either::channel(channel, &self.set, keys) {
                Ok(channel) => {
                    self.engine.numbers.channels += 1;
                    self.enter(index, channel, epoll::EventFlags::empty(), None);
                }
                Err(error) => {
                    warn!("a channel cannot be served: {error}");
                    self.free.push(index);
                }
            }
        }
    }

    /// Returns the index of a free place in `clients`.
    fn vacancy(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        })
    }

    fn enter(
        &mut self,
        index: usize,
        transport: Either,
        interest: epoll::EventFlags,
        peer: Option<SocketAddr>,
    ) {
        self.engine.numbers.connections += 1;
        self.engine.numbers.total_connections += 1;
        let connection = Connection::new(transport);
        if let Some(peer) = peer {
            self.engine.peers.enter(peer);
        }
        self.clients[index] = Some(Client { connection, interest, is_due: false, peer });
    }
}

impl<M> Drop for Server<M> {
    fn drop(&mut self) {
        info!(clients = self.clients.iter().flatten().count(), "the server ends");
    }
}
