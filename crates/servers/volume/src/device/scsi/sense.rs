//! Sense data: why a command was not executed (SPC-4, section 4.5).

/// A sense key with its additional sense code and qualifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key: the kind of error.
    pub key: u8,
    /// Additional sense code.
    pub code: u8,
    /// Additional sense code qualifier.
    pub qualifier: u8,
}

/// Length of sense data in fixed format, in bytes.
pub const SENSE: usize = 18;

impl Sense {
    /// No error.
    pub const NONE: Self = Self::of(0x0, 0x00, 0x00);
    /// A write failed.
    pub const WRITE_ERROR: Self = Self::of(0x3, 0x0c, 0x00);
    /// A read failed.
    pub const READ_ERROR: Self = Self::of(0x3, 0x11, 0x00);
    /// The parameter list is shorter than it says.
    pub const PARAMETER_LIST_LENGTH: Self = Self::of(0x5, 0x1a, 0x00);
    /// The unit does not support the command.
    pub const INVALID_COMMAND: Self = Self::of(0x5, 0x20, 0x00);
    /// The range extends beyond the end of the disk.
    pub const OUT_OF_RANGE: Self = Self::of(0x5, 0x21, 0x00);
    /// A field of the command has a value that is not supported.
    pub const INVALID_FIELD: Self = Self::of(0x5, 0x24, 0x00);
    /// There is no logical unit of this number.
    pub const NO_SUCH_UNIT: Self = Self::of(0x5, 0x25, 0x00);
    /// A field of the parameter list has a value that is not supported.
    pub const INVALID_PARAMETER: Self = Self::of(0x5, 0x26, 0x00);
    /// The capacity of the unit has changed.
    pub const CAPACITY_CHANGED: Self = Self::of(0x6, 0x2a, 0x09);
    /// The unit is read-only.
    pub const WRITE_PROTECTED: Self = Self::of(0x7, 0x27, 0x00);
    /// There is no space for a write to a thin-provisioned unit.
    pub const NO_SPACE: Self = Self::of(0x7, 0x27, 0x07);

    const fn of(key: u8, code: u8, qualifier: u8) -> Self {
        Self { key, code, qualifier }
    }

    /// Returns the sense data in fixed format, for the current command.
    pub fn bytes(self) -> [u8; SENSE] {
        let mut bytes = [0; SENSE];
        bytes[0] = 0x70;
        bytes[2] = self.key;
        bytes[7] = (SENSE - 8) as u8;
        bytes[12] = self.code;
        bytes[13] = self.qualifier;
        bytes
    }
}
