//! The proof that one socket sent the SYN that the other received.
//!
//! Each TCP segment carries its sender's clock (the timestamp option, RFC 7323): milliseconds since boot, plus an
//! offset that the sender's kernel keeps secret. The daemon of the connecting side reads that clock from the socket,
//! and the daemon of the accepting side has the value from the SYN. If the clock, set back to the time of `connect`,
//! shows that value, the SYN came from that socket. The probability that a guess is right is the window's width, a
//! few milliseconds, divided by 2^32.

use crate::option;
use etherparse::{LaxSlicedPacket, TcpOptionElement, TransportSlice};
use rustix::io::Result;
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::AsFd;
use std::time::Duration;

/// TCP_TIMESTAMP: the clock of the socket's own timestamps.
const TIMESTAMP: usize = 24;
/// TCP_SAVE_SYN, an option of listeners.
const SAVE_SYN: usize = 27;
/// TCP_SAVED_SYN, an option of accepted sockets.
const SAVED_SYN: usize = 28;
/// TCP_INFO.
const INFO: usize = crate::identity::TCP_INFO;
/// TCPI_OPT_TIMESTAMPS in `tcpi_options`, the sixth byte.
const TIMESTAMPS: u8 = 1;

/// The assumed error of the clocks: newer kernels keep the lowest bit of [`Clock`] for its unit, and reading takes
/// time.
const TOLERANCE: u32 = 2;

/// The widest window that proves anything, in milliseconds: the probability that a guess is right is 2^-24. The
/// window is as wide as the time that `connect` and the reading of the clock took. The other kernel's daemon reports
/// both times, and it may lie.
pub const MAX_WINDOW: u32 = 256;

/// Makes a listener keep the SYN of each connection, for [`SynTime::of`]. Connections that are already in its queue
/// have none.
pub fn save_syn(listener: impl AsFd) -> Result<()> {
    option::set(listener, option::TCP, SAVE_SYN, 1)
}

/// When a program connected, on CLOCK_MONOTONIC of its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connecting {
    /// The time right before the call.
    pub before: Duration,
    /// The time right after the call.
    pub after: Duration,
}

/// The clock of the timestamps that a socket sends, and when it was read. The fields are plain numbers, because one
/// kernel's daemon sends them to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// The value of the clock: milliseconds, modulo 2^32.
    pub value: u32,
    /// CLOCK_MONOTONIC right before the clock was read.
    pub before: Duration,
    /// CLOCK_MONOTONIC right after the clock was read.
    pub after: Duration,
}

impl Clock {
    /// Reads the clock of a connected socket. Returns `None` if the connection has no timestamps
    /// (`net.ipv4.tcp_timestamps` is 0 on either side).
    pub fn of(socket: impl AsFd) -> Result<Option<Self>> {
        let socket = socket.as_fd();
        let mut info = [0; 6];
        option::get(socket, option::TCP, INFO, &mut info)?;
        if info[5] & TIMESTAMPS == 0 {
            return Ok(None);
        }
        let mut value = [0; 4];
        let before = now();
        option::get(socket, option::TCP, TIMESTAMP, &mut value)?;
        Ok(Some(Self { value: u32::from_ne_bytes(value), before, after: now() }))
    }

    /// Returns whether the clock differs from its kernel's CLOCK_MONOTONIC, which is no secret
    /// (`net.ipv4.tcp_timestamps` is 2).
    pub fn is_secret(&self) -> bool {
        let (from, to) = (millis(self.before), millis(self.after));
        let offset = self.value.wrapping_sub(from).wrapping_add(TOLERANCE);
        offset > to.wrapping_sub(from).saturating_add(2 * TOLERANCE)
    }

    /// Returns whether a socket with this clock, which connected at that time, has sent a SYN with that value.
    pub fn proves(&self, connecting: Connecting, syn: SynTime) -> bool {
        let Connecting { before, after } = connecting;
        if after < before || after > self.after || self.after < self.before {
            return false;
        }
        let width = (after - before) + (self.after - self.before);
        if width.as_millis() > u128::from(MAX_WINDOW) || !self.is_secret() {
            return false;
        }
        // The earliest and the latest value that the clock can have shown at the two times.
        let earliest = self.value.wrapping_sub(millis(self.after - before)).wrapping_sub(TOLERANCE);
        let latest =
            self.value.wrapping_sub(millis(self.before.saturating_sub(after))).wrapping_add(TOLERANCE);
        syn.0.wrapping_sub(earliest) <= latest.wrapping_sub(earliest)
    }
}

/// The sender's clock in a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynTime(pub u32);

impl SynTime {
    /// Reads the SYN of an accepted socket, whose listener had [`save_syn`]. Returns `None` if there is no SYN, or
    /// none with a timestamp. There is none for an older connection, for one that was made by a SYN cookie, or if the
    /// SYN has been read already: **the kernel forgets it after the first read**.
    pub fn of(socket: impl AsFd) -> Result<Option<Self>> {
        // A SYN with the longest IPv6 extension headers that Linux accepts would not fit, and is not examined.
        let mut syn = [0; 512];
        let len = option::get(socket, option::TCP, SAVED_SYN, &mut syn)?;
        Ok(Self::in_syn(&syn[..len]))
    }

