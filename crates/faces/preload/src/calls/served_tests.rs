//! Compares a served connection of a client with a server that is asked without this library. The client must get the same bytes
//! in the same order.

use crate::cache::filter::Filter;
use crate::cache::{State, find};
use crate::calls::descriptors;
use crate::epoll;
use crate::served::{Asleep, Pieces, Rooms, giving_back};
use crate::state::socket::Socket;
use crate::system::errno::{Errno, check};
use crate::system::kernel;
use ginnel_cache::engine::Engine;
use ginnel_cache::numbers::Settings;
use ginnel_cache::talk::{State as Wants, Talk};
use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::binary::{Header, REQUEST, opcode};
use ginnel_cache_store::reader::Reader;
use ginnel_cache_store::store::Store;
use ginnel_layout::cache::Shape;
use ginnel_shmem::Mapping;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A server without sockets.
struct Server {
    engine: Engine<Mapping>,
    talk: Talk,
    input: Vec<u8>,
}

impl Server {
    fn new() -> (Self, Mapping) {
        let shape = Shape::new(8, 64 << 10, 256, usize::MAX).unwrap();
        let memory = Mapping::anonymous(shape.len()).unwrap();
        let store = Store::create(memory.clone(), shape, [1, 2], 0).unwrap();
        let settings = Settings {
            place: "test/test".into(),
            item_size: 32 << 10,
            connections: 1,
            verbosity: 0,
            listens: Vec::new(),
            unix: None,
        };
        let engine = Engine::new(store, settings, 0);
        (Self { engine, talk: Talk::default(), input: Vec::new() }, memory)
    }

    /// Answers the bytes that come. Returns false if the server closes the connection.
    fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        self.input.extend_from_slice(bytes);
        loop {
            let mut some = Vec::new();
            let (done, wants) = self.talk.run(&mut self.engine, &self.input, &mut some);
            self.input.drain(..done);
            out.append(&mut some);
            match wants {
                Wants::Hungry => return true,
                Wants::Full => {}
                Wants::Closed => return false,
            }
        }
    }
}

/// The client's end of a served connection, and the server behind it.
struct Client {
    socket: &'static Socket,
    stream: TcpStream,
    server: Option<std::thread::JoinHandle<()>>,
}

impl Client {
    fn new(protocol: Protocol) -> Self {
        let (mut server, memory) = Server::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut end, _) = listener.accept().unwrap();
        end.set_nodelay(true).unwrap();
        let server = std::thread::spawn(move || {
            let (mut bytes, mut out) = (vec![0; 64 << 10], Vec::new());
            while let Ok(n @ 1..) = end.read(&mut bytes) {
                let goes_on = server.take(&bytes[..n], &mut out);
                if end.write_all(&out).is_err() || !goes_on {
                    break;
                }
                out.clear();
            }
        });
        let socket = descriptors::add_socket(stream.as_raw_fd());
        socket.set_stage(crate::state::socket::Stage::Stays);
        socket.set_nonblocking(Some(false));
        let cache = find::Cache::of(Reader::new(memory).unwrap());
        *socket.cache.filter.lock() = Some(Box::new(Filter::new(cache, protocol)));
        socket.cache.set(State::Served);
        Self { socket, stream, server: Some(server) }
    }

    fn send(&self, bytes: &[u8], parts: usize) {
        let fd = self.stream.as_raw_fd();
        let pieces: Pieces<'_> = bytes.chunks(bytes.len().div_ceil(parts).max(1)).collect();
        let all = bytes.len() as isize;
        let sent = crate::served::transfer::send(self.socket, fd, 0, &pieces);
        assert_eq!(sent.unwrap_or_else(|| kernel::send(fd, bytes, libc::MSG_NOSIGNAL)), all);
    }

    /// Receives at most this number of bytes. Returns no bytes if there are none now.
    fn receive(&self, most: usize, flags: i32) -> Vec<u8> {
        let fd = self.stream.as_raw_fd();
        let mut bytes = vec![0; most];
        let at: *mut u8 = bytes.as_mut_ptr();
        let native = || {
            #[expect(unsafe_code, reason = "the very bytes")]
            // SAFETY: the memory has `most` bytes, and no other code uses it during the call.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, most) };
            kernel::receive(fd, bytes, flags)
        };
        let got = {
            let (first, second) = bytes.split_at_mut(most / 2);
            let mut rooms: Rooms<'_> = [first, second].into_iter().collect();
            crate::served::transfer::receive(self.socket, fd, flags, &mut rooms, native)
                .unwrap_or_else(|native| native())
        };
        match check(got) {
            Ok(n) => bytes.truncate(n),
            Err(errno) => {
                assert!(matches!(errno, Errno(libc::EAGAIN | libc::ECONNRESET)), "{errno:?}");
                bytes.clear();
            }
        }
        bytes
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        descriptors::forget(self.stream.as_raw_fd());
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// An action of the client.
#[derive(Clone, Debug)]
enum Step {
    /// Sends these bytes in one call, in this number of pieces.
    Send(Vec<u8>, usize),
    /// Receives at most this number of bytes, without waiting.
    Receive(usize),
    /// Looks at at most this number of bytes (`MSG_PEEK`), without waiting.
    Peek(usize),
    /// Waits until everything that is to come has come.
    Settle,
    /// Gives back what is queued, as before another process gets the connection.
    GiveBack,
    /// Whether another thread sleeps on the connection from now on.
    Sleeper(bool),
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => "(get|gets) [a-d]( [a-d]){0,3}\r\n".prop_map(String::into_bytes),
        2 => "mg [a-d]( v| k| s| c| f| Ox| t| q| u| b){0,3}\r\n".prop_map(String::into_bytes),
        1 => Just(b"mn\r\n".to_vec()),
        1 => "(delete [a-d]|incr [a-d] 3|touch [a-d] 0|verbosity 1)( noreply|)\r\n".prop_map(String::into_bytes),
        1 => "(version|md [a-d]( q|)|ma [a-d]( q|)|[ -~]{0,9})\r\n".prop_map(String::into_bytes),
        4 => ("(set|add|append|ms)", "[a-d]", prop::collection::vec(any::<u8>(), 0..300), any::<bool>()).prop_map(
            |(verb, key, value, quiet)| {
                let len = value.len();
                let quiet = match (&*verb, quiet) { (_, false) => "", ("ms", _) => " q", _ => " noreply" };
                let head = match &*verb {
                    "ms" => format!("ms {key} {len}{quiet}\r\n"),
                    _ => format!("{verb} {key} 7 0 {len}{quiet}\r\n"),
                };
                [head.as_bytes(), &value, b"\r\n"].concat()
            }
        ),
    ]
}

