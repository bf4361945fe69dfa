//! `ginnel perf --serve`: executes the measurements that clients request.

use super::measure::answer;
use super::transport::Transport;
use crate::{address, output};
use anyhow::{Context, Result, anyhow};
use ginnel::{AttachOptions, Channel, Endpoint, Listener, MessageChannel, StreamChannel};
use std::net::TcpListener;
use std::thread;

/// Returns the name at which streams are accepted; messages are accepted at `name`.
pub fn stream_name(name: &str) -> String {
    format!("{name}.stream")
}

/// Returns the options for the endpoints of a measurement.
pub fn options() -> AttachOptions {
    AttachOptions { name: Some("ginnel-perf".into()), ..AttachOptions::default() }
}

/// Serves both kinds of channel.
pub fn serve(at: &str) -> Result<()> {
    let (segment, name) = address::split(at)?;
    let endpoint = Endpoint::attach_with(segment, &options())?;
    let messages = endpoint.listen::<MessageChannel>(name)?;
    let streams = endpoint.listen::<StreamChannel>(&stream_name(name))?;
    output::ready(format!("measuring at {at}"));
    thread::scope(|scope| {
        let streams = scope.spawn(move || accept(&streams));
        let messages = accept(&messages);
        messages.and(streams.join().unwrap_or_else(|_| Err(anyhow!("the listener for streams has panicked"))))
    })
}

fn accept<C: Channel + Transport + Send + 'static>(listener: &Listener<C>) -> Result<()> {
    loop {
        converse(listener.accept()?)?;
    }
}

/// Serves TCP.
pub fn serve_tcp(at: &str) -> Result<()> {
    let listener = TcpListener::bind(at).with_context(|| format!("cannot listen at {at}"))?;
    output::ready(format!("measuring at {}", listener.local_addr()?));
    loop {
        let (socket, _) = listener.accept().context("accepting a connection")?;
        converse(socket)?;
    }
}

/// Executes one measurement in a thread.
fn converse<L: Transport + Send + 'static>(mut transport: L) -> Result<()> {
    let work = move || {
        // An error of a client that ends early, as interrupted clients do, is not reported.
        let _ = answer(&mut transport);
    };
    thread::Builder::new()
        .name("measure".into())
        .spawn(work)
        .context("cannot start a thread for a measurement")?;
    Ok(())
}
