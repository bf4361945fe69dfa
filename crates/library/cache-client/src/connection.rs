//! A connection to a server.

use crate::answer::{Answer, Nonsense, parse};
use ginnel::{Endpoint, StreamChannel, StreamReceiver, StreamSender};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};
use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The initial room for answers, in bytes.
const ROOM: usize = 16 << 10;
/// Room beyond this many bytes is released.
const MOST_ROOM: usize = 1 << 20;

/// Why a connection can no longer be used.
#[derive(Debug)]
pub enum Broken {
    /// Nothing of the request was sent.
    Before(String),
    /// The request may have arrived.
    After(String),
    /// The server has broken the protocol.
    Nonsense(&'static str),
}

enum Stream {
    Channel(Box<StreamSender>, Box<StreamReceiver>),
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection to a server, over a channel or a socket.
pub struct Connection {
    stream: Stream,
    timeout: Duration,
    input: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Connection {
    /// Connects over a channel of an endpoint's segment.
    pub fn channel(endpoint: &Endpoint, name: &str, timeout: Duration) -> Result<Self, ginnel::Error> {
        let mut channel = endpoint.connect_soon::<StreamChannel>(name, timeout)?;
        channel.set_timeout(Some(timeout));
        let (sender, receiver) = channel.split();
        Ok(Self::new(Stream::Channel(Box::new(sender), Box::new(receiver)), timeout))
    }

    /// Connects over TCP.
    pub fn tcp(address: &str, timeout: Duration) -> io::Result<Self> {
        let mut error = io::Error::other("the name has no address");
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(timeout))?;
                    stream.set_write_timeout(Some(timeout))?;
                    return Ok(Self::new(Stream::Tcp(stream), timeout));
                }
                Err(other) => error = other,
            }
        }
        Err(error)
    }

    /// Connects over a Unix socket.
    pub fn unix(path: &Path, timeout: Duration) -> io::Result<Self> {
        // A server that accepts no connections would keep a blocking connect waiting for ever.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self::new(Stream::Unix(stream), timeout))
    }

    fn new(stream: Stream, timeout: Duration) -> Self {
        Self { stream, timeout, input: vec![0; ROOM], begin: 0, end: 0 }
    }

    /// Sets how long the server may take for an answer from now on.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<(), Broken> {
        self.timeout = timeout;
        let timeout = Some(timeout);
        let set = match &mut self.stream {
            Stream::Channel(sender, receiver) => {
                sender.set_timeout(timeout);
                receiver.set_timeout(timeout);
                Ok(())
            }
            Stream::Tcp(stream) => {
                stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))
            }
            Stream::Unix(stream) => {
                stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))
            }
        };
        set.map_err(|error| Broken::Before(text(&error)))
    }

    /// Returns whether the server is still there, as far as is known without a request. No request may be under way.
    pub fn is_alive(&mut self) -> bool {
        let mut byte = [0; 1];
        let looked = match &mut self.stream {
            Stream::Channel(_, receiver) => {
                receiver.set_nonblocking(true);
                let looked = receiver.recv(&mut byte);
                receiver.set_nonblocking(false);
                return matches!(looked, Err(ginnel::Error::WouldBlock));
            }
            Stream::Tcp(stream) => rustix::net::recv(stream, &mut byte, RecvFlags::DONTWAIT),
            Stream::Unix(stream) => rustix::net::recv(stream, &mut byte, RecvFlags::DONTWAIT),
        };
        // A byte that was not asked for is as bad as the end.
        matches!(looked, Err(rustix::io::Errno::AGAIN))
    }

    /// Sends all bytes.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let (mut sent, end) = (0, Instant::now() + self.timeout);
        while sent < bytes.len() {
            let more = &bytes[sent..];
            let broken = match self.send_some(more, SendFlags::NOSIGNAL) {
                Ok(0) => "it takes nothing".into(),
                Ok(_) if Instant::now() > end => "it takes too little in the time".into(),
                Ok(n) => {
                    sent += n;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => text(&error),
            };
            return Err(if sent == 0 { Broken::Before(broken) } else { Broken::After(broken) });
        }
        Ok(())
    }

    fn send_some(&mut self, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Channel(sender, _) => Ok(sender.send(bytes)?),
            Stream::Tcp(stream) => Ok(rustix::net::send(stream, bytes, flags)?),
            Stream::Unix(stream) => Ok(rustix::net::send(stream, bytes, flags)?),
        }
    }

    /// Sends all bytes if there is room for them without waiting, and otherwise none. If there is room for only a
    /// part, the connection has failed, because this function does not wait for more.
    pub fn hint(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        if let Stream::Channel(sender, _) = &mut self.stream {
            sender.set_nonblocking(true);
        }
        let sent = self.send_some(bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if let Stream::Channel(sender, _) = &mut self.stream {
            sender.set_nonblocking(false);
        }
        match sent {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(Broken::After("it takes too little".into())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(Broken::Before(text(&error))),
        }
    }

    /// Waits for the next answer, and passes it to `take`.
    pub fn answer<T>(&mut self, take: impl FnOnce(Answer<'_>) -> T) -> Result<T, Broken> {
        let end = Instant::now() + self.timeout;
        loop {
            match parse(&self.input[self.begin..self.end]) {
                Ok(Some((answer, used))) => {
                    let taken = take(answer);
                    self.begin += used;
                    self.tidy();
                    return Ok(taken);
                }
                Ok(None) => {}
                Err(Nonsense(what)) => return Err(Broken::Nonsense(what)),
            }
            let before = self.begin + self.end;
            self.receive()?;
            if Instant::now() > end && before != 0 {
                return Err(Broken::After("the time is over".into()));
            }
        }
    }

    /// Waits for the next of several answers, all of which must come before `end`.
    pub fn answer_by<T>(&mut self, end: Instant, take: impl FnOnce(Answer<'_>) -> T) -> Result<T, Broken> {
        if Instant::now() > end {
            return Err(Broken::After("the time is over".into()));
        }
        self.answer(take)
    }

    /// Returns whether everything that has come was taken.
    pub fn is_empty(&self) -> bool {
        self.begin == self.end
    }

    fn tidy(&mut self) {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
            if self.input.len() > MOST_ROOM {
                self.input = vec![0; ROOM];
            }
        }
    }

    fn receive(&mut self) -> Result<(), Broken> {
        if self.end == self.input.len() {
            if self.begin > 0 {
                self.input.copy_within(self.begin..self.end, 0);
                (self.begin, self.end) = (0, self.end - self.begin);
            } else {
                self.input.resize(self.input.len() * 2, 0);
            }
        }
        let room = &mut self.input[self.end..];
        let got = match &mut self.stream {
            Stream::Channel(_, receiver) => receiver.recv(room).map_err(io::Error::from),
            Stream::Tcp(stream) => stream.read(room),
            Stream::Unix(stream) => stream.read(room),
        };
        match got {
            Ok(0) => Err(Broken::After("the server has ended the connection".into())),
            Ok(n) => {
                self.end += n;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Broken::After(text(&error))),
        }
    }
}

fn text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "no answer in the time".into(),
        _ => error.to_string(),
    }
}
