//! Users of a lock, and a neighbour that scribbles on its page between their operations; the daemon declares some of the users
//! dead. Without scribbles, the results must be those of the oracle.
#![no_main]

use ginnel_fuzz::ModelInput;
use kit::models::sync;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(ModelInput { choice, ops }) = ModelInput::parse(input) else { return };
    let kind = sync::kind(choice);
    if ops.iter().all(|op| op.code & 0x80 == 0) {
        sync::run(kind, &ops);
    }
    sync::alone(kind, &ops);
});
