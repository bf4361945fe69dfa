//! A cache in memory of which a neighbour changes any words between the calls of server and reader.
//!
//! Every call returns. Nothing outside of the block is touched, because the memory checks each offset.
#![no_main]

use ginnel_cache_store::reader::Reader;
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_shmem::{Mapping, SharedMemory};
use libfuzzer_sys::fuzz_target;

const LEN: usize = 64 << 10;

fuzz_target!(|ops: Vec<(u8, u16, u64)>| {
    let memory = Mapping::anonymous(LEN).expect("memory");
    let shape = plan(LEN, 1500, 150).expect("a shape");
    let mut store = Store::create(memory.clone(), shape, [1, 2], 0).expect("a cache");
    let reader = Reader::new(memory.clone()).expect("a reader");
    let mut value = Vec::new();
    for (code, a, b) in ops {
        let key = (a % 64).to_le_bytes();
        value.clear();
        match code % 12 {
            0..=2 => drop(store.set(&key, &[&vec![code; usize::from(a) % 1600]], a.into(), b as u32 % 100)),
            3 => drop(store.get(&key, &mut value)),
            4 => drop(reader.get(&key, &mut value)),
            5 => {
                let hash = reader.hash(&key);
                reader.prefetch_slots(hash);
                reader.prefetch_item(hash);
                let mut room = [0; 100];
                reader.get_to(hash, &key, &mut &mut room[..usize::from(a) % 100]);
                let survey = reader.survey();
                let segments = survey.free.segments + survey.small.segments + survey.main.segments;
                assert_eq!(segments, survey.shape.segments);
                assert!(reader.contact().len() <= 3 * 1024);
            }
            6 => drop(store.delete(&key)),
            7 => {
                store.touch(&key, b as u32);
                store.used_by_reader(b);
                store.tick(b);
            }
            8 => store.flush(),
            9 => {
                if let Ok(next) = Store::open(memory.clone(), b) {
                    store = next;
                }
                let _ = Reader::new(memory.clone()).map(|reader| reader.get(&key, &mut value));
            }
            10 => memory.store_relaxed_u64(usize::from(a) % (LEN / 8) * 8, b),
            // A word that looks like one of the cache's own.
            _ => {
                let from = b as usize % (LEN / 8) * 8;
                memory.store_relaxed_u64(usize::from(a) % (LEN / 8) * 8, memory.load_relaxed_u64(from));
            }
        }
    }
});
