//! Asks a server whether it is a cache, and which one.
//!
//! The library sends the question `stats ginnel` in front of the first request, in the protocol of that request. A `ginnel-cache`
//! answers with the place of its items. A memcached answers that it does not know this statistic, and the library does not ask it
//! again for a while. In either case, the library removes the answer from what the program receives. The program's call that
//! sends the first request waits for the answer, because the request may be a get. It waits at most [`PATIENCE`].

use crate::cache::asked::{Asked, KEY};
use crate::cache::filter::Filter;
use crate::cache::{State, find};
use crate::daemon::session;
use crate::process::settings;
use crate::process::signals::Blocked;
use crate::state::socket::Socket;
use crate::state::sockets::Using;
use crate::system::clock::now;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check};
use crate::system::kernel;
use crate::waiting::limit::milliseconds;
use ginnel_cache_protocol::answer::Found;
use ginnel_cache_protocol::binary::{Header, opcode};
use ginnel_cache_protocol::{Protocol, binary};
use libc::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the library waits for a server's answer to the question.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the library does not ask a server again that is not a `ginnel-cache`, in microseconds.
const FORGOTTEN: u64 = 10_000_000;
/// The number of bytes of an answer after which [`Asked::take`] returns. No correct answer is longer.
const MOST: usize = 1024;

const QUESTION: &[u8] = b"stats ginnel\r\n";

/// The reason why a served connection stays on TCP.
const SERVED: &str = "a cache: gets are answered from its memory";

/// The reason why a connection stays on TCP if the answer to the question is still to come. The library looks for the answer in
/// what comes by TCP.
const LATE: &str = "its server did not say in time whether it is a cache";

/// Servers that are not a `ginnel-cache`. The index follows from the hash of the address. An entry has the hash, and the time
/// until which it is valid, in microseconds.
static OTHERS: [(AtomicU64, AtomicU64); 64] = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64];

fn other(server: u64) -> &'static (AtomicU64, AtomicU64) {
    &OTHERS[(server >> 32) as usize % OTHERS.len()]
}

fn is_other(server: u64) -> bool {
    let (which, until) = other(server);
    which.load(Ordering::Relaxed) == server && now() < until.load(Ordering::Relaxed)
}

fn note_other(server: u64) {
    let (which, until) = other(server);
    until.store(now() + FORGOTTEN, Ordering::Relaxed);
    which.store(server, Ordering::Relaxed);
}

/// Notes that the socket is being connected to this address, at this port.
pub fn connected(socket: &'static Socket, port: u16, address: &[u8]) {
    if !settings::is_cache_port(port) {
        return;
    }
    let server = find::hash(address);
    if !is_other(server) {
        socket.cache.server.store(server, Ordering::Relaxed);
        socket.cache.set(State::Fresh);
        socket.watchers.serve();
    }
}

/// Returns which of memcached's protocols a client speaks that begins with these bytes, or `None` if it speaks neither.
fn spoken(first: &[u8]) -> Option<Protocol> {
    const VERBS: [&[u8]; 23] = [
        b"get",
        b"gets",
        b"gat",
        b"gats",
        b"set",
        b"add",
        b"replace",
        b"append",
        b"prepend",
        b"cas",
        b"delete",
        b"incr",
        b"decr",
        b"touch",
        b"flush_all",
        b"version",
        b"stats",
        b"mg",
        b"ms",
        b"md",
        b"ma",
        b"mn",
        b"verbosity",
    ];
    if first[0] == binary::REQUEST {
        // A client that authenticates (SASL) talks to another kind of server.
        let is_known = first.get(1).is_some_and(|opcode| *opcode <= opcode::GATQ);
        return is_known.then_some(Protocol::Binary);
    }
    let end = first.iter().position(|byte| matches!(byte, b' ' | b'\r' | b'\n'))?;
    VERBS.contains(&&first[..end]).then_some(Protocol::Text)
}

/// Asks the server of a fresh connection, of which the program is about to send the first bytes. Afterwards the connection is
/// served or not.
#[cold]
pub fn begin(socket: &'static Socket, fd: c_int, first: &[u8]) {
    let _errno = Kept::new();
    let _blocked = Blocked::new();
    let cache = &socket.cache;
    if !cache.change(State::Fresh, State::Asking) {
        return;
    }
    let next = match spoken(first) {
        // A thread that sleeps on the connection would receive the answer.
        Some(protocol) if !cache.is_asleep() && may_ask(socket) => ask(socket, fd, protocol),
        _ => State::None,
    };
    end(socket, next);
}

