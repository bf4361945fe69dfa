//! A guest program that sleeps on doorbells: every message wakes its receiver with one. Prints lines that tests wait for.

use anyhow::{Context, Result, bail};
use ginnel::{AttachOptions, ChannelOptions, Endpoint, Error, Listener, MessageChannel, WaitMode};
use std::env;
use std::time::{Duration, Instant};
use vmtest::guest_program::say;

const USAGE: &str = "bell echo|ring|attach SEGMENT [NAME] [SECONDS]";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |n: usize| args.get(n).map(String::as_str).context(USAGE);
    let options = AttachOptions { mode: WaitMode::Interrupt, ..Default::default() };
    let endpoint = Endpoint::attach_with(arg(1)?, &options)?;
    let kind = if endpoint.has_interrupts() { "interrupts" } else { "no interrupts" };
    match arg(0)? {
        "attach" => say(format_args!("attached with {kind}")),
        "echo" => echo(&endpoint, arg(2)?)?,
        "ring" => ring(&endpoint, arg(2)?, Duration::from_secs(arg(3)?.parse().context(USAGE)?))?,
        _ => bail!(USAGE),
    }
    Ok(())
}

/// Echoes the messages of one channel after the other.
fn echo(endpoint: &Endpoint, name: &str) -> Result<()> {
    let listener: Listener<MessageChannel> = endpoint.listen(name)?;
    say(format_args!("listening"));
    loop {
        let mut channel = listener.accept()?;
        let end = loop {
            match channel.recv().and_then(|message| channel.send(&message)) {
                Ok(()) => {}
                Err(end) => break end,
            }
        };
        say(format_args!("ended: {end}"));
    }
}

/// Sends one message at a time and waits for its echo.
fn ring(endpoint: &Endpoint, name: &str, time: Duration) -> Result<()> {
    let options = ChannelOptions { patience: Duration::from_secs(20), ..Default::default() };
    let mut channel: MessageChannel = endpoint.connect_with(name, &options)?;
    channel.set_timeout(Some(Duration::from_secs(30)));
    let begin = Instant::now();
    let (mut count, mut slowest) = (0u64, Duration::ZERO);
    while begin.elapsed() < time {
        let sent = Instant::now();
        channel.send(&count.to_le_bytes())?;
        match channel.recv() {
            Ok(echo) if echo == count.to_le_bytes() => {}
            Ok(echo) => bail!("message {count}: {} other bytes came back", echo.len()),
            Err(Error::TimedOut) => bail!("message {count}: a doorbell was lost"),
            Err(error) => return Err(error).with_context(|| format!("message {count}")),
        }
        slowest = slowest.max(sent.elapsed());
        count += 1;
        if count == 1 {
            say(format_args!("ringing"));
        }
    }
    let each = begin.elapsed() / u32::try_from(count).unwrap_or(u32::MAX).max(1);
    say(format_args!("done {count} messages, {each:?} each there and back, slowest {slowest:?}"));
    Ok(())
}
