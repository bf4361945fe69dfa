//! The journal: any bytes result in books. They are read once as they are, and once with right checksums, so that the records
//! themselves are reached.
#![no_main]

use ginnel_broker::lines::replay;
use ginnel_broker::text::Hex16;
use ginnel_broker::trust::{Mark, doubt};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let raw = replay(input);
    assert!(raw.dropped <= input.len());
    let mut good = Vec::new();
    let lines = input.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    for line in lines {
        good.extend_from_slice(format!("{:08x} ", crc32fast::hash(line)).as_bytes());
        good.extend_from_slice(line);
        good.push(b'\n');
    }
    let read = replay(&good);
    // Whether it is believed can always be said.
    let mark = Mark { boot_id: Hex16([0; 16]), journal: Hex16([1; 16]), last: input.len() as u64 };
    for mark in [None, Some(mark)] {
        doubt(&raw, mark, mark.map_or(Hex16([1; 16]), |mark| mark.boot_id));
        doubt(&read, mark, read.books.boot_id);
    }
    // Replaying the same bytes gives the same books.
    assert!(read == replay(&good));
});
