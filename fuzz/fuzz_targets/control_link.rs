//! The control memory of a VM: both daemons work on it while the input scribbles. Each step is bounded and nothing panics.
//! Whatever a neighbour has written, a session starts again when the neighbour stops.
#![no_main]

use ginnel_daemon::control_link::{Event, GuestLink, HostLink};
use ginnel_layout::relay::RelayKind;
use ginnel_layout::{Name, control};
use ginnel_shmem::{Mapping, SharedMemory};

/// Handles a bounded number of events, so a peer that sends without end cannot keep the caller busy.
fn drain(mut step: impl FnMut() -> Event) {
    for _ in 0..256 {
        if matches!(step(), Event::Idle) {
            return;
        }
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(memory) = Mapping::anonymous(control::SIZE) else { return };
    let Ok(name) = Name::new("vm") else { return };
    let mut host = HostLink::new(memory.clone(), 1, 32, name);
    let mut guest = GuestLink::new(memory.clone(), [7; 16], true);
    for chunk in input.chunks_exact(11) {
        let word = u64::from_le_bytes([
            chunk[3], chunk[4], chunk[5], chunk[6], chunk[7], chunk[8], chunk[9], chunk[10],
        ]);
        let at = usize::from(u16::from_le_bytes([chunk[1], chunk[2]])) * 8 % control::SIZE;
        match chunk[0] % 8 {
            0 => drain(|| host.step()),
            1 => drain(|| guest.step()),
            2 => drop(host.send(RelayKind::DATA, u32::from(chunk[1]), &chunk[2..])),
            3 => drop(guest.send(RelayKind::DATA, u32::from(chunk[1]), &chunk[2..])),
            // The header and the words of the rings are hit more often than the rest.
            4 => memory.store_relaxed_u64(at % 256, word),
            5 => memory.store_relaxed_u64(control::TO_GUEST + at % 1024, word),
            6 => memory.store_relaxed_u64(control::TO_HOST + at % 1024, word),
            _ => memory.store_relaxed_u64(at, word),
        }
    }
    // The neighbour has stopped, and both daemons are started anew, as an operator would do.
    let mut host = HostLink::new(memory.clone(), 1, 32, name);
    let mut guest = GuestLink::new(memory, [7; 16], true);
    for _ in 0..8 {
        drain(|| host.step());
        drain(|| guest.step());
    }
    assert!(guest.send(RelayKind::DATA, 5, b"after all").is_ok());
    let mut came = false;
    for _ in 0..256 {
        match host.step() {
            Event::Message { client: 5, body, .. } => came |= body == b"after all",
            Event::Idle => break,
            _ => {}
        }
    }
    assert!(came, "a fresh session does not work");
});
