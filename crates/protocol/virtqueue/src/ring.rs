//! The ring of a queue, of either format, for both sides.

pub(crate) enum Ring<Split, Packed> {
    Split(Split),
    Packed(Packed),
}

/// `each!(&ring, it => CALL)`: makes the same call for both formats.
macro_rules! each {
    ($ring:expr, $it:ident => $call:expr) => {
        match $ring {
            Ring::Split($it) => $call,
            Ring::Packed($it) => $call,
        }
    };
}
pub(crate) use each;
