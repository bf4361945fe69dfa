//! Split queues (virtio 1.2, section 2.7).

mod device;
mod driver;

use crate::device::check_area;
use crate::error::SetupError;
pub(crate) use device::Device;
pub(crate) use driver::Driver;
use ginnel_guest_memory::Area;
use ginnel_layout::virtio::{DESCRIPTOR, DESCRIPTOR_ALIGN, split};
use ginnel_shmem::SharedMemory;

/// The three areas of a queue, each long enough for the queue's size.
pub(crate) struct Areas<M> {
    descriptors: Area<M>,
    driver: Area<M>,
    device: Area<M>,
}

impl<M: SharedMemory> Areas<M> {
    fn new(
        size: u16,
        event_idx: bool,
        descriptors: Area<M>,
        driver: Area<M>,
        device: Area<M>,
    ) -> Result<Self, SetupError> {
        if !size.is_power_of_two() {
            return Err(SetupError::Size(size));
        }
        check_area("descriptor", &descriptors, DESCRIPTOR * usize::from(size), DESCRIPTOR_ALIGN)?;
        check_area("driver", &driver, split::driver_len(size, event_idx), split::DRIVER_ALIGN)?;
        check_area("device", &device, split::device_len(size, event_idx), split::DEVICE_ALIGN)?;
        Ok(Self { descriptors, driver, device })
    }
}
