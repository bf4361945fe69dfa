//! Hostile programs and hostile daemons of VMs talk to the host's daemon, which has no system calls here: nobody gets memory
//! twice, each request has one answer, and nobody sees anything of others. The harness is that of the daemon's unit test `hostile`.
#![no_main]

use ginnel_broker::broker::model;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    model::run(input);
});
