//! The daemon's state for monitoring, in pages.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for one page of the daemon's state, and says in `PAGE` where that page ended. The texts of all pages, concatenated,
/// are a JSON object. A client begins with [`Inspect::FIRST`], sends what it got back to ask for the next page, and is done
/// when it gets [`Inspect::FIRST`] back.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Inspect {
    /// Section of the object; 0 at its beginning and end.
    pub section: u32,
    /// Number of entries of that section that were already sent.
    pub entries: u32,
    /// Number of the last entry that was looked at, if entries have numbers.
    pub after: u64,
    /// Name of the last entry that was looked at, if entries have names.
    pub name: Name,
}
layout!(Inspect, 80 { section: 0, entries: 4, after: 8, name: 16 });

impl Inspect {
    /// Asks for the first page.
    pub const FIRST: Self = Self { section: 0, entries: 0, after: 0, name: Name::NONE };

    /// Returns whether another page follows.
    pub fn is_more(&self) -> bool {
        self.section != 0
    }
}
