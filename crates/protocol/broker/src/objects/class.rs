//! What the books need of a class of objects.

use crate::books::{Books, Endpoint, InvalidRecord};
use crate::relayed::Relayed;
use ginnel_layout::Name;
use std::iter::empty;

/// A class of objects, represented by the changes of its objects. These changes are its records in the journal.
pub trait Class: Sized {
    /// The names of its changes in the journal.
    const RECORDS: &'static [&'static str];

    /// Applies the change to the books. On an error nothing has changed.
    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord>;

    /// Returns whether the change gives a resource away: see [`Record::gives`](crate::record::Record::gives).
    fn gives(&self) -> bool;

    /// Returns changes that make all existing objects again, once the endpoints and the classes before this one have been
    /// restored.
    fn dump(books: &Books) -> impl Iterator<Item = Self>;

    /// Returns the changes that end what an endpoint has, in an order in which they can be made. After all of them the endpoint
    /// has nothing left.
    fn ends(_books: &Books, _endpoint: &Endpoint) -> impl Iterator<Item = Self> {
        empty()
    }

    /// Removes the remaining traces of an endpoint that has ended and was removed from the books.
    fn forget(_books: &mut Books, _endpoint: &Endpoint) {}

    /// Adds the doorbells that the daemon must relay because of the change. The change has been made already.
    fn relay(&self, _books: &Books, _bells: &mut Relayed) {}

    /// Adds the doorbells that the daemon must relay because of all existing objects, in the books of an earlier daemon.
    fn relay_all(_books: &Books, _bells: &mut Relayed) {}

    /// Removes the doorbells that need not be relayed after the change. The change has not been made yet.
    fn unrelay(&self, _bells: &mut Relayed) {}

    /// Returns changes for a reboot of the host, which has emptied all memory. They end the objects that must not survive a
    /// reboot and do not end with the endpoints.
    fn rebooted(_books: &Books) -> impl Iterator<Item = Self> {
        empty()
    }

    /// Removes the remaining objects of a segment that is being removed and has no endpoints any more.
    fn clear(_books: &mut Books, _segment: &Name) {}
}
