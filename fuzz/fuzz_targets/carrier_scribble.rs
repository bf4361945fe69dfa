//! A stream that changes from another carrier to a ring. Between its operations, the input scribbles on the words of the
//! change-over. A run depends only on its input.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::ring::carrier;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { ops, .. }) = ModelInput::parse(input) else { return };
    carrier::run(ops);
});
