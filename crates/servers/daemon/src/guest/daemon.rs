//! The guest's daemon: its parts, and its event loop.

use super::clients::{Attaching, Clients, FIRST_TOKEN};
use super::control::Control;
use super::owners::{self, Owners};
use super::policy::Policy;
use super::segments::Segments;
use super::vfio::Interrupts;
use crate::closer::Closer;
use crate::control_link::GuestLink;
use crate::excluded::Excluded;
use crate::hangup::Hangup;
use crate::keeper::Keeper;
use crate::logging;
use crate::namer::Namer;
use crate::poller::{Interest, Poller, Ready};
use crate::strangers::{self, Strangers, Syns};
use crate::user_connections::Most;
use anyhow::{Context, Result};
use ginnel_broker::process::{Image, Process};
use ginnel_layout::control::DAEMON_VECTOR;
use ginnel_layout::relay::RelayKind;
use ginnel_layout::wire::MAX_PACKET;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

// Epoll tokens. Clients have those from `FIRST_TOKEN` on, the watches of processes those from `owners::FIRST_TOKEN` on, and helpers
// those from `FIRST_HELPER` on.
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const BELL: u64 = 2;
const KEEPER: u64 = 3;
const HANGUP: u64 = 4;
const FIRST_HELPER: u64 = 1 << 56;

/// The events that are fetched at once.
const EVENTS: usize = 64;

/// The intervals at which the link is checked without interrupts: after something has happened, when nothing has happened for a
/// while, and when no program is connected.
const FIRST_NAP: Duration = Duration::from_millis(1);
const LAST_NAP: Duration = Duration::from_millis(20);
const LONE_NAP: Duration = Duration::from_millis(200);
/// How often the daemon tries again what no event announces: that descriptors are free, or that a lost host daemon is back.
const RETRY: Duration = Duration::from_secs(1);
/// The time between two attempts to start another keeper.
const RETRY_KEEPER: Duration = Duration::from_secs(5);

/// A client whose connection ended while the host was handling its request to attach.
#[derive(Clone, Copy)]
pub(super) struct Departed {
    pub process: Process,
    pub image: Option<Image>,
    pub user: u32,
    pub asked: Attaching,
}

/// Handles SIGHUP. Returns false if the daemon must end.
fn is_to_stay(hangup: &Hangup) -> bool {
    let stays = hangup.take();
    if stays {
        tracing::info!(
            "SIGHUP: nothing is reloaded, because all settings are on the command line: restart the daemon for others; its programs stay connected"
        );
    }
    stays
}

/// The guest's daemon.
pub struct Daemon {
    pub(super) poller: Rc<Poller>,
    pub(super) listener: OwnedFd,
    accepting: bool,
    pub(super) control: Control,
    pub(super) interrupts: Option<Interrupts>,
    keeper: Option<Keeper>,
    /// When it is tried again to start another keeper.
    retry_keeper_at: Instant,
    /// Makes the sockets.
    pub(super) namer: Namer,
    pub(super) link: GuestLink,
    /// There is a session with the host's daemon.
    pub(super) up: bool,
    pub(super) clients: Clients,
    pub(super) closer: Closer,
    /// The helpers for descriptors that programs send.
    pub(super) strangers: Strangers<u32>,
    pub(super) segments: Segments,
    /// The messages that the link's ring has not accepted. While there are some, the daemon does not read from programs.
    pub(super) outbox: VecDeque<(RelayKind, u32, Vec<u8>)>,
    pub(super) owners: Owners,
    /// The clients whose connections ended while the host was handling their request to attach.
    pub(super) departed: BTreeMap<u32, Departed>,
    pub(super) syns: Syns,
    /// The programs whose connections stay on TCP.
    pub(super) excluded: Excluded,
    policy: Policy,
    /// A buffer for packets of programs.
    pub(super) packet: Vec<u8>,
    nap: Duration,
    /// The host has been sent something and has sent nothing since.
    pub(super) unanswered: bool,
}

