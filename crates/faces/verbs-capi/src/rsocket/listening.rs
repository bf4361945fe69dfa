//! A listener, and the connections that wait to be accepted.

use super::direction::locked;
use super::maps::Maps;
use super::stream::{Greeting, Stream, greet};
use super::waiting::{Waiters, Wake};
use crate::cm::{addresses, opened};
use ginnel::{ChannelOptions, Error, ErrorCode, StreamChannel, StreamReceiver, StreamSender};
use ginnel_verbs::cm::hello::{Answer, Hello};
use ginnel_verbs::cm::names::PortSpace;
use ginnel_verbs::cm::rendezvous;
use ginnel_verbs::device::Device;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

/// Maximum number of connections that have not sent their hello yet. Beyond it, the oldest is closed.
const SILENT: usize = 64;
/// Number of attempts to find a free port.
const TRIES: u32 = 64;

/// A listener.
pub struct Listening {
    pub bound: SocketAddr,
    listeners: Vec<rendezvous::BoundListener<StreamChannel>>,
    /// Number of connections that wait in this process; the others wait at the daemon.
    backlog: usize,
    queue: Mutex<Queue>,
    pub waiters: Waiters,
}

#[derive(Default)]
struct Queue {
    silent: VecDeque<Silent>,
    arrived: VecDeque<Arrived>,
}

struct Silent {
    sender: StreamSender,
    receiver: StreamReceiver,
    device: Arc<Device>,
    greeting: Greeting<{ Hello::LEN }>,
}

/// A connection that has sent its hello and waits to be accepted.
pub struct Arrived {
    channel: StreamChannel,
    device: Arc<Device>,
    hello: Hello,
}

fn refused(error: &Error) -> c_int {
    match error.code() {
        Some(ErrorCode::IN_USE) => libc::EADDRINUSE,
        Some(ErrorCode::DENIED | ErrorCode::READ_ONLY) => libc::EACCES,
        Some(ErrorCode::NO_MEMORY | ErrorCode::QUOTA | ErrorCode::LIMIT) => libc::ENOMEM,
        _ => libc::EIO,
    }
}

impl Listening {
    /// Listens at the addresses of `bound` on every device.
    pub fn new(
        mut bound: SocketAddr,
        is_port_chosen: bool,
        options: &ChannelOptions,
        backlog: usize,
    ) -> Result<Self, c_int> {
        let devices: Vec<_> = opened().iter().map(|opened| opened.open().device.clone()).collect();
        if devices.is_empty() {
            return Err(libc::ENODEV);
        }
        let mut tries = if is_port_chosen { TRIES } else { 1 };
        let listeners = loop {
            let namespace = addresses::namespace();
            let made =
                rendezvous::listen(&devices, PortSpace::Tcp, &addresses::listened(bound), namespace, options);
            tries -= 1;
            match made.map_err(|error| refused(&error)) {
                Err(libc::EADDRINUSE) if tries > 0 => bound.set_port(addresses::any_port()),
                made => break made?,
            }
        };
        Ok(Self { bound, listeners, backlog, queue: Mutex::default(), waiters: Waiters::default() })
    }

    /// Accepts new channels and reads their hellos. Adds to `wake` what becomes readable when there are more.
    fn collect(&self, queue: &mut Queue, mut wake: Option<&mut Wake>) {
        let Queue { silent, arrived } = queue;
        for (listener, device) in &self.listeners {
            while arrived.len() + silent.len() < self.backlog + SILENT
                && let Ok(channel) = listener.try_accept()
            {
                let (sender, receiver) = channel.split();
                let greeting = Greeting::new();
                silent.push_back(Silent { sender, receiver, device: device.clone(), greeting });
            }
            if let Some(wake) = &mut wake {
                wake.add(Some(listener.as_fd().as_raw_fd()));
            }
        }
        let mut left = VecDeque::new();
        for mut one in silent.drain(..) {
            match one.greeting.take(&mut one.receiver, wake.as_deref_mut()) {
                Ok(None) => left.push_back(one),
                Ok(Some(bytes)) => {
                    let hello = Hello::decode(bytes);
                    let Silent { sender, receiver, device, .. } = one;
                    if let Some(hello) = hello
                        && let Ok(channel) = StreamChannel::reunite(sender, receiver)
                    {
                        arrived.push_back(Arrived { channel, device, hello });
                    }
                }
                Err(_) => {}
            }
        }
        while left.len() > SILENT {
            left.pop_front();
        }
        *silent = left;
    }

    /// Returns whether a connection can be accepted. If not, adds to `wake` what becomes readable then.
    pub fn is_ready(&self, wake: Option<&mut Wake>) -> bool {
        let mut queue = locked(&self.queue);
        if queue.arrived.is_empty() {
            self.collect(&mut queue, wake);
        }
        !queue.arrived.is_empty()
    }

    fn take(&self, wake: Option<&mut Wake>) -> Option<Arrived> {
        let mut queue = locked(&self.queue);
        if queue.arrived.is_empty() {
            self.collect(&mut queue, wake);
        }
        let arrived = queue.arrived.pop_front();
        drop(queue);
        if arrived.is_some() {
            // There may be another connection for another thread.
            self.waiters.ring(None);
        }
        arrived
    }

    /// Accepts the next connection. If there is none, waits (`waits`) or fails with EAGAIN.
    pub fn accept(&self, waits: bool) -> Result<Stream, c_int> {
        if let Some(arrived) = self.take(None) {
            return arrived.enter(self.bound);
        }
        if !waits {
            return Err(libc::EAGAIN);
        }
        let mut wake = Wake::new()?;
        let _entered = self.waiters.enter(&wake);
        loop {
            if let Some(arrived) = self.take(Some(&mut wake)) {
                return arrived.enter(self.bound);
            }
            wake.sleep(None)?;
        }
    }
}

impl Arrived {
    /// Establishes the connection, and answers the other side if it expects an answer.
    fn enter(self, bound: SocketAddr) -> Result<Stream, c_int> {
        let Self { mut channel, device, hello } = self;
        let maps = hello.offer.and_then(|theirs| {
            let open = opened().into_iter().map(|opened| opened.open());
            let open = open.into_iter().find(|open| Arc::ptr_eq(&open.device, &device))?;
            let mut maps = Maps::new(&open).ok()?;
            maps.connect(theirs, channel.info().peer.endpoint).ok()?;
            Some(maps)
        });
        if hello.offer.is_some() {
            let answer = Answer { offer: maps.as_ref().and_then(Maps::offer) };
            greet(&mut channel, &answer.encode()).map_err(|_| libc::ECONNABORTED)?;
        }
        // If the listener has several addresses, the hello says to which of them the other side connected.
        let local = match bound.ip().is_unspecified() {
            true => SocketAddr::new(hello.to.ip(), bound.port()),
            false => bound,
        };
        Ok(Stream::new(channel.split(), local, hello.from, maps))
    }
}
