//! The PCI configuration space of the controller.
//!
//! ```text
//! 0x00  header: an NVMe controller with BAR 0 (registers and doorbells), BAR 4 (MSI-X table), BAR 5 (pending bits)
//! 0x40  power management: D0 and D3hot, without effect on the device
//! 0x50  PCI Express: an endpoint; QEMU adapts it to the bus on which it puts the device
//! 0x90  MSI-X
//! ```
//!
//! QEMU emulates most of it for the guest: base addresses, the MSI-X table, and the type of the PCI Express device. What a guest writes
//! comes here as well, and decides about bus mastering.

/// Vendor of the device: the letters "GN". It is not assigned by the PCI-SIG. NVMe drivers find a controller by its class, whoever made
/// it; those of Linux and Windows treat some vendors' devices in a special way, among them QEMU's own (1b36:0010), so this is
/// none of them.
pub const VENDOR: u16 = 0x4e47;
/// Device number.
pub const DEVICE: u16 = 0x0001;

/// Bytes of the configuration space.
pub const LEN: usize = 4096;
/// Bytes of BAR 4 and BAR 5.
pub const MSIX_BAR: u64 = 4096;
/// Number of the BAR with the MSI-X table.
pub const TABLE_BAR: u32 = 4;
/// Number of the BAR with the pending bits.
pub const PENDING_BAR: u32 = 5;

// Offsets, from the PCI Express base specification, section 7.5.
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CACHE_LINE_SIZE: usize = 0x0c;
const BARS: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const POWER: usize = 0x40;
const EXPRESS: usize = 0x50;
const MSIX: usize = 0x90;

/// Bit of the command register: the device may access memory.
const BUS_MASTER: u8 = 1 << 2;

/// The configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: Vec<u8>,
    /// What the bytes are after a reset.
    initial: Vec<u8>,
    /// The bits that can be written.
    writable: Vec<u8>,
}

impl ConfigSpace {
    /// Returns the configuration space of a controller whose BAR 0 has `bar` bytes, a power of two up to 2^31, with
    /// so many interrupt vectors, 1 to 256.
    pub fn new(bar: u64, vectors: u16) -> Self {
        let mut new = Self { bytes: vec![0; LEN], initial: Vec::new(), writable: vec![0; LEN] };
        new.put(0, &VENDOR.to_le_bytes(), &[0; 2]);
        new.put(2, &DEVICE.to_le_bytes(), &[0; 2]);
        // Memory space, bus master, parity errors, system errors, interrupt disable.
        new.put(COMMAND, &[0; 2], &[0x46, 0x05]);
        // There are capabilities.
        new.put(STATUS, &[0x10, 0], &[0; 2]);
        new.put(REVISION, &(ginnel_layout::nvme::PCI_CLASS << 8).to_le_bytes(), &[0; 4]);
        new.put(CACHE_LINE_SIZE, &[0; 4], &[0xff, 0, 0, 0]);
        // 64 bits wide. The bits that say how large it is cannot be written.
        new.put(BARS, &4u64.to_le_bytes(), &(!(bar - 1)).to_le_bytes());
        for number in [TABLE_BAR, PENDING_BAR] {
            let size = (!(MSIX_BAR - 1) as u32).to_le_bytes();
            new.put(BARS + 4 * number as usize, &[0; 4], &size);
        }
        new.put(SUBSYSTEM, &VENDOR.to_le_bytes(), &[0; 2]);
        new.put(SUBSYSTEM + 2, &DEVICE.to_le_bytes(), &[0; 2]);
        new.put(CAPABILITIES, &[POWER as u8], &[0]);
        new.put(INTERRUPT_LINE, &[0; 4], &[0xff, 0, 0, 0]);
        // Version 3 without any PME; the device keeps its state in D3hot.
        new.put(POWER, &[0x01, EXPRESS as u8, 0x03, 0, 0x08, 0], &[0, 0, 0, 0, 0x03, 0]);
        // Version 2, endpoint. Role-based error reporting; one lane of 2.5 GT/s; completion timeouts can be disabled.
        new.put(EXPRESS, &[0x10, MSIX as u8, 0x02, 0], &[0; 4]);
        new.put(EXPRESS + 0x04, &0x8000u32.to_le_bytes(), &[0; 4]);
        new.put(EXPRESS + 0x08, &[0; 2], &[0xef, 0x7f]);
        new.put(EXPRESS + 0x0c, &0x11u32.to_le_bytes(), &[0; 4]);
        new.put(EXPRESS + 0x12, &0x11u16.to_le_bytes(), &[0; 2]);
        new.put(EXPRESS + 0x24, &0x10u32.to_le_bytes(), &[0; 4]);
        // Function mask and enable can be written.
        let size = (vectors - 1).to_le_bytes();
        new.put(MSIX, &[0x11, 0, size[0], size[1]], &[0, 0, 0, 0xc0]);
        new.put(MSIX + 4, &TABLE_BAR.to_le_bytes(), &[0; 4]);
        new.put(MSIX + 8, &PENDING_BAR.to_le_bytes(), &[0; 4]);
        new.initial.clone_from(&new.bytes);
        new
    }

