//! Random operations of two endpoints, with scribbles of a third member between them.
#![cfg(not(loom))]

use kit::models::{Op, verbs};
use proptest::prelude::*;

proptest! {
    #[test]
    fn scribbles_harm_only_their_segment(ops in prop::collection::vec((any::<u8>(), any::<u16>(), any::<u16>()), 1..200)) {
        let ops: Vec<_> = ops.into_iter().map(|(code, a, b)| Op { code, a, b }).collect();
        verbs::run(&ops);
    }

    #[test]
    fn without_scribbles_each_completion_belongs_to_a_request(
        ops in prop::collection::vec((0u8..0x80, any::<u16>(), any::<u16>()), 1..200),
    ) {
        let ops: Vec<_> = ops.into_iter().map(|(code, a, b)| Op { code, a, b }).collect();
        verbs::run(&ops);
    }
}
