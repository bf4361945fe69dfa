//! A guest program that sends numbered messages, echoes, holds channels, or scribbles. Each role prints lines that tests wait
//! for.

use anyhow::{Context, Result, bail, ensure};
use ginnel::{ChannelOptions, Endpoint, Error, Listener, MessageChannel, StreamChannel};
use std::env;
use std::time::{Duration, Instant};
use vmtest::guest_program::{Random, say};

const USAGE: &str =
    "load echo|drive|hold|churn|scribble|own|inherit|stream-out|stream-in SEGMENT [NAME] [SECONDS|COUNT]";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |n: usize| args.get(n).map(String::as_str).context(USAGE);
    let number = |n: usize| -> Result<u64> { arg(n)?.parse().context(USAGE) };
    match arg(0)? {
        "echo" => echo(arg(1)?, arg(2)?),
        "drive" => drive(arg(1)?, arg(2)?, Duration::from_secs(number(3)?)),
        "hold" => hold(arg(1)?, arg(2)?),
        "churn" => churn(arg(1)?, arg(2)?, Duration::from_secs(number(3)?)),
        "scribble" => scribble(arg(1)?, Duration::from_secs(number(2)?)),
        "own" => own(arg(1)?, arg(2)?),
        "inherit" => inherit(arg(1)?, arg(2)?),
        "stream-out" => stream_out(arg(1)?, arg(2)?, number(3)?),
        "stream-in" => stream_in(arg(1)?, arg(2)?),
        _ => bail!(USAGE),
    }
}

/// Returns message `number`: its number, then bytes that follow from it. Most messages are short, some are long.
fn message(number: u64, max: usize) -> Vec<u8> {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let kind = random.next() % 16;
    let len = 8 + random.next() as usize % if kind == 0 { max - 8 } else { 200 };
    let mut bytes = number.to_le_bytes().to_vec();
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns the name of an error in the lines that tests wait for.
fn name_of(error: &Error) -> &'static str {
    match error {
        Error::Finished => "finished",
        Error::Closed => "closed",
        Error::PeerDead => "dead",
        Error::Corrupt(_) => "corrupt",
        Error::Broken => "broken",
        Error::TimedOut => "timeout",
        _ => "other",
    }
}

/// Accepts channels without end, and echoes each channel's messages in a thread of its own.
fn echo(segment: &str, name: &str) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let listener: Listener<MessageChannel> = endpoint.listen(name)?;
    let (number, epoch) = endpoint.number();
    say(format_args!("listening as {number} epoch {epoch}"));
    loop {
        let mut channel = listener.accept()?;
        let peer = channel.info().peer.clone();
        say(format_args!("accepted from {} {} epoch {}", peer.member_name, peer.endpoint, peer.epoch));
        std::thread::spawn(move || {
            let error = loop {
                match channel.recv().and_then(|message| channel.send(&message)) {
                    Ok(()) => {}
                    Err(error) => break error,
                }
            };
            say(format_args!("ended {} {}: {error}", name_of(&error), peer.member_name));
        });
    }
}

/// Sends numbered messages for a while, several at a time, and checks that each comes back once, in order and unchanged.
fn drive(segment: &str, name: &str, time: Duration) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let options = ChannelOptions { patience: Duration::from_secs(20), ..Default::default() };
    let channel: MessageChannel = endpoint.connect_with(name, &options)?;
    let max = channel.max_message().min(4096);
    let (mut to, mut from) = channel.split();
    let limit = Some(Duration::from_secs(30));
    to.set_timeout(limit);
    from.set_timeout(limit);
    say(format_args!("connected"));
    let end = Instant::now() + time;
    let mut random = Random(0xfeed_5eed);
    let (mut sent, mut got) = (0u64, 0u64);
    let mut bytes = 0u64;
    while got < sent || Instant::now() < end {
        let window = if Instant::now() < end { 1 + random.next() % 16 } else { 0 };
        for _ in 0..window {
            to.send(&message(sent, max))?;
            sent += 1;
        }
        while got < sent {
            let came = from.recv().with_context(|| format!("message {got} of {sent}"))?;
            let wanted = message(got, max);
            ensure!(
                came == wanted,
                "message {got}: {} bytes came, {} were sent, or they differ",
                came.len(),
                wanted.len()
            );
            bytes += came.len() as u64;
            got += 1;
        }
    }
    say(format_args!("done {got} messages {bytes} bytes"));
    Ok(())
}

/// Opens a channel, exchanges one message, and waits for the end of the channel.
fn hold(segment: &str, name: &str) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let options = ChannelOptions { patience: Duration::from_secs(20), ..Default::default() };
    let mut channel: MessageChannel = endpoint.connect_with(name, &options)?;
    channel.send(b"hello")?;
    channel.recv()?;
    let peer = channel.info().peer.clone();
    say(format_args!("holding {} {} epoch {}", peer.member_name, peer.endpoint, peer.epoch));
    match channel.recv() {
        Ok(message) => bail!("{} bytes came, and nothing was sent", message.len()),
        Err(error) => say(format_args!("told {}", name_of(&error))),
    }
    // The test checks what became of the channel's resources while this end still exists.
    let _ = std::io::stdin().read_line(&mut String::new());
    Ok(())
}

