//! The numbers of bytes that a connection has carried, as the kernel counts them.
//!
//! The kernel counts sequence numbers, of which the SYN and the FIN take one each. Its count of received bytes
//! includes those that wait to be read, and its count of acknowledged bytes leaves out those that wait to be sent or
//! acknowledged. Other calls return the numbers of waiting bytes. (`tcpi_bytes_received`, `tcpi_bytes_acked`: RFC
//! 4898; `SIOCINQ`, `SIOCOUTQ`: `tcp(7)`.)

#![allow(unsafe_code)] // SIOCOUTQ, which no crate has.

use crate::identity::TCP_INFO;
use crate::option;
use rustix::io::{Errno, Result};
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// SIOCOUTQ.
const OUTQ: rustix::ioctl::Opcode = 0x5411;

/// Offsets in `struct tcp_info`.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const LEN: usize = 136;
const MIN_RTT: usize = 148;

/// How often to retry if the counts change while they are read.
const TRIES: usize = 3;
/// The same where the count of received bytes cannot change for long.
const TRIES_WHILE_NOBODY_READS: usize = 10_000;

/// The side of the connection that a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Called `connect`: its SYN is counted as sent.
    Connector,
    /// Called `accept`.
    Acceptor,
}

/// The bytes that programs have received and sent over a socket since it was created, by any call. The counts are
/// valid as long as neither side has shut down sending, because a FIN counts as one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that the programs have read.
    pub received: u64,
    /// Bytes that the programs have written.
    pub sent: u64,
}

impl Counts {
    /// Reads the counts of this socket. Returns `None` if they changed all the time; ask again later.
    pub fn of(socket: impl AsFd, role: Role) -> Result<Option<Self>> {
        let socket = socket.as_fd();
        for _ in 0..TRIES {
            let first = Totals::of(socket)?;
            let unread = rustix::io::ioctl_fionread(socket)?;
            let unacknowledged = unacknowledged(socket)?;
            if Totals::of(socket)? != first {
                continue;
            }
            let syn = u64::from(role == Role::Connector);
            // Counters that contradict each other have changed as well.
            let received = first.received.checked_sub(unread);
            let sent = (first.acknowledged + unacknowledged).checked_sub(syn);
            if let (Some(received), Some(sent)) = (received, sent) {
                return Ok(Some(Self { received, sent }));
            }
        }
        Ok(None)
    }
}

