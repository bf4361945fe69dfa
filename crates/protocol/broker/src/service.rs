//! What the broker does about objects beyond the books: it answers requests, and writes into segments what programs must know.

use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{ClientId, World};
use crate::objects::class::Class;
use crate::objects::{Change, with_all_classes};
use crate::reply::Refusal;
use ginnel_layout::Name;
use ginnel_layout::wire::Kind;

/// A kind of request that endpoints may send.
pub struct Request {
    /// The kind.
    pub kind: Kind,
    /// Whether the answer can contain something that the client did not have before, or does not know of.
    pub is_gift: bool,
    /// Whether only members that may write to their segment may send it.
    pub is_write: bool,
    /// The handler. It checks the body and everything else before it changes something.
    pub serve: Serve,
}

type Serve = fn(&mut Broker, &mut dyn World, &Caller, &[u8]) -> Result<(), Refusal>;

impl Request {
    /// A request that ends something, or changes a detail.
    pub const fn new(kind: Kind, serve: Serve) -> Self {
        Self { kind, is_gift: false, is_write: false, serve }
    }

    /// A request whose answer can contain something new.
    pub const fn gift(kind: Kind, serve: Serve) -> Self {
        Self { is_gift: true, ..Self::new(kind, serve) }
    }

    /// The same as [`Request::gift`], only for members that may write to their segment.
    pub const fn write(kind: Kind, serve: Serve) -> Self {
        Self { is_write: true, ..Self::gift(kind, serve) }
    }
}

/// A class of objects, as the broker serves it.
pub trait Service: Class {
    /// The requests about its objects.
    const REQUESTS: &'static [Request];

    /// Writes into the segment that this change, one of [`Class::ends`], is about to happen, and wakes the endpoints that it
    /// concerns.
    fn mark_end(&self, _broker: &mut Broker) {}

    /// Sends an endpoint, over a new connection, the notifications that it may have missed.
    fn greet(_broker: &mut Broker, _endpoint: u32, _client: ClientId) {}

    /// Marks in all objects of a segment that the segment's memory was lost, in words at which their users look.
    fn lose(_broker: &mut Broker, _segment: &Name) {}
}

/// Combines the classes.
macro_rules! services {
    ($($Class:ident: $Change:ty,)*) => {
        impl Change {
            /// Returns the request of that kind.
            pub fn request(kind: Kind) -> Option<&'static Request> {
                [$(<$Change>::REQUESTS),*].into_iter().flatten().find(|request| request.kind == kind)
            }

            /// See [`Service::mark_end`].
            pub fn mark_end(&self, broker: &mut Broker) {
                match self { $(Self::$Class(change) => change.mark_end(broker),)* }
            }

            /// See [`Service::greet`].
            pub fn greet(broker: &mut Broker, endpoint: u32, client: ClientId) {
                $(<$Change>::greet(broker, endpoint, client);)*
            }

            /// See [`Service::lose`].
            pub fn lose(broker: &mut Broker, segment: &Name) {
                $(<$Change>::lose(broker, segment);)*
            }
        }
    };
}

with_all_classes!(services);
