//! Facts of the guest's kernel about TCP connections that programs report.
//!
//! The host's daemon looks for the other end, and trusts these facts only about this guest. So this daemon reads them from the
//! socket itself. Of the program's own statements, only the time of the connection is passed on.

use super::clients::{self, Answer};
use ginnel_layout::wire::{Kind, SocketFacts, SocketReport, SocketRole, SocketStays, StaysReason};
use ginnel_tcp::{Clock, Identity, NotTcp, Owner, SynTime};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The number of SYNs that are remembered.
const SYNS: usize = 4096;

/// The name of a socket in this kernel: the cookie of its namespace and its own.
type Socket = (u64, u64);

/// The clocks in the SYNs of accepted connections. The kernel reports each only once, and a program may report a socket again.
#[derive(Default)]
pub struct Syns {
    known: BTreeMap<Socket, SynTime>,
    /// The sockets, the oldest first.
    order: VecDeque<Socket>,
}

impl Syns {
    /// Remembers what the kernel has reported about a socket, or returns what it reported earlier.
    fn recall(&mut self, socket: Socket, told: Option<SynTime>) -> Option<SynTime> {
        let Some(syn) = told else { return self.known.get(&socket).copied() };
        if self.known.insert(socket, syn).is_none() {
            self.order.push_back(socket);
        }
        if self.order.len() > SYNS
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        Some(syn)
    }

    /// Reads what the kernel says about a socket that a program has reported. Does not block.
    pub fn read(&mut self, report: SocketReport, socket: &OwnedFd) -> Result<SocketFacts, StaysReason> {
        let Identity { local, remote, cookie, namespace } =
            Identity::of(socket).map_err(|error| match error {
                NotTcp::Kernel => StaysReason::KERNEL,
                _ => StaysReason::NOT_TCP,
            })?;
        let mut facts = SocketFacts {
            report: SocketReport { reserved: 0, ..report },
            local: address(local),
            remote: address(remote),
            local_port: local.port(),
            remote_port: remote.port(),
            flags: 0,
            cookie,
            namespace,
            clock: 0,
            syn: 0,
            clock_before: 0,
            clock_after: 0,
        };
        // A socket whose owner cannot be found out counts as an ordinary user's.
        if Owner::of(socket) != Ok(Owner::System) {
            facts.flags |= SocketFacts::USER;
        }
        match report.role {
            SocketRole::CONNECTOR => {
                if let Ok(Some(clock)) = Clock::of(socket) {
                    facts.flags |= SocketFacts::CLOCK;
                    facts.clock = clock.value;
                    (facts.clock_before, facts.clock_after) = (nanos(clock.before), nanos(clock.after));
                }
            }
            SocketRole::ACCEPTOR => {
                let told = SynTime::of(socket).ok().flatten();
                if let Some(SynTime(syn)) = self.recall((namespace, cookie), told) {
                    facts.flags |= SocketFacts::SYN;
                    facts.syn = syn;
                }
            }
            _ => {} // The host refuses it.
        }
        Ok(facts)
    }
}

/// Returns an address in the form of the protocol.
fn address(address: SocketAddr) -> [u8; 16] {
    match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Makes the event that a connection stays on TCP.
pub fn stays(key: u64, reason: StaysReason) -> Answer {
    clients::packet(Kind::SOCK_STAYS, 0, SocketStays { key, reason, reserved: 0 }.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_syn_is_remembered_until_there_are_too_many() {
        let mut syns = Syns::default();
        assert_eq!(syns.recall((1, 0), None), None);
        for cookie in 0..=SYNS as u64 {
            assert_eq!(syns.recall((1, cookie), Some(SynTime(7))), Some(SynTime(7)));
        }
        assert_eq!((syns.known.len(), syns.order.len()), (SYNS, SYNS));
        assert_eq!(syns.recall((1, 0), None), None, "the oldest has made room");
        assert_eq!(syns.recall((1, 1), None), Some(SynTime(7)));
        assert_eq!(syns.recall((2, 1), None), None, "another namespace");
        assert_eq!(syns.recall((1, 1), Some(SynTime(8))), Some(SynTime(8)));
        assert_eq!((syns.known.len(), syns.order.len()), (SYNS, SYNS));
    }
}