fn packet() -> impl Strategy<Value = Vec<u8>> {
    let of = |opcode, key: &[u8], extras: &[u8], value: &[u8]| {
        let body = (key.len() + extras.len() + value.len()) as u32;
        let header = Header {
            magic: REQUEST,
            opcode,
            key: key.len() as u16,
            extras: extras.len() as u8,
            body,
            opaque: 7,
            ..Header::default()
        };
        [&header.bytes()[..], extras, key, value].concat()
    };
    let key = "[a-d]".prop_map(String::into_bytes);
    let gets = prop::sample::select(vec![opcode::GET, opcode::GETQ, opcode::GETK, opcode::GETKQ]);
    let others = prop::sample::select(vec![opcode::DELETE, opcode::DELETEQ, opcode::APPEND]);
    let sets = prop::sample::select(vec![opcode::SET, opcode::SETQ, opcode::ADD, opcode::ADDQ]);
    prop_oneof![
        6 => (gets, key.clone()).prop_map(move |(opcode, key)| of(opcode, &key, b"", b"")),
        2 => Just(()).prop_map(move |()| of(opcode::NOOP, b"", b"", b"")),
        1 => (others, key.clone()).prop_map(move |(opcode, key)| of(opcode, &key, b"", b"")),
        3 => (sets, key, prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(move |(opcode, key, value)| of(opcode, &key, &[0; 8], &value)),
    ]
}

/// Makes steps that send these requests, whole or cut at any place.
fn steps(request: BoxedStrategy<Vec<u8>>) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (prop::collection::vec(request, 1..4), 0..6_usize, 1..400_usize).prop_map(|(all, cuts, len)| {
            let bytes = all.concat();
            match cuts {
                0 => bytes.chunks(len).map(|bytes| Step::Send(bytes.to_vec(), 1)).collect(),
                parts => vec![Step::Send(bytes, parts)],
            }
        }),
        2 => (1..500_usize).prop_map(|most| vec![Step::Receive(most)]),
        1 => (1..50_usize).prop_map(|most| vec![Step::Peek(most)]),
        4 => Just(vec![Step::Settle]),
        1 => any::<bool>().prop_map(|sleeps| vec![Step::Sleeper(sleeps)]),
        1 => Just(vec![Step::GiveBack]),
    ];
    prop::collection::vec(step, 1..24).prop_map(|steps| steps.concat())
}

