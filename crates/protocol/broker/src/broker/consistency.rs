//! What must always hold in the books and in the rest of the broker's state, for tests and the fuzzer.

use super::{Broker, Effect};
use crate::account::{Account, Tally};
use crate::books::Index;
use crate::limits::{MAX_HOLDS, MAX_OWNERS};
use crate::objects::block::Block;
use crate::relayed::Reason;
use ginnel_layout::PAGE;
use ginnel_layout::segment::ARENA;
use ginnel_layout::wire::{self, BellKind, Fds, Kind, Rights};
use std::collections::{BTreeMap, BTreeSet};

impl Broker {
    /// Panics if the state contradicts itself.
    pub fn check(&self) {
        self.memory_belongs_to_one();
        self.channels_have_their_sides();
        self.locks_have_their_users();
        self.blocks_have_their_handles();
        self.endpoints_know_what_they_have();
        self.connections_and_endpoints_refer_to_each_other();
        self.listeners_have_their_names();
        self.accounts_are_charged_for_what_exists();
        self.doorbells_are_relayed_for_a_reason();
    }

    /// Whatever has memory lies inside its segment, nothing overlaps, and nothing else is taken.
    fn memory_belongs_to_one(&self) {
        let books = self.books();
        for segment in books.segments.values() {
            let mut blocks: Vec<(u64, u64)> = books
                .channels
                .values()
                .filter(|c| c.segment.0 == segment.name)
                .map(|c| (c.offset, c.offset + c.block_len()))
                .collect();
            let pages = books.syncs.values().filter(|s| s.segment.0 == segment.name);
            blocks.extend(pages.map(|s| (s.offset, s.offset + PAGE as u64)));
            let spans = books.blocks.values().filter(|b| b.segment.0 == segment.name);
            blocks.extend(spans.map(|b| (b.offset, b.offset + b.span)));
            let boards = books.boards.all().filter(|b| b.segment.0 == segment.name);
            blocks.extend(boards.map(|b| (b.offset, b.offset + PAGE as u64)));
            blocks.sort_unstable();
            assert!(blocks.windows(2).all(|w| w[0].1 <= w[1].0), "overlap");
            assert!(
                blocks.iter().all(|b| b.0 >= ARENA && b.1 <= segment.size && b.0.is_multiple_of(PAGE as u64))
            );
            assert_eq!(segment.arena.used(), blocks.iter().map(|b| b.1 - b.0).sum::<u64>());
        }
    }

    /// Each open side of a channel, and each board, belongs to an endpoint.
    fn channels_have_their_sides(&self) {
        let books = self.books();
        for channel in books.channels.values() {
            assert!(!channel.initiator.closed || !channel.acceptor.closed);
            for side in [channel.initiator, channel.acceptor] {
                let endpoint = books.endpoints.get(&side.endpoint).filter(|e| e.epoch == side.epoch);
                assert!(side.closed || endpoint.is_some_and(|e| e.channels.contains(&channel.number)));
            }
        }
        for board in books.boards.all() {
            let lives = books.endpoints.get(&board.endpoint).is_some_and(|e| e.epoch == board.epoch);
            let mut sides = books.channels.values().flat_map(|c| [c.initiator, c.acceptor]);
            assert!(lives || sides.any(|s| (s.endpoint, s.epoch) == (board.endpoint, board.epoch)));
        }
    }

    /// Each slot of a synchronisation object has a user that knows of it.
    fn locks_have_their_users(&self) {
        let books = self.books();
        for object in books.syncs.values() {
            let stays = object.persistent || object.bereaved;
            assert!(!object.users.is_empty() || (stays && !object.name.0.is_none()));
            assert!(object.users.windows(2).all(|w| w[0].slot < w[1].slot));
            for user in &object.users {
                assert!(books.endpoints[&user.endpoint].syncs.contains(&(object.number, user.slot)));
            }
        }
        let handles: usize = books.endpoints.values().map(|e| e.syncs.len()).sum();
        assert_eq!(handles, books.syncs.values().map(|s| s.users.len()).sum::<usize>());
    }

