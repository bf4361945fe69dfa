//! Listening, connecting and accepting.

use crate::boundary::{
    Growing, Outcome, checked, close, invalid, number, output_handle, read_options, return_handle, share,
    status, text, timeout,
};
use crate::channel::Channel;
use crate::endpoint::Endpoint;
use crate::handle_table::{Handle, handle};
use crate::status::Failure;
use crate::status::Status::GINNEL_ERR_INTERNAL;
use ginnel::{MessageChannel, StreamChannel};
use libc::c_int;
use std::ffi::c_char;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a channel carries.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Kind {
    /// Messages, each of which is received whole and in order: ginnel_message_send() and related functions.
    GINNEL_MESSAGE = 1,
    /// A stream of bytes, like TCP: ginnel_stream_send() and related functions.
    GINNEL_STREAM = 2,
}

impl Kind {
    fn new(kind: c_int) -> Outcome<Self> {
        [Self::GINNEL_MESSAGE, Self::GINNEL_STREAM]
            .into_iter()
            .find(|known| *known as c_int == kind)
            .ok_or_else(|| {
                invalid(format!("{kind} is not a kind of channel; use GINNEL_MESSAGE or GINNEL_STREAM"))
            })
    }
}

/// A name at which other endpoints connect. Any number of threads may use it at once. Created by ginnel_listen() or
/// ginnel_endpoint_listen(), freed by ginnel_listener_close().
pub struct Listener {
    /// Always there, until it is dropped.
    inner: Option<Inner>,
    /// The name is to be kept.
    is_left: AtomicBool,
}
handle!(Listener, "listener");

impl Listener {
    fn new(inner: Inner) -> Self {
        Self { inner: Some(inner), is_left: AtomicBool::new(false) }
    }

    fn inner(&self) -> Outcome<&Inner> {
        self.inner.as_ref().ok_or_else(|| Failure::new(GINNEL_ERR_INTERNAL, "a listener that is being freed"))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if *self.is_left.get_mut() {
            match self.inner.take() {
                Some(Inner::Message(of)) => of.leave(),
                Some(Inner::Stream(of)) => of.leave(),
                None => {}
            }
        }
    }
}

enum Inner {
    Message(ginnel::Listener<MessageChannel>),
    Stream(ginnel::Listener<StreamChannel>),
}

/// Options for opening a channel. Fill the structure with zeros, set `size`, then the members that should differ from
/// the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ChannelOptions {
    /// sizeof(ginnel_channel_options).
    pub size: usize,
    /// Size in bytes of the ring into which this side sends, rounded up to a power of two. If both sides ask for a
    /// size, the larger one counts. 0: the daemon's default. A message may have at most a quarter of this size.
    pub capacity: usize,
    /// For connecting: how long to wait until a program listens at the name, in nanoseconds. 0: not at all.
    pub patience_ns: u64,
    /// For listening: how many connections may wait to be accepted. 0: the daemon's default.
    pub backlog: u32,
    /// Size in bytes of the ring from which this side receives, like `capacity`. 0: the same as `capacity`.
    pub input_capacity: usize,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for ChannelOptions {}

impl ChannelOptions {
    fn in_rust(self) -> ginnel::ChannelOptions {
        ginnel::ChannelOptions {
            capacity: self.capacity,
            input_capacity: self.input_capacity,
            patience: Duration::from_nanos(self.patience_ns),
            backlog: self.backlog,
        }
    }
}

fn listen_at(
    endpoint: &ginnel::Endpoint,
    name: &str,
    kind: Kind,
    options: ChannelOptions,
) -> Outcome<Listener> {
    let options = options.in_rust();
    Ok(Listener::new(match kind {
        Kind::GINNEL_MESSAGE => Inner::Message(endpoint.listen_with(name, &options)?),
        Kind::GINNEL_STREAM => Inner::Stream(endpoint.listen_with(name, &options)?),
    }))
}

fn connect_to(
    endpoint: &ginnel::Endpoint,
    name: &str,
    kind: Kind,
    options: ChannelOptions,
) -> Outcome<Channel> {
    let options = options.in_rust();
    Ok(match kind {
        Kind::GINNEL_MESSAGE => endpoint.connect_with::<MessageChannel>(name, &options)?.into(),
        Kind::GINNEL_STREAM => endpoint.connect_with::<StreamChannel>(name, &options)?.into(),
    })
}

/// Attaches to the segment of `address`, which is "segment/name", and listens at that name. `kind` is GINNEL_MESSAGE or
/// GINNEL_STREAM; `options` may be NULL. On success the caller must free `*listener` with ginnel_listener_close(); on
/// failure it is NULL. The endpoint lives as long as the listener and its channels.
///
/// Blocks like ginnel_attach(). Any thread may call it. Errors: those of ginnel_attach() and ginnel_endpoint_listen().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listen(
    address: *const c_char,
    kind: c_int,
    options: *const ChannelOptions,
    listener: *mut *mut Listener,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(listener));
        let (segment, name) = ginnel::split(checked!(text(address)))?;
        let (kind, options) = (Kind::new(kind)?, checked!(read_options(options)));
        return_handle(place, listen_at(&ginnel::Endpoint::attach(segment)?, name, kind, options)?);
        Ok(())
    })
}

