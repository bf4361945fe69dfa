//! Blocks and synchronisation objects, as JSON.

use super::books::Books;
use super::record::{BlockHandle, SyncObject};
use super::server::Server;
use ginnel_layout::Name;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::Rights;
use ginnel_sync::authority;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};

/// An endpoint, as it is named to people.
fn endpoint(books: &Books, number: u32) -> Value {
    let endpoint = books.endpoints.get(&number);
    json!({
        "endpoint": number,
        "name": endpoint.map(|e| e.name.as_str()),
        "member": endpoint.and_then(|e| books.members.get(&e.member)).map(|m| m.name.as_str()),
        "pid": endpoint.map(|e| e.process.pid),
    })
}

impl Server {
    /// The first `most` blocks of the segments that are `seen`.
    pub(super) fn inspect_blocks(&self, seen: impl Fn(&Name) -> bool, most: usize) -> Vec<Value> {
        let books = self.broker.books();
        let member = |number| books.members.get(&number).map(|m| m.name.as_str());
        let handle = |handle: &BlockHandle| {
            let mut value = endpoint(books, handle.endpoint);
            value["rights"] = Rights(handle.rights).name().into();
            value["left"] = handle.left.map(|left| Rights(left).name()).into();
            value
        };
        let now = since_1970().as_secs();
        let blocks = books.blocks.values().filter(|b| seen(&b.segment.0)).take(most);
        blocks
            .map(|block| {
                let owner = books.owner_of(block);
                let grants: Vec<Value> = block
                    .grants
                    .iter()
                    .map(|grant| {
                        let whom = books.endpoints.values().find(|e| e.epoch == grant.epoch);
                        json!({
                            "member": member(grant.member),
                            "endpoint": whom.map(|e| e.number),
                            "rights": Rights(grant.rights).name(),
                        })
                    })
                    .collect();
                json!({
                    "number": block.number,
                    "segment": block.segment.0.as_str(),
                    "name": block.name.0.as_str(),
                    "owner": owner.map(|owner| endpoint(books, owner.number)),
                    "owner_member": member(block.member),
                    "owner_uid": block.uid,
                    "offset": block.offset,
                    "size": block.size,
                    "span": block.span,
                    "align": 1u64 << block.offset.trailing_zeros().min(63),
                    "age_s": now.saturating_sub(block.made),
                    "persistent": block.persistent,
                    "others": Rights(block.others).name(),
                    "grants": grants,
                    "handles": block.handles.iter().map(handle).collect::<Vec<_>>(),
                })
            })
            .collect()
    }

    /// The first `most` synchronisation objects of the segments that are `seen`, as their words are just now. Users may have
    /// written anything there.
    pub(super) fn inspect_locks(&self, seen: impl Fn(&Name) -> bool, most: usize) -> Vec<Value> {
        let objects = self.broker.books().syncs.values().filter(|s| seen(&s.segment.0));
        objects.take(most).map(|object| self.inspect_lock(object)).collect()
    }

    fn inspect_lock(&self, object: &SyncObject) -> Value {
        let books = self.broker.books();
        let kind = SyncKind(object.kind);
        let page = self.segments.sync_page(&object.segment.0, object.offset);
        let view = page.map(|page| authority::look(&page, kind)).unwrap_or_default();
        let user = |slot: usize| {
            let user = object.users.iter().find(|user| user.slot as usize == slot)?;
            Some(endpoint(books, user.endpoint))
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
