//! Errors: a number for programs, a fixed text for each number, and a detailed text of the last error of a thread.

use Status::*;
use ginnel::{Error, ErrorCode};
use ginnel_cache_client::{Error as CacheError, NotACache};
use libc::c_int;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

/// The result of most functions: GINNEL_OK, or a negative number that tells what went wrong. A number never changes and
/// never gets another meaning; later versions may add numbers. They are grouped:
///
///   -1 ...    not possible at the moment, or not there; nothing is wrong
///   -101 ...  the channel, lock or job has ended, or is broken
///   -201 ...  a mistake in the call
///   -300 ...  the daemon or a server refuses
///   -401 ...  a daemon or server is missing, or this machine lacks something
///   -501 ...  a bug in this library
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Status {
    /// Success.
    GINNEL_OK = 0,

    /// The operation is not possible now, and the handle is non-blocking: wait for its file descriptor and try again.
    GINNEL_ERR_WOULD_BLOCK = -1,
    /// The timeout expired. Nothing was sent or received; the caller can try again.
    GINNEL_ERR_TIMED_OUT = -2,
    /// The cache has no item with this key.
    GINNEL_ERR_NO_ITEM = -3,
    /// The cache already has an item with this key, or has none where one is needed.
    GINNEL_ERR_NOT_STORED = -4,
    /// The cache's item has another version by now.
    GINNEL_ERR_CHANGED = -5,

    /// The peer has finished sending, and everything that it sent has been received.
    GINNEL_ERR_FINISHED = -101,
    /// The peer has closed the channel and does not receive any more.
    GINNEL_ERR_CLOSED = -102,
    /// The peer's process or its VM has died. Everything that it sent before can be received first.
    GINNEL_ERR_PEER_DEAD = -103,
    /// A member of the segment has written something that no correct program writes. The object is unusable now.
    GINNEL_ERR_CORRUPT = -104,
    /// The segment's memory is gone: its file was truncated, or the daemon has declared the segment broken.
    GINNEL_ERR_BROKEN = -105,
    /// A writer has died while it held the read-write lock: lock it for writing, repair the data, and mark them
    /// consistent.
    GINNEL_ERR_OWNER_DIED = -106,
    /// The lock's owner died, and the next owner unlocked it without marking the data consistent: unlink the lock and
    /// create a new one.
    GINNEL_ERR_NOT_RECOVERABLE = -107,
    /// A party of the barrier has died.
    GINNEL_ERR_BARRIER_BROKEN = -108,
    /// The endpoint was declared dead, and its locks and other objects were handed on: attach again.
    GINNEL_ERR_FENCED = -109,
    /// A farm's job had no worker for as long as its manager waits.
    GINNEL_ERR_NO_WORKER = -110,
    /// A piece of a farm's job failed, or its worker died, on each attempt.
    GINNEL_ERR_PIECE = -111,
    /// A side of the channel has called ginnel_channel_abort(). Data that was sent and not received is lost.
    GINNEL_ERR_ABORTED = -112,
    /// The cache's server has not answered. It may or may not have done what it was asked for.
    GINNEL_ERR_LOST = -113,

    /// A pointer that must not be NULL is NULL.
    GINNEL_ERR_NULL = -201,
    /// An argument is outside its range, or not a handle of its type.
    GINNEL_ERR_INVALID = -202,
    /// Not a valid name or address.
    GINNEL_ERR_NAME = -203,
    /// The channel, listener or lock is of another kind.
    GINNEL_ERR_KIND = -204,
    /// The message is longer than the channel permits (open it with a larger capacity), or the value is longer than an
    /// item may be.
    GINNEL_ERR_TOO_LONG = -205,
    /// The message is longer than the buffer, and stays in the channel; or the value is longer than the buffer.
    GINNEL_ERR_BUFFER_TOO_SMALL = -206,
    /// The program has sent after ginnel_channel_finish().
    GINNEL_ERR_AFTER_FINISH = -207,
    /// A claim is open: send, commit or abort it first.
    GINNEL_ERR_CLAIMED = -208,
    /// Nothing is claimed, or nothing was peeked at.
    GINNEL_ERR_NOT_CLAIMED = -209,
    /// The range is not inside the block.
    GINNEL_ERR_RANGE = -210,
    /// This handle does not hold the lock.
    GINNEL_ERR_NOT_OWNER = -211,
    /// This handle already holds the lock.
    GINNEL_ERR_DEADLOCK = -212,
    /// The semaphore would have more permits than its limit.
    GINNEL_ERR_OVERFLOW = -213,
    /// A function of the program has ended the farm's job.
    GINNEL_ERR_CALLBACK = -214,

    /// The daemon refuses, for a reason that this version of the library does not know.
    GINNEL_ERR_REFUSED_OTHERWISE = -300,
    /// The daemon does not understand the request.
    GINNEL_ERR_NOT_UNDERSTOOD = -301,
    /// Daemon and library have no common protocol version.
    GINNEL_ERR_VERSION = -302,
    /// There is no segment of that name, or this machine is not a member of it.
    GINNEL_ERR_NO_SEGMENT = -303,
    /// This user or program is not permitted to do this.
    GINNEL_ERR_DENIED = -304,
    /// No program listens at that name.
    GINNEL_ERR_REFUSED = -305,
    /// The name is already in use.
    GINNEL_ERR_IN_USE = -306,
    /// A limit is reached: endpoints, channels, bytes, or connections that wait to be accepted.
    GINNEL_ERR_LIMIT = -307,
    /// The segment has not enough free memory.
    GINNEL_ERR_NO_MEMORY = -308,
    /// The daemon does not know this endpoint any more.
    GINNEL_ERR_STALE = -309,
    /// The daemon knows no such object.
    GINNEL_ERR_NOT_FOUND = -312,
    /// The host's daemon cannot be reached at the moment.
    GINNEL_ERR_UNAVAILABLE = -313,
    /// This machine may only read the segment; channels, locks and the creation of blocks need write access.
    GINNEL_ERR_READ_ONLY = -315,
    /// A quota is used up: bytes of memory, number of blocks, or open handles.
    GINNEL_ERR_QUOTA = -316,
    /// Another program has the block open in a way that excludes this, or the lock has as many handles as it may have.
    GINNEL_ERR_BUSY = -317,
    /// The handle was freed already.
    GINNEL_ERR_FREED = -318,
    /// The host's daemon cannot record the change, because its disk is full or fails. Nothing was changed.
    GINNEL_ERR_UNRECORDED = -319,
    /// The cache's server refuses; ginnel_last_error() returns its message.
    GINNEL_ERR_SERVER = -320,

    /// No daemon answers.
    GINNEL_ERR_NO_DAEMON = -401,
    /// The daemon has sent something that violates the protocol.
    GINNEL_ERR_PROTOCOL = -402,
    /// A system call failed; ginnel_last_error() names the call and the error.
    GINNEL_ERR_SYSTEM = -403,
    /// This machine does not support the operation: a VM without interrupts has no file descriptor to wait on.
    GINNEL_ERR_UNSUPPORTED = -404,
    /// The cache's server cannot be reached. Nothing was changed.
    GINNEL_ERR_NO_SERVER = -405,

    /// There is a bug in this library. The handle can only be closed.
    GINNEL_ERR_INTERNAL = -501,
}

