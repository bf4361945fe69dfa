//! Boots stock virtual machines for tests, benches and the demo. They have the distribution's kernel and QEMU, a file system of
//! busybox and of any host programs that a test needs, and an agent that runs commands.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use std::time::Duration;
//! use vmtest::TestBed;
//!
//! let bed = TestBed::new("hello")?;
//! let a = bed.vm("a").network().start()?; // both boot at once
//! let b = bed.vm("b").network().memory_mib(512).boot()?;
//! a.wait_ready()?;
//! let server = a.spawn("nc -l -p 7 -e echo hello")?;
//! let said = b.run(&format!("nc {} 7", a.address()?))?.ok()?.stdout;
//! assert_eq!(said, "hello\n");
//! server.wait(Duration::from_secs(5))?.ok()?;
//! # Ok(())
//! # }
//! ```
//!
//! A test bed takes the whole machine: only one exists at a time, and others wait for their turn. Run tests with
//! `--test-threads=1`; otherwise the waiting counts as time of the test.
//!
//! | environment | meaning |
//! |---|---|
//! | `GINNEL_ACCEL` | `kvm`, `tcg` or `auto` (the default: KVM if a guest boots with it) |
//! | `GINNEL_QEMU` | the QEMU to use |
//! | `GINNEL_KERNEL` | the kernel to boot: a `vmlinuz-RELEASE`, or the ELF file in it |
//! | `GINNEL_MODULES` | its `/lib/modules/RELEASE`, if that is not beside it as in a package |
//! | `GINNEL_VM_CACHE` | where kernel and base image are kept; `vm-cache` in cargo's target folder if not set |
//! | `GINNEL_NO_SKIP` | `1`: a test that would be skipped (`kit::require!`) fails |

mod accel;
mod agent_connection;
mod artifact;
mod cache;
mod cpio;
pub mod guest_program;
mod image;
pub mod installation;
mod kernel;
mod libs;
mod modules;
pub mod mpi;
mod net;
mod newer_qemu;
mod process;
#[allow(dead_code)] // each side uses its half
mod protocol;
mod qmp;
mod reaper;
mod record;
mod test_bed;
mod vm;
mod vmlinux;
mod wait;

pub use accel::Accel;
pub use artifact::artifact;
pub use image::base as prepare_image;
pub use kernel::Kernel;
pub use net::HOST as HOST_ADDRESS;
pub use newer_qemu::newer_qemu;
pub use process::HostJob;
pub use protocol::Exit;
pub use record::Output;
pub use test_bed::TestBed;
pub use vm::{Job, Vm, VmBuilder};
pub use wait::wait_until;
