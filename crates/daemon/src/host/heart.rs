//! Whether a VM that is there gives signs of life.
//!
//! Death is seen otherwise: by QEMU's connection, by its process, by the boot identity. A guest that hangs has all of these
//! and does nothing. Its daemon counts up a word of the control memory, as often as it is asked to; a count that stands still
//! means that the guest hangs, that it is paused, or that its daemon is not running, which cannot be told apart from here. So
//! this is off unless configured.

use super::config::OnHang;
use super::server::Server;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Signs of life that are asked for within the time after which their lack is told.
const BEATS: u32 = 4;

/// What is known of a VM's signs of life.
#[derive(Debug)]
pub struct Heart {
    patience: Duration,
    beats: u64,
    last: Instant,
    hangs: bool,
}

/// What a look at the count has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// No more than the last one.
    Nothing,
    /// There has been no sign for so long.
    Hangs(Duration),
    /// There are signs again, after so long.
    Recovered(Duration),
}

impl Heart {
    /// Of a VM that may be silent for `patience`.
    pub fn new(patience: Duration, now: Instant) -> Self {
        Self { patience, beats: 0, last: now, hangs: false }
    }

    /// How often a sign is to be asked for.
    pub fn every(&self) -> Duration {
        self.patience / BEATS
    }

    /// Whether the last finding was that it hangs.
    pub fn hangs(&self) -> bool {
        self.hangs
    }

    /// A session begins or ends: silence counts from here.
    pub fn start_over(&mut self, now: Instant) {
        (self.last, self.hangs) = (now, false);
    }

    /// Takes a look at the count.
    pub fn look(&mut self, beats: u64, now: Instant) -> Finding {
        let silence = now - self.last;
        if beats != self.beats {
            (self.beats, self.last) = (beats, now);
            return if std::mem::take(&mut self.hangs) {
                Finding::Recovered(silence)
            } else {
                Finding::Nothing
            };
        }
        if self.hangs || silence < self.patience {
            return Finding::Nothing;
        }
        self.hangs = true;
        Finding::Hangs(silence)
    }
}

impl Server {
    /// When the hearts must be looked at next; `None` if there are none.
    pub(super) fn next_look_at_hearts(&self) -> Option<Duration> {
        self.vms.values().filter(|vm| vm.up).filter_map(|vm| vm.heart.as_ref().map(Heart::every)).min()
    }

    /// Looks at the signs of life of all VMs with a session, and does what the policy says.
    pub(super) fn look_at_hearts(&mut self) {
        let now = Instant::now();
        for vm in self.vms.values_mut().filter(|vm| vm.up) {
            let beats = vm.beats();
            let Some(heart) = &mut vm.heart else { continue };
            let finding = heart.look(beats, now);
            if vm.config.on_hang == OnHang::Nothing {
                continue; // To be seen in the status.
            }
            let vm = &vm.config.name;
            match finding {
                Finding::Nothing => {}
                Finding::Hangs(silence) => {
                    warn!(%vm, "no sign of life for {:.1} s: the VM hangs, is paused, or its ginneld is not running", silence.as_secs_f32());
                }
                Finding::Recovered(silence) => {
                    info!(%vm, "the VM gives signs of life again, after {:.1} s", silence.as_secs_f32());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_told_once_and_so_is_its_end() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut heart = Heart::new(Duration::from_secs(4), start);
        assert_eq!(heart.every(), Duration::from_secs(1));
        assert_eq!(heart.look(1, at(1)), Finding::Nothing);
        assert_eq!(heart.look(1, at(4)), Finding::Nothing);
        assert_eq!(heart.look(1, at(5)), Finding::Hangs(Duration::from_secs(4)));
        assert!(heart.hangs());
        assert_eq!(heart.look(1, at(9)), Finding::Nothing);
        assert_eq!(heart.look(2, at(10)), Finding::Recovered(Duration::from_secs(9)));
        assert_eq!(heart.look(3, at(11)), Finding::Nothing);
        assert!(!heart.hangs());
    }

    #[test]
    fn a_new_session_begins_with_patience() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut heart = Heart::new(Duration::from_secs(4), start);
        assert_eq!(heart.look(0, at(4)), Finding::Hangs(Duration::from_secs(4)));
        heart.start_over(at(5));
        assert!(!heart.hangs());
        assert_eq!(heart.look(0, at(8)), Finding::Nothing);
        // A guest that lies counts backwards: also a sign.
        assert_eq!(heart.look(u64::MAX, at(9)), Finding::Nothing);
    }
}
