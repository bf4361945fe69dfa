//! Users of a lock, and a neighbour that scribbles on its page between their operations; the daemon declares some of the users
//! dead. Without scribbles, the results must be those of the oracle.
#![no_main]

use ginnel_fuzz::{SyncInput, sync_model};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(SyncInput { kind, ops }) = SyncInput::parse(input) else { return };
    if ops.iter().all(|op| op.code & 0x80 == 0) {
        sync_model::run(kind, &ops);
    }
    sync_model::alone(kind, &ops);
});