    /// Each handle, grant, name and revocation of a block belongs to an endpoint that knows of it.
    fn blocks_have_their_handles(&self) {
        let books = self.books();
        for block in books.blocks.values() {
            assert!(!block.handles.is_empty() || !block.name.0.is_none());
            assert!(block.size <= block.span && block.span.is_multiple_of(PAGE as u64));
            let owned = books.owner_of(block).is_some_and(|owner| owner.blocks.contains(&block.number));
            assert!(owned || block.persistent || block.name.0.is_none());
            for handle in block.handles.iter() {
                assert_eq!(books.handles[&handle.number], block.number);
                assert_eq!(books.endpoints[&handle.endpoint].handles[&handle.nonce], handle.number);
                // A holder with exclusive access has the only mapping that can write.
                if handle.rights == Rights::WRITE_EXCLUSIVE.0 {
                    assert_eq!(block.handles.iter().filter(|h| Rights(h.rights).may_write()).count(), 1);
                }
                assert!(handle.left.is_none_or(|left| left < handle.rights));
            }
            for grant in block.grants.iter().filter(|grant| grant.epoch != 0) {
                let whom = books.endpoints.get(&grant.endpoint).filter(|e| e.epoch == grant.epoch);
                assert!(whom.is_some_and(|e| e.granted.contains(&block.number)), "a grant to nobody");
            }
        }
        let left = books.blocks.values().flat_map(|b| b.handles.iter()).filter(|h| h.left.is_some());
        // Nobody is told of a handle that is about to be given back with its endpoint.
        let left = left.filter(|h| !books.endpoints[&h.endpoint].is_ending);
        let left: BTreeSet<(u32, u64)> = left.map(|h| (h.endpoint, h.number)).collect();
        assert_eq!(self.revocations.all(), left, "each revocation is remembered once");
        assert_eq!(books.handles.len(), books.blocks.values().map(|b| b.handles.len()).sum::<usize>());
        assert_eq!(books.handles.len(), books.endpoints.values().map(|e| e.handles.len()).sum::<usize>());
        for ((segment, name), block) in &books.block_names {
            assert_eq!((*segment, *name), (books.blocks[block].segment.0, books.blocks[block].name.0));
        }
    }

    /// What an endpoint remembers of its objects is what exists.
    fn endpoints_know_what_they_have(&self) {
        let books = self.books();
        assert_eq!(books.index, Index::of(books.endpoints.values()));
        for endpoint in books.endpoints.values() {
            let opened = books.channels.values().map(|c| (c.nonce, c.number, c.initiator));
            let opened = opened.filter(|(.., side)| side.endpoint == endpoint.number && !side.closed);
            assert_eq!(endpoint.opened, opened.map(|(nonce, number, _)| (nonce, number)).collect());
            let waiting = books.channels.values().filter(|c| !c.accepted && !c.acceptor.closed);
            let waiting = waiting.filter(|c| c.acceptor.endpoint == endpoint.number);
            assert_eq!(endpoint.waiting, waiting.map(|c| (c.listener, c.number)).collect());
            let slots = books.syncs.values().flat_map(|s| s.users.iter().map(|user| (s.number, user)));
            let slots = slots.filter(|(_, user)| user.endpoint == endpoint.number);
            assert_eq!(endpoint.slots, slots.map(|(n, user)| (user.nonce, (n, user.slot))).collect());
            let grants = |block: &&Block| block.grants.iter().any(|g| g.endpoint == endpoint.number);
            assert_eq!(endpoint.granted, books.blocks.values().filter(grants).map(|b| b.number).collect());
            let bytes: u64 = endpoint.blocks.iter().map(|block| books.blocks[block].span).sum();
            assert_eq!(endpoint.block_bytes, bytes);
        }
        for ((segment, name), object) in &books.sync_names {
            assert_eq!((*segment, *name), (books.syncs[object].segment.0, books.syncs[object].name.0));
        }
    }

    /// Connections and endpoints refer to each other, and an endpoint without owners has a connection or is held.
    fn connections_and_endpoints_refer_to_each_other(&self) {
        let books = self.books();
        for (number, connections) in &self.attached {
            assert!(!connections.is_empty() && books.endpoints.contains_key(number));
            assert!(connections.iter().all(|id| self.clients[id].endpoint == Some(*number)));
        }
        for (id, client) in &self.clients {
            assert!(client.endpoint.is_none_or(|number| self.attached[&number].contains(id)));
            // A connection does not remember children that own the endpoint no more.
            let owners = client.endpoint.map(|number| &books.endpoints[&number].owners);
            assert!(client.joined.iter().all(|child| owners.is_some_and(|owners| owners.contains(child))));
        }
        for (number, process) in &self.unwatched {
            assert!(books.endpoints[number].owners.contains(process));
        }
        for endpoint in books.endpoints.values() {
            assert!(endpoint.owners.len() <= MAX_OWNERS);
            assert!(
                endpoint.is_ending
                    || !endpoint.owners.is_empty()
                    || self.has_connection(endpoint.number)
                    || endpoint.is_held()
            );
            assert!(endpoint.holds.len() <= MAX_HOLDS && !(endpoint.is_ending && endpoint.is_held()));
            let ending = endpoint.blocks.iter().filter(|b| {
                let block = &books.blocks[b];
                !block.persistent && !block.name.0.is_none()
            });
            assert!(ending.eq(&endpoint.ending_names));
            assert!(endpoint.channels.iter().all(|c| books.channels.contains_key(c)));
            assert!(endpoint.listeners.iter().all(|l| books.listeners[l].endpoint == endpoint.number));
            // A member may have no share in the segment any more, and so no vectors, while its endpoints still give back what
            // they had. Nobody waits there.
            assert!(
                endpoint.is_ending
                    || books.vectors_of(&endpoint.segment, endpoint.member).contains(&endpoint.vector)
            );
        }
    }

