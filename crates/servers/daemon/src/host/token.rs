//! The tokens of the poller.

use ginnel_broker::broker::ClientId;

/// The owner of a descriptor in the poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The attach socket.
    Listener,
    /// A connection to the attach socket.
    Client(ClientId),
    /// A process that is watched. The number of a watch is never used again, so an event that was fetched before its watch
    /// ended matches nothing.
    Process(u64),
    /// The socket of a VM.
    VmListener(u32),
    /// The connection to a VM's QEMU. An event of an earlier connection only causes a needless look at the present one.
    VmConnection(u32),
    /// The control socket of a VM's QEMU. Here, too, an event of an earlier connection is harmless.
    VmMonitor(u32),
    /// The host's daemon vector.
    HostVector,
    /// The connection to the keeper.
    Keeper,
    /// The inotify descriptor that says that the file of a segment was modified other than through a mapping.
    Files,
    /// A process that changes the file of a segment.
    FileWork(u64),
    /// A process that connects to the control socket of a VM's QEMU.
    Finder(u64),
    /// A helper for descriptors that programs have sent.
    Helper(u64),
    /// A process that looks for those that have segments.
    Look(u64),
    /// The descriptor that becomes readable when a signal has come.
    Signal,
    /// The one for SIGHUP.
    Hangup,
    /// The eventfd that says that the configuration has been read again.
    Reread,
}

const KIND_BITS: u32 = 8;

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        let (kind, number) = match token {
            Token::Listener => (0, 0),
            Token::Client(client) => (1, client.0),
            Token::Process(watch) => (2, watch),
            Token::Signal => (3, 0),
            Token::VmListener(member) => (4, member.into()),
            Token::VmConnection(member) => (5, member.into()),
            Token::HostVector => (7, 0),
            Token::Keeper => (8, 0),
            Token::VmMonitor(member) => (9, member.into()),
            Token::Files => (11, 0),
            Token::FileWork(number) => (12, number),
            Token::Helper(number) => (13, number),
            Token::Hangup => (14, 0),
            Token::Reread => (15, 0),
            Token::Look(number) => (16, number),
            Token::Finder(number) => (17, number),
        };
        number << KIND_BITS | kind
    }
}

impl Token {
    /// Returns what a number that the poller has reported means.
    pub fn parse(token: u64) -> Option<Self> {
        let number = token >> KIND_BITS;
        Some(match token & ((1 << KIND_BITS) - 1) {
            0 => Self::Listener,
            1 => Self::Client(ClientId(number)),
            2 => Self::Process(number),
            3 => Self::Signal,
            4 => Self::VmListener(u32::try_from(number).ok()?),
            5 => Self::VmConnection(u32::try_from(number).ok()?),
            7 => Self::HostVector,
            8 => Self::Keeper,
            9 => Self::VmMonitor(u32::try_from(number).ok()?),
            11 => Self::Files,
            12 => Self::FileWork(number),
            13 => Self::Helper(number),
            14 => Self::Hangup,
            15 => Self::Reread,
            16 => Self::Look(number),
            17 => Self::Finder(number),
            _ => return None,
        })
    }
}
