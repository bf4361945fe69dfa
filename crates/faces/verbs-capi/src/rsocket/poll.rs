//! `rpoll` and `rselect`: waiting for rsockets and ordinary descriptors together.
#![allow(unsafe_code)] // Lists and sets from C.

use super::calls::are_foreign;
use super::socket::Socket;
use super::table;
use super::waiting::{Wake, poll};
use crate::real;
use ginnel::WaitMode;
use libc::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, c_short, fd_set, nfds_t, pollfd, timeval};
use std::ffi::{c_int, c_ulong};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{slice, thread};

/// Number of polls before the thread yields. The peer may need this CPU.
const LOOKS: u32 = 16;

/// Waits until at least one of these is ready, or the deadline has passed. Returns how many are ready, or `None` if none of them is an
/// rsocket of this library.
fn wait(all: &mut [pollfd], deadline: Option<Instant>) -> Option<Result<usize, c_int>> {
    let sockets: Vec<Option<Arc<Socket>>> = all.iter().map(|one| table::get(one.fd)).collect();
    if sockets.iter().all(Option::is_none) {
        return None;
    }
    Some(wait_for(all, &sockets, deadline))
}

fn wait_for(
    all: &mut [pollfd],
    sockets: &[Option<Arc<Socket>>],
    deadline: Option<Instant>,
) -> Result<usize, c_int> {
    // The ordinary descriptors, and the index of each in the list.
    let is_ordinary = |(i, one): &(usize, &pollfd)| sockets[*i].is_none() && one.fd >= 0;
    let at: Vec<usize> = all.iter().enumerate().filter(is_ordinary).map(|(i, _)| i).collect();
    let ordinary: Vec<pollfd> = at.iter().map(|i| all[*i]).collect();
    let now = Instant::now();
    let spin_until = now.checked_add(WaitMode::DEFAULT_BUDGET);
    let spin_until = [deadline, spin_until].into_iter().flatten().min().unwrap_or(now);
    let mut looks = 0;
    let mut kernel = ordinary.clone();
    loop {
        let found = look(all, sockets, None);
        // The kernel is asked less often, because that takes longer than looking at memory.
        let is_asked = looks % LOOKS == 0 && !kernel.is_empty();
        let found = found + if is_asked { ask(all, &at, &mut kernel)? } else { 0 };
        if found > 0 {
            // Asks the kernel too, so that the result contains all descriptors that are ready.
            let more = if is_asked || kernel.is_empty() { 0 } else { ask(all, &at, &mut kernel)? };
            return Ok(found + more);
        }
        if Instant::now() >= spin_until {
            break;
        }
        looks += 1;
        if looks >= LOOKS {
            thread::yield_now();
        }
    }
    let mut wake = Wake::new()?;
    loop {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(look(all, sockets, None) + ask(all, &at, &mut kernel)?);
        }
        let waiters: Vec<_> = all
            .iter()
            .zip(sockets)
            .filter_map(|(one, socket)| Some(socket.as_ref()?.waiters(one.events)))
            .flatten()
            .collect();
        let _entered: Vec<_> = waiters.iter().map(|waiters| waiters.enter(&wake)).collect();
        let found = look(all, sockets, Some(&mut wake)) + ask(all, &at, &mut kernel)?;
        if found > 0 {
            return Ok(found);
        }
        wake.descriptors.extend(&ordinary);
        wake.sleep(deadline)?;
    }
}

/// Polls the rsockets. Returns how many are ready.
fn look(all: &mut [pollfd], sockets: &[Option<Arc<Socket>>], mut wake: Option<&mut Wake>) -> usize {
    let mut found = 0;
    for (one, socket) in all.iter_mut().zip(sockets) {
        one.revents = match socket {
            Some(socket) => socket.ready(one.events, wake.as_deref_mut()),
            None => 0,
        };
        found += usize::from(one.revents != 0);
    }
    found
}

