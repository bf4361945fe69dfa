//! The device as QEMU sees it: registers, interrupt vectors, mapped doorbells, and the guest's memory that it may use.

use crate::error::Error;
use crate::memory::{DriverMemory, GUEST};
use crate::nvme::options::NvmeOptions;
use ginnel_guest_memory::Area;
use ginnel_layout::nvme::{Aqa, cap, cc, csts, register};
use ginnel_layout::vfio_user::pci;
use ginnel_shmem::{Mapping, Protection};
use ginnel_vfio_user::Region;
use ginnel_vfio_user::client::{self, Client};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Offset of the command register in PCI configuration space, and a value that turns memory and bus mastering on and INTx off.
const PCI_COMMAND: u64 = 4;
const ENABLED: u16 = 0x0406;

/// The registers in BAR 0. Each access is a message, as it is when the guest's access is trapped.
#[derive(Clone)]
pub(crate) struct Registers {
    connection: Arc<Mutex<Client>>,
    socket: Arc<OwnedFd>,
    /// Whether a write waits for its answer, as QEMU's does if a part of the region can be mapped.
    waits: bool,
}

impl Registers {
    pub fn connection(&self) -> MutexGuard<'_, Client> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn read_u32(&self, at: usize) -> Result<u32, Error> {
        let mut bytes = [0; 4];
        self.connection().read(pci::BAR0, at as u64, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub fn read_u64(&self, at: usize) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.connection().read(pci::BAR0, at as u64, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub fn write_u32(&self, at: usize, value: u32) -> Result<(), Error> {
        self.write(at, &value.to_le_bytes())
    }

    pub fn write_u64(&self, at: usize, value: u64) -> Result<(), Error> {
        self.write(at, &value.to_le_bytes())
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let mut connection = self.connection();
        if self.waits {
            connection.write(pci::BAR0, at as u64, bytes)?;
        } else {
            connection.post(pci::BAR0, at as u64, bytes)?;
        }
        Ok(())
    }

    /// Returns whether the controller says that it has failed.
    pub fn has_failed(&self) -> bool {
        matches!(self.read_u32(register::CSTS), Ok(csts) if csts & csts::CFS != 0)
    }
}

/// A connected device.
pub(crate) struct Device {
    pub registers: Registers,
    /// The register CAP.
    pub cap: u64,
    /// The interrupts' eventfds: one for the admin queue, and one for each pair of I/O queues.
    pub vectors: Vec<Arc<OwnedFd>>,
    bar: Region,
    /// The doorbells that can be mapped, at their offsets in BAR 0.
    doorbells: Option<Mapping>,
    patience: Duration,
}

impl Device {
    /// Connects, as QEMU does when a VM starts. Makes one attempt.
    pub fn open(options: &NvmeOptions, memory: &DriverMemory) -> Result<Self, Error> {
        let mut client = connect(&options.socket, options.patience)?;
        client.device_info()?;
        let (bar, file) = client.region(pci::BAR0)?;
        let doorbells = match file.filter(|_| !bar.areas.is_empty()) {
            Some(file) => Some(map(&file, bar.size)?),
            None => None,
        };
        let wanted = u32::from(options.queues) + 1;
        let found = client.irqs(pci::MSIX)?.count;
        if found < wanted {
            return Err(Error::Unsupported(format!("the device has {found} vectors and not {wanted}")));
        }
        client.map(GUEST, memory.len(), true, Some((memory.file(), 0)))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let vector = |_| Ok(Arc::new(eventfd(0, flags).map_err(Error::io("making an eventfd"))?));
        let vectors = (0..wanted).map(vector).collect::<Result<Vec<_>, Error>>()?;
        for (number, vector) in (0..).zip(&vectors) {
            client.set_vectors(number, &[&**vector])?;
        }
        let socket = client.as_fd().try_clone_to_owned();
        let socket = Arc::new(socket.map_err(|source| Error::Io { what: "duplicating the socket", source })?);
        let waits = !bar.areas.is_empty();
        let registers = Registers { connection: Arc::new(Mutex::new(client)), socket, waits };
        let cap = registers.read_u64(register::CAP)?;
        Ok(Self { registers, cap, vectors, bar, doorbells, patience: options.patience })
    }

    /// Returns the mapped doorbell at an offset of BAR 0, if it can be mapped.
    pub fn doorbell(&self, at: usize) -> Option<Area<Mapping>> {
        let memory = self.doorbells.clone()?;
        let (at_word, end) = (at as u64, at as u64 + 4);
        let contains =
            |area: &ginnel_layout::vfio_user::Area| area.offset <= at_word && end <= area.offset + area.size;
        self.bar.areas.iter().any(contains).then_some(Area { memory, at, len: 4, guest: at_word })
    }

    /// Resets the controller if it is enabled, and waits until it has stopped.
    pub fn disable(&self) -> Result<(), Error> {
        self.registers.write_u32(register::CC, 0)?;
        self.wait_for("to stop", |csts| csts & csts::RDY == 0)
    }

    /// Enables the controller with these admin queues, and waits until it is ready.
    pub fn enable(&self, entries: u16, submissions: u64, completions: u64) -> Result<(), Error> {
        let registers = &self.registers;
        registers.connection().write(pci::CONFIG, PCI_COMMAND, &ENABLED.to_le_bytes())?;
        self.disable()?;
        registers.write_u32(register::AQA, Aqa::new(entries.into(), entries.into()).0)?;
        registers.write_u64(register::ASQ, submissions)?;
        registers.write_u64(register::ACQ, completions)?;
        registers.write_u32(register::CC, cc::enable())?;
        self.wait_for("to become ready", |csts| csts & (csts::RDY | csts::CFS) != 0)?;
        if registers.has_failed() {
            return Err(Error::Controller("it has failed (CSTS.CFS); its log says why".into()));
        }
        Ok(())
    }

    /// Tells the controller to shut down, and waits until it has done so.
    pub fn shut_down(&self) -> Result<(), Error> {
        // CC.SHN: a normal shutdown.
        self.registers.write_u32(register::CC, cc::enable() | 1 << 14)?;
        self.wait_for("to shut down", |csts| csts & csts::SHST == csts::SHST_COMPLETE)
    }

    fn wait_for(&self, what: &str, is_so: impl Fn(u32) -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + self.patience;
        while !is_so(self.registers.read_u32(register::CSTS)?) {
            if Instant::now() > deadline {
                let patience = self.patience;
                return Err(Error::Controller(format!("{patience:?} are not enough for it {what}")));
            }
            // A driver has nothing to wait on but the register.
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    /// Returns the number of bytes from one doorbell to the next.
    pub fn stride(&self) -> usize {
        cap::stride(self.cap)
    }
}

fn connect(path: &Path, patience: Duration) -> Result<Client, Error> {
    let socket = std::os::unix::net::UnixStream::connect(path);
    let socket = socket.map_err(|source| Error::Connect { path: path.into(), source })?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience)).map_err(Error::io("limiting the socket"))?;
    let mut client = Client::new(socket);
    client.set_patience(Some(patience)).map_err(client::Error::Io)?;
    client.negotiate()?;
    Ok(client)
}

fn map(file: &OwnedFd, size: u64) -> Result<Mapping, Error> {
    // The offset of an area is also its offset in the file.
    let mapped = usize::try_from(size)
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidData))
        .and_then(|size| Mapping::of_file(file, 0, size, Protection::ReadWrite));
    mapped.map_err(|source| Error::Io { what: "mapping the doorbells", source })
}