/// Listens at a name in the endpoint's segment. On success the caller must free `*listener` with
/// ginnel_listener_close(); on failure it is NULL.
///
/// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted. Any thread may call it. Errors:
/// GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME, GINNEL_ERR_NO_DAEMON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_endpoint_listen(
    endpoint: *const Endpoint,
    name: *const c_char,
    kind: c_int,
    options: *const ChannelOptions,
    listener: *mut *mut Listener,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(listener));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let name = checked!(text(name));
        let (kind, options) = (Kind::new(kind)?, checked!(read_options(options)));
        return_handle(place, listen_at(endpoint, name, kind, options)?);
        Ok(())
    })
}

/// Attaches to the segment of `address`, which is "segment/name", and opens a channel to the program that listens at
/// that name. `kind` is GINNEL_MESSAGE or GINNEL_STREAM; `options` may be NULL. On success the caller must free
/// `*channel` with ginnel_channel_close(); on failure it is NULL. The endpoint lives as long as the channel.
///
/// Blocks like ginnel_attach(). Any thread may call it. Errors: those of ginnel_attach() and ginnel_endpoint_connect().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_connect(
    address: *const c_char,
    kind: c_int,
    options: *const ChannelOptions,
    channel: *mut *mut Channel,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(channel));
        let (segment, name) = ginnel::split(checked!(text(address)))?;
        let (kind, options) = (Kind::new(kind)?, checked!(read_options(options)));
        return_handle(place, connect_to(&ginnel::Endpoint::attach(segment)?, name, kind, options)?);
        Ok(())
    })
}

/// Opens a channel to the program that listens at a name in the endpoint's segment. The peer need not have accepted it
/// when this returns. On success the caller must free `*channel` with ginnel_channel_close(); on failure it is NULL.
///
/// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted, and for up to
/// `options->patience_ns` if no program listens. Any thread may call it. Errors: GINNEL_ERR_REFUSED, GINNEL_ERR_KIND,
/// GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME,
/// GINNEL_ERR_NO_DAEMON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_endpoint_connect(
    endpoint: *const Endpoint,
    name: *const c_char,
    kind: c_int,
    options: *const ChannelOptions,
    channel: *mut *mut Channel,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(channel));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let name = checked!(text(name));
        let (kind, options) = (Kind::new(kind)?, checked!(read_options(options)));
        return_handle(place, connect_to(endpoint, name, kind, options)?);
        Ok(())
    })
}

/// Accepts the next connection. The channel is of the listener's kind. On success the caller must free `*channel` with
/// ginnel_channel_close(); on failure it is NULL.
///
/// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Continues to wait when
/// the daemon is restarted. Any thread may call it. Errors: GINNEL_ERR_TIMED_OUT; GINNEL_ERR_WOULD_BLOCK for a timeout
/// of 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_accept(
    listener: *const Listener,
    timeout_ns: i64,
    channel: *mut *mut Channel,
) -> c_int {
    fn accept<C: ginnel::Channel>(of: &ginnel::Listener<C>, timeout_ns: i64) -> Result<C, ginnel::Error> {
        match timeout(timeout_ns) {
            Some(Duration::ZERO) => of.try_accept(),
            Some(timeout) => of.accept_timeout(timeout),
            None => of.accept(),
        }
    }
    status(|| {
        let place = checked!(output_handle(channel));
        let accepted = match checked!(share(listener)).inner()? {
            Inner::Message(of) => accept(of, timeout_ns)?.into(),
            Inner::Stream(of) => accept(of, timeout_ns)?.into(),
        };
        return_handle(place, accepted);
        Ok(())
    })
}

/// Returns a file descriptor for poll(2) and epoll(7), or a negative status. The descriptor is readable when
/// ginnel_accept() with a timeout of 0 is worth a call, which may still return GINNEL_ERR_WOULD_BLOCK. It belongs to
/// the library: do not read or close it, and do not use it after the listener is closed. Any thread may call it; it
/// does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listener_fd(listener: *const Listener) -> c_int {
    number(|| {
        Ok(match checked!(share(listener)).inner()? {
            Inner::Message(of) => of.as_fd().as_raw_fd(),
            Inner::Stream(of) => of.as_fd().as_raw_fd(),
        })
    })
}

/// Frees a listener but keeps its name: a process that adopts the endpoint (see ginnel_hold()) can listen there and
/// accept the connections that wait. The name becomes free when the endpoint ends. Before exec(3) it is better to keep
/// the listener, in case the call fails. NULL is allowed. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listener_leave(listener: *mut Listener) -> c_int {
    status(|| {
        if listener.is_null() {
            return Ok(());
        }
        checked!(share(listener)).is_left.store(true, Ordering::Relaxed);
        // SAFETY: uses of a listener are counted.
        unsafe { Listener::table().close(listener) }?;
        Ok(())
    })
}

/// Frees a listener and its name. Connections that wait to be accepted are refused; accepted channels stay open. NULL
/// is allowed. A call of another thread that uses the listener goes on, and frees it when it returns. Informs the daemon,
/// which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listener_close(listener: *mut Listener) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(listener) }
}
