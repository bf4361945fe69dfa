//! A DAX info block that was overwritten: only the right block is accepted, and otherwise the wrong field is named.
//!
//! The input is a segment (uuid, size, page), and either changes of its right block (place and value) or bytes to put there.
#![no_main]

use ginnel_layout::dax::InfoBlock;
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes, IntoBytes};

fuzz_target!(|input: ([u8; 16], u64, u32, bool, &[u8])| {
    let (uuid, size, page, changes, data) = input;
    let right = InfoBlock::new(uuid, size, page);
    assert_eq!(right.check(uuid, size, page), Ok(()));
    let mut bytes = right.as_bytes().to_vec();
    if changes {
        for change in data.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len();
            bytes[at] = change[2];
        }
    } else {
        let len = data.len().min(bytes.len());
        bytes[..len].copy_from_slice(&data[..len]);
    }
    let Ok(block) = InfoBlock::read_from_bytes(&bytes) else { unreachable!("a block's length") };
    let same = bytes == right.as_bytes();
    match block.check(uuid, size, page) {
        Ok(()) => assert!(same),
        Err(damage) => {
            assert!(!same);
            assert!(damage.to_string().contains(damage.field));
            assert!(damage.values.is_none_or(|(found, right)| found != right));
        }
    }
});
