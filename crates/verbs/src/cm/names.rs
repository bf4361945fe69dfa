//! The names of addresses in a segment.

use std::net::{IpAddr, SocketAddr};

/// A space of port numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Of reliable connections.
    Tcp,
    /// Of datagrams.
    Udp,
    /// Of datagrams that share a multicast address.
    Ipoib,
    /// InfiniBand's own.
    Ib,
}

impl Space {
    /// Its number in messages.
    pub(crate) const ALL: [Self; 4] = [Self::Tcp, Self::Udp, Self::Ipoib, Self::Ib];

    /// Whether those who meet there exchange datagrams.
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

/// Where loopback addresses are: a member's network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Number of the member.
    pub member: u32,
    /// Number of the namespace, as its kernel says it.
    pub namespace: u64,
}

/// The name of whoever listens at an address, which is none of the unspecified ones. Those of a loopback address are for the same network
/// namespace alone, and all loopback addresses are one.
pub fn name(space: Space, address: SocketAddr, network: Network) -> String {
    let (space, port) = (space.word(), address.port());
    match address.ip().to_canonical() {
        ip if ip.is_loopback() => format!("cm.{space}.{port}.lo.{}.{}", network.member, network.namespace),
        IpAddr::V4(ip) => format!("cm.{space}.{port}.{ip}"),
        // A name has no colons.
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
            assert_eq!(name(Space::Tcp, address.parse().unwrap(), network), wanted);
        }
        let longest = "[1111:2222:3333:4444:5555:6666:7777:8888]:65535".parse().unwrap();
        for space in Space::ALL {
            let name = name(space, longest, network);
            assert!(ginnel_layout::name::Name::new(&name).is_ok(), "{name}");
        }
    }
}
