//! What the test programs of this package share.

pub mod lie;
pub mod life;
pub mod stage;
pub mod verbs;
