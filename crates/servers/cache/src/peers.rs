//! The addresses of the clients that have connected over TCP.

use std::collections::HashMap;
use std::net::SocketAddr;

/// The addresses from which clients have connected. One address can have several connections, to different addresses of the server.
#[derive(Debug, Default)]
pub(crate) struct Peers(HashMap<SocketAddr, usize>);

impl Peers {
    /// Returns an address as both ends of a connection write it. They may differ in the scope of an IPv6 address, and in the notation
    /// of an IPv4 address.
    pub fn plain(address: SocketAddr) -> SocketAddr {
        SocketAddr::new(address.ip().to_canonical(), address.port())
    }

    /// Reads an address that a client has sent.
    pub fn parse(text: &[u8]) -> Option<SocketAddr> {
        std::str::from_utf8(text).ok()?.parse().ok().map(Self::plain)
    }

    pub fn enter(&mut self, address: SocketAddr) {
        *self.0.entry(address).or_default() += 1;
    }

    pub fn leave(&mut self, address: SocketAddr) {
        if let Some(count) = self.0.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&address);
            }
        }
    }

    pub fn has(&self, address: SocketAddr) -> bool {
        self.0.contains_key(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::Peers;

    #[test]
    fn an_address_is_known_until_its_last_connection_ends() {
        let mut peers = Peers::default();
        let address = Peers::parse(b"127.0.0.1:80").unwrap();
        assert_eq!(Peers::parse(b"[::ffff:127.0.0.1]:80"), Some(address));
        assert_eq!(Peers::parse(b"\xff"), None);
        peers.enter(address);
        peers.enter(address);
        peers.leave(address);
        assert!(peers.has(address));
        peers.leave(address);
        assert!(!peers.has(address));
        peers.leave(address);
    }
}
