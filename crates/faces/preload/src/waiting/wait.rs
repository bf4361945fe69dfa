//! Calls that wait for one socket.
//!
//! A waiting thread polls the ring for a while. Then it announces in the ring that it is about to sleep, checks the
//! ring again, and sleeps in a system call on the kernel's socket. A byte from the peer, or the peer's end, wakes it
//! there.

use crate::carrying::returning::Taker;
use crate::carrying::{connection, counted, look, returning, room, wakeups};
use crate::process::{signals, spin, thread};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket};
use crate::system::errno::{Errno, Result};
use crate::system::kernel;
use crate::waiting::call::Call;
use crate::waiting::sleep::{Point, Sleep};
use crate::waiting::{in_kernel, limit, sleep};
use ginnel_ring::wait::Watchable;
use libc::c_int;
use std::sync::atomic::Ordering;

/// The interval, in milliseconds, at which a thread that cannot be woken checks again.
const STEP: c_int = 1;

/// A thread that the peer wakes, until it is awake or cancelled.
struct Armed(&'static Socket, fn(&'static Socket));

impl Drop for Armed {
    fn drop(&mut self) {
        self.1(self.0);
    }
}

/// Waits until another attempt to receive is worthwhile.
pub fn for_data(call: &mut Call) -> Result<()> {
    await_data(call)?;
    call.go_on()
}

fn await_data(call: &mut Call) -> Result<()> {
    let (socket, fd) = (call.socket, call.fd);
    call.waits()?;
    if socket.receiving.carrier() != Carrier::Kernel && looks_pay(socket) {
        let what = socket.receiving.lock().as_ref().map(|receiver| receiver.ring.watch().look);
        if let Some(what) = what {
            let found = spin::spin(|| what.has_changed());
            learn(socket, found);
            if found {
                return Ok(());
            }
        }
    }
    let mut point = point(socket);
    let sleep = Sleep::begin(socket, fd, &mut point);
    sleep::settle(&point, std::iter::once(&sleep));
    wakeups::arm_for_data(socket, point.wake_for(socket));
    wakeups::probe(socket);
    let _armed = Armed(socket, wakeups::rise_from_data);
    if look::is_ready(socket) {
        return Ok(());
    }
    sleep_for_data(call, &sleep, &point)
}

/// Takes a wait point at the doorbell for a thread that waits for what a ring carries.
fn point(socket: &'static Socket) -> Point {
    let is_rung = socket.receiving.carrier() == Carrier::Ring
        && socket.end() == End::None
        && socket.receiving.common().is_none();
    if is_rung { Point::at_doorbell() } else { Point::later() }
}

fn sleep_for_data(call: &mut Call, sleep: &Sleep, point: &Point) -> Result<()> {
    let (socket, fd) = (call.socket, call.fd);
    // If the kernel carries the direction, it may have bytes of the program. They end the sleep, and stay where they
    // are.
    let wakes_only = socket.receiving.carrier() == Carrier::Ring;
    if !sleep.is_woken() {
        return doze(call);
    }
    if let Some(point) = point.taken() {
        if sleep.keeper().is_none() && !wakes_only && kernel::poll_now(fd, kernel::READABLE) != 0 {
            return Ok(());
        }
        let left = call.left()?;
        let slept = point.sleep(socket, fd, sleep.keeper().is_some(), limit::milliseconds(left));
        if call.woken(slept, left.is_some())? == Some(false) {
            return Ok(());
        }
    } else if sleep_at_socket(call, wakes_only)? {
        return Ok(());
    }
    if wakes_only {
        sleep.take(socket, fd);
    }
    Ok(())
}

/// Sleeps as the keeper. Returns whether the call that has slept has taken the byte that has woken it.
fn sleep_at_socket(call: &mut Call, wakes_only: bool) -> Result<bool> {
    let (socket, fd) = (call.socket, call.fd);
    let is_first = call.sleeps();
    let left = if is_first && !call.has_moved { None } else { call.left()? };
    if left.is_some() || call.has_moved {
        // The call of the kernel would begin the time anew, and go on after a signal.
        let slept = kernel::poll_readable(fd, limit::milliseconds(left));
        return call.woken(slept, left.is_some()).map(|_| false);
    }
    // The byte that wakes this thread is for no other thread, so the call that sleeps also takes it. If there are
    // other threads, one may give the descriptor's number to another file, whose bytes must not be taken.
    let may_take = thread::is_only()
        && wakes_only
        && socket.receiving.common().is_none()
        && socket.end() == End::None
        && socket.watchers.is_empty()
        && socket.receiving.waiting.load(Ordering::Relaxed) == 1;
    let taker = may_take.then(|| Taker::begin(socket)).flatten();
    let byte = in_kernel::sleep_as_recv(socket, fd, taker.is_some())?;
    if let (Some(taker), Some(byte)) = (&taker, byte) {
        taker.took(fd, byte);
    }
    Ok(taker.is_some())
}

