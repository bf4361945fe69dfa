//! Requests of a client of a cache, as parsed by a process between the client and the server: complete and in pieces.
#![no_main]

use ginnel_cache_protocol::follow::{Awaited, Lost, Requests};
use libfuzzer_sys::fuzz_target;

/// Returns which answers are expected after these bytes, and whether the bytes end between two requests.
fn follow(bytes: &[u8], piece: usize) -> Result<(Vec<Awaited>, bool), Lost> {
    let (mut requests, mut awaited) = (Requests::default(), Vec::new());
    for bytes in bytes.chunks(piece) {
        requests.pass(bytes, |passed| {
            awaited.push(passed.awaited);
            Ok(())
        })?;
    }
    Ok((awaited, requests.is_between()))
}

fuzz_target!(|said: &[u8]| {
    let whole = follow(said, said.len().max(1));
    // A long line is parsed again with each piece.
    let least = said.len() / 512 + 1;
    for piece in [least, least + 2, least * 7] {
        assert_eq!(follow(said, piece), whole, "{piece}");
    }
});
