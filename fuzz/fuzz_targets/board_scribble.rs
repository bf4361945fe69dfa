//! Rings whose consumers sleep by way of a readiness board, and scribbles on the board and on their wake words between their
//! operations. The same input does the same again.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::board;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { ops, .. }) = RingInput::parse(input) else { return };
    board::run(ops);
});
