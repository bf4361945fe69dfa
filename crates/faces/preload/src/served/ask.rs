//! Asks a server whether it is a cache, and which one, over a connection of the library's own.
//!
//! The program's connection carries no byte of the question. So a server of another protocol, or a proxy, that does not know the
//! question at most closes the library's connection. The question is `stats ginnel ADDRESS`, with the address of the program's end, and
//! a `ginnel-cache` also says whether it has a connection from there itself. A proxy may relay the question to a cache behind it and
//! yet change requests on their way, or send them to other caches.

use crate::process::{hidden, signals};
use crate::state::socket::Socket;
use crate::state::sockets::Using;
use crate::system::kernel;
use ginnel_cache_protocol::answer::{Expected, Found, Scan};
use libc::c_int;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a server may take to accept the connection and to answer, together.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the end of the program's connection may come after that of the library's, if the server has died.
const BETWEEN: Duration = Duration::from_millis(20);
/// The maximum length of an answer. No correct answer is longer.
const MOST: usize = 1024;

/// What a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is this cache.
    Cache { segment: String, name: String, id: [u64; 2] },
    /// The program's connection is still being made, or has ended.
    NotConnected,
    /// It is not known what the server is, for this reason.
    Unknown(&'static str),
    /// The server is not the cache to which the program sends, for this reason, and will never be.
    Other(&'static str),
}

const LATE: &str = "its server did not say in time whether it is a cache";
const REFUSES: &str = "its server does not accept the connection that asks what it is";
const DIED: &str = "its server ended when it was asked whether it is a cache";
const CLOSES: &str = "its server is not a ginnel-cache, and closes when it is asked";
const ANSWERS: &str = "its server is not a ginnel-cache";
const RELAYS: &str = "a proxy is between the program and the cache";

/// Asks the server to which a socket of the program is connected.
pub fn ask(socket: &'static Socket, fd: c_int) -> Answer {
    match within(Instant::now() + PATIENCE, socket, fd) {
        Ok(answer) | Err(answer) => answer,
    }
}

fn within(end: Instant, socket: &'static Socket, fd: c_int) -> Result<Answer, Answer> {
    let (own, remote) = {
        let _using = Using::begin(socket, fd).ok_or(Answer::NotConnected)?;
        let fd = kernel::borrow(fd);
        let remote = rustix::net::getpeername(fd).ok().flatten();
        (ginnel_tcp::addresses(fd).map_err(|_| Answer::NotConnected)?.0, remote)
    };
    let remote = remote.ok_or(Answer::NotConnected)?;
    let connection = connect(&remote, end)?;
    let question = format!("stats ginnel {own}\r\n");
    match rustix::net::send(&connection, question.as_bytes(), SendFlags::NOSIGNAL) {
        Ok(sent) if sent == question.len() => {}
        _ => return Err(closed(socket, fd)),
    }
    let (mut text, mut scan) = (Vec::new(), Scan::new(Expected::Stats));
    loop {
        let mut bytes = [0; 512];
        let got = match rustix::net::recv(&connection, &mut bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(closed(socket, fd)),
            Ok((got, _)) => got,
            Err(Errno::AGAIN | Errno::INTR) => {
                wait(&connection, PollFlags::IN, end)?;
                continue;
            }
            Err(_) => return Err(closed(socket, fd)),
        };
        text.extend_from_slice(&bytes[..got]);
        match scan.look(&bytes[..got]) {
            Found::More if text.len() <= MOST => {}
            Found::More | Found::NoAnswer => return Err(Answer::Other(ANSWERS)),
            Found::End(_) => return Ok(read(&text)),
        }
    }
}

fn connect(remote: &rustix::net::SocketAddrAny, end: Instant) -> Result<OwnedFd, Answer> {
    let refused = |_| Answer::Unknown(REFUSES);
    let family = remote.address_family();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection =
        hidden::hide(rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(refused)?);
    match rustix::net::connect(&connection, remote) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            wait(&connection, PollFlags::OUT, end)?;
            sockopt::socket_error(&connection).and_then(|result| result).map_err(refused)?;
        }
        Err(error) => return Err(refused(error)),
    }
    Ok(connection)
}

/// Waits until the connection has these events.
fn wait(connection: &OwnedFd, events: PollFlags, end: Instant) -> Result<(), Answer> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match poll_for(connection, events, left) {
            _ if left.is_zero() => return Err(Answer::Unknown(LATE)),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(_) => return Err(Answer::Unknown(REFUSES)),
        }
    }
}

fn poll_for(fd: impl AsFd, events: PollFlags, time: Duration) -> rustix::io::Result<usize> {
    let time = Timespec::try_from(time).map_err(|_| Errno::INVAL)?;
    poll(&mut [PollFd::new(&fd, events)], Some(&time))
}

/// Returns what a server is that has closed the library's connection.
fn closed(socket: &'static Socket, fd: c_int) -> Answer {
    let end = Instant::now() + BETWEEN;
    loop {
        // If the server has died, the program's connection ends too.
        match Using::begin(socket, fd) {
            None => return Answer::NotConnected,
            Some(_using) if kernel::poll_now(fd, libc::POLLRDHUP) != 0 => return Answer::Unknown(DIED),
            Some(_) if Instant::now() >= end => return Answer::Other(CLOSES),
            Some(_) => {}
        }
        let _ = signals::sleep(1);
    }
}

/// Reads an answer.
fn read(text: &[u8]) -> Answer {
    let value = |name: &str| {
        let text = std::str::from_utf8(text).ok()?;
        text.split("\r\n").find_map(|line| line.strip_prefix("STAT ")?.strip_prefix(name)?.strip_prefix(' '))
    };
    let cache = || {
        let (place, id) = value("ginnel")?.split_once(' ')?;
        let (segment, name) = place.split_once('/')?;
        let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let half = |at: usize| u64::from_str_radix(id.get(at..at + 16)?, 16).ok();
        let id = is_id.then_some([half(0)?, half(16)?])?;
        Some(Answer::Cache { segment: segment.into(), name: name.into(), id })
    };
    match cache() {
        Some(_) if value("ginnel_client") != Some("yes") => Answer::Other(RELAYS),
        Some(cache) => cache,
        None => Answer::Other(ANSWERS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_of_a_cache_is_parsed() {
        let good = "STAT ginnel web/main 00000000000000010000000000000002\r\n";
        let cache = Answer::Cache { segment: "web".into(), name: "main".into(), id: [1, 2] };
        let text = |text: &str| read(text.as_bytes());
        assert_eq!(text(&format!("{good}STAT ginnel_client yes\r\nEND\r\n")), cache);
        assert_eq!(text(&format!("{good}STAT ginnel_client no\r\nEND\r\n")), Answer::Other(RELAYS));
        assert_eq!(text(&format!("{good}END\r\n")), Answer::Other(RELAYS));
        for wrong in ["ERROR\r\n", "STAT ginnel web\r\nEND\r\n", "STAT ginnel a/b 00\r\nEND\r\n"] {
            assert_eq!(text(wrong), Answer::Other(ANSWERS), "{wrong:?}");
        }
    }
}
