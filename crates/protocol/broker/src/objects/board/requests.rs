//! The request for a readiness board.

use super::record::{Board, Change};
use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{Effect, World};
use crate::limits::MAX_BOARDS;
use crate::reply::{Refusal, body, broken};
use crate::service::{Request, Service};
use crate::text::Text;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_layout::{Name, PAGE, board};
use zerocopy::IntoBytes;

impl Service for Change {
    const REQUESTS: &[Request] = &[Request::write(Kind::BOARD_OPEN, |broker, world, caller, bytes| {
        broker.board_open(world, caller, &body(bytes)?)
    })];

    fn lose(broker: &mut Broker, segment: &Name) {
        for number in broker.books.index.of_segment(segment).collect::<Vec<_>>() {
            let Some(epoch) = broker.books.endpoints.get(&number).map(|e| e.epoch) else { continue };
            for offset in broker.books.boards.of(number, epoch) {
                broker.effect(Effect::PostAll { segment: *segment, offset });
            }
        }
    }
}

impl Broker {
    pub(crate) fn board_open(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::BoardOpen,
    ) -> Result<(), Refusal> {
        let Caller { endpoint: number, epoch, segment, member, uid, .. } = *caller;
        let boards = self.books.boards.all.get(&(number, epoch));
        let full = boards.filter(|boards| boards.len() >= MAX_BOARDS);
        // Peers may still write to it, which costs the process that takes it over a few needless looks.
        let left = full.and_then(|boards| boards.values().find(|board| board.is_left)).copied();
        let (nonce, process) = (body.nonce, caller.sender);
        let offset = match (boards.and_then(|boards| boards.get(&nonce)), left) {
            (Some(board), _) => board.offset,
            (None, Some(Board { nonce: old, offset, .. })) => {
                self.effect(Effect::NewBoard { segment, offset });
                self.record(Change::BoardTaken { endpoint: number, epoch, old, nonce, process })?;
                offset
            }
            (None, None) => {
                if world.is_broken(&segment) {
                    return Err(broken(&segment));
                }
                if full.is_some() {
                    let text = format!(
                        "endpoint {number} has {MAX_BOARDS} readiness boards, which is the limit: wait for fewer rings, or \
                         attach again"
                    );
                    return Err(Refusal::new(ErrorCode::LIMIT, text));
                }
                let (account, len) = (caller.account(), board::LEN as u64);
                let (used, limit) =
                    (self.books.tally(account).bytes, self.limits_of(member).bytes_per_member);
                if used.saturating_add(len) > limit {
                    let text = format!(
                        "{account} has channels of {used} bytes, and a readiness board of {len} more is over the limit: \
                         close channels, or raise bytes_per_member"
                    );
                    return Err(Refusal::new(ErrorCode::LIMIT, text));
                }
                let arena = self.books.segments.get(&segment).map(|s| &s.arena);
                let Some(offset) = arena.and_then(|arena| arena.find(len, PAGE as u64)) else {
                    let text = format!(
                        "segment {segment} has no room for a readiness board of {len} bytes: close channels, or make the \
                         segment larger"
                    );
                    return Err(Refusal::new(ErrorCode::NO_MEMORY, text));
                };
                self.effect(Effect::NewBoard { segment, offset });
                let segment = Text(segment);
                self.record(Change::Board(Board {
                    endpoint: number,
                    epoch,
                    segment,
                    member,
                    uid,
                    offset,
                    nonce,
                    process: Some(process),
                    is_left: false,
                }))?;
                offset
            }
        };
        self.answer(caller, Kind::BOARD, wire::Board { offset }.as_bytes(), vec![])
    }
}
