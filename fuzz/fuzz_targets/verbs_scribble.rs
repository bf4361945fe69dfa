//! Two endpoints with all kinds of queue pairs, and a neighbour that scribbles on their tables and rings between their
//! operations.
#![no_main]

use ginnel_fuzz::{VerbsInput, verbs_model};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(VerbsInput { ops }) = VerbsInput::parse(input) else { return };
    verbs_model::run(&ops);
});
