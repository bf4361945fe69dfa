//! Blocks and synchronisation objects, as they are told of.

use super::books::Books;
use super::inspect::member_name;
use super::record::{Block, BlockHandle, SyncObject};
use super::server::Server;
use super::viewer::Viewer;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::Rights;
use ginnel_status::{self as status, Grant, Lock, User};
use ginnel_sync::authority;
use std::time::{Duration, SystemTime};

/// Most handles, and most grants, of a block that are shown one by one: there may be as many as endpoints have handles.
const MOST: usize = 64;

/// An endpoint, as it is named to people.
fn endpoint(books: &Books, viewer: &Viewer, number: u32) -> User {
    let endpoint = books.endpoints.get(&number);
    let known = endpoint.filter(|e| viewer.knows(e.member, e.uid));
    User {
        endpoint: number,
        name: endpoint.map(|e| e.name.to_string()),
        member: endpoint.and_then(|e| books.members.get(&e.member)).map(|m| m.name.to_string()),
        pid: known.map(|e| e.pid()),
        ..User::default()
    }
}

impl Server {
    /// A block.
    pub(super) fn inspect_block(&self, viewer: &Viewer, block: &Block) -> status::Block {
        let books = self.broker.books();
        let rights = |rights| Rights(rights).name().to_owned();
        let handle = |handle: &BlockHandle| User {
            rights: rights(handle.rights),
            left: handle.left.map(rights),
            ..endpoint(books, viewer, handle.endpoint)
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
            owner: books.owner_of(block).map(|owner| endpoint(books, viewer, owner.number)),
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
            grants_total: block.grants.iter().count(),
            handles: block.handles.iter().take(MOST).map(handle).collect(),
            handles_total: block.handles.len(),
        }
    }

    /// A synchronisation object, as its words are just now. Users may have written anything there.
    pub(super) fn inspect_lock(&self, viewer: &Viewer, object: &SyncObject) -> Lock {
        let books = self.broker.books();
        let kind = SyncKind(object.kind);
        let page = self.segments.sync_page(&object.segment.0, object.offset);
        let view = page.map(|page| authority::look(&page, kind)).unwrap_or_default();
        let user = |slot: usize| {
            let user = object.users.iter().find(|user| user.slot as usize == slot)?;
            Some(endpoint(books, viewer, user.endpoint))
        };
        let waiter = |&(slot, since): &(usize, u64)| {
            let waited = since_1970().saturating_sub(Duration::from_nanos(since));
            Some(User { since_s: (since != 0).then_some(waited.as_secs_f64()), ..user(slot)? })
        };
        Lock {
            number: object.number,
            segment: object.segment.0.to_string(),
            name: object.name.0.to_string(),
            kind: kind.name().to_owned(),
            limit: object.limit,
            persistent: object.persistent,
            users: object.users.len(),
            owner: view.owner.and_then(user),
            owner_died: view.owner_died,
            not_recoverable: view.not_recoverable,
            done: view.done,
            permits: (kind == SyncKind::SEMAPHORE).then_some(view.permits),
            readers: view.readers.iter().filter_map(|&slot| user(slot)).collect(),
            waiters: view.waiters.iter().filter_map(waiter).collect(),
        }
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
