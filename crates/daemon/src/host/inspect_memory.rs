//! Blocks and synchronisation objects, as JSON.

use super::books::Books;
use super::record::{Block, BlockHandle, SyncObject};
use super::server::Server;
use super::viewer::Viewer;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::Rights;
use ginnel_sync::authority;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};

/// Most handles, and most grants, of a block that are shown one by one: there may be as many as endpoints have handles.
const MOST: usize = 64;

/// An endpoint, as it is named to people.
fn endpoint(books: &Books, viewer: &Viewer, number: u32) -> Value {
    let endpoint = books.endpoints.get(&number);
    let known = endpoint.filter(|e| viewer.knows(e.member, e.uid));
    json!({
        "endpoint": number,
        "name": endpoint.map(|e| e.name.as_str()),
        "member": endpoint.and_then(|e| books.members.get(&e.member)).map(|m| m.name.as_str()),
        "pid": known.map(|e| e.pid()),
    })
}

impl Server {
    /// A block.
    pub(super) fn inspect_block(&self, viewer: &Viewer, block: &Block) -> Value {
        let books = self.broker.books();
        let member = |number| books.members.get(&number).map(|m| m.name.as_str());
        let handle = |handle: &BlockHandle| {
            let mut value = endpoint(books, viewer, handle.endpoint);
            value["rights"] = Rights(handle.rights).name().into();
            value["left"] = handle.left.map(|left| Rights(left).name()).into();
            value
        };
        let grants = block.grants.iter().take(MOST).map(|grant| {
            let whom = Some(grant.endpoint).filter(|endpoint| *endpoint != 0);
            json!({
                "member": member(grant.member),
                "endpoint": whom,
                "rights": Rights(grant.rights).name(),
            })
        });
        json!({
            "number": block.number,
            "segment": block.segment.0.as_str(),
            "name": block.name.0.as_str(),
            "owner": books.owner_of(block).map(|owner| endpoint(books, viewer, owner.number)),
            "owner_member": member(block.member),
            "owner_uid": viewer.knows(block.member, block.uid).then_some(block.uid),
            "offset": block.offset,
            "size": block.size,
            "span": block.span,
            "align": 1u64 << block.offset.trailing_zeros().min(63),
            "age_s": since_1970().as_secs().saturating_sub(block.made),
            "persistent": block.persistent,
            "others": Rights(block.others).name(),
            "grants": grants.collect::<Vec<_>>(),
            "grants_total": block.grants.iter().count(),
            "handles": block.handles.iter().take(MOST).map(handle).collect::<Vec<_>>(),
            "handles_total": block.handles.len(),
        })
    }

    /// A synchronisation object, as its words are just now. Users may have written anything there.
    pub(super) fn inspect_lock(&self, viewer: &Viewer, object: &SyncObject) -> Value {
        let books = self.broker.books();
        let kind = SyncKind(object.kind);
        let page = self.segments.sync_page(&object.segment.0, object.offset);
        let view = page.map(|page| authority::look(&page, kind)).unwrap_or_default();
        let user = |slot: usize| {
            let user = object.users.iter().find(|user| user.slot as usize == slot)?;
            Some(endpoint(books, viewer, user.endpoint))
        };
        let waiters: Vec<Value> = view
            .waiters
            .iter()
            .filter_map(|&(slot, since)| {
                let waited = since_1970().saturating_sub(Duration::from_nanos(since));
                let mut value = user(slot)?;
                value["since_s"] = (since != 0).then_some(waited.as_secs_f64()).into();
                Some(value)
            })
            .collect();
        json!({
            "number": object.number,
            "segment": object.segment.0.as_str(),
            "name": object.name.0.as_str(),
            "kind": kind.name(),
            "limit": object.limit,
            "persistent": object.persistent,
            "users": object.users.len(),
            "owner": view.owner.and_then(user),
            "owner_died": view.owner_died,
            "not_recoverable": view.not_recoverable,
            "done": view.done,
            "permits": (kind == SyncKind::SEMAPHORE).then_some(view.permits),
            "readers": view.readers.iter().filter_map(|&slot| user(slot)).collect::<Vec<_>>(),
            "waiters": waiters,
        })
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