    fn put(&mut self, at: usize, bytes: &[u8], writable: &[u8]) {
        self.bytes[at..][..bytes.len()].copy_from_slice(bytes);
        self.writable[at..][..writable.len()].copy_from_slice(writable);
    }

    /// Becomes what it was at first.
    pub fn reset(&mut self) {
        self.bytes.clone_from(&self.initial);
    }

    /// Reads bytes. Those behind the end are zeros.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        into.fill(0);
        let from = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..)).unwrap_or_default();
        into.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }

    /// Writes the bits that can be written.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        let Ok(at) = usize::try_from(at) else { return };
        let places = self.bytes.iter_mut().zip(&self.writable).skip(at);
        for ((to, writable), from) in places.zip(data) {
            *to = *to & !writable | from & writable;
        }
    }

    /// Returns whether the device may access the guest's memory.
    pub fn is_bus_master(&self) -> bool {
        self.bytes[COMMAND] & BUS_MASTER != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<const N: usize>(config: &ConfigSpace, at: usize) -> [u8; N] {
        let mut bytes = [0xee; N];
        config.read(at as u64, &mut bytes);
        bytes
    }

    fn u32_at(config: &ConfigSpace, at: usize) -> u32 {
        u32::from_le_bytes(read(config, at))
    }

    #[test]
    fn the_list_of_capabilities_ends() {
        let config = ConfigSpace::new(0x2000, 3);
        let mut at = usize::from(read::<1>(&config, CAPABILITIES)[0]);
        let mut seen = Vec::new();
        while at != 0 {
            let [id, next] = read(&config, at);
            seen.push(id);
            at = next.into();
        }
        assert_eq!(seen, [0x01, 0x10, 0x11]);
        assert_eq!(u32_at(&config, 0), 0x0001_4e47);
        assert_eq!(u32_at(&config, REVISION) >> 8, 0x01_08_02);
        assert_eq!(u32_at(&config, MSIX) >> 16, 2);
        assert_eq!(u32_at(&config, 0x100), 0, "no extended capabilities");
    }

    #[test]
    fn bars_tell_their_sizes() {
        let mut config = ConfigSpace::new(1 << 20, 65);
        for bar in 0..6 {
            config.write(BARS as u64 + 4 * bar, &[0xff; 4]);
        }
        let bars: [u32; 6] = std::array::from_fn(|bar| u32_at(&config, BARS + 4 * bar));
        assert_eq!(bars, [0xfff0_0004, 0xffff_ffff, 0, 0, 0xffff_f000, 0xffff_f000]);
    }

    #[test]
    fn only_some_bits_can_be_written() {
        let mut config = ConfigSpace::new(0x2000, 3);
        let before = config.clone();
        assert!(!config.is_bus_master());
        config.write(COMMAND as u64, &[0x04]);
        assert!(config.is_bus_master());
        config.write(0, &[0xff; LEN]);
        assert_eq!(u32_at(&config, 0), 0x0001_4e47);
        assert_eq!(read(&config, COMMAND), [0x46, 0x05]);
        config.reset();
        assert_eq!(config.bytes, before.bytes);
        // Neither the end nor what lies behind it is a problem.
        config.write(LEN as u64 - 1, &[1; 8]);
        config.write(u64::MAX, &[1; 8]);
        assert_eq!((read(&config, LEN - 2), read(&config, LEN)), ([0; 4], [0; 4]));
    }
}
