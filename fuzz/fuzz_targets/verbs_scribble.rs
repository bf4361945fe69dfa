//! Two endpoints with all kinds of queue pairs, and a neighbour that scribbles on their tables and rings between their
//! operations.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::verbs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { ops, .. }) = ModelInput::parse(input) else { return };
    verbs::run(&ops);
});
