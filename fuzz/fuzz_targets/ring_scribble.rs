//! Both sides of a ring, and scribbles on its memory between their operations. The same input does the same again.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::scribble;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { messages, capacity, ops }) = RingInput::parse(input) else { return };
    scribble::alone(capacity, messages, ops);
});