/// Waits until another attempt to send so many bytes at once is worthwhile.
pub fn for_space(call: &mut Call, least: usize) -> Result<()> {
    await_space(call, least)?;
    call.go_on()
}

fn await_space(call: &mut Call, least: usize) -> Result<()> {
    let (socket, fd) = (call.socket, call.fd);
    call.waits()?;
    let what = socket.sending.lock().as_ref().map(|sender| sender.ring.watch().look);
    if spin::may_look()
        && let Some(what) = what
        && spin::spin(|| what.has_changed())
    {
        return Ok(());
    }
    let mut point = point(socket);
    let sleep = Sleep::begin(socket, fd, &mut point);
    sleep::settle(&point, std::iter::once(&sleep));
    wakeups::arm_for_room(socket, point.wake_for(socket));
    let _armed = Armed(socket, wakeups::rise_from_room);
    if room::has_room(socket, least) {
        return Ok(());
    }
    sleep_for_space(call, least, &sleep, &point)
}

fn sleep_for_space(call: &mut Call, least: usize, sleep: &Sleep, point: &Point) -> Result<()> {
    let (socket, fd) = (call.socket, call.fd);
    let left = call.left()?;
    counted::begin_ring_if_due(socket);
    if !returning::is_full_for(socket, fd, least) {
        return Ok(());
    }
    // The peer can send a wake byte only once its direction has changed over; and while bytes of the program wait in the kernel,
    // a wake byte is not seen behind them.
    let can_be_woken = !crate::carrying::grow::attend_waiting(socket)
        && sleep.is_woken()
        && socket.receiving.carrier() == Carrier::Ring
        && !socket.has(Fact::ShutDownReceiving)
        && socket.end() == End::None;
    let result = if can_be_woken {
        // Nothing reports that there will be no room.
        let most = returning::STEP;
        let milliseconds = left.map_or(most, |left| left.as_millis().clamp(1, most as u128) as c_int);
        match point.taken() {
            Some(point) => point.sleep(socket, fd, sleep.keeper().is_some(), milliseconds),
            None => kernel::poll_readable(fd, milliseconds),
        }
    } else {
        signals::sleep(STEP).map(|()| false)
    };
    // Without a wait point, a byte has woken this thread.
    let has_bytes = result != Ok(false) || point.taken().is_none();
    let result = call.woken(result, left.is_some()).map(drop);
    if !sleep.is_woken() {
        connection::look_for_end(socket, fd);
    } else if can_be_woken && has_bytes {
        sleep.take(socket, fd);
    }
    // A peer that has ended may have released room before, or never will.
    if socket.end() != End::None && !room::has_room(socket, 1) {
        return Err(Errno(libc::ECONNRESET));
    }
    result
}

/// Sleeps for a moment, for a call that nothing wakes.
pub fn a_moment(call: &mut Call) -> Result<()> {
    doze(call)?;
    call.go_on()
}

fn doze(call: &mut Call) -> Result<()> {
    let left = call.left()?;
    call.woken(signals::sleep(STEP), left.is_some()).map(drop)
}

/// Waits until the kernel has room for what a call sends.
pub fn for_kernel(call: &mut Call) -> Result<()> {
    let left = call.left()?;
    let slept = kernel::poll_writable(call.fd, limit::milliseconds(left));
    call.woken(slept, left.is_some())?;
    call.go_on()
}

/// The number of failures in a row from which on the thread spins only now and then,
const FAILURES: u32 = 2;
/// which is one time in this many.
const PROBE: u32 = 32;

/// Returns whether a spin before the next sleep is likely to find something.
pub fn looks_pay(socket: &'static Socket) -> bool {
    if !spin::may_look() {
        return false;
    }
    let failures = socket.patience.load(Ordering::Relaxed);
    if failures < FAILURES {
        return true;
    }
    socket.patience.store(failures + 1, Ordering::Relaxed);
    failures.is_multiple_of(PROBE)
}

/// Records whether a spin has found something.
pub fn learn(socket: &'static Socket, found: bool) {
    if found {
        socket.patience.store(0, Ordering::Relaxed);
    } else {
        let failures = socket.patience.load(Ordering::Relaxed);
        socket.patience.store(
            failures.max(FAILURES - 1).saturating_add(u32::from(failures < FAILURES)),
            Ordering::Relaxed,
        );
    }
}
