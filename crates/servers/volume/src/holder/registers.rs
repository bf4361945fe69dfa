//! BAR 0 of the controller: its registers (NVMe 1.4, section 3.1) and doorbells.
//!
//! The registers are words of the state, so that an engine finds them however often it is replaced. The holder stores those that the
//! guest writes. CSTS is the engine's word: while there is no engine, it stays as it is, and the guest waits for it.

use ginnel_layout::nvme::{DOORBELLS, VS_1_4, cap, cc, register};
use ginnel_layout::nvme_state::{ACQ, AQA, ASQ, BUS_MASTER, CC, CSTS, INTMS, RESET_GENERATION};
use ginnel_nvme::{Constants, SetupError, State};
use ginnel_shmem::SharedMemory;

/// How long a guest waits for CSTS.RDY: 127.5 seconds, the longest time that CAP can say. A new engine may have to wait for its
/// predecessor's requests.
const TIMEOUT: u8 = 255;

/// The exponent of the stride of doorbells that are mapped: each has a page of its own.
const PAGE_STRIDE: u8 = 10;

/// What a controller is like for as long as its holder lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The number of I/O queues, 1 to [`MAX_QUEUES`](ginnel_layout::nvme_state::MAX_QUEUES).
    pub queues: u16,
    /// The slots of each queue, and the length of the longest queue: a power of two.
    pub slots: u16,
    /// Whether the guest writes the doorbells of its I/O queues in the file itself.
    pub mapped: bool,
}

impl Shape {
    /// Returns the register CAP.
    pub fn cap(self) -> u64 {
        let stride = if self.mapped { PAGE_STRIDE } else { 0 };
        cap::mqes(self.slots.into()) | cap::CQR | cap::CSS_NVM | cap::to(TIMEOUT) | cap::dstrd(stride)
    }

    /// Returns the bytes from one doorbell to the next.
    pub fn stride(self) -> usize {
        cap::stride(self.cap())
    }

    /// Returns the offset behind the last doorbell.
    pub fn end(self) -> usize {
        DOORBELLS + 2 * (usize::from(self.queues) + 1) * self.stride()
    }

    /// Returns the bytes of BAR 0, and of the file with the doorbells. Linux maps at least 8192.
    pub fn bar(self) -> usize {
        self.end().next_power_of_two().max(2 * DOORBELLS)
    }

    /// Returns the offset and the bytes of the part of BAR 0 that is mapped: the doorbells of the I/O queues.
    pub fn mapped_area(self) -> Option<(usize, usize)> {
        let first = DOORBELLS + 2 * self.stride();
        self.mapped.then(|| (first, self.end() - first))
    }

    /// Returns the constants of the state.
    pub fn constants(self) -> Constants {
        let Self { queues, slots, mapped } = self;
        Constants { queues, slots, mapped, cap: self.cap(), vs: VS_1_4 }
    }
}

/// What a write means for the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The engine must look at the state.
    pub control: bool,
    /// The queue whose doorbell was written.
    pub kick: Option<u16>,
    /// Why the write, or a part of it, was ignored. A driver that follows the specification does nothing like that.
    pub odd: Option<&'static str>,
}

/// The registers and doorbells.
pub struct Registers<M> {
    shape: Shape,
    state: State<M>,
    doorbells: M,
}

impl<M: SharedMemory> Registers<M> {
    /// Creates the state in `state`, which has [`State::len`] bytes, all zeros. `doorbells` has [`Shape::bar`].
    pub fn new(shape: Shape, state: M, doorbells: M) -> Result<Self, SetupError> {
        Ok(Self { shape, state: State::create(state, &shape.constants())?, doorbells })
    }