/// Ends the asking with this state.
fn end(socket: &'static Socket, next: State) {
    let reason = match next {
        State::Served => SERVED,
        State::Late => LATE,
        _ => return socket.cache.set(next),
    };
    // Meanwhile, another thread may have found rings for the connection.
    if !session::stays_unless_joined(socket, reason) {
        return socket.cache.set(State::None);
    }
    session::withdraw(socket);
    socket.watchers.serve();
    socket.cache.set(next);
}

fn may_ask(socket: &'static Socket) -> bool {
    !is_confined()
        && !socket.is_joined()
        && !is_other(socket.cache.server.load(Ordering::Relaxed))
        // Without a daemon, no cache can be found.
        && settings::attach().socket.exists()
}

/// Sends the question and waits for the answer. Returns the next state of the socket.
fn ask(socket: &'static Socket, fd: c_int, protocol: Protocol) -> State {
    let server = socket.cache.server.load(Ordering::Relaxed);
    let question = match protocol {
        Protocol::Text => QUESTION.to_vec(),
        Protocol::Binary => {
            let (key, body) = (KEY.len() as u16, KEY.len() as u32);
            let header =
                Header { magic: binary::REQUEST, opcode: opcode::STAT, key, body, ..Header::default() };
            [&header.bytes()[..], KEY].concat()
        }
    };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let sent = transport(socket, fd, || kernel::send(fd, &question, flags)).map(check);
    match sent {
        Some(Ok(n)) if n == question.len() => {}
        // The send buffer has room for so few bytes, unless the program has made it very small.
        Some(Ok(n)) => {
            let rest = kernel::send_some(fd, &question[n..], true);
            socket.sending.count_others(rest as u64);
            if n + rest < question.len() {
                // The server would take the program's next bytes for the rest of the question.
                kernel::send_no_more(fd);
                return State::None;
            }
        }
        // The socket is still being connected.
        Some(Err(Errno(libc::EAGAIN | libc::ENOTCONN))) => return State::Fresh,
        _ => return State::None,
    }
    let mut asked = Asked::new(protocol);
    let end = Instant::now() + PATIENCE;
    let mut before = 0;
    loop {
        match asked.take(socket, fd) {
            Step::More => {}
            Step::Over => {
                note_other(server);
                return State::None;
            }
            Step::Answered => break,
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            note_other(server);
            *socket.cache.filter.lock() = Some(Box::new(Filter::asked(asked)));
            return State::Late;
        }
        // A part of an answer that has come can stay readable, so the next wait after new bytes is short.
        let has_come = std::mem::replace(&mut before, asked.text.len()) != asked.text.len();
        let wait = if has_come { Duration::from_millis(1) } else { left };
        let _ = kernel::poll_readable(fd, milliseconds(Some(wait)));
    }
    let found = asked.answer().and_then(|(segment, name, id)| find::find(segment, name, id));
    let Some(found) = found else {
        note_other(server);
        return State::None;
    };
    *socket.cache.name.lock() = &found.name;
    *socket.cache.filter.lock() = Some(Box::new(Filter::new(found, protocol)));
    State::Served
}

/// Makes a call that sends bytes of this library, and that does not sleep. Returns `None` if the descriptor no longer is this
/// socket, or if the kernel no longer carries what it sends.
pub fn transport(socket: &'static Socket, fd: c_int, call: impl FnOnce() -> isize) -> Option<isize> {
    let _using = Using::begin(socket, fd)?;
    let send = || {
        let sent = call();
        socket.sending.count_others(u64::try_from(sent).unwrap_or(0));
        sent
    };
    socket.sending.through_kernel(send, |_| 0)
}

/// The progress of an answer.
pub enum Step {
    /// More is to come.
    More,
    /// The whole answer has been taken.
    Answered,
    /// No answer will come. Everything that comes belongs to the program.
    Over,
}

impl Asked {
    /// Takes what has come of the answer from the kernel, and no byte behind the answer. Does not wait.
    pub fn take(&mut self, socket: &'static Socket, fd: c_int) -> Step {
        loop {
            let mut bytes = [0; 512];
            let Some(_using) = Using::begin(socket, fd) else { return Step::Over };
            let n = match check(kernel::receive(fd, &mut bytes, libc::MSG_PEEK | libc::MSG_DONTWAIT)) {
                Err(Errno(libc::EAGAIN | libc::EINTR)) => return Step::More,
                // The program's own call reports the end or the error.
                Ok(0) | Err(_) => return Step::Over,
                Ok(n) => n,
            };
            let (found, own) = match self.scan.look(&bytes[..n]) {
                Found::More => (Step::More, n),
                Found::End(end) => (Step::Answered, end),
                Found::NoAnswer => return Step::Over,
            };
            let taken = match check(kernel::receive(fd, &mut bytes[..own], libc::MSG_DONTWAIT)) {
                Ok(taken) if taken == own => taken,
                // Another thread has taken some of it.
                _ => return Step::Over,
            };
            socket.receiving.count_others(taken as u64);
            self.text.extend_from_slice(&bytes[..taken]);
            if matches!(found, Step::Answered) || self.text.len() > MOST {
                return found;
            }
        }
    }

