//! Finds out what the kernel says about the sockets that programs of this host report.

use ginnel_broker::sockets::connecting;
use ginnel_layout::wire::{SocketReport, SocketRole, StaysReason};
use ginnel_tcp::{Clock, Identity, NotTcp, Owner, Side, SynTime};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};

/// The number of SYNs that are kept, because the kernel reports each only once.
const SYNS: usize = 4096;

/// The timestamps of SYNs, by network namespace and cookie of the sockets that have received them.
#[derive(Debug, Default)]
pub struct Syns {
    of: HashMap<(u64, u64), SynTime>,
    order: VecDeque<(u64, u64)>,
}

impl Syns {
    fn get(&mut self, socket: impl AsFd, identity: &Identity) -> Option<SynTime> {
        let name = (identity.namespace, identity.cookie);
        if let Some(known) = self.of.get(&name) {
            return Some(*known);
        }
        let syn = SynTime::of(socket).ok().flatten()?;
        if self.order.len() >= SYNS
            && let Some(oldest) = self.order.pop_front()
        {
            self.of.remove(&oldest);
        }
        self.of.insert(name, syn);
        self.order.push_back(name);
        Some(syn)
    }
}

/// Reads what the kernel says about a socket of this host.
pub fn read(
    syns: &mut Syns,
    socket: &OwnedFd,
    report: &SocketReport,
) -> Result<(Identity, Owner, Side), StaysReason> {
    let identity = Identity::of(socket).map_err(|why| match why {
        NotTcp::Kernel => StaysReason::KERNEL,
        _ => StaysReason::NOT_TCP,
    })?;
    let side = match report.role {
        SocketRole::CONNECTOR => {
            Side::Connector { connecting: connecting(report), clock: Clock::of(socket).ok().flatten() }
        }
        _ => Side::Acceptor { syn: syns.get(socket, &identity) },
    };
    // If the owner cannot be found out, the socket counts as an ordinary user's, because that is trusted least.
    let owner = Owner::of(socket).unwrap_or(Owner::User);
    Ok((identity, owner, side))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use zerocopy::FromZeros;

    fn of(socket: impl AsFd, role: SocketRole) -> Result<(Identity, Owner, Side), StaysReason> {
        let socket = socket.as_fd().try_clone_to_owned().unwrap();
        read(&mut Syns::default(), &socket, &SocketReport { role, ..FromZeros::new_zeroed() })
    }

    #[test]
    fn the_kernel_says_which_two_sockets_belong_together() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (acceptor, _) = listener.accept().unwrap();
        let (one, _, side) = of(&connector, SocketRole::CONNECTOR).unwrap();
        let (other, ..) = of(&acceptor, SocketRole::ACCEPTOR).unwrap();
        assert_eq!((one.local, one.remote, one.namespace), (other.remote, other.local, other.namespace));
        assert_ne!(one.cookie, other.cookie);
        assert!(matches!(side, Side::Connector { .. }));
    }

    #[test]
    fn what_is_no_connection_stays_on_tcp() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(of(&file, SocketRole::ACCEPTOR).err(), Some(StaysReason::NOT_TCP));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(of(&listener, SocketRole::ACCEPTOR).err(), Some(StaysReason::NOT_TCP));
    }
}
