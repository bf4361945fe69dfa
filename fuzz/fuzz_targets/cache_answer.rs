//! Answers of a cache's server to its client, complete and in pieces.
#![no_main]

use ginnel_cache_client::answer::{Answer, flag, number, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|said: &[u8]| {
    let mut rest = said;
    while let Ok(Some((answer, used))) = parse(rest) {
        assert!((1..=rest.len()).contains(&used));
        assert_eq!(parse(&rest[..used]), Ok(Some((answer, used))));
        // A part of an answer is not taken for the whole. Long values are tried with few ends.
        for end in (0..used).step_by(used / 64 + 1) {
            assert_eq!(parse(&rest[..end]), Ok(None));
        }
        if let Answer::Short(_, flags) | Answer::Value(_, flags) = answer {
            for letter in [b'f', b'c'] {
                flag(flags, letter);
            }
            number(flags);
        }
        rest = &rest[used..];
    }
});
