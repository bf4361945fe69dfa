//! Synchronisation objects in the form in which they are shown.

use crate::host::inspect::{since_1970, user_of};
use crate::host::server::Server;
use crate::host::viewer::Viewer;
use ginnel_broker::objects::sync::{SyncObject, kind_of};
use ginnel_layout::sync::SyncKind;
use ginnel_status::{Lock, User};
use ginnel_sync::authority;
use std::time::Duration;

impl Server {
    /// Returns a synchronisation object with the present contents of its words. Users may have written anything there.
    pub(crate) fn inspect_lock(&self, viewer: &Viewer, object: &SyncObject) -> Lock {
        let books = self.broker.books();
        let kind = kind_of(object);
        let page = self.segments.sync_page(&object.segment.0, object.offset);
        let view = page.map(|page| authority::look(&page, kind)).unwrap_or_default();
        let user = |slot: usize| {
            let user = object.users.iter().find(|user| user.slot as usize == slot)?;
            Some(user_of(books, viewer, user.endpoint))
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
