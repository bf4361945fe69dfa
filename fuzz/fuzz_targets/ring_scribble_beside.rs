//! Both sides of a ring, while another thread scribbles on its memory all the time; it executes the operations whose code has
//! the top bit. The result depends on timing, so an input may have to be tried more than once.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::scribble;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { messages, capacity, ops }) = RingInput::parse(input) else { return };
    let (scribbles, ops): (Vec<_>, Vec<_>) = ops.into_iter().partition(|op| op.code & 0x80 != 0);
    scribble::beside(capacity, messages, ops, &scribbles);
});
