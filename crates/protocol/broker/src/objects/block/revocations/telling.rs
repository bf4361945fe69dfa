//! Sends revocations, a bounded number in each turn.

use super::WINDOW;
use crate::broker::Broker;
use crate::effects::ClientId;
use crate::reply;
use ginnel_layout::wire::{self, Kind, Rights};
use zerocopy::IntoBytes;

/// The revocations that are sent before others get their turn.
const TURN: usize = 256;

impl Broker {
    /// Sends a bounded number of revocations to the endpoints that have a connection that is `ready` for more. Sends over all of
    /// their connections: one that is never read must not keep the others waiting, and is ended. Returns true if there are others
    /// that can be sent at once.
    pub fn tell_revoked(&mut self, ready: impl Fn(ClientId) -> bool) -> bool {
        let mut budget = TURN;
        for endpoint in self.revocations.open.iter().copied().collect::<Vec<_>>() {
            let connections = self.connections(endpoint);
            if !connections.iter().any(|client| ready(*client)) {
                continue;
            }
            // The limit keeps one endpoint from making all others wait.
            for _ in 0..WINDOW {
                if budget == 0 {
                    return true;
                }
                let Some(handle) = self.revocations.next(endpoint) else { break };
                budget -= 1;
                for client in &connections {
                    self.send_revoked(*client, endpoint, handle);
                }
            }
        }
        false
    }

    fn send_revoked(&mut self, client: ClientId, endpoint: u32, handle: u64) {
        let Ok((_, held)) = self.held(endpoint, handle) else { return };
        let Some(left) = held.left else { return };
        let event = wire::BlockRights { handle, rights: Rights(left), reserved: 0 };
        self.send(client, reply::packet(Kind::BLOCK_REVOKED, 0, event.as_bytes()), vec![]);
    }
}