/// Each status with its text.
const TEXTS: &[(Status, &CStr)] = &[
    (GINNEL_OK, c"success"),
    (GINNEL_ERR_WOULD_BLOCK, c"the operation would block"),
    (GINNEL_ERR_TIMED_OUT, c"timed out"),
    (GINNEL_ERR_NO_ITEM, c"no such item"),
    (GINNEL_ERR_NOT_STORED, c"not stored"),
    (GINNEL_ERR_CHANGED, c"the item was changed"),
    (GINNEL_ERR_FINISHED, c"the peer has finished sending"),
    (GINNEL_ERR_CLOSED, c"the peer has closed the channel"),
    (GINNEL_ERR_PEER_DEAD, c"the peer has died"),
    (GINNEL_ERR_CORRUPT, c"corrupt channel or lock"),
    (GINNEL_ERR_BROKEN, c"the segment's memory is gone"),
    (GINNEL_ERR_OWNER_DIED, c"a writer died while it held the lock"),
    (GINNEL_ERR_NOT_RECOVERABLE, c"lock unlocked with inconsistent data"),
    (GINNEL_ERR_BARRIER_BROKEN, c"a party of the barrier has died"),
    (GINNEL_ERR_FENCED, c"endpoint declared dead"),
    (GINNEL_ERR_NO_WORKER, c"the farm has no worker"),
    (GINNEL_ERR_PIECE, c"a piece failed on each attempt"),
    (GINNEL_ERR_ABORTED, c"the channel was aborted"),
    (GINNEL_ERR_LOST, c"no answer from the server of the cache"),
    (GINNEL_ERR_NULL, c"null pointer"),
    (GINNEL_ERR_INVALID, c"argument outside its range"),
    (GINNEL_ERR_NAME, c"invalid name or address"),
    (GINNEL_ERR_KIND, c"wrong kind of object"),
    (GINNEL_ERR_TOO_LONG, c"message too long for the channel"),
    (GINNEL_ERR_BUFFER_TOO_SMALL, c"message longer than the buffer"),
    (GINNEL_ERR_AFTER_FINISH, c"sending after finish"),
    (GINNEL_ERR_CLAIMED, c"a claim is open"),
    (GINNEL_ERR_NOT_CLAIMED, c"nothing claimed or peeked at"),
    (GINNEL_ERR_RANGE, c"outside the block"),
    (GINNEL_ERR_NOT_OWNER, c"lock not held by this handle"),
    (GINNEL_ERR_DEADLOCK, c"lock held by this handle already"),
    (GINNEL_ERR_OVERFLOW, c"too many permits"),
    (GINNEL_ERR_CALLBACK, c"job ended by a function of the program"),
    (GINNEL_ERR_REFUSED_OTHERWISE, c"refused by the daemon"),
    (GINNEL_ERR_NOT_UNDERSTOOD, c"not understood by the daemon"),
    (GINNEL_ERR_VERSION, c"no common protocol version"),
    (GINNEL_ERR_NO_SEGMENT, c"no such segment"),
    (GINNEL_ERR_DENIED, c"permission denied"),
    (GINNEL_ERR_REFUSED, c"no program listens at that name"),
    (GINNEL_ERR_IN_USE, c"name taken already"),
    (GINNEL_ERR_LIMIT, c"limit reached"),
    (GINNEL_ERR_NO_MEMORY, c"no room in the segment"),
    (GINNEL_ERR_STALE, c"endpoint no longer known to the daemon"),
    (GINNEL_ERR_NOT_FOUND, c"not found"),
    (GINNEL_ERR_UNAVAILABLE, c"daemon unavailable"),
    (GINNEL_ERR_READ_ONLY, c"read-only segment"),
    (GINNEL_ERR_QUOTA, c"quota exceeded"),
    (GINNEL_ERR_BUSY, c"busy"),
    (GINNEL_ERR_FREED, c"handle already freed"),
    (GINNEL_ERR_UNRECORDED, c"the daemon could not record the change"),
    (GINNEL_ERR_SERVER, c"refused by the server of the cache"),
    (GINNEL_ERR_NO_DAEMON, c"no daemon answers"),
    (GINNEL_ERR_PROTOCOL, c"the daemon violated the protocol"),
    (GINNEL_ERR_SYSTEM, c"system call failed"),
    (GINNEL_ERR_UNSUPPORTED, c"not supported on this machine"),
    (GINNEL_ERR_NO_SERVER, c"the server of the cache cannot be reached"),
    (GINNEL_ERR_INTERNAL, c"bug in the library"),
];

