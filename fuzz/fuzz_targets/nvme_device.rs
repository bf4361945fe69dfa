//! A controller's queues whose memory, doorbells, shadows and state contain anything, and PRP lists that lie anywhere in that memory.
#![no_main]

use ginnel_fuzz::WordsInput;
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::nvme::Status;
use ginnel_nvme::{QueueGroup, prp};
use ginnel_shmem::{Mapping, SharedMemory};
use kit::models::nvme::rig::Rig;

/// Takes all commands that are there, finds and writes the memory that they name, and completes all but the last.
fn turn(group: &mut QueueGroup<Mapping>, guest: &GuestMemory<Mapping>, rig: &Rig) {
    let most = usize::from(rig.slots) * usize::from(rig.submissions);
    let (mut buffers, mut tickets) = (Vec::new(), Vec::new());
    let _ = (group.is_empty(), group.visible());
    for _ in 0..=most {
        let Ok(Some((ticket, command))) = group.take() else { break };
        let len = command.cdw12 & 0xf_ffff;
        let status = match prp::buffers(guest, command.prp1, command.prp2, len, 40, &mut buffers) {
            Ok(()) => {
                let found: u64 = buffers.iter().map(|buffer| u64::from(buffer.len)).sum();
                assert!(found == u64::from(len) && buffers.len() <= 40);
                let written = guest.write(&buffers, u64::from(len).saturating_sub(1), &[1, 2]);
                assert_eq!(written, 1.min(len as usize));
                Status::SUCCESS
            }
            Err(status) => status,
        };
        tickets.push((ticket, status));
    }
    assert!(tickets.len() <= most, "more than there are slots");
    let _ = tickets.pop();
    for (ticket, status) in tickets {
        group.complete(ticket, status, 1);
    }
    let _ = group.publish();
    let _ = group.arm();
    group.disarm();
    let _ = (group.states(), group.outstanding());
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(input) = WordsInput::parse(input) else { return };
    let rig = Rig::choose(input.choice);
    let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
    rig.create(&memory, &doorbells, &state);
    let guest = rig.guest(&memory);
    let mut group = None;
    for (place, value, go) in input.words() {
        // The doorbells come first, because they are few and matter most.
        let words = [(&doorbells, 4096, 8192), (&memory, 0, memory.len()), (&state, 64, state.len())];
        let mut at = 8 * place;
        let found = words.into_iter().find(|(_, from, end)| {
            let found = at < end - from;
            at = if found { at + from } else { at - (end - from) };
            found
        });
        match found {
            Some((memory, ..)) => memory.store_relaxed_u64(at, value),
            // A new process.
            None => group = None,
        }
        if go {
            group = group.or_else(|| rig.group(&memory, &doorbells, &state).ok());
            if let Some(group) = &mut group {
                turn(group, &guest, &rig);
            }
        }
    }
});
