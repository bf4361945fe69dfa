//! A stream that leaves another carrier for a ring, and scribbles on the words of the change-over between its operations. The same
//! input does the same again.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::carrier;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { ops, .. }) = RingInput::parse(input) else { return };
    carrier::run(ops);
});