fn text_of(status: c_int) -> Option<&'static CStr> {
    TEXTS.iter().find(|(known, _)| *known as c_int == status).map(|(_, text)| *text)
}

/// The reason why a function failed.
pub(crate) struct Failure {
    status: Status,
    /// A text that says more than the status does.
    detail: Option<String>,
}

impl Failure {
    pub fn new(status: Status, detail: impl Into<String>) -> Self {
        Self { status, detail: Some(detail.into()) }
    }

    /// Keeps the text for ginnel_last_error() and returns the number.
    pub fn record(self) -> c_int {
        let text = match self.detail {
            // A zero byte could only come from a name that C has passed, and C cannot pass one; cut the text there all
            // the same.
            Some(text) => CString::new(text)
                .unwrap_or_else(|e| {
                    let end = e.nul_position();
                    CString::new(&e.into_vec()[..end]).unwrap_or_default()
                })
                .into(),
            None => Cow::Borrowed(text_of(self.status as c_int).unwrap_or_default()),
        };
        // A thread that is ending cannot keep the text any more.
        let _ = LAST.try_with(|last| *last.borrow_mut() = text);
        self.status as c_int
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self { status, detail: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = status_of(&error);
        // Loops meet the first two groups all the time, so no text is made for them, except for corruption and what
        // follows.
        let plain = status as c_int > GINNEL_ERR_CORRUPT as c_int;
        Self { status, detail: (!plain).then(|| error.to_string()) }
    }
}

impl Status {
    /// Returns the number for an error of a cache.
    pub(crate) fn of_cache(error: &CacheError) -> Self {
        match error {
            CacheError::Address { .. } => GINNEL_ERR_NAME,
            CacheError::Segment { source, .. } => status_of(source),
            CacheError::NotACache { source: NotACache::Unknown, .. } => GINNEL_ERR_KIND,
            CacheError::NotACache { .. } | CacheError::Nonsense { .. } => GINNEL_ERR_CORRUPT,
            CacheError::Key(_) => GINNEL_ERR_INVALID,
            CacheError::TooLarge { .. } => GINNEL_ERR_TOO_LONG,
            CacheError::NoServer { .. } => GINNEL_ERR_NO_SERVER,
            CacheError::Lost { .. } => GINNEL_ERR_LOST,
            CacheError::Refused { .. } => GINNEL_ERR_SERVER,
            // A variant that the Rust library has added since this table was written.
            _ => GINNEL_ERR_INTERNAL,
        }
    }
}

fn status_of(error: &Error) -> Status {
    match error {
        Error::WouldBlock => GINNEL_ERR_WOULD_BLOCK,
        Error::TimedOut => GINNEL_ERR_TIMED_OUT,
        Error::Finished => GINNEL_ERR_FINISHED,
        Error::Closed => GINNEL_ERR_CLOSED,
        Error::PeerDead => GINNEL_ERR_PEER_DEAD,
        Error::Aborted => GINNEL_ERR_ABORTED,
        Error::Corrupt(_) | Error::CorruptLock(_) => GINNEL_ERR_CORRUPT,
        Error::OwnerDied => GINNEL_ERR_OWNER_DIED,
        Error::NotRecoverable => GINNEL_ERR_NOT_RECOVERABLE,
        Error::BarrierBroken => GINNEL_ERR_BARRIER_BROKEN,
        Error::Fenced => GINNEL_ERR_FENCED,
        Error::NotOwner => GINNEL_ERR_NOT_OWNER,
        Error::Deadlock => GINNEL_ERR_DEADLOCK,
        Error::Overflow { .. } => GINNEL_ERR_OVERFLOW,
        Error::Denied { .. } => GINNEL_ERR_DENIED,
        Error::OutOfBlock { .. } => GINNEL_ERR_RANGE,
        Error::Broken => GINNEL_ERR_BROKEN,
        Error::TooLong { .. } => GINNEL_ERR_TOO_LONG,
        Error::BufferTooSmall { .. } => GINNEL_ERR_BUFFER_TOO_SMALL,
        Error::AfterFinish => GINNEL_ERR_AFTER_FINISH,
        Error::Name { .. } => GINNEL_ERR_NAME,
        Error::ReadOnly { .. } => GINNEL_ERR_READ_ONLY,
        Error::Refused { code, .. } => refused(*code),
        Error::NoDaemon { .. } => GINNEL_ERR_NO_DAEMON,
        Error::Protocol { .. } => GINNEL_ERR_PROTOCOL,
        Error::System { source, .. } if source.kind() == std::io::ErrorKind::Unsupported => {
            GINNEL_ERR_UNSUPPORTED
        }
        Error::System { .. } => GINNEL_ERR_SYSTEM,
        // A variant that the Rust library has added since this table was written.
        _ => GINNEL_ERR_INTERNAL,
    }
}

/// Returns the number for the daemon's code. A failure that the library itself can also detect has the same number for
/// both.
fn refused(code: ErrorCode) -> Status {
    match code {
        ErrorCode::PROTOCOL => GINNEL_ERR_NOT_UNDERSTOOD,
        ErrorCode::VERSION => GINNEL_ERR_VERSION,
        ErrorCode::NO_SEGMENT => GINNEL_ERR_NO_SEGMENT,
        ErrorCode::DENIED => GINNEL_ERR_DENIED,
        ErrorCode::REFUSED => GINNEL_ERR_REFUSED,
        ErrorCode::IN_USE => GINNEL_ERR_IN_USE,
        ErrorCode::LIMIT => GINNEL_ERR_LIMIT,
        ErrorCode::NO_MEMORY => GINNEL_ERR_NO_MEMORY,
        ErrorCode::STALE => GINNEL_ERR_STALE,
        ErrorCode::KIND => GINNEL_ERR_KIND,
        ErrorCode::BROKEN => GINNEL_ERR_BROKEN,
        ErrorCode::NOT_FOUND => GINNEL_ERR_NOT_FOUND,
        ErrorCode::UNAVAILABLE => GINNEL_ERR_UNAVAILABLE,
        ErrorCode::INVALID => GINNEL_ERR_INVALID,
        ErrorCode::READ_ONLY => GINNEL_ERR_READ_ONLY,
        ErrorCode::QUOTA => GINNEL_ERR_QUOTA,
        ErrorCode::BUSY => GINNEL_ERR_BUSY,
        ErrorCode::CLOSED => GINNEL_ERR_FREED,
        ErrorCode::UNRECORDED => GINNEL_ERR_UNRECORDED,
        _ => GINNEL_ERR_REFUSED_OTHERWISE,
    }
}

thread_local! {
    static LAST: RefCell<Cow<'static, CStr>> = const { RefCell::new(Cow::Borrowed(c"")) };
}

/// Returns a short fixed text for a status. The result is never NULL and must not be freed. Any thread may call it; it
/// does not block.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_strerror(status: c_int) -> *const c_char {
    text_of(status).unwrap_or(c"unknown status").as_ptr()
}

/// Returns a description of the last call of this thread that failed: what failed, where, and often how to fix it. The
/// text is empty if no call has failed. It is never NULL, must not be freed, and is valid until the next call of this
/// thread that fails. It does not block.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
