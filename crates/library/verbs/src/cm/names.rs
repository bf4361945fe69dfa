//! The names under which addresses are known in a segment.

use std::net::{IpAddr, SocketAddr};

/// A space of port numbers: `rdma_port_space`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortSpace {
    /// For reliable connections (`RDMA_PS_TCP`).
    Tcp,
    /// For datagrams (`RDMA_PS_UDP`).
    Udp,
    /// For datagrams that share a multicast address (`RDMA_PS_IPOIB`).
    Ipoib,
    /// For InfiniBand's own service IDs (`RDMA_PS_IB`).
    Ib,
}

impl PortSpace {
    /// All port spaces. The index of each is its number in messages.
    pub(crate) const ALL: [Self; 4] = [Self::Tcp, Self::Udp, Self::Ipoib, Self::Ib];

    /// Returns whether the two sides exchange datagrams.
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Udp | Self::Ipoib)
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Ipoib => "ipoib",
            Self::Ib => "ib",
        }
    }
}

/// A network namespace of a member. Loopback addresses are valid only within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Number of the member.
    pub member: u32,
    /// Number of the namespace, as its kernel reports it.
    pub namespace: u64,
}

/// Returns the name of the listener of an address, which must not be an unspecified one. The name of a loopback address contains the
/// network namespace, and all loopback addresses share one name.
pub fn name(space: PortSpace, address: SocketAddr, network: Network) -> String {
    let (space, port) = (space.word(), address.port());
    match address.ip().to_canonical() {
        ip if ip.is_loopback() => format!("cm.{space}.{port}.lo.{}.{}", network.member, network.namespace),
        IpAddr::V4(ip) => format!("cm.{space}.{port}.{ip}"),
        // A name must not contain colons.
        IpAddr::V6(ip) => format!("cm.{space}.{port}.{}", ip.to_string().replace(':', "-")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_one_name() {
        let network = Network { member: 3, namespace: u64::MAX };
        for (address, wanted) in [
            ("10.0.0.1:7471", "cm.tcp.7471.10.0.0.1"),
            ("[::ffff:10.0.0.1]:7471", "cm.tcp.7471.10.0.0.1"),
            ("127.0.0.1:1", "cm.tcp.1.lo.3.18446744073709551615"),
            ("127.1.2.3:1", "cm.tcp.1.lo.3.18446744073709551615"),
            ("[::1]:1", "cm.tcp.1.lo.3.18446744073709551615"),
            ("[fd00::1]:65535", "cm.tcp.65535.fd00--1"),
        ] {
            assert_eq!(name(PortSpace::Tcp, address.parse().unwrap(), network), wanted);
        }
        let longest = "[1111:2222:3333:4444:5555:6666:7777:8888]:65535".parse().unwrap();
        for space in PortSpace::ALL {
            let name = name(space, longest, network);
            assert!(ginnel_layout::name::Name::new(&name).is_ok(), "{name}");
        }
    }
}
