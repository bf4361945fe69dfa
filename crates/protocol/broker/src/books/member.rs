//! A member, as the books have it.

use crate::declared::VmSpec;
use crate::process::Process;
use crate::text::Hex16;
use crate::told::Told;
use ginnel_layout::Name;

/// A member: the host or a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The member number.
    pub number: u32,
    /// The member's name.
    pub name: Name,
    /// The declaration, if the member was declared at run time.
    pub runtime: Option<VmSpec>,
    /// The member is not declared any more; only its number is remembered.
    pub retired: bool,
    /// The member's QEMU, while it runs.
    pub qemu: Option<Qemu>,
    /// The guest, once its daemon has had a session.
    pub session: Option<Session>,
}

/// A running QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Qemu {
    /// The process of QEMU.
    pub process: Process,
    /// The doorbells that QEMU has been told of.
    pub told: Told,
}

/// A running guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Session {
    /// The boot identity of the guest's kernel.
    pub boot_id: Hex16,
    /// Whether the guest can be interrupted.
    pub interrupts: bool,
}