/// Asks the kernel about the ordinary descriptors, whose indices in the list are `at`. Returns how many are ready.
fn ask(all: &mut [pollfd], at: &[usize], kernel: &mut [pollfd]) -> Result<usize, c_int> {
    if kernel.is_empty() {
        return Ok(0);
    }
    let found = poll(kernel, Some(Instant::now()))?;
    for (i, one) in at.iter().zip(kernel) {
        all[*i].revents = one.revents;
    }
    Ok(found)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rpoll(list: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    let all = match count {
        0 => &mut [],
        // SAFETY: the caller's list has this length.
        _ => unsafe { slice::from_raw_parts_mut(list, count as usize) },
    };
    // A negative timeout means none.
    let timeout_of = |timeout: c_int| u64::try_from(timeout).ok().map(Duration::from_millis);
    let deadline = timeout_of(timeout).and_then(|timeout| Instant::now().checked_add(timeout));
    match wait(all, deadline) {
        Some(result) => super::given(result) as c_int,
        // SAFETY: the caller's list.
        None if are_foreign() => unsafe { real::rpoll(list, count, timeout) },
        // SAFETY: the caller's list.
        None => unsafe { libc::poll(list, count, timeout) },
    }
}

/// Number of bits in a word of a set.
const BITS: usize = c_ulong::BITS as usize;

/// A set from C, which may be longer than its type says.
struct Set(*mut c_ulong);

impl Set {
    fn new(set: *mut fd_set) -> Self {
        Self(set.cast())
    }

    /// # Safety
    ///
    /// The set is long enough to contain this number.
    unsafe fn has(&self, number: usize) -> bool {
        // SAFETY: the caller's promise.
        !self.0.is_null() && unsafe { *self.0.add(number / BITS) } >> (number % BITS) & 1 == 1
    }

    /// # Safety
    ///
    /// The set is long enough to contain this number.
    unsafe fn put(&self, number: usize, is_there: bool) -> c_int {
        if self.0.is_null() {
            return 0;
        }
        let bit = 1 << (number % BITS);
        // SAFETY: the caller's promise.
        unsafe {
            let word = self.0.add(number / BITS);
            if is_there {
                *word |= bit;
            } else {
                *word &= !bit;
            }
        }
        c_int::from(is_there)
    }
}

/// The events that each set requests, and the results that belong to it (select(2)).
const KINDS: [(c_short, c_short); 3] =
    [(POLLIN, POLLIN | POLLHUP | POLLERR), (POLLOUT, POLLOUT | POLLERR), (POLLPRI, POLLPRI)];

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rselect(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    exceptions: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let Ok(numbers) = usize::try_from(count) else { return crate::cm::failed(libc::EINVAL) };
    let sets = [reads, writes, exceptions].map(Set::new);
    let mut list = Vec::new();
    for number in 0..numbers {
        // SAFETY: the caller's sets are long enough for this number.
        let wanted = unsafe { sets.each_ref().map(|set| set.has(number)) };
        let events = wanted.iter().zip(KINDS).map(|(is_wanted, kind)| if *is_wanted { kind.0 } else { 0 });
        let events = events.fold(0, |all, one| all | one);
        if events != 0 {
            list.push(pollfd { fd: number as c_int, events, revents: 0 });
        }
    }
    // SAFETY: the caller's structure.
    let time = unsafe { timeout.as_ref() };
    let length = match time.map(|time| (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec))) {
        None => None,
        Some((Ok(seconds), Ok(micros))) => {
            Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
        }
        Some(_) => return crate::cm::failed(libc::EINVAL),
    };
    let deadline = length.and_then(|length| Instant::now().checked_add(length));
    let result = match wait(&mut list, deadline) {
        Some(result) => result,
        // SAFETY: the caller's sets and structure.
        None if are_foreign() => return unsafe { real::rselect(count, reads, writes, exceptions, timeout) },
        // SAFETY: the caller's sets and structure.
        None => return unsafe { libc::select(count, reads, writes, exceptions, timeout) },
    };
    if let Some(deadline) = deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        // SAFETY: the caller's structure, which exists if there is a deadline. As in Linux, it gets the remaining time.
        unsafe {
            (*timeout).tv_sec = left.as_secs().cast_signed();
            (*timeout).tv_usec = left.subsec_micros().into();
        }
    }
    match result {
        Err(error) => return crate::cm::failed(error),
        Ok(_) if list.iter().any(|one| one.revents & POLLNVAL != 0) => {
            return crate::cm::failed(libc::EBADF);
        }
        Ok(_) => {}
    }
    let mut found = 0;
    for one in &list {
        for (set, (wanted, results)) in sets.iter().zip(KINDS) {
            if one.events & wanted != 0 {
                // SAFETY: the caller's sets are long enough for this number.
                found += unsafe { set.put(one.fd as usize, one.revents & results != 0) };
            }
        }
    }
    found
}
