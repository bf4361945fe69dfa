//! The events of a socket that the kernel does not carry alone, and how a thread is woken for them.

use crate::carrying::bell::Wake;
use crate::carrying::look::Found;
use crate::carrying::{connection, counted, disconnecting, look, returning, room, wakeups};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket};
use crate::system::kernel;
use libc::{c_int, c_short};

/// Returns which events of interest (as for `poll`) are present at a socket that the kernel alone does not carry.
pub fn readiness(socket: &'static Socket, fd: c_int, interest: c_short) -> c_short {
    let mut events = 0;
    disconnecting::follow_if_due(socket);
    if socket.receiving.carrier() == Carrier::Counted {
        // Once the program has received all that TCP carries, the ring says how the connection ends.
        counted::begin_ring_if_due(socket);
    }
    if socket.has(Fact::ShutDownReceiving) || socket.receiving.carrier() != Carrier::Ring {
        // Whoever takes wake bytes finds out about this. Here, nobody does.
        returning::leave_if_recalled(socket, fd);
    }
    if socket.has(Fact::ShutDownReceiving) && socket.end() == End::None {
        // Nobody asks the kernel either, whose socket is readable for good.
        connection::look_for_end(socket, fd);
    }
    let input = libc::POLLIN | libc::POLLRDNORM;
    let output = interest & (libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND);
    let mut is_ending = socket.has(Fact::ShutDownReceiving);
    let found = match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => {
            let now = kernel::poll_now(fd, interest & !output | libc::POLLRDHUP);
            is_ending |= now & libc::POLLRDHUP != 0;
            events |= now & (interest | libc::POLLHUP | libc::POLLERR);
            Found::Nothing
        }
        _ => {
            // Where the kernel says what can be received, it also says how the connection has ended.
            let mut kernels = 0;
            let (found, is_ending_in_ring) = look::look_ahead(socket, || {
                kernels = kernel::poll_now(fd, libc::POLLIN | libc::POLLRDHUP);
                kernels != 0
            });
            is_ending |= is_ending_in_ring || kernels & libc::POLLRDHUP != 0;
            events |= kernels & (libc::POLLHUP | libc::POLLERR);
            found
        }
    };
    match found {
        Found::Nothing => {}
        Found::Something => events |= interest & input,
        Found::End => events |= interest & (input | libc::POLLRDHUP),
    }
    let has_shut_down = room::has_shut_down(socket);
    if is_ending {
        events |= interest & libc::POLLRDHUP;
        // What the kernel carries before a ring that has ended may still be on its way.
        if socket.receiving.carrier() != Carrier::Counted
            || socket.has(Fact::ShutDownReceiving)
            || kernel::poll_now(fd, libc::POLLIN) != 0
        {
            events |= interest & input;
        }
        // Both directions have ended.
        if has_shut_down {
            events |= libc::POLLHUP;
        }
    }
    if output != 0 {
        match socket.sending.carrier() {
            _ if has_shut_down => events |= output,
            Carrier::Ring if returning::is_full(socket, fd) => {}
            Carrier::Ring if socket.sending.carrier() == Carrier::Ring => events |= output,
            _ => events |= kernel::poll_now(fd, output),
        }
    }
    // What this side sends over TCP may break a connection whose end is in a ring.
    if is_ending
        && socket.end() < End::Reset
        && socket.sending.carrier() == Carrier::Kernel
        && matches!(socket.receiving.carrier(), Carrier::Ring | Carrier::Returning)
    {
        connection::look_for_end(socket, fd);
    }
    if is_ending && (socket.has(Fact::SentInVain) || look::is_reset(socket)) {
        events |= interest & (input | libc::POLLRDHUP | output) | libc::POLLHUP;
        if !socket.has(Fact::ToldReset) {
            events |= libc::POLLERR;
        }
    } else if is_ending && socket.end() == End::Lost {
        events |= libc::POLLHUP;
        if socket.untold().is_some() {
            events |= libc::POLLERR;
        }
    }
    events
}

/// Returns what a sleeper must be woken for, so that events are not missed which are reported whatever the interest is.
pub fn needs(socket: &'static Socket, interest: c_short) -> c_short {
    if room::has_shut_down(socket) { interest | libc::POLLRDHUP } else { interest }
}

/// The conditions for which a sleeper waits. The peer wakes it for them until [`rise`].
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Armed {
    data: bool,
    space: bool,
}

impl Armed {
    /// Returns whether the peer wakes the sleeper when there are bytes.
    pub fn is_for_data(self) -> bool {
        self.data
    }

    /// Returns whether the peer wakes the sleeper when there is room.
    pub fn is_for_room(self) -> bool {
        self.space
    }
}

/// Makes the peer wake a sleeper for the events of interest. The sleeper may wait already. The caller must check once more before it
/// sleeps.
pub fn arm_more(socket: &'static Socket, interest: c_short, how: Wake, armed: &mut Armed) {
    let interest = needs(socket, interest);
    if interest & (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP) != 0 {
        match std::mem::replace(&mut armed.data, true) {
            false => wakeups::arm_for_data(socket, how),
            true => wakeups::arm_for_data_again(socket, how),
        }
    }
    if interest & (libc::POLLOUT | libc::POLLWRNORM) != 0 && socket.sending.carrier() == Carrier::Ring {
        match std::mem::replace(&mut armed.space, true) {
            false => wakeups::arm_for_room(socket, how),
            true => wakeups::arm_for_room_again(socket, how),
        }
    }
}

/// Records that the sleeper is awake.
pub fn rise(socket: &'static Socket, armed: &mut Armed) {
    let armed = std::mem::take(armed);
    if armed.data {
        wakeups::rise_from_data(socket);
    }
    if armed.space {
        wakeups::rise_from_room(socket);
    }
}

/// Returns whether the peer can wake this side for all events of interest. This side must have asked for it with [`arm_more`].
pub fn can_be_woken(socket: &'static Socket, interest: c_short) -> bool {
    counted::begin_ring_if_due(socket);
    // The daemon wakes no sleeper.
    if crate::carrying::grow::attend_waiting(socket) || connection::is_undecided(socket) {
        return false;
    }
    let output = interest & (libc::POLLOUT | libc::POLLWRNORM) != 0;
    if !output || socket.sending.carrier() != Carrier::Ring {
        return true;
    }
    // A thread that waits for room in a full ring checks by the clock, because no event reports that the peer will make no
    // room. After a while, `returning::is_full` then returns the direction to the kernel.
    room::has_room(socket, 1) && socket.receiving.carrier() == Carrier::Ring
}
