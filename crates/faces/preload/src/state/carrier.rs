//! What carries a direction.

/// The carrier of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Carrier {
    /// The kernel.
    Kernel,
    /// A thread checks whether the direction can change over, or is about to change it.
    Changing,
    /// For receiving: the kernel, up to the byte that the sender will name.
    Counted,
    /// The ring.
    Ring,
    /// For receiving: the kernel again, once the remaining wake bytes have been dropped.
    Returning,
}

impl Carrier {
    pub fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Kernel,
            1 => Self::Changing,
            2 => Self::Counted,
            3 => Self::Ring,
            _ => Self::Returning,
        }
    }
}
