//! The objects that endpoints make in segments. Each class of them has a folder of its own here: its part of the books, its
//! records in the journal, the requests that it answers, what becomes of it when an endpoint ends, and how it is shown.
//! `docs/adding-an-object.md` says how to add one.
//!
//! | module | its objects |
//! |---|---|
//! | `channel` | channels, and the listeners to which they are opened |
//! | `board` | readiness boards |
//! | `sync` | synchronisation objects: locks and what else has users that wait |
//! | `block` | blocks of memory, their handles and the rights to them |
//! | `memory_object` | what blocks and synchronisation objects have in common |

pub mod block;
pub mod board;
pub mod channel;
mod memory_object;
pub mod sync;

use super::books::{Books, Endpoint, InvalidRecord};
use super::broker::{Broker, ClientId, World};
use super::caller::Caller;
use super::record::Record;
use super::relayed::Relayed;
use super::reply::Refusal;
use ginnel_layout::Name;
use ginnel_layout::wire::Kind;
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use std::iter::empty;

/// A request that endpoints may make.
pub struct Request {
    /// Which.
    pub kind: Kind,
    /// Whether it can be answered with something that the client was not given before, or does not know of.
    pub is_gift: bool,
    /// Whether it is for those alone who may write to their segment.
    pub is_write: bool,
    /// Checks the body and everything else, then changes something.
    pub serve: Serve,
}

type Serve = fn(&mut Broker, &mut dyn World, &Caller, &[u8]) -> Result<(), Refusal>;

impl Request {
    /// One that ends something, or changes a detail.
    pub const fn new(kind: Kind, serve: Serve) -> Self {
        Self { kind, is_gift: false, is_write: false, serve }
    }

    /// One that can be answered with something new.
    pub const fn gift(kind: Kind, serve: Serve) -> Self {
        Self { is_gift: true, ..Self::new(kind, serve) }
    }

    /// The same, for those alone who may write to their segment.
    pub const fn write(kind: Kind, serve: Serve) -> Self {
        Self { is_write: true, ..Self::gift(kind, serve) }
    }
}

/// A class of objects, by the changes that happen to them. These are its records in the journal.
pub trait Class: Sized {
    /// How the journal calls its changes.
    const RECORDS: &'static [&'static str];
    /// What endpoints may ask for.
    const REQUESTS: &'static [Request];

    /// Changes the books. On error nothing has changed.
    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord>;

    /// Whether it gives somebody something: see [`Record::gives`].
    fn gives(&self) -> bool;

    /// Changes that make what there is, once the endpoints and the classes before this one are there.
    fn dump(books: &Books) -> impl Iterator<Item = Self>;

    /// What becomes of the things that an endpoint has when it ends: a change for each of them, in an order in which they can
    /// be made. When all of them are made there are no more.
    fn ends(_books: &Books, _endpoint: &Endpoint) -> impl Iterator<Item = Self> {
        empty()
    }

    /// Writes into the segment that this change, one of [`Class::ends`], is about to happen, and wakes those whom it concerns.
    fn mark_end(&self, _broker: &mut Broker) {}

    /// An endpoint has ended and is not in the books any more: forgets what else they know of it.
    fn forget(_books: &mut Books, _endpoint: &Endpoint) {}

    /// The change was made: doorbells that the daemon has to pass on because of it.
    fn relay(&self, _books: &Books, _bells: &mut Relayed) {}

    /// The same for all that there is, in the books of an earlier daemon.
    fn relay_all(_books: &Books, _bells: &mut Relayed) {}

    /// The change will be made: doorbells that need not be passed on any more.
    fn unrelay(&self, _bells: &mut Relayed) {}

    /// An endpoint has a new connection: tells it what it may have missed.
    fn greet(_broker: &mut Broker, _endpoint: u32, _client: ClientId) {}

    /// A segment's memory was lost: writes that where its users look.
    fn lose(_broker: &mut Broker, _segment: &Name) {}

    /// The host was rebooted, so all memory is empty: what must not outlive it beside that which endpoints have.
    fn rebooted(_books: &Books) -> impl Iterator<Item = Self> {
        empty()
    }

    /// A segment goes away, and has no endpoints any more: forgets what has none in it.
    fn clear(_books: &mut Books, _segment: &Name) {}
}

