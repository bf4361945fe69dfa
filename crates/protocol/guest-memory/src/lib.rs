//! The memory of a guest, as a device in another process sees it: which bytes lie at a guest's address.
//!
//! A front end (of vhost-user or vfio-user) describes the memory as regions, each a file that the device maps. A request names its
//! data by guest addresses, which [`GuestMemory`] translates into [`Buffer`]s: pieces of one region each. A queue keeps the [`Area`]s in
//! which it lies.
//!
//! The guest can write any address into a request, and can change all bytes at any time. Each address is checked, and all access goes
//! through [`ginnel_shmem::SharedMemory`]. No function blocks or calls the kernel.

mod area;
mod memory;

pub use area::Area;
pub use memory::{Buffer, GuestMemory, MemoryError, Region};