/// Opens, uses and closes channels for a while from one endpoint. Daemons may be replaced meanwhile.
fn churn(segment: &str, name: &str, time: Duration) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let options = ChannelOptions { patience: Duration::from_secs(20), ..Default::default() };
    let end = Instant::now() + time;
    let mut count = 0u64;
    while Instant::now() < end {
        let mut channel: MessageChannel = endpoint.connect_with(name, &options)?;
        channel.set_timeout(Some(Duration::from_secs(20)));
        let wanted = message(count, 2000);
        channel.send(&wanted)?;
        ensure!(channel.recv()? == wanted, "the echo differs");
        count += 1;
        if count == 1 {
            say(format_args!("churning"));
        }
    }
    say(format_args!("done {count} channels"));
    Ok(())
}

/// Writes random words to places all over the segment.
fn scribble(segment: &str, time: Duration) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let memory = endpoint.memory();
    let len = ginnel::SharedMemory::len(memory);
    say(format_args!("scribbling"));
    let mut random = Random(0xbad_5eed ^ u64::from(std::process::id()));
    let end = Instant::now() + time;
    let mut count = 0u64;
    while Instant::now() < end {
        for _ in 0..4096 {
            let word = random.next();
            // Places at the start of cache lines and inside them hit headers and payloads alike. The low part of a segment,
            // where blocks lie, is hit more often.
            let reach = if word.is_multiple_of(2) { len } else { len.min(6 << 20) };
            let at = random.next() as usize % (reach / 64) * 64;
            let value = match word % 5 {
                0 => 0,
                1 => u64::MAX,
                2 => 1,
                _ => random.next(),
            };
            ginnel::SharedMemory::write(memory, at + (word >> 8) as usize % 8 * 8, &value.to_le_bytes());
        }
        count += 4096;
    }
    say(format_args!("done {count} words"));
    Ok(())
}

/// Returns the offset of a word that no block and no channel of these tests reaches, near the end of the segment.
fn far_word(endpoint: &Endpoint) -> usize {
    ginnel::SharedMemory::len(endpoint.memory()) - 4096
}

/// Locks a mutex, and stores to the segment as fast as it can without end, as a program may do that hangs.
fn own(segment: &str, name: &str) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let mut mutex = endpoint.mutex(name)?;
    let _guard = mutex.lock()?;
    let at = far_word(&endpoint);
    say(format_args!("owns"));
    for count in 1u64.. {
        ginnel::SharedMemory::store_release_u64(endpoint.memory(), at, count);
    }
    Ok(())
}

/// Waits for that mutex. Then prints each second whether the former owner still stores, until it is killed.
fn inherit(segment: &str, name: &str) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let mut mutex = endpoint.mutex(name)?;
    mutex.set_timeout(Some(Duration::from_secs(60)));
    say(format_args!("waiting"));
    let guard = mutex.lock()?;
    let at = far_word(&endpoint);
    let count = || ginnel::SharedMemory::load_acquire_u64(endpoint.memory(), at);
    let mut before = count();
    say(format_args!("inherited, owner died: {}", guard.owner_died()));
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = count();
        say(format_args!("{} after {before}", if now == before { "silence" } else { "stores" }));
        before = now;
    }
}

/// Sends `mib` MiB through a stream in writes of different sizes, and finishes.
fn stream_out(segment: &str, name: &str, mib: u64) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let options = ChannelOptions { patience: Duration::from_secs(20), ..Default::default() };
    let channel: StreamChannel = endpoint.connect_with(name, &options)?;
    let (mut to, mut back) = channel.split();
    let mut bytes = Random(7);
    let mut sizes = Random(11);
    let total = mib << 20;
    let (mut sent, mut sum) = (0u64, 0u64);
    while sent < total {
        let len = (1 + sizes.next() % 100_000).min(total - sent) as usize;
        let chunk: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|_| bytes.next().to_le_bytes()).take(len).collect();
        sum = chunk.iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        to.send_all(&chunk)?;
        sent += len as u64;
    }
    // This closes one direction; the other still works.
    to.finish();
    let mut answer = Vec::new();
    std::io::Read::read_to_end(&mut back, &mut answer)?;
    ensure!(answer == sum.to_le_bytes(), "the receiver saw other bytes");
    say(format_args!("done {sent} bytes"));
    Ok(())
}

/// Receives a stream to its end and answers with a checksum.
fn stream_in(segment: &str, name: &str) -> Result<()> {
    let endpoint = Endpoint::attach(segment)?;
    let listener: Listener<StreamChannel> = endpoint.listen(name)?;
    say(format_args!("listening"));
    let (mut to, mut from) = listener.accept()?.split();
    let mut sum = 0u64;
    let mut buffer = vec![0u8; 70_001];
    loop {
        let n = from.recv(&mut buffer)?;
        if n == 0 {
            break;
        }
        sum = buffer[..n].iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    }
    to.send_all(&sum.to_le_bytes())?;
    Ok(())
}