    /// Returns the segment, the name and the ID of the cache, or `None` if the answer is not that of a `ginnel-cache`.
    fn answer(&self) -> Option<(&str, &str, [u64; 2])> {
        let value = match self.protocol {
            Protocol::Text => self.text.strip_prefix(b"STAT ginnel ")?.split(|byte| *byte == b'\r').next()?,
            Protocol::Binary => {
                let header = Header::parse(&self.text)?;
                let body = self.text[binary::HEADER..].get(..header.body as usize)?;
                body.get(usize::from(header.extras)..)?.strip_prefix(KEY)?
            }
        };
        let (place, id) = std::str::from_utf8(value).ok()?.split_once(' ')?;
        let (segment, name) = place.split_once('/')?;
        let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let half = |at: usize| u64::from_str_radix(id.get(at..at + 16)?, 16).ok();
        is_id.then_some((segment, name, [half(0)?, half(16)?]))
    }
}

/// Takes an answer that comes late, before a call of the program that receives. Returns `None` if that call may be made now, else
/// the error for it.
#[cold]
pub fn late(socket: &'static Socket, fd: c_int, waits: bool) -> Option<Errno> {
    let _errno = Kept::new();
    let mut deadline = crate::waiting::deadline::Deadline::default();
    loop {
        let _blocked = Blocked::new();
        let step = {
            let mut filter = socket.cache.filter.lock();
            match filter.as_mut().and_then(|filter| filter.asked.as_mut()) {
                Some(asked) => asked.take(socket, fd),
                None => Step::Over,
            }
        };
        drop(_blocked);
        match step {
            Step::More if !waits => return Some(Errno(libc::EAGAIN)),
            Step::More => {
                if let Err(errno) = crate::waiting::wait::for_more(fd, &mut deadline) {
                    return Some(errno);
                }
            }
            Step::Answered | Step::Over => {
                socket.cache.change(State::Late, State::None);
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::descriptors;
    use crate::state::socket::Stage;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_connection_whose_server_answers_late_stays_on_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = stream.as_raw_fd();
        let socket = descriptors::add_socket(fd);
        socket.set_stage(Stage::Native);
        let next = ask(socket, fd, Protocol::Text);
        end(socket, next);
        assert_eq!((socket.cache.state(), socket.stage()), (State::Late, Stage::Stays));
        descriptors::forget(fd);
    }

    #[test]
    fn clients_of_memcached_are_known_by_their_first_bytes() {
        for first in [&b"get a\r\n"[..], b"set a 0", b"version\r\n", b"mg a v\r\n", b"stats\n"] {
            assert_eq!(spoken(first), Some(Protocol::Text));
        }
        assert_eq!(spoken(b"\x80\x00"), Some(Protocol::Binary));
        for first in
            [&b"GET / HTTP/1.1\r\n"[..], b"\x80", b"\x80\x21", b"get", b"\x16\x03\x01", b"quit\r\n", b"g"]
        {
            assert_eq!(spoken(first), None);
        }
    }

    #[test]
    fn the_answer_of_a_cache_is_parsed() {
        let answer = |protocol, text: &[u8]| {
            let asked = Asked { text: text.to_vec(), ..Asked::new(protocol) };
            asked.answer().map(|(segment, name, id)| (segment.to_owned(), name.to_owned(), id))
        };
        let expected = Some(("web".to_owned(), "main".to_owned(), [1, 2]));
        let value = b"web/main 00000000000000010000000000000002";
        let text = [b"STAT ginnel ", &value[..], b"\r\nEND\r\n"].concat();
        assert_eq!(answer(Protocol::Text, &text), expected);
        let body = (KEY.len() + value.len()) as u32;
        let header = Header { magic: binary::ANSWER, key: KEY.len() as u16, body, ..Header::default() };
        let packet = [&header.bytes()[..], KEY, value].concat();
        assert_eq!(answer(Protocol::Binary, &packet), expected);
        for wrong in [
            &b"ERROR\r\n"[..],
            b"STAT ginnel web 1\r\n",
            b"STAT ginnel a/b +0000000000000010000000000000002\r\n",
        ] {
            assert_eq!(answer(Protocol::Text, wrong), None);
        }
        assert_eq!(answer(Protocol::Binary, &packet[..30]), None);
    }
}
