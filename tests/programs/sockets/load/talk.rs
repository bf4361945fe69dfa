//! One end of a connection under load: random calls and sizes, and bytes that can be computed from their position.
#![allow(unsafe_code)] // Calls that the standard library does not have.

use kit::random::Random;
use libc::{c_int, iovec};
use std::cell::RefCell;
use std::io::{Error, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

/// The time after which an end is considered hung.
const WATCHDOG: c_int = 60_000;

/// The number of calls, with a pause before each, after which a sender does not wait any longer for the change.
const PATIENCE: u32 = 100_000;
/// Length of the period of a stream's content: a prime, so that no buffer has this length.
const PERIOD: usize = 65_521;
/// The longest piece that is sent or received at once.
pub const LONGEST: usize = 300 << 10;

/// Returns the bytes of a stream from a position on.
pub fn content(stream: u64, position: u64, len: usize) -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mut random = Random::new(5);
        let period: Vec<u8> = (0..PERIOD).map(|_| random.index(256) as u8).collect();
        period.iter().copied().cycle().take(PERIOD + LONGEST).collect()
    });
    let start = ((stream.wrapping_mul(7919) + position) % PERIOD as u64) as usize;
    &table[start..start + len]
}

/// The way in which an end waits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Style {
    /// In its calls; only for one direction.
    Blocking,
    Poll,
    /// Edge-triggered.
    Epoll,
}

/// The properties of a connection that both ends know.
#[derive(Clone, Copy)]
pub struct Plan {
    seed: u64,
    styles: [Style; 2],
    sends: [bool; 2],
    /// Whether a sender continues until its bytes go through shared memory.
    pub changes: bool,
}

impl Plan {
    pub fn new(number: u64) -> Self {
        let mut random = Random::new(number + 1);
        let sends = [[true, true], [true, false], [false, true]][random.index(3)];
        let style = |random: &mut Random| match random.index(3) {
            0 if sends != [true, true] => Style::Blocking,
            0 | 1 => Style::Poll,
            _ => Style::Epoll,
        };
        let styles = [style(&mut random), style(&mut random)];
        Self { seed: number, styles, sends, changes: !one_in(&mut random, 8) }
    }
}

/// The numbers of bytes that an end has sent and received.
pub type Sums = (u64, u64);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; LONGEST]);
}

/// One end of a connection while it works.
pub struct End<'s> {
    stream: &'s TcpStream,
    fd: RawFd,
    plan: Plan,
    /// 0 means the end that has connected.
    side: usize,
    random: Random,
    sent: u64,
    received: u64,
    /// The position at which the sent stream ends, once it is known.
    until: Option<u64>,
    has_finished: bool,
    has_ended: bool,
    /// The number of calls that have sent.
    calls: u32,
}

impl<'s> End<'s> {
    pub fn new(stream: &'s TcpStream, plan: Plan, side: usize) -> Self {
        let mut random = Random::new(plan.seed * 2 + side as u64);
        let until = match (plan.sends[side], plan.changes) {
            (false, _) => Some(0),
            (true, false) => Some(random.below(10_000)),
            (true, true) => None,
        };
        Self {
            stream,
            fd: stream.as_raw_fd(),
            plan,
            side,
            random,
            sent: 0,
            received: 0,
            until,
            // An end that sends nothing shows that by closing.
            has_finished: !plan.sends[side],
            has_ended: false,
            calls: 0,
        }
    }

    /// Sends and receives everything.
    pub fn run(mut self) -> Sums {
        let style = self.plan.styles[self.side];
        self.stream.set_nonblocking(style != Style::Blocking).unwrap();
        match style {
            Style::Blocking => self.blocking(),
            Style::Poll => self.polling(),
            Style::Epoll => self.edge_triggered(),
        }
        (self.sent, self.received)
    }

    fn is_over(&self) -> bool {
        self.has_finished && self.has_ended
    }

    fn blocking(&mut self) {
        while !self.has_finished {
            self.send();
        }
        while !self.has_ended {
            self.receive();
        }
    }

    fn polling(&mut self) {
        while !self.is_over() {
            let wants_to_send = if self.has_finished { 0 } else { libc::POLLOUT };
            let wants_to_receive = if self.has_ended { 0 } else { libc::POLLIN };
            let mut poll = libc::pollfd { fd: self.fd, events: wants_to_send | wants_to_receive, revents: 0 };
            // SAFETY: one pollfd.
            let n = unsafe { libc::poll(&raw mut poll, 1, WATCHDOG) };
            assert!(n == 1, "connection {}: poll: {n} at {}, {}", self.plan.seed, self.sent, self.received);
            if poll.revents & libc::POLLIN != 0 {
                self.receive();
            }
            if poll.revents & libc::POLLOUT != 0 && !self.has_finished {
                self.send();
            }
        }
    }

