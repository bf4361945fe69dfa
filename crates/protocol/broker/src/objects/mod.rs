//! The objects that endpoints make in segments. Each class of objects has a folder of its own here, with its part of the books,
//! its records in the journal, the requests that it answers, what becomes of its objects when an endpoint ends, and how they are
//! shown. `docs/adding-an-object.md` says how to add a class.
//!
//! | module | objects |
//! |---|---|
//! | `channel` | channels, and the listeners to which they are opened |
//! | `board` | readiness boards |
//! | `sync` | synchronisation objects: locks and others with users that wait |
//! | `block` | blocks of memory, their handles and the rights to them |
//! | `memory_object`, `quota` | the common part of blocks and synchronisation objects, and its limits |
//! | `class` | what the books need of each class |

pub mod block;
pub mod board;
pub mod channel;
pub mod class;
mod memory_object;
mod quota;
pub mod sync;

use crate::books::{Books, Endpoint, InvalidRecord};
use crate::relayed::Relayed;
use class::Class;
use ginnel_layout::Name;
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use std::iter::empty;

/// Combines a list of classes into one class.
macro_rules! classes {
    ($($Class:ident: $Change:ty,)*) => {
        /// A change of an object, of whatever class.
        #[derive(Clone, Debug, PartialEq)]
        #[expect(missing_docs, reason = "each is a class")]
        pub enum Change {
            $($Class($Change),)*
        }

        impl Change {
            /// Returns whether a change has this name in the journal.
            pub fn is_known(record: &str) -> bool {
                [$(<$Change>::RECORDS),*].into_iter().flatten().any(|known| *known == record)
            }

            /// Reads a change that has this name.
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

        /// Returns for each class its [`Class::RECORDS`], and the names that its changes have in the journal.
        #[cfg(test)]
        fn names() -> Vec<[&'static [&'static str]; 2]> {
            vec![$([<$Change>::RECORDS, tests::variants(<$Change>::deserialize)]),*]
        }
    };
}

/// Calls a macro with all classes. A class comes after those that it refers to: boards outlive endpoints because of channels.
macro_rules! with_all_classes {
    ($macro:ident) => {
        $macro! {
            Channel: $crate::objects::channel::Change,
            Board: $crate::objects::board::Change,
            Sync: $crate::objects::sync::Change,
            Block: $crate::objects::block::Change,
        }
    };
}
pub(crate) use with_all_classes;

with_all_classes!(classes);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use serde::de::Visitor;
    use serde::de::value::Error as Unread;
    use serde::forward_to_deserialize_any;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::rc::Rc;

    /// A deserializer that reads nothing, and notes the names of the variants of the requested enumeration.
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

    /// Returns the names of all variants of an enumeration in the journal.
    pub(super) fn variants<T>(read: fn(Asked) -> Result<T, Unread>) -> &'static [&'static str] {
        let variants = Rc::new(Cell::new([].as_slice()));
        assert!(read(Asked(Rc::clone(&variants))).is_err());
        variants.get()
    }

    #[test]
    fn each_change_has_a_known_and_unique_name_in_the_journal() {
        let mut all = BTreeSet::from(["optional"]);
        for [records, variants] in names() {
            assert!(!variants.is_empty());
            assert_eq!(records, variants, "RECORDS of a class, and the variants of its changes");
            all.extend(records);
        }
        // The journal uses `optional` as a mark of records, and the other names are in use beside the changes.
        let others = variants(Record::deserialize);
        assert!(others.contains(&"dead"));
        all.extend(others);
        let count = 1 + others.len() + names().iter().map(|[records, _]| records.len()).sum::<usize>();
        assert_eq!(all.len(), count, "a name is used twice");
    }
}
