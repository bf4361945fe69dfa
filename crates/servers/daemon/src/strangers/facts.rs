//! What the kernel says about a TCP connection that a program reports. Of the program's own statements, only the time of the
//! connection is passed on.

use ginnel_layout::wire::{SocketFacts, SocketReport, SocketRole, StaysReason};
use ginnel_tcp::{Clock, Identity, NotTcp, Owner, SynTime};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The number of SYNs that are remembered.
const SYNS: usize = 4096;

/// The name of a socket in this kernel: the cookie of its namespace and its own.
type Socket = (u64, u64);

/// The clocks in the SYNs of accepted connections. The kernel reports each only once, and a program may report a socket again.
#[derive(Debug, Default)]
pub struct Syns {
    known: BTreeMap<Socket, u32>,
    /// The sockets, the oldest first.
    order: VecDeque<Socket>,
}

impl Syns {
    /// Remembers what the kernel has reported about a socket, or adds what it reported earlier.
    pub fn complete(&mut self, facts: SocketFacts) -> SocketFacts {
        let socket = (facts.namespace, facts.cookie);
        if facts.flags & SocketFacts::SYN == 0 {
            let Some(&syn) = self.known.get(&socket).filter(|_| facts.report.role == SocketRole::ACCEPTOR)
            else {
                return facts;
            };
            return SocketFacts { flags: facts.flags | SocketFacts::SYN, syn, ..facts };
        }
        if self.known.insert(socket, facts.syn).is_none() {
            self.order.push_back(socket);
        }
        if self.order.len() > SYNS
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        facts
    }
}

/// Reads what the kernel says about a socket. This may block for as long as the program likes, because it takes locks that the
/// program can hold.
pub fn read(report: SocketReport, socket: &OwnedFd) -> Result<SocketFacts, StaysReason> {
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
    // A socket whose owner cannot be found out counts as an ordinary user's, because that is trusted least.
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
            if let Ok(Some(SynTime(syn))) = SynTime::of(socket) {
                facts.flags |= SocketFacts::SYN;
                facts.syn = syn;
            }
        }
        _ => {} // The broker refuses it.
    }
    Ok(facts)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use zerocopy::FromZeros;

    fn facts(cookie: u64, syn: Option<u32>) -> SocketFacts {
        let report = SocketReport { role: SocketRole::ACCEPTOR, ..FromZeros::new_zeroed() };
        let flags = if syn.is_some() { SocketFacts::SYN } else { 0 };
        SocketFacts { report, namespace: 1, cookie, flags, syn: syn.unwrap_or(0), ..FromZeros::new_zeroed() }
    }

    #[test]
    fn a_syn_is_remembered_until_there_are_too_many() {
        let mut syns = Syns::default();
        let mut recall = |facts| {
            let facts = syns.complete(facts);
            (facts.flags & SocketFacts::SYN != 0).then_some(facts.syn)
        };
        assert_eq!(recall(facts(0, None)), None);
        for cookie in 0..=SYNS as u64 {
            assert_eq!(recall(facts(cookie, Some(7))), Some(7));
        }
        assert_eq!(recall(facts(0, None)), None, "the oldest has made room");
        assert_eq!(recall(facts(1, None)), Some(7));
        assert_eq!(recall(SocketFacts { namespace: 2, ..facts(1, None) }), None, "another namespace");
        assert_eq!(recall(facts(1, Some(8))), Some(8));
        assert_eq!((syns.known.len(), syns.order.len()), (SYNS, SYNS));
    }

    fn of(socket: impl AsFd, role: SocketRole) -> Result<SocketFacts, StaysReason> {
        let socket = socket.as_fd().try_clone_to_owned().unwrap();
        read(SocketReport { role, ..FromZeros::new_zeroed() }, &socket)
    }

    #[test]
    fn the_kernel_says_which_two_sockets_belong_together() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (acceptor, _) = listener.accept().unwrap();
        let one = of(&connector, SocketRole::CONNECTOR).unwrap();
        let other = of(&acceptor, SocketRole::ACCEPTOR).unwrap();
        assert_eq!((one.local, one.remote, one.namespace), (other.remote, other.local, other.namespace));
        assert_eq!((one.local_port, one.remote_port), (other.remote_port, other.local_port));
        assert_ne!(one.cookie, other.cookie);
    }

    #[test]
    fn what_is_no_connection_stays_on_tcp() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(of(&file, SocketRole::ACCEPTOR).err(), Some(StaysReason::NOT_TCP));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(of(&listener, SocketRole::ACCEPTOR).err(), Some(StaysReason::NOT_TCP));
    }
}
