//! The headers of a SYN, which anybody may have sent.
#![no_main]

use ginnel_tcp::SynTime;

libfuzzer_sys::fuzz_target!(|headers: &[u8]| {
    let _ = SynTime::in_syn(headers);
});