    /// Finds the timestamp in the headers of a SYN, from the network header on. The sender may have put anything
    /// there.
    pub fn in_syn(headers: &[u8]) -> Option<Self> {
        let packet = LaxSlicedPacket::from_ip(headers).ok()?;
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { return None };
        tcp.options_iterator().find_map(|option| match option {
            Ok(TcpOptionElement::Timestamp(value, _)) => Some(Self(value)),
            _ => None,
        })
    }
}

/// Reads CLOCK_MONOTONIC. Only daemons do so; a program that connects reads it through the C library.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock begins at zero.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Converts a time to a timestamp's value, modulo 2^32.
fn millis(time: Duration) -> u32 {
    time.as_millis() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::random::Random;
    use std::net::{TcpListener, TcpStream};

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn showing(value: u32, before: u64, after: u64) -> Clock {
        Clock { value, before: ms(before), after: ms(after) }
    }

    #[test]
    fn a_clock_proves_the_times_of_its_connect_only() {
        // The clock is read at 10,000 ms, and `connect` took from 4,000 to 4,003 ms. With this offset, the clock passes zero in
        // between.
        let clock = showing(3_000, 10_000, 10_001);
        let connecting = Connecting { before: ms(4_000), after: ms(4_003) };
        let at = |time: i64| SynTime((3_000_i64 + time - 10_000) as u32);
        for good in [3_998, 4_000, 4_002, 4_005] {
            assert!(clock.proves(connecting, at(good)), "{good}");
        }
        for bad in [0, 3_990, 4_010, 10_000] {
            assert!(!clock.proves(connecting, at(bad)), "{bad}");
        }
        let taken = (-1_000..20_000).filter(|&time| clock.proves(connecting, at(time))).count();
        assert!((4..=9).contains(&taken), "{taken} values would do");
    }

    #[test]
    fn times_that_cannot_be_prove_nothing() {
        let clock = showing(3_000, 10_000, 10_000);
        for (before, after) in [(4_000, 3_999), (4_000, 4_300), (9_999, 11_000)] {
            let connecting = Connecting { before: ms(before), after: ms(after) };
            let any =
                (0..20_000_u32).map(|n| n.wrapping_sub(10_000)).any(|n| clock.proves(connecting, SynTime(n)));
            assert!(!any, "{before} to {after}");
        }
        // A clock whose reading takes too long must prove nothing, because its window would include every time.
        let vague = showing(3_000, 9_000, 10_000);
        let connecting = Connecting { before: ms(4_000), after: ms(4_001) };
        assert!(!(0..20_000_u32).any(|n| vague.proves(connecting, SynTime(n.wrapping_sub(10_000)))));
    }

    #[test]
    fn a_clock_without_an_offset_proves_nothing() {
        for value in [9_998, 10_000, 10_003] {
            let plain = showing(value, 10_000, 10_001);
            assert!(!plain.is_secret());
            let connecting = Connecting { before: ms(9_999), after: ms(10_000) };
            assert!(!plain.proves(connecting, SynTime(value)));
        }
        assert!(showing(10_100, 10_000, 10_001).is_secret() && showing(9_000, 10_000, 10_001).is_secret());
    }

    #[test]
    fn only_the_connecting_socket_can_prove_the_connection() {
        let setting = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_timestamps").unwrap_or_default();
        kit::require!(setting.trim() == "1", "net.ipv4.tcp_timestamps is {:?}, not 1", setting.trim());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        save_syn(&listener).unwrap();
        let connect = || {
            let before = now();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (socket, Connecting { before, after: now() })
        };
        let (one, one_connected) = connect();
        let accepted = listener.accept().unwrap().0;
        let clock = Clock::of(&one).unwrap().filter(Clock::is_secret).expect("a secret clock");
        let syn = SynTime::of(&accepted).unwrap().expect("a time in the SYN");
        assert!(clock.proves(one_connected, syn));
        assert_eq!(SynTime::of(&accepted).unwrap(), None, "the kernel tells it once");
        // The clock does not prove another time of connecting.
        let later = Connecting { before: one_connected.before - ms(50), after: one_connected.after - ms(50) };
        assert!(!clock.proves(later, syn));
    }

    #[test]
    fn headers_of_any_content_are_read() {
        // IPv4 and TCP with options: maximum segment size, SACK permitted, timestamp 0x01020304.
        let mut syn = vec![0x45, 0, 0, 56, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        syn.extend([0x30, 0x39, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 0, 0x90, 2, 0xff, 0xff, 0, 0, 0, 0]);
        syn.extend([2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0]);
        assert_eq!(SynTime::in_syn(&syn), Some(SynTime(0x0102_0304)));
        for cut in 0..syn.len() {
            let _ = SynTime::in_syn(&syn[..cut]);
        }
        let mut random = Random::new(1);
        for _ in 0..20_000 {
            let mut bytes = syn.clone();
            for _ in 0..4 {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.next() as u8;
            }
            let _ = SynTime::in_syn(&bytes);
        }
        assert_eq!(SynTime::in_syn(&[]), None);
    }
}
