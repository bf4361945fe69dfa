//! Both sides of a ring, with scribbles on its memory between their operations. A run depends only on its input.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::ring::scribble;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(input) = ModelInput::parse(input) else { return };
    let (messages, capacity) = input.ring();
    scribble::alone(capacity, messages, input.ops);
});
