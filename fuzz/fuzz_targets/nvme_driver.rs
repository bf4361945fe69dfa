//! A driver and a device on a completion queue and its submission queues, with scribbles on all of their memory between their operations.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::nvme;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { choice, ops }) = ModelInput::parse(input) else { return };
    nvme::scribble(choice, ops);
});
