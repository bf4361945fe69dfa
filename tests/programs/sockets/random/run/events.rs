//! Calls that ask for events.

use crate::random::model::{ERR, HUP, IN, OUT, RDHUP, Watch};
use crate::random::players::{Answer, PATIENCE};
use crate::random::program::Step;
use crate::random::run::{Outcome, Run, Waiting, fail, pause};
use std::collections::BTreeMap;
use std::time::Instant;

impl Run<'_> {
    pub(super) fn poll(&mut self, process: u32, place: i64, end: usize, form: i64, events: i16) -> Outcome {
        let asked = if form == 2 { IN | OUT } else { HUP | ERR } | events;
        let (mut must, may) = (self.model.must(end) & asked, self.model.may(end));
        if form == 2 {
            must &= events & (IN | OUT);
        }
        let begun = Instant::now();
        loop {
            // If something must come, the call waits for it. Otherwise it returns at once.
            let time = if must == 0 { 0 } else { PATIENCE.as_millis() as i64 };
            let answer = self.ask(process, "poll", &[place, form, events.into(), time])?;
            let found = *answer.more.first().unwrap_or(&0) as i16;
            if answer.result < 0 {
                return fail(format!("poll: {answer:?}"));
            }
            // `select` reports the end, and what is broken, as input and room.
            let may = if form == 2 && may & (HUP | ERR) != 0 { may | IN | OUT } else { may };
            if found & !may != 0 {
                return fail(format!("poll says {found:#x}, but at most {may:#x} may be"));
            }
            if must & !found == 0 {
                return Ok(());
            }
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail(format!("poll says {found:#x}, and {must:#x} must be"));
            }
        }
    }

    pub(super) fn watch(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let interest = [IN, OUT, IN | OUT, IN | RDHUP, IN | OUT | RDHUP, RDHUP][usize::from(step.size % 6)];
        let (is_edge_triggered, is_once) = (step.how % 4 > 1, step.how % 8 == 1);
        let mut events = i64::from(interest as u16);
        if is_edge_triggered {
            events |= libc::EPOLLET as u32 as i64;
        }
        if is_once {
            events |= i64::from(libc::EPOLLONESHOT);
        }
        let known = self.model.watches.contains_key(&(process, place));
        let operation = if known { libc::EPOLL_CTL_MOD } else { libc::EPOLL_CTL_ADD };
        let answer = self.ask(process, "control", &[operation.into(), place, events])?;
        if answer.result != 0 {
            return fail(format!("epoll_ctl: {answer:?}"));
        }
        let (is_spent, edges, was_full, is_old) = (false, !0, false, self.someone_waits(process));
        let watch = Watch { end, interest, is_edge_triggered, is_once, is_spent, edges, was_full, is_old };
        self.model.watches.insert((process, place), watch);
        Ok(())
    }

    pub(super) fn unwatch(&mut self, process: u32, place: i64) -> Outcome {
        let answer = self.ask(process, "control", &[libc::EPOLL_CTL_DEL.into(), place, 0])?;
        self.model.watches.remove(&(process, place));
        if answer.result == 0 { Ok(()) } else { fail(format!("epoll_ctl: {answer:?}")) }
    }

    /// Returns the events that a process's epoll instance must report.
    pub(super) fn expected(&self, process: u32) -> BTreeMap<i64, i16> {
        let own = self.model.watches.iter().filter(|((owner, _), _)| *owner == process);
        let must = own.map(|((_, place), watch)| (*place, self.model.watch_must(watch)));
        must.filter(|(_, events)| *events != 0).collect()
    }

    pub(super) fn wait(&mut self, process: u32) -> Outcome {
        if self.model.watches.keys().all(|(owner, _)| *owner != process) || self.someone_waits(process) {
            return Ok(());
        }
        let mut must = self.expected(process);
        let begun = Instant::now();
        loop {
            let time = if must.is_empty() { 0 } else { PATIENCE.as_millis() as i64 };
            let answer = self.ask(process, "wait", &[time])?;
            self.was_told(process, &answer, &BTreeMap::new(), &mut must)?;
            must.retain(|_, events| *events != 0);
            if must.is_empty() {
                return Ok(());
            }
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail(format!("epoll_wait does not say {must:x?}"));
            }
        }
    }

    /// An epoll instance has reported events. `seen` are events that were true while it waited. Removes what it has reported from
    /// `must`.
    pub(super) fn was_told(
        &mut self,
        process: u32,
        answer: &Answer,
        seen: &BTreeMap<i64, i16>,
        must: &mut BTreeMap<i64, i16>,
    ) -> Outcome {
        if answer.result < 0 || answer.more.len() != 2 * answer.result as usize {
            return fail(format!("epoll_wait: {answer:?}"));
        }
        for pair in answer.more.chunks(2) {
            let (place, events) = (pair[0], pair[1] as i16);
            let was = *seen.get(&place).unwrap_or(&0);
            let Some(watch) = self.model.watches.get(&(process, place)).cloned() else {
                // It may have been told before the watch was removed.
                if events & !was == 0 {
                    continue;
                }
                return fail(format!("epoll_wait names place {place}, which it does not watch"));
            };
            let may = self.model.may(watch.end) & (watch.interest | HUP | ERR) | was;
            if events == 0 || events & !may != 0 || watch.is_spent {
                return fail(format!(
                    "epoll_wait says {events:#x} of place {place}, of {watch:?}: may be {may:#x}"
                ));
            }
            let watch = self.model.watches.get_mut(&(process, place)).unwrap();
            watch.edges &= !events;
            watch.was_full &= events & OUT == 0;
            watch.is_spent = watch.is_once && !watch.is_old;
            if watch.is_once {
                must.remove(&place);
            } else if let Some(must) = must.get_mut(&place) {
                *must &= !events;
            }
        }
        Ok(())
    }

    pub(super) fn someone_waits(&self, process: u32) -> bool {
        self.pending.iter().any(|p| p.process == process && matches!(p.call, Waiting::Epoll { .. }))
    }
}
