//! Synchronisation objects: their users, and what remains to be done when a user leaves.
//!
//! The contents of an object's words are a matter of its users. The daemon gives out the page and its slots, and writes who has
//! each slot. It takes back a slot with [`ginnel_sync::authority::reclaim`], however its user has ended.

mod books;
pub(crate) mod record;
mod requests;

use super::class::Class;
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::relayed::{Reason, Relayed};
use ginnel_layout::Name;
use ginnel_sync::authority::Left;
pub use record::{Change, SyncObject, SyncUser, kind_of};

impl Class for Change {
    const RECORDS: &[&str] = &["sync", "sync_opened", "sync_closed", "sync_unlinked"];

    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
        match self {
            Self::Made(object) => books.enter(object),
            Self::Opened { object, user } => books.open::<SyncObject>(*object, *user),
            Self::Closed { object, slot, died } => {
                books.sync_left(*object, *slot, if *died { Left::Died } else { Left::Closed })
            }
            Self::Unlinked { object } => books.sync_unlinked(*object),
        }
    }

    fn gives(&self) -> bool {
        matches!(self, Self::Made(_) | Self::Opened { .. })
    }

    fn dump(books: &Books) -> impl Iterator<Item = Self> {
        books.syncs.values().cloned().map(Self::Made)
    }

    fn ends(_: &Books, endpoint: &Endpoint) -> impl Iterator<Item = Self> {
        endpoint.syncs.iter().map(|&(object, slot)| Self::Closed { object, slot, died: true })
    }

    fn relay(&self, books: &Books, bells: &mut Relayed) {
        match self {
            Self::Made(object) => relay(books, object.number, &object.users, bells),
            Self::Opened { object, user } => relay(books, *object, std::slice::from_ref(user), bells),
            _ => {}
        }
    }

    fn relay_all(books: &Books, bells: &mut Relayed) {
        books.syncs.values().for_each(|object| relay(books, object.number, &object.users, bells));
    }

    fn unrelay(&self, bells: &mut Relayed) {
        if let Self::Closed { object, slot, .. } = *self {
            bells.remove(Reason::Sync(object, slot));
        }
    }

    /// Objects without a name are removed with their users.
    fn rebooted(books: &Books) -> impl Iterator<Item = Self> {
        let named = books.syncs.values().filter(|object| !object.name.0.is_none());
        named.map(|object| Self::Unlinked { object: object.number })
    }

    fn clear(books: &mut Books, segment: &Name) {
        books.remove_all::<SyncObject>(segment);
    }
}

/// Adds the doorbells that the daemon must relay because of some users of an object. All users ring one another, and users of one
/// member always can. An object has few users.
fn relay(books: &Books, object: u64, users: &[SyncUser], bells: &mut Relayed) {
    let Some(others) = books.syncs.get(&object).map(|object| &object.users) else { return };
    let pairs = users.iter().flat_map(|user| others.iter().map(|other| (user.slot, other.slot)));
    for (slot, other) in pairs {
        let (Some(one), Some(two)) = (books.sync_bell(object, slot), books.sync_bell(object, other)) else {
            continue;
        };
        for (slot, (member, vector), ringer) in [(slot, one, two.0), (other, two, one.0)] {
            if !books.knows(ringer, member, vector) {
                bells.insert(Reason::Sync(object, slot), (member, vector));
            }
        }
    }
}
