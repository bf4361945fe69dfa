//! Channels and listeners in the books.

use super::listener::Listener;
use super::record::Channel;
use crate::account::Tally;
use crate::books::{Books, InvalidRecord};
use crate::numbers::{following_listener, is_ahead};
use ginnel_layout::Name;
use ginnel_layout::channel::{Capacities, ChannelKind};
use std::collections::btree_map::Entry;

impl Books {
    pub(super) fn listen(
        &mut self,
        number: u32,
        endpoint: u32,
        name: Name,
        kind: u32,
        backlog: u32,
        capacities: Capacities,
    ) -> Result<(), InvalidRecord> {
        let owner =
            self.endpoints.get_mut(&endpoint).ok_or(InvalidRecord("a listener of an unknown endpoint"))?;
        let segment = owner.segment;
        let (Entry::Vacant(at_name), Entry::Vacant(listener)) =
            (self.names.entry((segment, name)), self.listeners.entry(number))
        else {
            return Err(InvalidRecord("two listeners at one name"));
        };
        owner.listeners.insert(number);
        at_name.insert(number);
        if is_ahead(number, self.next_listener) {
            self.next_listener = following_listener(number);
        }
        let kind = ChannelKind(kind);
        listener.insert(Listener { number, endpoint, segment, name, kind, backlog, capacities, waiting: 0 });
        Ok(())
    }

    pub(crate) fn unlisten(&mut self, listener: u32) -> Result<(), InvalidRecord> {
        let listener =
            self.listeners.remove(&listener).ok_or(InvalidRecord("an unknown listener removed"))?;
        self.names.remove(&(listener.segment, listener.name));
        if let Some(endpoint) = self.endpoints.get_mut(&listener.endpoint) {
            endpoint.listeners.remove(&listener.number);
        }
        Ok(())
    }

    pub(super) fn channel(&mut self, channel: &Channel) -> Result<(), InvalidRecord> {
        let (number, segment) = (channel.number, channel.segment.0);
        if !channel.capacities().are_valid() || self.channels.contains_key(&number) {
            return Err(InvalidRecord("an impossible channel"));
        }
        let open = [channel.initiator, channel.acceptor].into_iter().filter(|side| !side.closed);
        for side in open.clone() {
            let endpoint = self
                .endpoints
                .get(&side.endpoint)
                .ok_or(InvalidRecord("a channel of an unknown endpoint"))?;
            if endpoint.epoch != side.epoch || endpoint.segment != segment {
                return Err(InvalidRecord("a channel of another endpoint"));
            }
        }
        let opener = self.endpoints.get(&channel.initiator.endpoint).filter(|_| !channel.initiator.closed);
        if opener.is_some_and(|opener| opener.opened.contains_key(&channel.nonce)) {
            return Err(InvalidRecord("two channels of one request"));
        }
        if open.clone().count() == 0 || !self.members.contains_key(&channel.initiator.member) {
            return Err(InvalidRecord("a channel of an unknown endpoint"));
        }
        let len = channel.block_len();
        let arena =
            &mut self.segments.get_mut(&segment).ok_or(InvalidRecord("a channel in no segment"))?.arena;
        if !arena.take(channel.offset, len) {
            return Err(InvalidRecord("a channel without memory"));
        }
        for side in open {
            if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint) {
                endpoint.channels.insert(number);
            }
        }
        if !channel.initiator.closed
            && let Some(endpoint) = self.endpoints.get_mut(&channel.initiator.endpoint)
        {
            endpoint.bytes += len;
            endpoint.opened.insert(channel.nonce, number);
        }
        self.charge(channel.account(), Tally::channel(len));
        for side in [channel.initiator, channel.acceptor] {
            self.numbers.refer(side.endpoint, side.epoch);
            self.one_more_side(&side);
        }
        if !channel.accepted {
            if let Some(listener) = self.listeners.get_mut(&channel.listener) {
                listener.waiting += 1;
            }
            if !channel.acceptor.closed
                && let Some(endpoint) = self.endpoints.get_mut(&channel.acceptor.endpoint)
            {
                endpoint.waiting.insert((channel.listener, number));
            }
        }
        self.next_channel = self.next_channel.max(number.saturating_add(1));
        if channel.relayed {
            self.relayed.insert(number);
        }
        self.channels.insert(number, channel.clone());
        Ok(())
    }

    pub(super) fn accepted(&mut self, number: u64) -> Result<(), InvalidRecord> {
        let channel = self.channels.get_mut(&number).ok_or(InvalidRecord("an unknown channel accepted"))?;
        if channel.accepted || channel.acceptor.closed {
            return Err(InvalidRecord("a channel accepted twice"));
        }
        channel.accepted = true;
        let (listener, endpoint) = (channel.listener, channel.acceptor.endpoint);
        self.one_less_waits(listener, endpoint, number);
        Ok(())
    }

    /// Closes a side that is open. The memory becomes free when both sides are closed.
    pub(super) fn close(&mut self, number: u64, initiator: bool) -> Result<(), InvalidRecord> {
        let channel = self.channels.get_mut(&number).filter(|channel| !channel.side(initiator).closed);
        let channel = channel.ok_or(InvalidRecord("a channel closed twice"))?;
        let (side, other) = match initiator {
            true => (&mut channel.initiator, channel.acceptor),
            false => (&mut channel.acceptor, channel.initiator),
        };
        side.closed = true;
        let side = *side;
        let (listener, nonce, len) = (channel.listener, channel.nonce, channel.block_len());
        if !initiator && !channel.accepted {
            channel.accepted = true;
            self.one_less_waits(listener, side.endpoint, number);
        }
        let ends_here = other.closed;
        if let Some(endpoint) = self.endpoints.get_mut(&side.endpoint).filter(|e| e.epoch == side.epoch) {
            // Both sides may belong to one endpoint.
            if side.endpoint != other.endpoint || ends_here {
                endpoint.channels.remove(&number);
            }
            if initiator {
                endpoint.bytes = endpoint.bytes.saturating_sub(len);
                endpoint.opened.remove(&nonce);
            }
        }
        if ends_here && let Some(channel) = self.channels.remove(&number) {
            self.relayed.remove(&number);
            self.discharge(channel.account(), Tally::channel(len));
            for side in [channel.initiator, channel.acceptor] {
                self.one_less_side(&side);
            }
            if let Some(segment) = self.segments.get_mut(&channel.segment.0) {
                let given = segment.arena.give(channel.offset, len);
                debug_assert!(given, "the block of a channel was taken");
            }
        }
        Ok(())
    }

    /// Notes that a channel does not wait for its acceptor any more.
    fn one_less_waits(&mut self, listener: u32, endpoint: u32, channel: u64) {
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.waiting.remove(&(listener, channel));
        }
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// Returns a number for a listener that no listener has. All numbers are used before one is used again.
    pub fn free_listener(&self) -> u32 {
        let mut number = self.next_listener.max(1);
        while self.listeners.contains_key(&number) {
            number = following_listener(number);
        }
        number
    }
}
