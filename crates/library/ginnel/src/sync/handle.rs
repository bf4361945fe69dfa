//! A handle of an open object: the object's page, the handle's slot in it, how the handle waits, and how it wakes
//! others.

use crate::doorbell::{Doorbell, WaitPoint};
use crate::endpoint::{Endpoint, parse_name};
use crate::error::Error;
use crate::fork::Opener;
use crate::inner::Inner;
use crate::peer_doorbells::EndpointId;
use ginnel_layout::sync::{SIZE, SLOT_BELL, SLOT_ENDPOINT, SLOT_ENDPOINT_EPOCH, SyncKind, slot};
use ginnel_layout::wire::{self, Kind};
use ginnel_ring::wait::{Sleeper, WaitMode};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_sync::{Patience, User, World};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Options for opening a synchronisation object. The defaults are right for most programs.
#[derive(Clone, Copy, Debug)]
pub struct SyncOptions {
    /// Create the object if it does not exist; otherwise the open fails with [`wire::ErrorCode::NOT_FOUND`]. Default:
    /// true.
    pub create: bool,
    /// Fail with [`wire::ErrorCode::IN_USE`] if the object exists. Default: false.
    pub exclusive: bool,
    /// If this open creates the object: keep it until it is unlinked. Otherwise it is removed with its last handle.
    /// Default: false.
    pub persistent: bool,
}

impl Default for SyncOptions {
    fn default() -> Self {
        Self { create: true, exclusive: false, persistent: false }
    }
}

/// The part that the handles of all kinds of object have in common.
pub(crate) struct Handle {
    pub page: Mapping,
    pub user: User,
    pub limit: u32,
    pub patience: Patience,
    pub wakeups: Wakeups,
    kind: SyncKind,
    name: ginnel_layout::Name,
    object: u64,
    opener: Arc<Opener>,
}

impl Handle {
    pub fn open(
        endpoint: &Endpoint,
        name: &str,
        kind: SyncKind,
        (limit, initial): (u32, u32),
        options: &SyncOptions,
    ) -> Result<Self, Error> {
        let flag = |on: bool, bit| if on { bit } else { 0 };
        let flags = flag(options.create, wire::SyncOpen::CREATE)
            | flag(options.exclusive, wire::SyncOpen::EXCLUSIVE)
            | flag(options.persistent, wire::SyncOpen::PERSISTENT);
        Self::ask(
            endpoint.inner().clone(),
            parse_name(name)?,
            kind,
            (limit, initial),
            flags,
            endpoint.inner().mode,
        )
    }

    fn ask(
        endpoint: Arc<Inner>,
        name: ginnel_layout::Name,
        kind: SyncKind,
        (limit, initial): (u32, u32),
        flags: u32,
        mode: WaitMode,
    ) -> Result<Self, Error> {
        endpoint.may_write()?;
        let nonce = endpoint.next_nonce();
        let body = wire::SyncOpen { name, kind: kind.0, limit, initial, flags, nonce };
        let packet = endpoint.request(Kind::SYNC_OPEN, body.as_bytes())?;
        let (sync, _) = packet.into_body::<wire::Sync>(Kind::SYNC, &endpoint.path)?;
        let (user, page) = Self::checked(&endpoint, &sync, kind).inspect_err(|_| {
            // The daemon has granted the slot, so it must be given back even though the answer is unusable.
            let wire::Sync { object, slot, epoch, .. } = sync;
            endpoint.tell(Kind::SYNC_CLOSE, wire::SyncRef { object, slot, epoch }.as_bytes());
        })?;
        let wakeups = Wakeups {
            wait_point: WaitPoint::new(endpoint.event.clone()),
            page: page.clone(),
            known: HashMap::new(),
            woke: None,
            endpoint,
        };
        Ok(Self {
            page,
            user,
            limit: sync.limit,
            patience: Patience { mode, timeout: None },
            wakeups,
            kind,
            name,
            object: sync.object,
            opener: Opener::current(),
        })
    }

    /// Checks the daemon's answer, and returns our identity in the slot and the object's page.
    fn checked(endpoint: &Inner, sync: &wire::Sync, kind: SyncKind) -> Result<(User, Mapping), Error> {
        let user = u16::try_from(sync.epoch)
            .ok()
            .and_then(|epoch| User::new(sync.slot as usize, epoch, endpoint.number()))
            .ok_or_else(|| endpoint.protocol("an impossible slot"))?;
        let page = endpoint
            .part(sync.offset, SIZE)
            .ok_or_else(|| endpoint.protocol("an object outside the segment"))?;
        if sync.kind != kind.0 || !kind.allows(sync.limit) {
            return Err(endpoint.protocol("an object of another kind"));
        }
        Ok((user, page))
    }

