//! The vfio-user protocol (QEMU's `docs/interop/vfio-user.rst`): QEMU is the client of a process that serves a PCI device.
//!
//! ```text
//!  server    one client's socket: whole messages come out, replies go in; nothing blocks
//!  request   what a message asks for, checked
//!  region    the description of a region, as a client asks for it
//!  client    the other side, blocking
//! ```
//!
//! The crate contains no device and no policy. A client may be hostile: a message that cannot be told from its neighbours ends the
//! connection, and any other is a [`Request`] or an error number for the reply. Neither memory nor time depends on what
//! a client claims: bodies are bounded, longer ones are skipped, and a client that does not read its replies is not read
//! from either.
//!
//! # The server's side
//!
//! ```no_run
//! use ginnel_vfio_user::{Errno, Gone, Limits, Request, Server};
//!
//! /// Handles one message of a device without regions, if one has come.
//! fn turn(server: &mut Server) -> Result<(), Gone> {
//!     let Some(mut message) = server.receive()? else { return Ok(()) };
//!     let to = message.reply_to();
//!     let limits = Limits { fds: 8, data: 4096, maps: 1024 };
//!     match message.request() {
//!         Ok(Request::Version { .. }) => server.reply(to, &limits.version(), None),
//!         Ok(Request::Reset) => server.reply(to, &[], None),
//!         Ok(_) => server.fail(to, Errno::NOTSUP),
//!         Err(errno) => server.fail(to, errno),
//!     }
//!     server.flush()
//! }
//! ```

pub mod client;
mod region;
mod request;
mod server;

pub use region::Region;
pub use request::{Action, Irqs, Limits, MAX_DATA, Request};
pub use rustix::io::Errno;
pub use server::{Gone, MAX_BODY, MAX_FDS, Message, ReplyTo, Server};