impl Daemon {
    /// Makes the daemon; `stop` becomes readable when it must end.
    #[expect(clippy::too_many_arguments, reason = "a daemon is made of that many parts")]
    pub fn new(
        listener: OwnedFd,
        most: Most,
        excluded: Excluded,
        stop: impl AsFd,
        control: Control,
        interrupts: Option<Interrupts>,
        keeper: Option<Keeper>,
        mut namer: Namer,
        boot_id: [u8; 16],
        segments: Segments,
        closer: Closer,
    ) -> Result<Self> {
        let poller = Rc::new(Poller::new().context("cannot make an epoll")?);
        poller.add(&listener, LISTENER, Interest::READ).context("cannot wait for programs")?;
        poller.add(&stop, STOP, Interest::READ).context("cannot wait for signals")?;
        if let Some(interrupts) = &interrupts {
            let bell = interrupts.events.get(DAEMON_VECTOR as usize).context("no vector for the daemon")?;
            poller.add(bell, BELL, Interest::READ).context("cannot wait for interrupts")?;
        }
        if let Some(connection) = keeper.as_ref().and_then(Keeper::connection) {
            poller.add(connection, KEEPER, Interest::READ).context("cannot watch the keeper")?;
        }
        namer.serves();
        let link = GuestLink::new(control.memory.clone(), boot_id, interrupts.is_some());
        Ok(Self {
            clients: Clients::new(poller.clone(), closer.clone(), most),
            closer,
            strangers: Strangers::new(|number| FIRST_HELPER + number, strangers::own_helper),
            // Processes outlive their connections, and have children that join.
            owners: Owners::new(poller.clone(), most),
            departed: BTreeMap::new(),
            poller,
            listener,
            accepting: true,
            control,
            interrupts,
            keeper,
            retry_keeper_at: Instant::now(),
            namer,
            link,
            up: false,
            segments,
            outbox: VecDeque::new(),
            syns: Syns::default(),
            excluded,
            policy: Policy::new(),
            packet: vec![0; MAX_PACKET],
            nap: FIRST_NAP,
            unanswered: false,
        })
    }

    /// Serves until it is told to stop.
    pub fn run(&mut self, hangup: &Hangup) -> Result<()> {
        self.poller.add(hangup, HANGUP, Interest::READ).context("cannot wait for signals")?;
        let mut ready = Vec::new();
        loop {
            let busy = self.look_at_link();
            for owner in self.owners.take_changed() {
                self.owner_gone(owner);
            }
            self.step_strangers();
            self.send_outbox();
            if self.link.take_ring() {
                self.control.ring_host();
            }
            // This comes after the ring, so that the host works meanwhile.
            self.policy.set_batch(self.clients.take_pipelining());
            self.retry_keeper();
            let timeouts = [
                self.timeout(busy),
                self.owners.until_next(),
                self.strangers.until_stuck(),
                self.until_keeper(),
            ];
            let timeout = timeouts.into_iter().flatten().min();
            logging::tell_left_out();
            self.poller.wait(&mut ready, EVENTS, timeout).context("cannot wait for events")?;
            self.clients.in_turn(&mut ready);
            for event in &ready {
                if event.token == STOP || (event.token == HANGUP && !is_to_stay(hangup)) {
                    self.link.close();
                    self.control.ring_host();
                    return Ok(());
                }
                self.handle(*event);
            }
            if !ready.is_empty() {
                self.nap = FIRST_NAP;
            } else if !busy {
                self.idle();
            }
        }
    }

