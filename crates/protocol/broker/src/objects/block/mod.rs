//! Blocks: memory of a segment with a name, and the rights to it.
//!
//! Like POSIX shared memory, a block lives as long as it has a name or somebody has it open. Its owner is the endpoint that has
//! made it. When the owner ends, the name is removed too, unless the block is persistent. In that case every endpoint of the same
//! member and user has the owner's rights.
//!
//! Revoked rights are removed from the books at once, but the holder keeps its mapping until its library
//! has learnt of the revocation ([`BlockHandle::left`]). Until then the handle keeps its old rights, and nobody gets exclusive
//! access.

mod books;
mod handles;
pub(crate) mod record;
mod requests;
mod revocations;

use super::class::Class;
use crate::books::{Books, Endpoint, InvalidRecord};
use ginnel_layout::Name;
pub use handles::{BlockGrant, BlockHandle};
pub use record::{Block, Change};
pub use revocations::Revocations;

impl Class for Change {
    const RECORDS: &[&str] = &[
        "block",
        "block_linked",
        "block_unlinked",
        "block_opened",
        "block_closed",
        "block_resized",
        "block_granted",
        "block_grant_ended",
        "block_acked",
    ];

    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
        match self {
            Self::Made(block) => books.block(block),
            Self::Linked { block, name } => books.block_linked(*block, name.0),
            Self::Unlinked { block } => books.block_unlinked(*block),
            Self::Opened { block, handle } => books.open::<Block>(*block, *handle),
            Self::Closed { handle } => books.block_closed(*handle),
            Self::Resized { block, size, span } => books.block_resized(*block, *size, *span),
            Self::Granted { block, grant } => books.block_granted(*block, *grant),
            Self::GrantEnded { block, endpoint } => books.block_grant_ended(*block, *endpoint),
            Self::Acked { handle } => books.block_acked(*handle),
        }
    }

    fn gives(&self) -> bool {
        !matches!(
            self,
            Self::Unlinked { .. } | Self::Closed { .. } | Self::GrantEnded { .. } | Self::Acked { .. }
        )
    }

    fn dump(books: &Books) -> impl Iterator<Item = Self> {
        books.blocks.values().map(|block| Self::Made(Box::new(block.clone())))
    }

    /// The changes remove the grants to this endpoint alone, its handles, and the names that do not outlive it. A block, and its
    /// grants with it, may be removed with its last handle, so the grants come first.
    fn ends(_: &Books, endpoint: &Endpoint) -> impl Iterator<Item = Self> {
        let number = endpoint.number;
        let grants = endpoint.granted.iter().map(move |&block| Self::GrantEnded { block, endpoint: number });
        let handles = endpoint.handles.values().map(|&handle| Self::Closed { handle });
        grants.chain(handles).chain(endpoint.ending_names.iter().map(|&block| Self::Unlinked { block }))
    }

    fn rebooted(books: &Books) -> impl Iterator<Item = Self> {
        let stay = books.blocks.values().filter(|block| block.persistent && !block.name.0.is_none());
        stay.map(|block| Self::Unlinked { block: block.number })
    }

    fn clear(books: &mut Books, segment: &Name) {
        let there = books.blocks.values().filter(|block| block.segment.0 == *segment);
        for block in there.map(|block| block.number).collect::<Vec<_>>() {
            books.block_removed(block);
        }
    }
}
