//! A driver and a device on one queue, with scribbles on its memory and its in-flight region between their operations.
#![no_main]

use ginnel_fuzz::{VirtqueueInput, virtqueue_model};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(VirtqueueInput { choice, ops }) = VirtqueueInput::parse(input) else { return };
    virtqueue_model::scribble(choice, ops);
});
