//! Operations on a ring, compared with a queue in private memory.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::ring::{messages, stream};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(input) = ModelInput::parse(input) else { return };
    let (messages, capacity) = input.ring();
    if messages { messages::run(capacity, input.ops) } else { stream::run(capacity, input.ops) }
});