/// Runs these steps, and returns the number of gets that were answered in the client.
fn run(protocol: Protocol, steps: &[Step]) -> Result<u64, TestCaseError> {
    let (mut alone, _) = Server::new();
    let mut expected = Vec::new();
    let client = Client::new(protocol);
    let mut got = Vec::new();
    let mut sleeper = None;
    let mut goes_on = true;
    let wait = |got: &mut Vec<u8>, expected: &[u8], goes_on: bool| {
        client.socket.set_nonblocking(Some(false));
        while got.len() < expected.len() {
            let more = client.receive(4096, 0);
            if more.is_empty() {
                // Bytes that were sent after the server's end may have broken the connection.
                return !goes_on;
            }
            got.extend(more);
        }
        true
    };
    for step in steps.iter().chain([&Step::Settle]) {
        match step {
            Step::Send(bytes, parts) if goes_on && !bytes.is_empty() => {
                goes_on = alone.take(bytes, &mut expected);
                client.send(bytes, *parts);
            }
            Step::Receive(most) => got.extend(client.receive(*most, libc::MSG_DONTWAIT)),
            Step::Peek(most) => {
                let seen = client.receive(*most, libc::MSG_DONTWAIT | libc::MSG_PEEK);
                prop_assert!(expected[got.len()..].starts_with(&seen));
            }
            Step::Settle => prop_assert!(wait(&mut got, &expected, goes_on)),
            Step::GiveBack => {
                let given_back = giving_back::give_back(client.socket);
                prop_assert_eq!(given_back, client.socket.cache.queued() == 0);
            }
            Step::Sleeper(true) => sleeper = Asleep::begin(client.socket),
            Step::Sleeper(false) => sleeper = None,
            Step::Send(..) => {}
        }
        prop_assert!(expected.starts_with(&got), "{:?}", got.escape_ascii().to_string());
    }
    drop(sleeper);
    Ok(client.socket.cache.answered.load(Ordering::Relaxed))
}

/// Held by each test, so that one test runs at a time, because all tests of this process share its descriptors.
static TURN: Mutex<()> = Mutex::new(());

fn check_all(protocol: Protocol, request: BoxedStrategy<Vec<u8>>) {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let answered = Arc::new(Mutex::new(0));
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in steps(request))| {
        *answered.lock().unwrap() += run(protocol, &steps)?;
    });
    let answered = *answered.lock().unwrap();
    assert!(answered > 100, "only {answered} were answered from memory");
}

#[test]
fn text_is_as_without_this_library() {
    check_all(Protocol::Text, request().boxed());
}

#[test]
fn packets_are_as_without_this_library() {
    check_all(Protocol::Binary, packet().boxed());
}

#[test]
fn a_call_that_waits_for_all_gets_what_is_queued_and_what_comes() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    client.send(b"get a\r\n", 1);
    assert_eq!(client.socket.cache.queued(), 5);
    client.send(b"version\r\nget a\r\n", 1);
    assert_eq!(client.socket.cache.queued(), 5, "the second one is the server's");
    let all = b"END\r\nVERSION 1.6.18\r\nEND\r\n";
    assert_eq!(client.receive(all.len(), libc::MSG_WAITALL), all);
    client.send(b"get a\r\n", 1);
    assert_eq!(client.receive(9, libc::MSG_TRUNC).len(), 5);
    assert_eq!(client.socket.cache.answered.load(Ordering::Relaxed), 2);
    assert_eq!(client.socket.cache.passed.load(Ordering::Relaxed), 1);
}

#[test]
fn what_is_given_back_comes_from_the_kernel() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    client.send(b"get a\r\n", 1);
    assert_eq!(client.receive(2, 0), b"EN");
    client.send(b"version\r\n", 1);
    assert_eq!(client.socket.cache.queued(), 3);
    assert!(giving_back::give_back(client.socket));
    assert_eq!(client.socket.cache.state(), State::None);
    let mut bytes = [0; 19];
    let received = kernel::receive(client.stream.as_raw_fd(), &mut bytes, libc::MSG_WAITALL);
    assert_eq!((received, &bytes[..]), (19, &b"D\r\nVERSION 1.6.18\r\n"[..19]));
    // A value that the program has not sent completely stands in the way.
    let client = Client::new(Protocol::Text);
    client.send(b"get a\r\nset b 0 0 5\r\nab", 1);
    assert!(!giving_back::give_back(client.socket));
    assert_eq!((client.receive(5, 0), client.socket.cache.state()), (b"END\r\n".to_vec(), State::None));
}

