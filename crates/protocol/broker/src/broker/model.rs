//! A daemon without system calls, and hostile programs and VMs that talk to its broker.
//!
//! [`run`] reads steps from bytes, and panics as soon as one of the [`invariants`] does not hold. The fuzz target `broker` and the
//! test `hostile` use it. The [`server`] does with the broker's effects what the real one does, except that segments, journal and
//! sockets are in private memory; [`steps`] is what its neighbours may do: programs of several users of the host, the daemons of
//! three VMs, which say whatever they like, and an operator who restarts the daemon or lets the disk fill up.

mod invariants;
mod server;
mod steps;

use server::Server;
use std::collections::BTreeSet;

/// The most steps of an input. Longer lists find nothing that shorter ones do not, and take long under a sanitizer.
const MOST_STEPS: usize = 400;

/// The bytes of a step.
pub const STEP: usize = 8;

macro_rules! kinds {
    ($($(#[$doc:meta])* $Kind:ident,)*) => {
        /// What a step does.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Do {
            $($(#[$doc])* $Kind,)*
        }

        impl Do {
            /// All kinds of steps.
            pub const ALL: &[Self] = &[$(Self::$Kind,)*];
        }
    };
}

kinds! {
    /// A program of the host connects.
    Connect,
    /// A VM's daemon opens a connection.
    Open,
    /// A program says hello.
    Hello,
    /// A program attaches.
    Attach,
    /// A program attaches to an endpoint that is there already, perhaps that of another member.
    Return,
    /// A program listens.
    Listen,
    /// A program stops listening.
    Unlisten,
    /// A program connects to a listener.
    Channel,
    /// A program accepts a channel.
    Accepted,
    /// A program closes a channel.
    Close,
    /// A program continues with a channel.
    Resume,
    /// A program opens a lock.
    SyncOpen,
    /// A program closes a lock.
    SyncClose,
    /// A program unlinks a lock.
    SyncUnlink,
    /// A program makes a block.
    BlockCreate,
    /// A program opens a block.
    BlockOpen,
    /// A program resizes a block.
    BlockResize,
    /// A program gives a block a name.
    BlockLink,
    /// A program removes the name of a block.
    BlockUnlink,
    /// A program closes a block.
    BlockClose,
    /// A program grants rights to a block.
    BlockGrant,
    /// A program acknowledges that rights were taken away.
    BlockAck,
    /// A program asks for a readiness board.
    Board,
    /// A program detaches.
    Detach,
    /// A child joins.
    Join,
    /// A program asks for a hold.
    Hold,
    /// A program asks for a doorbell.
    Bell,
    /// A program reports or withdraws a socket.
    Socket,
    /// A program asks for the state, or for something that only an administrator may do.
    Inspect,
    /// A program sends any bytes. They are the following steps.
    Raw,
    /// The next packet is changed before it is sent.
    Change,
    /// A connection ends.
    HangUp,
    /// A process of the host ends.
    End,
    /// A VM's daemon says anything. The contents are the following steps.
    Say,
    /// A VM's daemon says that a process owns an endpoint, or does not own it any more.
    Owner,
    /// A VM's daemon starts again, perhaps after the VM's kernel.
    Session,
    /// A VM ends, or its QEMU starts.
    Vm,
    /// The time of a hold is over.
    Time,
    /// The daemon cannot watch processes, or can again.
    Watch,
    /// The disk of the journal is full, fails, or has room again.
    Disk,
    /// The daemon is restarted, perhaps after a reboot.
    Restart,
    /// The file of a segment is truncated or restored.
    Truncate,
    /// A segment is removed and declared again, or the rights of its members change.
    Declare,
    /// The daemon does what it does in the background.
    Work,
}

/// A step: what it does, who does it, and numbers as arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// What the step does.
    pub what: Do,
    /// Who does it: an index of all that exist.
    pub who: u8,
    /// The first argument.
    pub a: u8,
    /// The second argument.
    pub b: u8,
    /// The third argument.
    pub n: u32,
}

impl Step {
    fn read(&[what, who, a, b, n @ ..]: &[u8; STEP]) -> Self {
        let what = Do::ALL[usize::from(what) % Do::ALL.len()];
        Self { what, who, a, b, n: u32::from_le_bytes(n) }
    }

    /// Returns the step as bytes.
    pub fn bytes(self) -> [u8; STEP] {
        let [n0, n1, n2, n3] = self.n.to_le_bytes();
        [self.what as u8, self.who, self.a, self.b, n0, n1, n2, n3]
    }
}

/// Runs steps. The first byte says how the daemon works; each eight bytes after it are a step. Returns the kinds of all packets
/// that programs were sent.
pub fn run(input: &[u8]) -> BTreeSet<u16> {
    let Some((&first, rest)) = input.split_first() else { return BTreeSet::new() };
    let mut server = Server::new(first);
    let mut rest = rest.as_chunks::<STEP>().0.iter().take(MOST_STEPS);
    while let Some(bytes) = rest.next() {
        server.step(Step::read(bytes), &mut rest);
        server.check();
    }
    server.end();
    server.told
}