    /// Returns how long the daemon may sleep without events; `None` means without limit.
    fn timeout(&mut self, busy: bool) -> Option<Duration> {
        if busy {
            self.nap = FIRST_NAP;
            return Some(Duration::ZERO);
        }
        if self.up && self.segments.is_due() {
            return Some(Duration::ZERO);
        }
        if self.interrupts.is_some() {
            return (!self.up || !self.accepting || self.unanswered).then_some(RETRY);
        }
        let nap = self.nap;
        self.nap = (nap * 2).min(if self.clients.is_empty() { LONE_NAP } else { LAST_NAP });
        Some(nap)
    }

    /// Handles the case that nothing has happened within the timeout.
    fn idle(&mut self) {
        if self.up && std::mem::take(&mut self.unanswered) {
            // If a ring was ever lost, in either direction, this limits the delay to a second.
            self.control.ring_host();
        }
        if !self.accepting {
            self.set_accepting(true);
        }
        if self.up
            && let Some(told) = self.segments.measure_next()
        {
            self.tell(RelayKind::MAPPED, 0, told.as_bytes());
        }
    }

    fn handle(&mut self, event: Ready) {
        match event.token {
            LISTENER => self.accept(),
            BELL => {
                // The counter is reset before the link is checked, which comes next.
                if let Some(interrupts) = &self.interrupts {
                    let _ = rustix::io::read(&interrupts.events[DAEMON_VECTOR as usize], &mut [0u8; 8]);
                }
            }
            KEEPER => self.serve_keeper(),
            helper if helper >= FIRST_HELPER => {
                let clients = &self.clients;
                self.strangers.ready(&self.poller, helper - FIRST_HELPER, |id| clients.fd(id));
            }
            watch if watch >= owners::FIRST_TOKEN => {
                for owner in self.owners.ended(watch) {
                    self.owner_gone(owner);
                }
            }
            client if client >= FIRST_TOKEN => {
                let id = (client - FIRST_TOKEN) as u32;
                if event.writable && self.clients.flush(id).is_err() {
                    self.drop_client(id);
                } else if event.readable {
                    self.read_client(id);
                }
            }
            _ => {}
        }
    }

    /// Handles what the keeper says. If it has died, starts another one and gives it what the first one had.
    fn serve_keeper(&mut self) {
        if self.keeper.as_mut().is_none_or(Keeper::hear) {
            return;
        }
        tracing::warn!("the keeper has died; starting another");
        if let Some(connection) = self.keeper.as_ref().and_then(Keeper::connection) {
            self.poller.remove(connection);
        }
        if let Err(error) = self.replace_keeper() {
            tracing::error!(
                "interrupts will end with this daemon, unless a keeper can be started later: {error:#}"
            );
        }
    }

    /// Returns the time until [`Daemon::retry_keeper`] has something to do.
    fn until_keeper(&self) -> Option<Duration> {
        let lost = self.keeper.as_ref().is_some_and(Keeper::is_lost);
        lost.then(|| self.retry_keeper_at.saturating_duration_since(Instant::now()))
    }

    /// Tries again to start a keeper in place of one that has died.
    fn retry_keeper(&mut self) {
        if self.until_keeper().is_some_and(|left| left.is_zero()) {
            // Why that fails was said.
            let _ = self.replace_keeper();
        }
    }

    fn replace_keeper(&mut self) -> Result<()> {
        self.retry_keeper_at = Instant::now() + RETRY_KEEPER;
        let (Some(keeper), Some(interrupts)) = (&mut self.keeper, &self.interrupts) else { return Ok(()) };
        keeper.reopen(&mut self.namer)?;
        super::keep(keeper, interrupts);
        if let Some(Err(error)) = keeper.connection().map(|c| self.poller.add(c, KEEPER, Interest::READ)) {
            tracing::warn!("cannot watch the keeper: {error}");
        }
        Ok(())
    }

    /// Sets whether programs that connect are accepted.
    pub(super) fn set_accepting(&mut self, accepting: bool) {
        let interest = Interest { read: accepting, write: false };
        if self.poller.modify(&self.listener, LISTENER, interest).is_ok() {
            self.accepting = accepting;
        }
    }
}