#[test]
fn no_more_is_queued_than_a_bound() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    let value = vec![b'v'; 20_000];
    client.send(&[b"set a 0 0 20000\r\n", &value[..], b"\r\n"].concat(), 1);
    assert_eq!(client.receive(99, 0), b"STORED\r\n");
    for _ in 0..100 {
        client.send(b"get a\r\n", 1);
    }
    let answer = value.len() + "VALUE a 0 20000\r\n\r\nEND\r\n".len();
    assert!(client.socket.cache.queued() <= crate::cache::queue::MOST);
    let answered = client.socket.cache.answered.load(Ordering::Relaxed);
    assert_eq!((answered as usize, client.socket.cache.queued()), (13, 13 * answer));
    let mut left = 100 * answer;
    while left > 0 {
        left -= client.receive(left.min(60_000), 0).len();
    }
    client.send(b"get a\r\n", 1);
    assert_eq!(client.socket.cache.queued(), answer);
}

#[test]
fn queued_answers_are_received_before_the_end() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    client.send(b"get a\r\nmg a\r\n", 1);
    client.send(b"quit\r\n", 1);
    assert_eq!(client.receive(5, 0), b"END\r\n");
    assert_eq!(client.receive(99, 0), b"EN\r\n");
    assert_eq!(client.receive(99, 0), b"");
    assert_eq!(client.socket.cache.state(), State::None);
}

#[test]
fn a_connection_that_has_ended_is_noticed_soon() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    client.send(b"get a\r\n", 1);
    assert_eq!(client.receive(5, 0), b"END\r\n");
    kernel::send(client.stream.as_raw_fd(), b"quit\r\n", 0);
    while kernel::poll_now(client.stream.as_raw_fd(), libc::POLLIN) == 0 {}
    std::thread::sleep(Duration::from_millis(20));
    let _ = crate::served::transfer::send(
        client.socket,
        client.stream.as_raw_fd(),
        0,
        &Pieces::from_slice(&[b"get a\r\n"]),
    );
    assert_eq!(client.socket.cache.queued(), 0, "there is no server any more");
}

#[test]
#[expect(unsafe_code, reason = "an epoll instance")]
fn gets_are_passed_on_while_somebody_polls_an_epoll_instance() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    client.socket.cache.set(State::None);
    // SAFETY: the call has no preconditions.
    let epoll = unsafe { libc::epoll_create1(0) };
    descriptors::add_epoll(epoll);
    let polled = libc::pollfd { fd: epoll, events: libc::POLLIN, revents: 0 };
    assert!(!crate::calls::poll::concerns_us(&[polled]), "it sleeps in the kernel");
    // Meanwhile, another thread connects the socket.
    client.socket.cache.set(State::Served);
    let fd = client.stream.as_raw_fd();
    let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    let instance = epoll::EPOLLS.get(epoll).unwrap();
    assert_eq!(instance.control(epoll, libc::EPOLL_CTL_ADD, fd, Some(event), || 0), 0);
    client.send(b"get a\r\n", 1);
    assert_eq!(client.socket.cache.queued(), 0, "nobody would wake who polls");
    assert_eq!(client.receive(5, 0), b"END\r\n");
    descriptors::forget(epoll);
    // SAFETY: no other code has this descriptor.
    unsafe { libc::close(epoll) };
}

#[test]
#[expect(unsafe_code, reason = "an epoll instance")]
fn other_descriptors_have_their_turn_where_there_is_room_for_one_event() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let client = Client::new(Protocol::Text);
    // SAFETY: the call has no preconditions.
    let epoll = unsafe { libc::epoll_create1(0) };
    descriptors::add_epoll(epoll);
    let instance = epoll::EPOLLS.get(epoll).unwrap();
    let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    assert_eq!(instance.control(epoll, libc::EPOLL_CTL_ADD, client.stream.as_raw_fd(), Some(event), || 0), 0);
    let mut others = 0;
    for _ in 0..300 {
        client.send(b"get a\r\n", 1);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }];
        // The kernel reports another descriptor as always readable.
        let kernel = |events: &mut [libc::epoll_event], _| {
            events[0] = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 9 };
            Ok(1)
        };
        assert_eq!(instance.wait(epoll, &mut events, 1, None, kernel), Ok(1));
        let data = events[0].u64;
        if data == 7 {
            assert_eq!(client.receive(99, 0).len() % 5, 0);
        } else {
            others += 1;
        }
    }
    assert!(others > 0, "the kernel was never asked");
    descriptors::forget(epoll);
    // SAFETY: no other code has this descriptor.
    unsafe { libc::close(epoll) };
}
