//! Both sides of a ring, while another thread scribbles on its memory all the time; it executes the operations whose code has
//! the top bit. The result depends on timing, so an input may have to be tried more than once.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::ring::scribble;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(input) = ModelInput::parse(input) else { return };
    let (messages, capacity) = input.ring();
    let (scribbles, ops): (Vec<_>, Vec<_>) = input.ops.into_iter().partition(|op| op.code & 0x80 != 0);
    scribble::beside(capacity, messages, ops, &scribbles);
});
