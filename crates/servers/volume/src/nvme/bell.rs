//! The interrupt of the admin queue. Its eventfd is the VMM's, which can make it block at any time, so a thread of its own writes it.

use super::Stuck;
use crate::worker::ring;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// How many interrupts may wait for the thread. Those of an honest VMM never do for long.
const MANY: usize = 64;

/// The thread, as the main thread sees it. It ends with this, or with the process if it blocks.
pub(super) struct Bell(SyncSender<Arc<OwnedFd>>);

impl Bell {
    /// Starts the thread.
    pub fn new() -> io::Result<Self> {
        let (bell, rings) = sync_channel::<Arc<OwnedFd>>(MANY);
        let work = move || rings.iter().for_each(|eventfd| ring(&eventfd));
        std::thread::Builder::new().name("volume-bell".to_owned()).spawn(work)?;
        Ok(Self(bell))
    }

    /// Writes an eventfd soon. Never blocks.
    pub fn ring(&self, eventfd: &Arc<OwnedFd>) -> Result<(), Stuck> {
        let blocks = |_| Stuck("the VMM's eventfd of interrupt 0 blocks".to_owned());
        self.0.try_send(eventfd.clone()).map_err(blocks)
    }
}
