//! A device on a queue whose memory, indirect tables and in-flight region contain anything.
#![no_main]

use ginnel_fuzz::WordsInput;
use ginnel_guest_memory::GuestMemory;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue};
use kit::models::virtqueue::rig::Rig;

/// Serves all requests that are there, reads and writes everything that they ask for, and completes all but the last.
fn turn(device: &mut DeviceQueue<Mapping>, guest: &GuestMemory<Mapping>, size: u16) {
    let (mut chain, mut tickets) = (Chain::new(), Vec::new());
    assert!(device.visible() <= size.into(), "more to take than the queue holds");
    let _ = device.is_empty();
    for _ in 0..=size {
        let Ok(Some(ticket)) = device.pop(guest, &mut chain) else { break };
        let mut header = [0; 16];
        let n = guest.read(chain.readable(), 0, &mut header);
        assert_eq!(n, 16.min(chain.readable_len() as usize));
        let n = guest.write(chain.writable(), chain.writable_len().saturating_sub(1).into(), &[1, 2]);
        assert_eq!(n, 1.min(chain.writable_len() as usize));
        tickets.push(ticket);
    }
    assert!(tickets.len() <= usize::from(size), "more than the queue holds");
    let _ = tickets.pop();
    for ticket in tickets {
        device.push(ticket, 1);
    }
    let _ = device.publish();
    let _ = device.arm();
    device.disarm();
    let _ = (device.base(), device.state(), device.outstanding());
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(input) = WordsInput::parse(input) else { return };
    let rig = Rig::choose(input.choice);
    let (memory, region) = (rig.memory(), rig.inflight_memory());
    let guest = rig.guest(&memory);
    let region_of = |used: bool| used.then_some(&region);
    let mut device = None;
    for (place, value, go) in input.words() {
        let at = 8 * place;
        if at < memory.len() {
            memory.store_relaxed_u64(at, value);
        } else if at - memory.len() < region.len() {
            region.store_relaxed_u64(at - memory.len(), value);
        } else {
            // A new session, which begins where the front end says.
            let setup = rig.setup(&memory, value as u32, region_of(value >> 32 & 1 != 0));
            device = DeviceQueue::new(setup).ok();
        }
        if go {
            if device.is_none() {
                let setup = rig.setup(&memory, rig.base(), region_of(input.choice & 16 != 0));
                device = DeviceQueue::new(setup).ok();
            }
            if let Some(device) = &mut device {
                turn(device, &guest, rig.size);
            }
        }
    }
});