    /// Reads bytes of BAR 0. Doorbells, and registers that do not exist, are zeros.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let mut registers = [0; 0x38];
        let mut put = |at: usize, bytes: &[u8]| registers[at..][..bytes.len()].copy_from_slice(bytes);
        put(register::CAP, &self.shape.cap().to_le_bytes());
        put(register::VS, &VS_1_4.to_le_bytes());
        for (at, word) in [
            (register::INTMS, INTMS),
            (register::INTMC, INTMS),
            (register::CC, CC),
            (register::CSTS, CSTS),
            (register::AQA, AQA),
        ] {
            put(at, &(self.state.load(word) as u32).to_le_bytes());
        }
        for (at, word) in [(register::ASQ, ASQ), (register::ACQ, ACQ)] {
            put(at, &self.state.load(word).to_le_bytes());
        }
        into.fill(0);
        let from = usize::try_from(at).ok().and_then(|at| registers.get(at..)).unwrap_or_default();
        into.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }

    /// Writes to BAR 0: one aligned word of 32 or 64 bits. A write of another length is ignored.
    pub fn write(&self, at: u64, data: &[u8]) -> Written {
        let odd = |why| Written { odd: Some(why), ..Written::default() };
        let (words, rest) = data.as_chunks::<4>();
        if !rest.is_empty() || !(1..=2).contains(&words.len()) || !at.is_multiple_of(4) {
            return odd("it is no word of 32 or 64 bits");
        }
        let Ok(at) = usize::try_from(at) else { return odd("it is behind the last register") };
        if at >= DOORBELLS {
            return match words {
                [word] => self.doorbell(at, u32::from_le_bytes(*word)),
                _ => odd("a doorbell has 32 bits"),
            };
        }
        let mut all = Written::default();
        for (word, at) in words.iter().zip((at..).step_by(4)) {
            let one = self.register(at, u32::from_le_bytes(*word));
            all = Written { control: all.control | one.control, kick: None, odd: all.odd.or(one.odd) };
        }
        all
    }

    fn register(&self, at: usize, value: u32) -> Written {
        let state = &self.state;
        let quiet = Written::default();
        // The queues lie where these registers said when the controller was enabled.
        let is_enabled = self.is_enabled();
        let half = |word: usize, high: bool| {
            let (old, new) = (state.load(word), u64::from(value));
            let both = if high { old & 0xffff_ffff | new << 32 } else { old & !0xffff_ffff | new };
            state.store(word, both);
            quiet
        };
        match at {
            register::CC => self.configure(value),
            register::INTMS => {
                state.store(INTMS, state.load(INTMS) | u64::from(value));
                Written { control: true, ..quiet }
            }
            register::INTMC => {
                state.store(INTMS, state.load(INTMS) & !u64::from(value));
                Written { control: true, ..quiet }
            }
            register::AQA | register::ASQ..0x38 if is_enabled => Written {
                odd: Some("the admin queues cannot be changed while the controller is enabled"),
                ..quiet
            },
            register::AQA => {
                state.store(AQA, value.into());
                quiet
            }
            0x28 => half(ASQ, false),
            0x2c => half(ASQ, true),
            0x30 => half(ACQ, false),
            0x34 => half(ACQ, true),
            _ => Written { odd: Some("the register cannot be written"), ..quiet },
        }
    }

    /// Returns whether the guest wants the controller to be enabled.
    pub fn is_enabled(&self) -> bool {
        self.state.load(CC) as u32 & cc::EN != 0
    }

    fn configure(&self, value: u32) -> Written {
        let old = self.state.load(CC) as u32;
        if old == value {
            return Written::default();
        }
        if old & cc::EN != 0 && value & cc::EN == 0 {
            self.next_generation();
        }
        self.state.store(CC, value.into());
        Written { control: true, ..Written::default() }
    }

    fn doorbell(&self, at: usize, value: u32) -> Written {
        let stride = self.shape.stride();
        let number = (at - DOORBELLS) / stride;
        let queue = u16::try_from(number / 2).ok().filter(|queue| *queue <= self.shape.queues);
        let Some(queue) = queue.filter(|_| (at - DOORBELLS).is_multiple_of(stride)) else {
            return Written { odd: Some("there is no such doorbell"), ..Written::default() };
        };
        // ORDER nvme.doorbell: the commands before the tail were written by the guest before it wrote this doorbell, and QEMU has told
        // it since. Pairs with: the device's load of the doorbell (ginnel_nvme, doorbell.rs).
        self.doorbells.store_release_u32(at, value);
        Written { kick: Some(queue), ..Written::default() }
    }

    fn next_generation(&self) {
        self.state.store(RESET_GENERATION, self.state.load(RESET_GENERATION).wrapping_add(1));
    }

    /// Resets what the guest has written. The engine must look at the state.
    pub fn reset(&self) {
        // Before the generation, so that an engine that sees it sees a controller that is not enabled.
        for word in [CC, AQA, ASQ, ACQ, INTMS] {
            self.state.store(word, 0);
        }
        self.next_generation();
    }

    /// Says whether the device may access the guest's memory. Returns whether that is new; then the engine must look at the state.
    pub fn set_bus_master(&self, on: bool) -> bool {
        let old = self.state.load(BUS_MASTER) != 0;
        self.state.store(BUS_MASTER, on.into());
        old != on
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::Mapping;

    const SHADOW: Shape = Shape { queues: 2, slots: 64, mapped: false };
    const MAPPED: Shape = Shape { mapped: true, ..SHADOW };

    fn registers(shape: Shape) -> Registers<Mapping> {
        let state = Mapping::anonymous(State::<Mapping>::len(shape.queues, shape.slots)).unwrap();
        Registers::new(shape, state, Mapping::anonymous(shape.bar()).unwrap()).unwrap()
    }

    fn read<const N: usize>(registers: &Registers<Mapping>, at: usize) -> [u8; N] {
        let mut bytes = [0xee; N];
        registers.read(at as u64, &mut bytes);
        bytes
    }

    fn u32_at(registers: &Registers<Mapping>, at: usize) -> u32 {
        u32::from_le_bytes(read(registers, at))
    }

    const QUIET: Written = Written { control: false, kick: None, odd: None };
    const CONTROL: Written = Written { control: true, ..QUIET };

    #[test]
    fn bar_0_has_room_for_all_doorbells() {
        assert_eq!((SHADOW.stride(), SHADOW.bar(), SHADOW.mapped_area()), (4, 0x2000, None));
        assert_eq!((MAPPED.stride(), MAPPED.end(), MAPPED.bar()), (4096, 0x7000, 0x8000));
        assert_eq!(MAPPED.mapped_area(), Some((0x3000, 0x4000)));
        let most = Shape { queues: 64, ..MAPPED };
        assert_eq!((most.end(), most.bar()), (0x1000 + 130 * 4096, 1 << 20));
    }

    #[test]
    fn the_guest_enables_and_resets_the_controller() {
        let registers = registers(SHADOW);
        let cap = u64::from_le_bytes(read(&registers, register::CAP));
        assert_eq!((cap & 0xffff, cap >> 37 & 1, cap >> 24 & 0xff), (63, 1, 255));
        assert_eq!(u32_at(&registers, register::VS), VS_1_4);
        assert_eq!(registers.write(0x24, &0x1f_001fu32.to_le_bytes()), QUIET);
        assert_eq!(registers.write(0x28, &0x1234_5678_9000u64.to_le_bytes()), QUIET);
        assert_eq!(registers.write(0x30, &0xa000u32.to_le_bytes()), QUIET);
        assert_eq!(registers.write(0x34, &1u32.to_le_bytes()), QUIET);
        assert_eq!(registers.write(0x14, &cc::enable().to_le_bytes()), CONTROL);
        assert_eq!(registers.write(0x14, &cc::enable().to_le_bytes()), QUIET, "nothing is new");
        assert_eq!(registers.state.load(ASQ), 0x1234_5678_9000);
        assert_eq!(registers.state.load(ACQ), 0x1_0000_a000);
        assert_eq!(u32_at(&registers, register::AQA), 0x1f_001f);
        for at in [0x24, 0x28, 0x34] {
            assert!(registers.write(at, &[0; 4]).odd.is_some(), "{at:#x} while it is enabled");
        }
        assert_eq!(registers.state.load(RESET_GENERATION), 0);
        assert_eq!(registers.write(0x14, &(cc::enable() | 1 << 14).to_le_bytes()), CONTROL, "shutdown");
        assert_eq!(registers.state.load(RESET_GENERATION), 0);
        assert_eq!(registers.write(0x14, &[0; 4]), CONTROL);
        assert_eq!(registers.state.load(RESET_GENERATION), 1);
        assert_eq!(registers.state.load(ASQ), 0x1234_5678_9000, "the admin queues stay (7.3.2)");
        registers.reset();
        assert_eq!((registers.state.load(ASQ), registers.state.load(RESET_GENERATION)), (0, 2));
        assert!(registers.set_bus_master(true) && !registers.set_bus_master(true));
    }

    #[test]
    fn the_status_is_the_engines() {
        let registers = registers(SHADOW);
        registers.state.store(CSTS, 1);
        assert_eq!(u32_at(&registers, register::CSTS), 1);
        assert!(registers.write(0x1c, &[0xff; 4]).odd.is_some());
        registers.reset();
        assert_eq!(u32_at(&registers, register::CSTS), 1);
        registers.write(0x0c, &5u32.to_le_bytes());
        registers.write(0x10, &4u32.to_le_bytes());
        assert_eq!((u32_at(&registers, 0x0c), u32_at(&registers, 0x10)), (1, 1));
    }

    #[test]
    fn doorbells_are_stored_and_name_their_queue() {
        for shape in [SHADOW, MAPPED] {
            let registers = registers(shape);
            for doorbell in 0..6 {
                let at = DOORBELLS + doorbell * shape.stride();
                let written = registers.write(at as u64, &(7 + doorbell as u32).to_le_bytes());
                assert_eq!(written, Written { kick: Some(doorbell as u16 / 2), ..QUIET });
                assert_eq!(registers.doorbells.load_acquire_u32(at), 7 + doorbell as u32);
                assert_eq!(u32_at(&registers, at), 0);
            }
            for (at, len) in [(shape.end(), 4), (DOORBELLS, 8), (DOORBELLS, 2), (DOORBELLS + 2, 4)] {
                let written = registers.write(at as u64, &vec![1; len]);
                assert!(written.odd.is_some() && written.kick.is_none(), "{at:#x}, {len}: {written:?}");
            }
        }
        let registers = registers(MAPPED);
        assert!(registers.write(DOORBELLS as u64 + 4, &[0; 4]).odd.is_some(), "between two doorbells");
    }

    #[test]
    fn any_access_is_possible() {
        let registers = registers(SHADOW);
        for at in (0..0x50).chain([0xfff, 0x1fff, 0x2000, u64::MAX]) {
            for len in 0..20 {
                registers.write(at, &vec![0xff; len]);
                registers.read(at, &mut vec![0; len]);
            }
        }
        // Eight bytes over two registers are two words.
        registers.reset();
        assert_eq!(registers.write(0x10, &[0; 8]), CONTROL);
    }
}
