//! Both sides of a ring, with scribbles on its memory between their operations. A run depends only on its input.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::scribble;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { messages, capacity, ops }) = RingInput::parse(input) else { return };
    scribble::alone(capacity, messages, ops);
});
