//! Messages that a neighbour sends to a program that listens for RDMA connections.
#![no_main]

use ginnel_verbs::cm::message::Message;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(message) = Message::decode(input) else { return };
    assert_eq!(message.encode(), input, "{message:?}");
});
