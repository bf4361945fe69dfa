//! What the daemon tells of itself, in pages.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for a page of what the daemon knows, and says in `PAGE` where that page ends. The texts of all pages, one behind the
/// other, are a JSON object. A client begins with [`Inspect::FIRST`], sends what came back for the next page, and is done when
/// [`Inspect::FIRST`] comes back.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Inspect {
    /// The part of the object; 0 at its beginning and end.
    pub section: u32,
    /// Entries of that part that have come.
    pub entries: u32,
    /// The last entry that was looked at: its number, ...
    pub after: u64,
    /// ... or its name.
    pub name: Name,
}
layout!(Inspect, 80 { section: 0, entries: 4, after: 8, name: 16 });

impl Inspect {
    /// The first page.
    pub const FIRST: Self = Self { section: 0, entries: 0, after: 0, name: Name::NONE };

    /// Whether another page follows.
    pub fn is_more(&self) -> bool {
        self.section != 0
    }
}
