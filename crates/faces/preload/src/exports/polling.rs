//! `poll`, `select`, `epoll` and their variants.

use crate::calls::{descriptors, poll};
use crate::epoll::{EPOLLS, native};
use crate::process::settings;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result, check, tell_int};
use crate::system::memory::{can_read, can_write, is_beyond, is_prepared, is_there};
use crate::system::real;
use crate::waiting::limit;
use crate::waiting::limit::Limit;
use libc::{c_int, c_short, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use std::mem::offset_of;
use std::time::Duration;

/// Converts a time in milliseconds. A negative time means no limit (`None`).
fn milliseconds(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// Converts a time of the program. Null means no limit (`None`). Returns EINVAL if the time is not valid.
pub unsafe fn time(timeout: *const timespec) -> Result<Option<Duration>> {
    if !timeout.is_null() && !is_there(timeout) {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the pointer is null, or leads to a time.
    let Some(time) = (unsafe { timeout.as_ref() }) else { return Ok(None) };
    match (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Ok(Some(Duration::new(seconds, nanos))),
        _ => Err(Errno(libc::EINVAL)),
    }
}

fn spec(time: Duration) -> timespec {
    timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// The most descriptors that the kernel may ever allow a process. It refuses a call with more of them, so this library does not look
/// at them.
const MOST: nfds_t = 1 << 30;

/// Returns whether a list can be read, and its results be written: at its beginning and its end.
fn has_list(fds: *mut pollfd, count: usize) -> bool {
    let result = |i: usize| fds.wrapping_add(i).wrapping_byte_add(offset_of!(pollfd, revents));
    can_read(fds, count * size_of::<pollfd>())
        && [0, count - 1].into_iter().all(|i| can_write(result(i), size_of::<c_short>()))
}

unsafe fn list<'a>(fds: *mut pollfd, count: nfds_t) -> &'a mut [pollfd] {
    if count == 0 || count > MOST || !is_prepared() || !has_list(fds, count as usize) {
        return &mut [];
    }
    // SAFETY: the program says that the array has `count` entries.
    unsafe { std::slice::from_raw_parts_mut(fds, count as usize) }
}

/// Calls the C library's `ppoll` with this signal mask of the program, which may be null.
struct InKernel(*const sigset_t);

impl limit::Native for InKernel {
    fn poll(&mut self, fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize> {
        if self.0.is_null() && is_confined() {
            // The program may have allowed itself this call only.
            let milliseconds = limit::milliseconds(timeout);
            // SAFETY: `fds` has as many entries as the call says.
            let ready = unsafe { real::poll(fds.as_mut_ptr(), fds.len() as nfds_t, milliseconds) };
            return check(ready as isize);
        }
        let time = timeout.map(spec);
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `fds` has as many entries as the call says, and the mask comes from the program.
        check(unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as nfds_t, time, self.0) } as isize)
    }

    fn sets_mask(&self) -> bool {
        !self.0.is_null()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program says that the array has `count` entries, and that nothing else uses them during the call.
    let list = unsafe { list(fds, count) };
    if !settings::is_on() || !poll::concerns_us(list) {
        // SAFETY: the program obeys the rules of the function, and its arguments are passed on unchanged.
        return unsafe { real::poll(fds, count, timeout) };
    }
    tell_int(
        poll::poll(list, &mut Limit::new(milliseconds(timeout)), InKernel(std::ptr::null()))
            .map(|n| n as c_int),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: libc::size_t,
) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        // SAFETY: `abort` does not return.
        unsafe { libc::abort() };
    }
    // SAFETY: the array has `count` entries, as just checked, and nothing else uses them during the call.
    unsafe { poll(fds, count, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let list = unsafe { list(fds, count) };
    if !settings::is_on() || !poll::concerns_us(list) {
        // SAFETY: the program obeys the rules of the function, and its arguments are passed on unchanged.
        return unsafe { real::ppoll(fds, count, timeout, mask) };
    }
    // SAFETY: the pointer is null, or the program passes a time.
    let time = unsafe { time(timeout) };
    tell_int(
        time.and_then(|time| poll::poll(list, &mut Limit::new(time), InKernel(mask))).map(|n| n as c_int),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: libc::size_t,
) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        // SAFETY: `abort` does not return.
        unsafe { libc::abort() };
    }
    // SAFETY: the array has `count` entries, as just checked; the time and the mask are null, or the program passes them.
    unsafe { ppoll(fds, count, timeout, mask) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let within = within_table(count);
    // SAFETY: each set is null, or the program passes one with room for all numbers below `within`.
    let Some(mut list) = (unsafe { selected(within, read, write, except) }) else {
        // SAFETY: the program obeys the rules of the function, and its arguments are passed on unchanged.
        return unsafe { real::select(count, read, write, except, timeout) };
    };
    if !timeout.is_null() && !is_there(timeout) {
        return tell_int(Err(Errno(libc::EFAULT)));
    }
    // SAFETY: the pointer is null, or leads to a time.
    let time = match unsafe { timeout.as_ref() } {
        None => None,
        Some(time) => match (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec)) {
            // More than a second of microseconds is valid.
            (Ok(seconds), Ok(micros)) => {
                Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
            }
            _ => return tell_int(Err(Errno(libc::EINVAL))),
        },
    };
    let mut limit = Limit::new(time);
    let ready = poll_selected(&mut list, &mut limit, std::ptr::null());
    // The kernel, too, leaves a time alone that may only be read.
    if let Some(left) = limit.rest()
        && !timeout.is_null()
        && can_write(timeout, size_of::<timeval>())
    {
        // SAFETY: the time can be written. Linux stores the remaining time.
        unsafe {
            *timeout = timeval { tv_sec: left.as_secs() as i64, tv_usec: i64::from(left.subsec_micros()) }
        };
    }
    // SAFETY: each set is null, or has room for all numbers below `within`, among which are those of the list.
    tell_int(ready.and_then(|_| unsafe { select_result(&list, within, read, write, except) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let within = within_table(count);
    // SAFETY: each set is null, or the program passes one with room for all numbers below `within`.
    let Some(mut list) = (unsafe { selected(within, read, write, except) }) else {
        // SAFETY: the program obeys the rules of the function, and its arguments are passed on unchanged.
        return unsafe { real::pselect(count, read, write, except, timeout, mask) };
    };
    // SAFETY: the pointer is null, or the program passes a time.
    let time = unsafe { time(timeout) };
    let ready = time.and_then(|time| poll_selected(&mut list, &mut Limit::new(time), mask));
    // SAFETY: each set is null, or has room for all numbers below `within`, among which are those of the list.
    tell_int(ready.and_then(|_| unsafe { select_result(&list, within, read, write, except) }))
}

/// Waits for what the sets ask for. `poll` also reports what they do not ask for: the end, of a descriptor that is in the third set alone.
fn poll_selected(list: &mut poll::List, limit: &mut Limit, mask: *const sigset_t) -> Result<usize> {
    loop {
        let ready = poll::poll(list, limit, InKernel(mask))?;
        let is_asked = |poll: &pollfd| {
            poll.revents & libc::POLLNVAL != 0
                || SETS.iter().any(|(asked, told)| poll.events & asked != 0 && poll.revents & told != 0)
        };
        if ready == 0 || list.iter().any(is_asked) {
            return Ok(ready);
        }
        // Such a descriptor will have nothing else.
        list.iter_mut().filter(|poll| poll.revents != 0).for_each(|poll| poll.fd = -1);
    }
}

/// The events with which `poll` is asked for each of the three sets, and those that put a descriptor into it.
const SETS: [(i16, i16); 3] =
    [(libc::POLLIN, INPUT), (libc::POLLOUT, OUTPUT), (libc::POLLPRI, libc::POLLPRI)];
const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR;

/// Returns the descriptors of the sets, if this library must handle any of them.
unsafe fn selected(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
) -> Option<poll::List> {
    let len = usize::try_from(count).unwrap_or(0).div_ceil(64) * size_of::<u64>();
    let are_all = |is: &dyn Fn(*mut fd_set) -> bool| {
        [read, write, except].into_iter().all(|set| set.is_null() || is(set))
    };
    if !settings::is_on() || count <= 0 || !is_prepared() || !are_all(&|set| can_read(set, len)) {
        return None;
    }
    let has = |set: *mut fd_set, fd: c_int| {
        // SAFETY: the pointer is null, or the program passes a set with room for all numbers below `count`.
        !set.is_null() && unsafe { word(set, fd).read() } >> (fd % 64) & 1 != 0
    };
    let list: poll::List = (0..count)
        .filter_map(|fd| {
            let mut events = 0;
            for (set, (asked, _)) in [read, write, except].into_iter().zip(SETS) {
                if has(set, fd) {
                    events |= asked;
                }
            }
            (events != 0).then_some(pollfd { fd, events, revents: 0 })
        })
        .collect();
    let concerns_us = poll::concerns_us(&list) && are_all(&|set| can_write(set, len));
    concerns_us.then_some(list)
}

/// Limits the numbers that a call looks at to those for which the process has entries, as the kernel does: a program may pass sets that
/// are shorter than it says.
fn within_table(count: c_int) -> c_int {
    const SET: c_int = libc::FD_SETSIZE as c_int;
    if count <= SET {
        return count;
    }
    let _errno = Kept::new();
    let status = if is_confined() { None } else { std::fs::read_to_string("/proc/self/status").ok() };
    let size = status.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("FDSize:")));
    count.min(size.and_then(|size| size.trim().parse().ok()).unwrap_or(SET))
}

/// Returns the address of the word that has a descriptor's bit in a set.
unsafe fn word(set: *mut fd_set, fd: c_int) -> *mut u64 {
    // SAFETY: the caller knows that the set has this bit.
    unsafe { set.cast::<u64>().add(fd as usize / 64) }
}

/// Leaves only the ready descriptors in the sets. Returns the number of bits, or EBADF if a descriptor is not open.
unsafe fn select_result(
    list: &[pollfd],
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
) -> Result<c_int> {
    if list.iter().any(|poll| poll.revents & libc::POLLNVAL != 0) {
        return Err(Errno(libc::EBADF));
    }
    let mut bits = 0;
    for (set, (asked, told)) in [read, write, except].into_iter().zip(SETS) {
        if set.is_null() {
            continue;
        }
        for fd in (0..count).step_by(64) {
            let keep = if count - fd < 64 { !0u64 << (count - fd) } else { 0 };
            // SAFETY: the set is not null, and the program passes one with room for all numbers below `count`.
            unsafe { *word(set, fd) &= keep };
        }
        for poll in list {
            if poll.events & asked != 0 && poll.revents & told != 0 {
                // SAFETY: the set is not null, and has room for all numbers below `count`, among which are those of the list.
                unsafe { *word(set, poll.fd) |= 1 << (poll.fd % 64) };
                bits += 1;
            }
        }
    }
    Ok(bits)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: the function takes only a number.
    created(unsafe { real::epoll_create(size) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: the function takes only a number.
    created(unsafe { real::epoll_create1(flags) })
}

fn created(fd: c_int) -> c_int {
    if fd >= 0 && settings::is_on() {
        descriptors::add_epoll(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    let Some(call) = EPOLLS.call(epoll) else { return native() };
    let instance = call.what();
    // SAFETY: the program passes a valid pointer, unless the operation needs none.
    let event = if is_there(event) { Some(unsafe { *event }) } else { None };
    instance.control(epoll, operation, fd, event, native)
}

/// Does what `epoll_wait` and its variants do. `timeout` and `mask` are those of the program's call, and `native` makes that call.
unsafe fn wait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
    native: impl FnOnce() -> c_int,
) -> c_int {
    let Some(call) = EPOLLS.call(epoll).filter(|_| count > 0 && !is_beyond(events, 1)) else {
        return native();
    };
    let instance = call.what();
    // The kernel notices that there is no room when it has an event, and so does the library for those that it reports itself. Few programs
    // have as many as they have room for, and all of that is memory that need not be touched.
    let most = (count as usize).min(instance.most_reported().max(1));
    let checked = [most, 64, 8, 1]
        .into_iter()
        .filter(|room| *room <= most)
        .find(|room| can_write(events, room * size_of::<epoll_event>()));
    let mut one = [epoll_event { events: 0, u64: 0 }];
    let events = match checked {
        // SAFETY: the program says that there is room for `count` events. Only the first `checked` ones, which are there, and those
        // that the kernel has filled in are accessed.
        Some(_) => unsafe { std::slice::from_raw_parts_mut(events, count as usize) },
        None => &mut one[..],
    };
    let native = |events: &mut [epoll_event], timeout| match EPOLLS.is(epoll, instance) {
        true => native::native(epoll, events, timeout, mask),
        // Another thread has closed the instance, so its number may now belong to another one.
        false => Err(Errno(libc::EBADF)),
    };
    tell_int(match instance.wait(epoll, events, checked.unwrap_or(1), timeout, native) {
        Ok(1..) if checked.is_none() => Err(Errno(libc::EFAULT)),
        told => told.map(|n| n as c_int),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    unsafe {
        wait(epoll, events, count, milliseconds(timeout), std::ptr::null(), || {
            real::epoll_wait(epoll, events, count, timeout)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    unsafe {
        wait(epoll, events, count, milliseconds(timeout), mask, || {
            real::epoll_pwait(epoll, events, count, timeout, mask)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    unsafe {
        let native = || real::epoll_pwait2(epoll, events, count, timeout, mask);
        match time(timeout) {
            Ok(time) => wait(epoll, events, count, time, mask, native),
            Err(_) => native(),
        }
    }
}
