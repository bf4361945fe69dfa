//! Blocks in the form in which they are shown.

use crate::host::inspect::{MOST, member_name, since_1970, user_of};
use crate::host::server::Server;
use crate::host::viewer::Viewer;
use ginnel_broker::objects::block::{Block, BlockHandle};
use ginnel_layout::wire::Rights;
use ginnel_status::{self as status, Grant, User};

impl Server {
    /// Returns a block in the form in which it is shown.
    pub(crate) fn inspect_block(&self, viewer: &Viewer, block: &Block) -> status::Block {
        let books = self.broker.books();
        let rights = |rights| Rights(rights).name().to_owned();
        let handle = |handle: &BlockHandle| User {
            rights: rights(handle.rights),
            left: handle.left.map(rights),
            ..user_of(books, viewer, handle.endpoint)
        };
        let grants = block.grants.iter().take(MOST).map(|grant| Grant {
            member: member_name(books, grant.member),
            endpoint: Some(grant.endpoint).filter(|endpoint| *endpoint != 0),
            rights: rights(grant.rights),
        });
        status::Block {
            number: block.number,
            segment: block.segment.0.to_string(),
            name: block.name.0.to_string(),
            owner: books.owner_of(block).map(|owner| user_of(books, viewer, owner.number)),
            owner_member: member_name(books, block.member),
            owner_uid: viewer.knows(block.member, block.uid).then_some(block.uid),
            offset: block.offset,
            size: block.size,
            span: block.span,
            align: 1u64 << block.offset.trailing_zeros().min(63),
            age_s: since_1970().as_secs().saturating_sub(block.made),
            persistent: block.persistent,
            others: rights(block.others),
            grants: grants.collect(),
            grants_total: block.grants.len(),
            handles: block.handles.iter().take(MOST).map(handle).collect(),
            handles_total: block.handles.len(),
        }
    }
}
