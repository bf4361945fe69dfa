//! A ring is of either kind, on each side of a queue.

pub(crate) enum Ring<Split, Packed> {
    Split(Split),
    Packed(Packed),
}

/// `each!(&ring, it => CALL)`: the same call for both kinds.
macro_rules! each {
    ($ring:expr, $it:ident => $call:expr) => {
        match $ring {
            Ring::Split($it) => $call,
            Ring::Packed($it) => $call,
        }
    };
}
pub(crate) use each;