    fn edge_triggered(&mut self) {
        // SAFETY: the function takes only a number.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        let mut event = libc::epoll_event { events: events as u32, u64: self.plan.seed };
        // SAFETY: the kernel reads the event, which is a local variable.
        assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, self.fd, &raw mut event) }, 0);
        while !self.is_over() {
            let mut progress = false;
            while !self.has_ended && self.receive() {
                progress = true;
            }
            // Do not continue until there is no room, because bytes arrive meanwhile.
            if !self.has_finished {
                progress |= self.send();
            }
            if progress || self.is_over() {
                continue;
            }
            // SAFETY: the kernel writes at most one event, to a local variable.
            let n = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, WATCHDOG) };
            assert!(
                n == 1 && { event.u64 } == self.plan.seed,
                "connection {}: epoll_wait: {n} at {}, {}",
                self.plan.seed,
                self.sent,
                self.received
            );
        }
        // SAFETY: ours.
        unsafe { libc::close(epoll) };
    }

    /// Returns whether bytes have bypassed the kernel.
    fn has_left_tcp(&self) -> bool {
        const BYTES_SENT: usize = 200;
        const NOT_SENT: usize = 144;
        let mut info = [0u8; 208];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: room for as many bytes.
        let result = unsafe {
            libc::getsockopt(
                self.fd,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        assert_eq!(result, 0);
        let sent = u64::from_ne_bytes(info[BYTES_SENT..BYTES_SENT + 8].try_into().unwrap());
        let not_sent = u32::from_ne_bytes(info[NOT_SENT..NOT_SENT + 4].try_into().unwrap());
        self.sent > sent + u64::from(not_sent)
    }

    /// Makes one call that sends, or that ends the stream. Returns false if there is no room.
    fn send(&mut self) -> bool {
        if self.until.is_none() && (self.calls >= PATIENCE || self.has_left_tcp()) {
            let more = if one_in(&mut self.random, 32) { 800 << 10 } else { 20 << 10 };
            self.until = Some(self.sent + self.random.below(more));
        }
        let left = self.until.map_or(LONGEST as u64, |until| until - self.sent) as usize;
        if left == 0 {
            self.stream.shutdown(Shutdown::Write).unwrap();
            self.has_finished = true;
            return true;
        }
        self.calls += 1;
        if self.until.is_none() {
            // This pause keeps TCP's buffers from filling up while the daemon works.
            std::thread::sleep(Duration::from_micros(self.random.below(200)));
        }
        let most = if self.until.is_some() && one_in(&mut self.random, 8) { LONGEST } else { 2000 };
        let len = left.min(1 + self.random.index(most));
        let bytes = content(self.plan.seed * 2 + self.side as u64, self.sent, len);
        let call = self.random.index(4);
        let pieces = split(bytes.as_ptr().cast_mut(), len, &mut self.random);
        // SAFETY: all bytes are there; none of these calls writes to them.
        let n = unsafe {
            match call {
                0 => libc::write(self.fd, bytes.as_ptr().cast(), len),
                1 => libc::send(self.fd, bytes.as_ptr().cast(), len, libc::MSG_NOSIGNAL),
                2 => libc::writev(self.fd, pieces.as_ptr(), pieces.len() as c_int),
                _ => {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (pieces.as_ptr().cast_mut(), pieces.len());
                    libc::sendmsg(self.fd, &raw const message, libc::MSG_NOSIGNAL)
                }
            }
        };
        self.sent += self.moved(n, "sends").unwrap_or(0) as u64;
        n > 0
    }

    /// Makes one call that receives, or peeks and then receives. Returns false if there is nothing.
    fn receive(&mut self) -> bool {
        BUFFER.with_borrow_mut(|buffer| self.receive_into(buffer))
    }

    fn receive_into(&mut self, buffer: &mut [u8]) -> bool {
        let most = if one_in(&mut self.random, 4) { LONGEST } else { 3000 };
        let len = 1 + self.random.index(most);
        let call = self.random.index(5);
        if call == 4 {
            // SAFETY: room for as many bytes.
            let n = unsafe { libc::recv(self.fd, buffer.as_mut_ptr().cast(), len, libc::MSG_PEEK) };
            let Some(n) = self.moved(n, "looks") else { return false };
            self.check(&buffer[..n]);
        }
        let pieces = split(buffer.as_mut_ptr(), len, &mut self.random);
        // SAFETY: room for as many bytes.
        let n = unsafe {
            match call {
                0 => libc::read(self.fd, buffer.as_mut_ptr().cast(), len),
                1 => libc::readv(self.fd, pieces.as_ptr(), pieces.len() as c_int),
                2 => libc::recv(self.fd, buffer.as_mut_ptr().cast(), len, libc::MSG_WAITALL),
                _ => libc::recv(self.fd, buffer.as_mut_ptr().cast(), len, 0),
            }
        };
        let Some(n) = self.moved(n, "receives") else { return false };
        self.check(&buffer[..n]);
        self.received += n as u64;
        self.has_ended = n == 0;
        true
    }

    fn check(&self, bytes: &[u8]) {
        let stream = self.plan.seed * 2 + 1 - self.side as u64;
        let right = content(stream, self.received, bytes.len());
        // Without optimization, a loop takes longer than the program that is tested.
        if bytes != right {
            let wrong = (0..bytes.len()).find(|&i| bytes[i] != right[i]).unwrap_or_default();
            panic!("connection {}: byte {} is wrong", self.plan.seed, self.received + wrong as u64);
        }
    }

    /// Returns the number of bytes that a call has moved; `None` if nothing can be moved now.
    fn moved(&self, n: isize, what: &str) -> Option<usize> {
        usize::try_from(n)
            .map_err(|_| {
                let error = Error::last_os_error();
                let (seed, sent, received) = (self.plan.seed, self.sent, self.received);
                assert!(
                    error.kind() == ErrorKind::WouldBlock,
                    "connection {seed}, which {what}: {error} at {sent}, {received}"
                );
            })
            .ok()
    }
}

fn one_in(random: &mut Random, n: usize) -> bool {
    random.index(n) == 0
}

/// Returns up to three pieces of a buffer.
fn split(at: *mut u8, len: usize, random: &mut Random) -> Vec<iovec> {
    let mut cuts = [0, random.index(len + 1), random.index(len + 1), len];
    cuts.sort_unstable();
    let piece = |two: &[usize]| iovec { iov_base: at.wrapping_add(two[0]).cast(), iov_len: two[1] - two[0] };
    cuts.windows(2).map(piece).collect()
}