/// Returns how many bytes programs have read from this socket, for a caller that keeps everybody from reading meanwhile. A FIN that has
/// come counts as a byte. What arrives meanwhile is bounded by the kernel's buffer, so this does not take long.
pub fn bytes_read(socket: impl AsFd) -> Result<u64> {
    let socket = socket.as_fd();
    for _ in 0..TRIES_WHILE_NOBODY_READS {
        let first = Totals::of(socket)?.received;
        let unread = rustix::io::ioctl_fionread(socket)?;
        if Totals::of(socket)?.received == first {
            return Ok(first.saturating_sub(unread));
        }
    }
    Err(Errno::AGAIN)
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Totals {
    acknowledged: u64,
    received: u64,
}

impl Totals {
    fn of(socket: BorrowedFd<'_>) -> Result<Self> {
        let mut info = [0; LEN];
        option::get(socket, option::TCP, TCP_INFO, &mut info)?;
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&info[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        Ok(Self { acknowledged: word(BYTES_ACKED), received: word(BYTES_RECEIVED) })
    }
}

/// Returns the shortest time that a segment and its acknowledgement have taken lately. (`tcpi_min_rtt`, Linux 4.6.)
pub fn round_trip(socket: impl AsFd) -> Result<Duration> {
    let mut info = [0; MIN_RTT + 4];
    let len = option::get(socket, option::TCP, TCP_INFO, &mut info)?;
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&info[MIN_RTT..]);
    match u32::from_ne_bytes(bytes) {
        // The kernel is older, or no segment has been acknowledged.
        _ if len < info.len() => Err(Errno::NOPROTOOPT),
        u32::MAX => Err(Errno::AGAIN),
        microseconds => Ok(Duration::from_micros(microseconds.into())),
    }
}

/// Returns the number of bytes that were written and are not acknowledged.
fn unacknowledged(socket: BorrowedFd<'_>) -> Result<u64> {
    // SAFETY: SIOCOUTQ fills a C `int`.
    let count = unsafe { rustix::ioctl::ioctl(socket, rustix::ioctl::Getter::<OUTQ, c_int>::new()) }?;
    Ok(count.unsigned_abs().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::random::Random;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (connector, listener.accept().unwrap().0)
    }

    #[test]
    fn a_round_trip_takes_some_time() {
        let (mut connector, mut acceptor) = pair();
        connector.write_all(b"x").unwrap();
        acceptor.read_exact(&mut [0]).unwrap();
        let time = round_trip(&connector).unwrap();
        assert!(time > Duration::ZERO && time < Duration::from_secs(1), "{time:?}");
    }

    /// Acknowledgements may move the counts while they are read.
    fn counts(socket: &TcpStream, role: Role) -> Counts {
        loop {
            if let Some(counts) = Counts::of(socket, role).unwrap() {
                return counts;
            }
        }
    }

    /// Sends or receives random pieces in both directions, with much and little under way, and compares after each.
    #[test]
    fn they_are_what_the_programs_count() {
        let (connector, acceptor) = pair();
        connector.set_nonblocking(true).unwrap();
        acceptor.set_nonblocking(true).unwrap();
        let mut ends = [(connector, Role::Connector, 0, 0), (acceptor, Role::Acceptor, 0, 0)];
        let mut bytes = vec![7; 1 << 20];
        let mut random = Random::new(1);
        for round in 0..4_000 {
            let (socket, role, received, sent) = &mut ends[random.below(2) as usize];
            let len = 1 + random.below(if round % 7 == 0 { 1 << 20 } else { 3_000 }) as usize;
            let result = match random.below(2) == 0 {
                true => socket.write(&bytes[..len]).map(|n| *sent += n as u64),
                false => socket.read(&mut bytes[..len]).map(|n| *received += n as u64),
            };
            assert!(result.is_ok() || result.is_err_and(|e| e.kind() == ErrorKind::WouldBlock));
            assert_eq!(
                counts(socket, *role),
                Counts { received: *received, sent: *sent },
                "{role:?}, {round}"
            );
        }
        assert!(ends[0].2 > 1_000_000 && ends[1].2 > 1_000_000, "bytes went both ways");
    }

    #[test]
    fn bytes_that_bypass_the_library_are_counted() {
        let (connector, acceptor) = pair();
        // This is another descriptor of the same socket, such as a child or the C library may have.
        let mut past = connector.try_clone().unwrap();
        past.write_all(b"hello").unwrap();
        assert_eq!(counts(&connector, Role::Connector), Counts { received: 0, sent: 5 });
        let mut two = [0; 2];
        (&acceptor).read_exact(&mut two).unwrap();
        assert_eq!(counts(&acceptor, Role::Acceptor), Counts { received: 2, sent: 0 });
        assert_eq!(bytes_read(&acceptor).unwrap(), 2);
        let seen = acceptor.peek(&mut two).unwrap();
        assert_eq!(counts(&acceptor, Role::Acceptor).received, 2, "looking at {seen} bytes takes none");
    }

    /// Bytes that arrive all the time change no count of bytes that are read.
    #[test]
    fn the_count_of_read_bytes_holds_while_others_arrive() {
        let (mut connector, mut acceptor) = pair();
        let end = std::thread::spawn(move || {
            let mut sent = 0;
            connector.set_nonblocking(true).unwrap();
            while let Ok(n) = connector.write(&[7; 1000]) {
                sent += n as u64;
            }
            sent
        });
        let mut taken = 0;
        while !end.is_finished() {
            taken += acceptor.read(&mut [0; 100]).unwrap() as u64;
            assert_eq!(bytes_read(&acceptor).unwrap(), taken);
        }
        let sent = end.join().unwrap();
        let rest = std::io::copy(&mut acceptor, &mut std::io::sink()).unwrap();
        assert_eq!(taken + rest, sent);
        // The connector has closed its end.
        assert_eq!(bytes_read(&acceptor).unwrap(), sent + 1);
    }
}
