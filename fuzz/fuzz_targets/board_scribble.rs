//! Rings whose consumers sleep through a readiness board. Between their operations, the input scribbles on the board and on the
//! words for waking. A run depends only on its input.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::ring::board;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { ops, .. }) = ModelInput::parse(input) else { return };
    board::run(ops);
});
