//! Asking a server whether it is a cache, and which.
//!
//! The question goes in front of the first request, in the protocol which that speaks: `stats ginnel`. A `ginnel-cache` says where its items lie. A
//! memcached says that it knows nothing of that, and is not asked again for a while. Either way the answer is taken out of what the program
//! receives. The call that sends waits for it, because what that sends may be a get; but not for long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::answer::{Expected, Found, Scan};
use ginnel_cache_protocol::binary::{self, Header, opcode};
use libc::c_int;

use super::filter::Filter;
use super::{State, find};
use crate::confined::is_confined;
use crate::errno::{Errno, Kept, check};
use crate::signals::Blocked;
use crate::socket::{Socket, now};
use crate::table::Using;
use crate::wait::milliseconds;
use crate::{kernel, meet, settings};

/// How long a server may take to say what it is.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a server is not asked again that is none of ours, in microseconds.
const FORGOTTEN: u64 = 10_000_000;
/// No answer to the question is longer.
const MOST: usize = 1024;

const QUESTION: &[u8] = b"stats ginnel\r\n";
const KEY: &[u8] = b"ginnel";

/// Why a connection whose gets are answered here stays on TCP.
const SERVED: &str = "a cache: gets are answered from its memory";

/// And one whose answer to the question is still to come: it is looked for in what the kernel carries.
const LATE: &str = "its server did not say in time whether it is a cache";

/// Servers that are no caches of ours: each in the place of its hash, and until when that is remembered.
static OTHERS: [(AtomicU64, AtomicU64); 64] = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64];

/// FNV-1a.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

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

/// The socket is being connected to this port of an address.
pub fn connected(socket: &'static Socket, port: u16, address: &[u8]) {
    if !settings::is_cache_port(port) {
        return;
    }
    let server = hash(address);
    if !is_other(server) {
        socket.cache.server.store(server, Ordering::Relaxed);
        socket.cache.set(State::Fresh);
        socket.watchers.serve();
    }
}

/// Which protocol a client speaks whose first bytes are these, if it speaks memcached's.
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
        // Who authenticates does so at another server.
        let is_known = first.get(1).is_some_and(|opcode| *opcode <= opcode::GATQ);
        return is_known.then_some(Protocol::Binary);
    }
    let end = first.iter().position(|byte| matches!(byte, b' ' | b'\r' | b'\n'))?;
    VERBS.contains(&&first[..end]).then_some(Protocol::Text)
}

/// The first bytes of a fresh connection are about to be sent. It is served afterwards, or not.
#[cold]
pub fn begin(socket: &'static Socket, fd: c_int, first: &[u8]) {
    let _errno = Kept::new();
    let _blocked = Blocked::new();
    let cache = &socket.cache;
    if !cache.change(State::Fresh, State::Asking) {
        return;
    }
    let next = match spoken(first) {
        // Who sleeps there would get the answer.
        Some(protocol) if !cache.is_asleep() && may_ask(socket) => ask(socket, fd, protocol),
        _ => State::None,
    };
    end(socket, next);
}

/// The server was asked.
fn end(socket: &'static Socket, next: State) {
    let reason = match next {
        State::Served => SERVED,
        State::Late => LATE,
        _ => return socket.cache.set(next),
    };
    meet::withdraw(socket);
    // Another thread has looked for its rings meanwhile.
    if socket.is_joined() {
        return socket.cache.set(State::None);
    }
    socket.stays(reason);
    socket.watchers.serve();
    socket.cache.set(next);
}

fn may_ask(socket: &'static Socket) -> bool {
    !is_confined()
        && !socket.is_joined()
        && !is_other(socket.cache.server.load(Ordering::Relaxed))
        // Without a daemon there is nothing to be found.
        && settings::attach().socket.exists()
}

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
        // There is room for so few bytes, unless somebody has made it very small.
        Some(Ok(n)) => {
            let rest = kernel::send_some(fd, &question[n..], true);
            socket.sending.count_others(rest as u64);
            if n + rest < question.len() {
                // What follows would be taken for the rest of it.
                kernel::send_no_more(fd);
                return State::None;
            }
        }
        // It is still being connected.
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
        // What has come of an answer stays readable, so it is not waited for twice in a row.
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

/// A call that sends bytes of this library, which does not sleep.
pub fn transport(socket: &'static Socket, fd: c_int, call: impl FnOnce() -> isize) -> Option<isize> {
    let _using = Using::begin(socket, fd)?;
    let send = || {
        let sent = call();
        socket.sending.count_others(u64::try_from(sent).unwrap_or(0));
        sent
    };
    socket.sending.through_kernel(send, |_| 0)
}

/// A server that was asked.
pub struct Asked {
    protocol: Protocol,
    scan: Scan,
    /// What has come of its answer.
    text: Vec<u8>,
}

/// How far its answer has come.
pub enum Step {
    More,
    /// All of it has been taken.
    Answered,
    /// There will be none: what comes is the program's.
    Over,
}

impl Asked {
    fn new(protocol: Protocol) -> Self {
        let expected = if protocol == Protocol::Text { Expected::Stats } else { Expected::Packets };
        Self { protocol, scan: Scan::new(expected), text: Vec::new() }
    }

    /// Takes what has come of the answer, and nothing that is behind it. Does not wait.
    pub fn take(&mut self, socket: &'static Socket, fd: c_int) -> Step {
        loop {
            let mut bytes = [0; 512];
            let Some(_using) = Using::begin(socket, fd) else { return Step::Over };
            let n = match check(kernel::receive(fd, &mut bytes, libc::MSG_PEEK | libc::MSG_DONTWAIT)) {
                Err(Errno(libc::EAGAIN | libc::EINTR)) => return Step::More,
                // The program is told by its own call.
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

    /// Where the cache is: its segment, its name and its ID.
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

/// The server's answer comes late. `None` if the program's call may be made now; else what that is told.
#[cold]
pub fn late(socket: &'static Socket, fd: c_int, waits: bool) -> Option<Errno> {
    let _errno = Kept::new();
    let mut deadline = crate::wait::Deadline::default();
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
                if let Err(errno) = crate::wait::for_more(fd, &mut deadline) {
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
    use crate::socket::Stage;
    use crate::table;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_connection_whose_server_answers_late_stays_on_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = stream.as_raw_fd();
        let socket = table::add_socket(fd);
        socket.set_stage(Stage::Native);
        let next = ask(socket, fd, Protocol::Text);
        end(socket, next);
        assert_eq!((socket.cache.state(), socket.stage()), (State::Late, Stage::Stays));
        table::forget(fd);
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
    fn what_a_cache_says_is_understood() {
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