    /// Opens another handle of the same object, with the same settings.
    pub fn again(&self) -> Result<Self, Error> {
        let (endpoint, limit) = (self.wakeups.endpoint.clone(), (self.limit, 0));
        let mut other = Self::ask(endpoint, self.name, self.kind, limit, 0, self.patience.mode)?;
        if other.object != self.object {
            // The object was removed meanwhile, and another user has created a new one with this name.
            return Err(Error::Refused {
                code: wire::ErrorCode::NOT_FOUND,
                text: format!(
                    "{} {} has been unlinked, so no further handle can be opened",
                    self.kind.name(),
                    self.name
                ),
            });
        }
        other.patience = self.patience;
        Ok(other)
    }

    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Whether this process may release the handle or its guard. False in the child of a fork while the parent lives.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.opener.is_here_or_succeeded()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let body = wire::SyncRef {
            object: self.object,
            slot: self.user.slot() as u32,
            epoch: self.user.epoch().into(),
        };
        self.wakeups.endpoint.tell(Kind::SYNC_CLOSE, body.as_bytes());
    }
}

/// The place where a handle sleeps, and the doorbells with which it wakes other handles.
pub(crate) struct Wakeups {
    wait_point: WaitPoint,
    page: Mapping,
    endpoint: Arc<Inner>,
    /// Doorbells by slot, each with the bell number and the endpoint for which it is valid.
    known: HashMap<usize, ((u32, EndpointId), Arc<Doorbell>)>,
    woke: Option<Instant>,
}

/// After a pause this long, the naps of a VM without interrupts start at their shortest length again.
const NEW_WAIT: Duration = Duration::from_millis(5);

impl Sleeper for Wakeups {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        if self.woke.is_none_or(|at| at.elapsed() > NEW_WAIT) {
            self.wait_point.rested();
        }
        let slept = self.wait_point.sleep(deadline);
        self.woke = Some(Instant::now());
        slept
    }
}

impl World for Wakeups {
    #[cold]
    fn ring(&mut self, k: usize) {
        let word = |at| self.page.load_relaxed_u32(slot(k) + at);
        let (bell, sleeper) = (word(SLOT_BELL), (word(SLOT_ENDPOINT), word(SLOT_ENDPOINT_EPOCH)));
        match self.known.get(&k) {
            Some((of, doorbell)) if *of == (bell, sleeper) => doorbell.ring(),
            _ => {
                if let Some(doorbell) = self.endpoint.ring(bell, sleeper) {
                    self.known.insert(k, ((bell, sleeper), doorbell));
                }
            }
        }
    }
}

/// Removes the name of an object.
pub(crate) fn unlink(endpoint: &Endpoint, name: &str) -> Result<(), Error> {
    let body = wire::ByName { name: parse_name(name)? };
    let packet = endpoint.inner().request(Kind::SYNC_UNLINK, body.as_bytes())?;
    packet.into_body::<[u8; 0]>(Kind::OK, &endpoint.inner().path).map(|_| ())
}

/// The methods that all kinds of handle share. Each kind has a field `handle` and is made from a [`Handle`] by `new`.
macro_rules! common {
    ($handle:ident) => {
        impl $handle {
            /// Sets how this handle waits. The default is the endpoint's wait mode.
            pub fn set_mode(&mut self, mode: ginnel_ring::wait::WaitMode) {
                self.handle.patience.mode = mode;
            }

            /// Sets how long each operation of this handle may wait; `None`, the default, means for ever.
            pub fn set_timeout(&mut self, timeout: Option<std::time::Duration>) {
                self.handle.patience.timeout = timeout;
            }

            /// Opens another handle of the same object with the same settings, for another thread. Blocks for the
            /// daemon, for at most 10 seconds.
            ///
            /// # Errors
            ///
            /// As for opening the object, and [`Error::Refused`](crate::Error::Refused) if the object has been
            /// unlinked.
            pub fn try_clone(&self) -> Result<Self, $crate::error::Error> {
                self.handle.again().map(Self::new)
            }

            /// Returns the object's name.
            pub fn name(&self) -> &str {
                self.handle.name()
            }
        }
    };
}
pub(crate) use common;
