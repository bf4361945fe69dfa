//! Any list of operations must behave as with a queue, and no scribble may do more harm than to spoil the ring.
#![cfg(not(loom))]

use kit::models::Op;
use kit::models::ring::{board, capacity, carrier, messages, scribble, stream};
use proptest::collection::vec;
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    any::<(u8, u16, u16)>().prop_map(|(code, a, b)| Op { code, a, b })
}

/// Selects mostly operations. Scribbles are the codes with the top bit; without this selection, half of all codes would be
/// scribbles.
fn mostly_operations() -> impl Strategy<Value = Op> {
    (op(), 0..8u8).prop_map(|(op, n)| Op { code: if n == 0 { op.code | 0x80 } else { op.code & 0x7f }, ..op })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_message_ring_is_a_queue(size in any::<u8>(), ops in vec(op(), 0..400)) {
        messages::run(capacity(size), ops);
    }

    #[test]
    fn a_stream_ring_is_a_queue(size in any::<u8>(), ops in vec(op(), 0..200)) {
        stream::run(capacity(size), ops);
    }

    #[test]
    fn scribbles_spoil_only_the_ring(size in any::<u8>(), messages in any::<bool>(), ops in vec(mostly_operations(), 0..400)) {
        scribble::alone(capacity(size), messages, ops);
    }

    #[test]
    fn scribbles_on_a_board_cost_wakes_and_nothing_else(ops in vec(mostly_operations(), 0..400)) {
        board::run(ops);
    }

    #[test]
    fn a_stream_that_changes_over_is_a_queue(ops in vec(op().prop_map(|op| Op { code: op.code & 0x7f, ..op }), 0..200)) {
        carrier::run(ops);
    }

    #[test]
    fn scribbles_on_a_change_over_spoil_only_the_change_over(ops in vec(mostly_operations(), 0..200)) {
        carrier::run(ops);
    }

    #[test]
    fn scribbles_beside_spoil_only_the_ring(size in any::<u8>(), messages in any::<bool>(), ops in vec(op(), 0..200), scribbles in vec(op(), 1..8)) {
        scribble::beside(capacity(size), messages, ops, &scribbles);
    }
}
