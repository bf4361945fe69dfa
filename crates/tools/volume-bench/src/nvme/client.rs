//! The client: a disk, as a VM with an NVMe driver sees it.

use crate::disk::Disk;
use crate::error::Error;
use crate::front::Front;
use crate::memory::DriverMemory;
use crate::nvme::admin::Admin;
use crate::nvme::command::command;
use crate::nvme::device::Device;
use crate::nvme::layout::Layout;
use crate::nvme::options::{Doorbells, NvmeOptions};
use crate::nvme::start::{Start, Started};
use crate::nvme::transport::{NvmeTransport, Rings, SlotMemory};
use crate::queue::{Buffers, Queue, stride};
use ginnel_layout::nvme::{Command, Completion, Feature, Opcode};
use ginnel_vfio_user::client::Client;
use std::os::fd::BorrowedFd;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// A connection to an NVMe controller over vfio-user, and the memory and the queues that outlive it.
///
/// The client belongs to one thread; each of its queues can be used by a thread of its own.
pub struct NvmeClient {
    options: NvmeOptions,
    memory: DriverMemory,
    layout: Layout,
    device: Device,
    admin: Admin,
    disk: Disk,
    serial: String,
    doorbells: Doorbells,
    queues: Vec<Queue<NvmeTransport>>,
}

impl NvmeClient {
    /// Connects, as QEMU does, and starts the controller, as a driver does. Makes one attempt. Blocks for each step for at
    /// most the `patience` of the options.
    pub fn connect(options: NvmeOptions) -> Result<Self, Error> {
        options.check()?;
        let (layout, len) = Layout::plan(&options);
        let memory = DriverMemory::new("ginnel-volume-bench", len)?;
        layout.write_lists(&memory, &options);
        let device = Device::open(&options, &memory)?;
        let start = Start { options: &options, memory: &memory, layout: &layout, device: &device };
        let Started { admin, disk, serial, exponent, doorbells, rings } = start.start()?;
        let queue = |(index, rings)| new_queue(&options, &memory, &layout, exponent, index, rings);
        let queues = rings.into_iter().enumerate().map(queue).collect::<Result<_, _>>()?;
        Ok(Self { options, memory, layout, device, admin, disk, serial, doorbells, queues })
    }

    /// Connects as [`NvmeClient::connect`] does, and retries for at most `limit` while there is no server.
    pub fn connect_within(options: NvmeOptions, limit: Duration) -> Result<Self, Error> {
        retry(limit, || Self::connect(options.clone()))
    }

    /// Returns how the doorbells of the I/O queues are rung.
    pub fn doorbells(&self) -> Doorbells {
        self.doorbells
    }

    /// Returns one pair of queues. Panics if `index` is out of range.
    pub fn queue(&mut self, index: usize) -> &mut Queue<NvmeTransport> {
        &mut self.queues[index]
    }

    /// Returns the connection, over which tests send what QEMU sends. Queues with trapped doorbells wait while it is
    /// locked.
    pub fn connection(&self) -> MutexGuard<'_, Client> {
        self.device.registers.connection()
    }

    /// Returns the file of the guest's memory.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Executes any admin command. Its identifier is chosen here.
    pub fn admin(&mut self, command: Command) -> Result<Completion, Error> {
        self.admin.call(command, self.options.patience)
    }

    /// Submits any admin command, and returns its identifier.
    pub fn submit_admin(&mut self, command: Command) -> Result<u16, Error> {
        self.admin.submit(command)
    }

    /// Returns the next completion of a submitted admin command, if there is one.
    pub fn poll_admin(&mut self) -> Result<Option<Completion>, Error> {
        self.admin.poll()
    }

    /// Turns the disk's write cache on or off (Set Features). Returns the completion.
    pub fn set_write_cache(&mut self, on: bool) -> Result<Completion, Error> {
        let set = command(Opcode::SET_FEATURES);
        self.admin(Command { nsid: 0, cdw10: Feature::WRITE_CACHE.0.into(), cdw11: on.into(), ..set })
    }

    /// Resets the controller with its register, and starts it again. Afterwards all requests that were in flight are in
    /// flight again.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.device.disable()?;
        self.start_again()
    }

    /// Resets the device, as QEMU does when the VM is reset, and starts the controller again, as [`NvmeClient::reset`] does.
    pub fn reset_device(&mut self) -> Result<(), Error> {
        self.connection().reset()?;
        self.start_again()
    }

    /// Connects again, as a VM to which the device is plugged again does. Makes one attempt. Afterwards all requests that
    /// were in flight are in flight again.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        self.device = Device::open(&self.options, &self.memory)?;
        self.start_again()
    }

    /// Connects again as [`NvmeClient::reconnect`] does, and retries for at most `limit` while there is no server.
    pub fn reconnect_within(&mut self, limit: Duration) -> Result<(), Error> {
        retry(limit, || self.reconnect())
    }

    /// Shuts the controller down, as a driver does before the VM is switched off, and closes the connection.
    pub fn close(self) -> Result<(), Error> {
        self.device.shut_down()
    }

    fn start_again(&mut self) -> Result<(), Error> {
        let Self { options, memory, layout, device, .. } = self;
        let Started { admin, disk, serial, doorbells, rings, .. } =
            Start { options, memory, layout, device }.start()?;
        if disk.block != self.disk.block {
            return Err(Error::Unsupported("the disk has blocks of another size than before".into()));
        }
        (self.admin, self.disk, self.serial, self.doorbells) = (admin, disk, serial, doorbells);
        for (queue, rings) in self.queues.iter_mut().zip(rings) {
            queue.transport.restart(rings);
            queue.put_again()?;
            queue.publish()?;
        }
        Ok(())
    }
}

impl Front for NvmeClient {
    type Transport = NvmeTransport;

    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn queues(&mut self) -> &mut [Queue<NvmeTransport>] {
        &mut self.queues
    }

    fn resume(&mut self, limit: Duration) -> Result<(), Error> {
        self.reconnect_within(limit)
    }

    /// The holder keeps it, and no client sees it.
    fn has_inflight_record(&self) -> bool {
        true
    }

    fn serial(&mut self) -> Result<String, Error> {
        Ok(self.serial.clone())
    }
}

fn new_queue(
    options: &NvmeOptions,
    memory: &DriverMemory,
    layout: &Layout,
    exponent: u8,
    index: usize,
    rings: Rings,
) -> Result<Queue<NvmeTransport>, Error> {
    let part = &layout.io[index];
    let slots = SlotMemory {
        buffers: memory.part(part.buffers)?,
        stride: stride(options.buffer),
        len: options.buffer,
        guest: part.buffers.guest(),
        lists: part.lists.guest(),
        exponent,
    };
    let buffers = Buffers { memory: memory.part(part.buffers)?, len: options.buffer };
    Ok(Queue::new(index, options.depth, buffers, NvmeTransport::new(index, options.depth, rings, slots)))
}

/// Makes attempts until one succeeds, or fails for another reason than that there is no server, for at most `limit`.
fn retry<T>(limit: Duration, mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let deadline = Instant::now() + limit;
    loop {
        match attempt() {
            Err(Error::Connect { .. } | Error::Gone) if Instant::now() < deadline => {
                // There is no notification when a server starts.
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}
