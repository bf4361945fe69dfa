//! Operations on a ring, compared with a queue in private memory.
#![no_main]

use ginnel_fuzz::RingInput;
use ginnel_fuzz::model::{messages, stream};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(RingInput { messages, capacity, ops }) = RingInput::parse(input) else { return };
    if messages { messages::run(capacity, ops) } else { stream::run(capacity, ops) }
});
