//! A client sends any bytes, in any pieces, to the engine of a cache with a small store. The engine answers or closes, in
//! bounded memory, and the answer to one request ends where clients expect it.
#![no_main]

use ginnel_cache::engine::Engine;
use ginnel_cache::numbers::Settings;
use ginnel_cache::talk::{MOST_ANSWERS, State, Talk};
use ginnel_cache_protocol::answer::{Expected, Found, Scan, of_text};
use ginnel_cache_protocol::{binary, text};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_shmem::Mapping;
use libfuzzer_sys::fuzz_target;

const ITEM: usize = 4096;
const MEMORY: usize = 256 << 10;

fuzz_target!(|bytes: &[u8]| {
    let [cut, clock, bytes @ ..] = bytes else { return };
    look(bytes);
    let memory = Mapping::anonymous(MEMORY).unwrap();
    let store = Store::create(memory, plan(MEMORY, ITEM, 100).unwrap(), [1, 2], 1000).unwrap();
    let settings = Settings {
        place: "web/main".into(),
        item_size: ITEM,
        connections: 10,
        verbosity: 0,
        listens: Vec::new(),
        unix: None,
    };
    let mut engine = Engine::new(store, settings, 1_700_000_000);
    let (mut talk, mut kept, mut out) = (Talk::default(), Vec::new(), Vec::new());
    let mut now = 1000;
    for piece in bytes.chunks(usize::from(*cut).max(1)) {
        kept.extend_from_slice(piece);
        now += u64::from(*clock) * 16;
        engine.tick(now, 1_700_000_000 + now as i64 / 1000);
        let mut turns = 0;
        loop {
            let (done, state) = talk.run(&mut engine, &kept, &mut out);
            assert!(done <= kept.len());
            kept.drain(..done);
            // One answer may exceed the limit: a value, or all statistics.
            assert!(out.len() <= MOST_ANSWERS + ITEM + (32 << 10));
            match state {
                State::Closed => return,
                State::Full => out.clear(),
                State::Hungry => {
                    // The bytes that are kept are never longer than a request with its value.
                    assert!(kept.len() < talk.wanted() && talk.wanted() <= (96 << 10));
                    break;
                }
            }
            turns += 1;
            assert!(turns < 10_000);
        }
        out.clear();
    }
});

/// Parses the same bytes as a client does, or a process between client and server.
fn look(bytes: &[u8]) {
    if let text::Parsed::Request(request, head) = text::parse(bytes) {
        assert!(head <= bytes.len());
        let _ = (of_text(&request), request.value());
    }
    let _ = text::next_key(bytes);
    if let binary::Parsed::Request(request, head) = binary::parse(bytes) {
        assert!(head <= bytes.len() && head == binary::wanted(bytes));
        let _ = request.value();
    }
    for expected in [
        Expected::Line,
        Expected::Values,
        Expected::Stats,
        Expected::Meta,
        Expected::Packet,
        Expected::Packets,
    ] {
        let whole = Scan::new(expected).look(bytes);
        let (mut scan, mut at) = (Scan::new(expected), 0);
        let by_bytes = loop {
            match scan.look(&bytes[at..bytes.len().min(at + 1)]) {
                Found::End(more) => break Found::End(at + more),
                Found::More if at >= bytes.len() => break Found::More,
                Found::More => at += 1,
                Found::NoAnswer => break Found::NoAnswer,
            }
        };
        assert_eq!(whole, by_bytes);
    }
}
