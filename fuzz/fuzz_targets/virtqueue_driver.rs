//! A driver and a device on one queue, with scribbles on its memory and its in-flight region between their operations.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::virtqueue;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { choice, ops }) = ModelInput::parse(input) else { return };
    virtqueue::scribble(choice, ops);
});