/// Makes of a list of classes one class that is all of them.
macro_rules! classes {
    ($($Class:ident: $Change:ty,)*) => {
        /// A change that happens to an object, of whatever class.
        #[derive(Clone, Debug, PartialEq)]
        #[expect(missing_docs, reason = "each is a class")]
        pub enum Change {
            $($Class($Change),)*
        }

        impl Change {
            /// The request of that kind.
            pub fn request(kind: Kind) -> Option<&'static Request> {
                [$(<$Change>::REQUESTS),*].into_iter().flatten().find(|request| request.kind == kind)
            }

            /// Whether the journal calls a change by this name.
            pub fn is_known(record: &str) -> bool {
                [$(<$Change>::RECORDS),*].into_iter().flatten().any(|known| *known == record)
            }

            /// Reads a change that is called by this name.
            pub fn read<'de, D: Deserializer<'de>>(record: &str, from: D) -> Result<Self, D::Error> {
                $(if <$Change>::RECORDS.contains(&record) {
                    return <$Change>::deserialize(from).map(Self::$Class);
                })*
                Err(D::Error::custom("no change of an object"))
            }

            /// See [`Class::apply`].
            pub fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
                match self { $(Self::$Class(change) => change.apply(books),)* }
            }

            /// See [`Class::gives`].
            pub fn gives(&self) -> bool {
                match self { $(Self::$Class(change) => change.gives(),)* }
            }

            /// See [`Class::dump`].
            pub fn dump(books: &Books) -> impl Iterator<Item = Self> {
                empty()$(.chain(<$Change>::dump(books).map(Self::$Class)))*
            }

            /// See [`Class::ends`].
            pub fn ends(books: &Books, endpoint: &Endpoint) -> impl Iterator<Item = Self> {
                empty()$(.chain(<$Change>::ends(books, endpoint).map(Self::$Class)))*
            }

            /// See [`Class::mark_end`].
            pub fn mark_end(&self, broker: &mut Broker) {
                match self { $(Self::$Class(change) => change.mark_end(broker),)* }
            }

            /// See [`Class::forget`].
            pub fn forget(books: &mut Books, endpoint: &Endpoint) {
                $(<$Change>::forget(books, endpoint);)*
            }

            /// See [`Class::relay`].
            pub fn relay(&self, books: &Books, bells: &mut Relayed) {
                match self { $(Self::$Class(change) => change.relay(books, bells),)* }
            }

            /// See [`Class::relay_all`].
            pub fn relay_all(books: &Books, bells: &mut Relayed) {
                $(<$Change>::relay_all(books, bells);)*
            }

            /// See [`Class::unrelay`].
            pub fn unrelay(&self, bells: &mut Relayed) {
                match self { $(Self::$Class(change) => change.unrelay(bells),)* }
            }

            /// See [`Class::greet`].
            pub fn greet(broker: &mut Broker, endpoint: u32, client: ClientId) {
                $(<$Change>::greet(broker, endpoint, client);)*
            }

            /// See [`Class::lose`].
            pub fn lose(broker: &mut Broker, segment: &Name) {
                $(<$Change>::lose(broker, segment);)*
            }

            /// See [`Class::rebooted`].
            pub fn rebooted(books: &Books) -> impl Iterator<Item = Self> {
                empty()$(.chain(<$Change>::rebooted(books).map(Self::$Class)))*
            }

            /// See [`Class::clear`].
            pub fn clear(books: &mut Books, segment: &Name) {
                $(<$Change>::clear(books, segment);)*
            }
        }

        impl Serialize for Change {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                match self { $(Self::$Class(change) => change.serialize(to),)* }
            }
        }

        /// For each class its [`Class::RECORDS`], and the names that its changes have in the journal.
        #[cfg(test)]
        fn names() -> Vec<[&'static [&'static str]; 2]> {
            vec![$([<$Change>::RECORDS, tests::variants(<$Change>::deserialize)]),*]
        }

        $(impl From<$Change> for Record {
            fn from(change: $Change) -> Self {
                Self::Object(Change::$Class(change))
            }
        })*
    };
}

// All classes. What one refers to comes before it: boards outlive endpoints because of channels.
classes! {
    Channel: channel::Change,
    Board: board::Change,
    Sync: sync::Change,
    Block: block::Change,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::Visitor;
    use serde::de::value::Error as Unread;
    use serde::forward_to_deserialize_any;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::rc::Rc;

    /// Reads nothing, and notes the names of the variants of the enumeration that is asked for.
    pub(super) struct Asked(Rc<Cell<&'static [&'static str]>>);

    impl<'de> Deserializer<'de> for Asked {
        type Error = Unread;

        fn deserialize_enum<V: Visitor<'de>>(
            self,
            _: &'static str,
            variants: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Unread> {
            self.0.set(variants);
            Err(Unread::custom("only asked"))
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Unread> {
            Err(Unread::custom("no enumeration"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map struct identifier ignored_any
        }
    }

    /// The names of all variants of an enumeration in the journal.
    pub(super) fn variants<T>(read: fn(Asked) -> Result<T, Unread>) -> &'static [&'static str] {
        let variants = Rc::new(Cell::new([].as_slice()));
        assert!(read(Asked(Rc::clone(&variants))).is_err());
        variants.get()
    }

    #[test]
    fn each_change_has_a_name_in_the_journal_that_is_known_and_its_own() {
        let mut all = BTreeSet::from(["optional"]);
        for [records, variants] in names() {
            assert!(!variants.is_empty());
            assert_eq!(records, variants, "RECORDS of a class, and the variants of its changes");
            all.extend(records);
        }
        // The journal reads `optional` as a mark of records, and the others are beside the changes.
        let others = variants(Record::deserialize);
        assert!(others.contains(&"dead"));
        all.extend(others);
        let count = 1 + others.len() + names().iter().map(|[records, _]| records.len()).sum::<usize>();
        assert_eq!(all.len(), count, "a name is used twice");
    }
}
