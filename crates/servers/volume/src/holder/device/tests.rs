//! Any requests of a client to a controller without an engine.

use super::*;
use crate::attach::Terms;
use crate::holder::link::Files;
use ginnel_layout::vfio_user::Command;
use ginnel_nvme::State;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};

const SHAPE: Shape = Shape { queues: 2, slots: 64, mapped: true };

fn device() -> (Device, Link) {
    let memory = |len| Mapping::anonymous(len).unwrap();
    let state = memory(State::<Mapping>::len(SHAPE.queues, SHAPE.slots));
    let file = || memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
    let terms = Terms { queues: 2, slots: 64, mapped: true, vectors: 3 };
    let link = Link::new(terms, Files { state: file(), doorbells: Arc::new(file()) });
    (Device::new(SHAPE, state, memory(SHAPE.bar())).unwrap(), link)
}

/// Numbers near the limits of what there is, and others.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..16,
        Just(0x1000),
        0xff0u64..0x1010,
        0x2ff0u64..0x9010,
        any::<u64>(),
        (0u64..64).prop_map(|n| n << 12)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Nothing is a panic; replies are as long as they must be; ranges never overlap; and without any engine, nothing is waited for.
    #[test]
    fn nothing_that_a_client_asks_for_is_a_panic(
        steps in prop::collection::vec((1u16..14, number(), number(), number(), 0usize..4), 1..60),
    ) {
        let (mut device, mut link) = device();
        for (command, a, b, c, fds) in steps {
            let u32s = |list: &[u64]| list.iter().flat_map(|n| (*n as u32).to_le_bytes()).collect::<Vec<u8>>();
            let body = match Command(command) {
                Command::DMA_MAP => [u32s(&[32, 3]), [a << 12, b << 12, c << 12].as_bytes().to_vec()].concat(),
                Command::DMA_UNMAP => [u32s(&[24, a % 3]), [b << 12, c].as_bytes().to_vec()].concat(),
                Command::DEVICE_GET_REGION_INFO => u32s(&[a, 0, b, 0, 0, 0, 0, 0]),
                Command::DEVICE_SET_IRQS => u32s(&[20, 0x24, 2, a % 4, if b % 2 == 0 { fds as u64 } else { b }]),
                Command::REGION_READ => [a.to_le_bytes().to_vec(), u32s(&[b % 10, c % 20])].concat(),
                Command::REGION_WRITE => {
                    [a.to_le_bytes().to_vec(), u32s(&[b % 10, c % 12]), vec![c as u8; (c % 12) as usize]].concat()
                }
                Command::DEVICE_RESET => Vec::new(),
                _ => u32s(&[a, b, c, 0]),
            };
            let fds = (0..fds).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
            let Ok(request) = Request::parse(Command(command), &body, fds) else { continue };
            let wanted = match &request {
                Request::Read { access } => Some(16 + access.count as usize),
                Request::Write { .. } => Some(16),
                _ => None,
            };
            match device.handle(request, &mut link) {
                Answer::When(number, ..) => prop_assert!(link.is_settled(number)),
                Answer::Now(body) => prop_assert!(wanted.is_none_or(|wanted| body.len() == wanted)),
                Answer::File(..) | Answer::Refused(_) => {}
            }
            let mut end = None;
            for mapped in device.ranges.iter() {
                prop_assert!(end.is_none_or(|end| mapped.range.iova > end));
                end = Some(mapped.range.iova + (mapped.range.len - 1));
            }
        }
        let number = device.client_gone(&mut link);
        prop_assert!(link.is_settled(number) && device.ranges.iter().count() == 0);
    }
}