    /// Each listener has its name, and knows how many channels wait.
    fn listeners_have_their_names(&self) {
        let books = self.books();
        for (key, listener) in &books.names {
            let listener = &books.listeners[listener];
            assert_eq!(*key, (listener.segment, listener.name));
            let waiting =
                books.channels.values().filter(|c| c.listener == listener.number && !c.accepted).count();
            assert_eq!(listener.waiting as usize, waiting);
        }
        assert_eq!(books.names.len(), books.listeners.len());
    }

    /// Each account is charged for what exists, and for nothing else.
    fn accounts_are_charged_for_what_exists(&self) {
        let books = self.books();
        let mut charges: BTreeMap<Account, Tally> = BTreeMap::new();
        for endpoint in books.endpoints.values() {
            charges.entry(endpoint.account()).or_default().endpoints += 1;
            charges.entry(endpoint.account()).or_default().handles +=
                (endpoint.syncs.len() + endpoint.handles.len()) as u32;
            charges.entry(endpoint.account()).or_default().holds += endpoint.holds.len() as u32;
        }
        for channel in books.channels.values() {
            let tally = charges.entry(channel.account()).or_default();
            tally.channels += 1;
            tally.bytes += channel.block_len();
        }
        for board in books.boards.all() {
            charges.entry(board.account()).or_default().bytes += PAGE as u64;
        }
        let syncs = books.syncs.values().map(|s| (Account::new(s.member, s.segment.0, s.uid), PAGE as u64));
        let blocks = books.blocks.values().map(|b| (Account::new(b.member, b.segment.0, b.uid), b.span));
        for (account, bytes) in syncs.chain(blocks) {
            let tally = charges.entry(account).or_default();
            tally.blocks += 1;
            tally.block_bytes += bytes;
        }
        for account in charges.keys() {
            assert_eq!(books.tally(*account), charges[account], "{account}");
        }
        let accounts = books.members.keys().flat_map(|member| books.accounts_of(*member)).count();
        assert_eq!(accounts, charges.len());
    }

    /// The daemon listens to every program that must ring through it: those that use an object together with a program that
    /// cannot ring them, and the sides of relayed channels.
    fn doorbells_are_relayed_for_a_reason(&self) {
        let books = self.books();
        let reasons = self.relayed_bells.reasons();
        for object in books.syncs.values() {
            let bells: Vec<_> = object
                .users
                .iter()
                .map(|u| (u.slot, books.sync_bell(object.number, u.slot).unwrap()))
                .collect();
            for (slot, (member, vector)) in &bells {
                let others = bells.iter().filter(|(other, _)| other != slot);
                if others.map(|(_, bell)| bell.0).any(|other| !books.knows(other, *member, *vector)) {
                    assert_eq!(reasons.get(&Reason::Sync(object.number, *slot)), Some(&(*member, *vector)));
                }
            }
        }
        for channel in books.relayed.iter().map(|number| &books.channels[number]) {
            for (initiator, side) in [(true, channel.initiator), (false, channel.acceptor)] {
                assert_eq!(reasons.contains_key(&Reason::Channel(channel.number, initiator)), !side.closed);
            }
        }
        for (reason, bell) in reasons {
            let there = match *reason {
                Reason::Channel(number, _) => books.relayed.contains(&number),
                Reason::Sync(number, slot) => books.sync_bell(number, slot) == Some(*bell),
            };
            assert!(there, "{reason:?} is over");
        }
        let bells: BTreeSet<_> = reasons.values().copied().collect();
        assert_eq!(self.relayed_bells.bells().collect::<BTreeSet<_>>(), bells);
    }
}

/// A packet announces exactly the descriptors that come with it.
pub fn check_packet(effect: &Effect) {
    let Effect::Send { packet, fds, .. } = effect else { return };
    assert!(packet.len() <= wire::MAX_PACKET);
    let (header, body) = wire::split(packet).unwrap();
    let announced = match header.kind {
        Kind::ATTACHED => wire::body::<wire::Attached>(body).unwrap().fds.0,
        Kind::CHANNEL | Kind::INCOMING => {
            let channel = wire::body::<wire::Channel>(body).unwrap();
            assert_eq!(channel.bell_kind == BellKind::EVENT, channel.fds.0 & Fds::PEER_EVENT != 0);
            channel.fds.0
        }
        Kind::BELL_OK => wire::body::<wire::BellOk>(body).unwrap().fds.0,
        _ => 0,
    };
    assert_eq!(announced.count_ones() as usize, fds.len(), "{:?}", header.kind);
}
