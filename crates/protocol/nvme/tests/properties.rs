//! Any list of operations must agree with simple records, and no scribble may do more harm than to spoil the queues.
#![cfg(not(loom))]

use kit::models::{Op, nvme};
use proptest::collection::vec;
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    any::<(u8, u16, u16)>().prop_map(|(code, a, b)| Op { code, a, b })
}

/// Selects mostly operations. Scribbles are the codes with the top bit; without this selection, half of all codes would be
/// scribbles.
fn mostly_operations() -> impl Strategy<Value = Op> {
    (op(), 0..6u8).prop_map(|(op, n)| Op { code: if n == 0 { op.code | 0x80 } else { op.code & 0x7f }, ..op })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn queues_agree_with_simple_records(choice in any::<u8>(), ops in vec(op(), 0..400)) {
        nvme::run(choice, ops);
    }

    #[test]
    fn scribbles_spoil_only_the_queues(choice in any::<u8>(), ops in vec(mostly_operations(), 0..400)) {
        nvme::scribble(choice, ops);
    }
}
