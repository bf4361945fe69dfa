//! Objects in the form in which they are shown.

pub mod blocks;
pub mod channels;
pub mod sync;
