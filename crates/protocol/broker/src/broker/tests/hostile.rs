//! Random steps of hostile programs and VMs: the harness of the fuzz target `broker`, on stable.

use crate::broker::model::{self, Do, STEP, Step};
use ginnel_layout::wire::Kind;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;

/// Any step. Those without which the others do nothing come often.
fn step() -> impl Strategy<Value = Step> {
    let what = prop_oneof![
        2 => Just(Do::Connect),
        2 => Just(Do::Open),
        4 => Just(Do::Attach),
        3 => Just(Do::Listen),
        5 => Just(Do::Channel),
        2 => Just(Do::BlockCreate),
        3 => Just(Do::BlockOpen),
        2 => Just(Do::BlockGrant),
        2 => Just(Do::Socket),
        20 => prop::sample::select(Do::ALL),
    ];
    (what, any::<u8>(), any::<u8>(), any::<u8>(), any::<u32>()).prop_map(|(what, who, a, b, n)| Step {
        what,
        who,
        a,
        b,
        n,
    })
}

/// Two programs of the host and one of a VM, attached to the same segment.
fn programs() -> Vec<Step> {
    let step = |what, who, a| Step { what, who, a, b: 1, n: 0 };
    let come = [step(Do::Connect, 0, 0), step(Do::Connect, 0, 0), step(Do::Open, 0, 0)];
    come.into_iter().chain((0..3).map(|who| step(Do::Attach, who, 0))).collect()
}

/// The programs or nobody, and any steps.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let before = prop_oneof![Just(programs()), Just(vec![])];
    (any::<u8>(), before, prop::collection::vec(step(), 1..80)).prop_map(|(first, before, steps)| {
        let steps = before.into_iter().chain(steps);
        std::iter::once(first).chain(steps.flat_map(Step::bytes)).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn hostile_programs_and_vms_get_nothing_twice(input in input()) {
        model::run(&input);
    }

    #[test]
    fn any_bytes_are_steps(bytes in prop::collection::vec(any::<u8>(), 0..40 * STEP)) {
        model::run(&bytes);
    }
}

/// The endpoint has more to give back than fits into one turn, so it is still in the books when its member has left.
#[test]
fn a_member_leaves_a_segment_while_its_endpoint_ends() {
    let step = |what, who, a, b, n| Step { what, who, a, b, n };
    let steps = [
        step(Do::Open, 17, 0, 0, 0),
        step(Do::Attach, 0, 109, 0, 0),
        step(Do::Listen, 0, 5, 1, 1_572_413_354),
        step(Do::Open, 8, 81, 0, 0),
        step(Do::Return, 29, 0, 20, 0),
        step(Do::Channel, 0, 0, 72, 3_350_527),
        step(Do::Declare, 65, 13, 0, 0),
        step(Do::Work, 0, 0, 0, 0),
    ];
    model::run(&std::iter::once(19).chain(steps.into_iter().flat_map(Step::bytes)).collect::<Vec<_>>());
}

/// Without this, a harness in which nobody can attach any more would find nothing, and nobody would notice.
#[test]
fn random_steps_reach_every_kind_of_answer_and_event() {
    let mut runner = TestRunner::deterministic();
    let told: BTreeSet<u16> =
        (0..600).flat_map(|_| model::run(&input().new_tree(&mut runner).unwrap().current())).collect();
    // The harness answers `ADMIN` without `TEXT`. Whether and when two sockets match is a matter of time.
    let all = [
        Kind::HELLO_OK,
        Kind::ATTACHED,
        Kind::LISTENING,
        Kind::CHANNEL,
        Kind::INCOMING,
        Kind::OK,
        Kind::ERROR,
        Kind::SYNC,
        Kind::BELL_OK,
        Kind::BLOCK,
        Kind::BLOCK_REVOKED,
        Kind::PAGE,
        Kind::BOARD,
        Kind::SEGMENT_CUT,
        Kind::SOCK_STAYS,
    ];
    let missing: Vec<Kind> = all.into_iter().filter(|kind| !told.contains(&kind.0)).collect();
    assert_eq!(missing, []);
}
