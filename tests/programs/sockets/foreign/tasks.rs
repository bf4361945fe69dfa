//! Tokio: a server, a proxy in front of it, and a client. Each has many tasks.

use super::duration;
use crate::load::talk::{LONGEST, content};
use kit::program::run_by;
use kit::random::Random;
use kit::wait::WATCHDOG;
use programs::stage::{MODES, Stage, free_port};
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::net::Ipv4Addr;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The environment variables that tell a program what it is, the ports of the server and the proxy, and the client's time in seconds.
const ROLE: &str = "GINNEL_TEST_TASKS_ROLE";
const PORTS: [&str; 2] = ["GINNEL_TEST_TASKS_SERVER", "GINNEL_TEST_TASKS_PROXY"];
const SECONDS: &str = "GINNEL_TEST_TASKS_SECONDS";

/// How a program begins a line that says why a connection has failed.
const FAILED: &str = "a connection has failed: ";

/// Number of threads of each program.
const THREADS: usize = 4;
/// Number of connections of the client at a time. Half of them go through the proxy.
const TASKS: u64 = 24;

#[test]
fn tokio_streams_arrive() {
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let ports = PORTS.map(|_| free_port());
        let command = |stage: &Stage, role| {
            let mut command = stage.command(&[]);
            run_by(&mut command, tasks)
                .env(ROLE, role)
                .env(SECONDS, duration().as_secs().to_string())
                .envs(PORTS.into_iter().zip(ports.map(|port| port.to_string())));
            command
        };
        for (role, port) in ["server", "proxy"].into_iter().zip(ports) {
            let command = command(&stage, role);
            stage.start(port, command);
        }
        // The client has a watchdog of its own.
        let client = command(&stage, "client").output().unwrap();
        let said = String::from_utf8_lossy(&client.stderr).into_owned() + &stage.log();
        assert!(client.status.success() && !said.contains(FAILED), "{mode}: {said}");
        let connections = stage.end();
        let changed = connections.iter().filter(|end| end.has_changed_over()).count();
        println!("tokio, {mode}: {changed} of {} ends changed over", connections.len());
        // Both ends of the connections that live long enough.
        assert!(changed >= 2, "{mode}: {connections:#?}");
    }
}

kit::program! {
    fn tasks() {
        let port = |name| std::env::var(name).unwrap().parse().unwrap();
        let [server, proxy] = PORTS.map(port);
        let runtime = Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().unwrap();
        let ended = runtime.block_on(async {
            match std::env::var(ROLE).unwrap().as_str() {
                "server" => serve(server, answer).await,
                "proxy" => serve(proxy, move |client| relay(client, server)).await,
                _ => ask([server, proxy]).await,
            }
        });
        ended.unwrap();
    }
}

/// Serves each connection in a task.
async fn serve<F: Future<Output = Result<()>> + Send + 'static>(
    port: u16,
    serve_one: impl Fn(TcpStream) -> F,
) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    loop {
        let served = serve_one(listener.accept().await?.0);
        tokio::spawn(async {
            if let Err(error) = served.await {
                // The test looks for that.
                eprintln!("{FAILED}{error}");
            }
        });
    }
}

async fn relay(mut client: TcpStream, server: u16) -> Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await?;
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}

/// Answers a connection, which begins with its number.
async fn answer(mut client: TcpStream) -> Result<()> {
    let seed = client.read_u64().await?;
    talk(client, seed, 1).await
}

/// Connects to the server, and to the proxy, again and again.
async fn ask(ports: [u16; 2]) -> Result<()> {
    let seconds = std::env::var(SECONDS).unwrap().parse().unwrap();
    let (begun, mut seed) = (Instant::now(), 0);
    while seed == 0 || begun.elapsed().as_secs() < seconds {
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            tasks.spawn(ask_once(ports[(seed % 2) as usize], seed));
            seed += 1;
        }
        while let Some(ended) = tasks.join_next().await {
            ended?;
        }
    }
    Ok(())
}

async fn ask_once(port: u16, seed: u64) {
    let asks = async {
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        server.write_u64(seed).await?;
        talk(server, seed, 0).await
    };
    match timeout(WATCHDOG, asks).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => eprintln!("{FAILED}{error}"),
        Err(_) => eprintln!("{FAILED}number {seed} hangs"),
    }
}

/// One side of a conversation, which both sides know. The client is side 0.
async fn talk(stream: TcpStream, seed: u64, side: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let (from, to) = stream.into_split();
    let mut sender = Sender { to, stream: seed * 2 + side, position: 0 };
    let mut receiver = Receiver { from, stream: seed * 2 + 1 - side, position: 0 };
    // Messages that are answered, one by one.
    for _ in 0..random.one_of([1, 20, 200]) {
        let (question, answer) = (1 + random.index(3000), 1 + random.index(3000));
        if side == 0 {
            sender.send(question).await?;
            receiver.receive(answer).await?;
        } else {
            receiver.receive(question).await?;
            sender.send(answer).await?;
        }
    }
    // Two streams at once. The shorter one ends while the other continues.
    let mut lens = [(); 2].map(|()| random.one_of([0, 10_000, 4_000_000]) + random.index(10_000));
    lens.rotate_left(side as usize);
    let [sent, received] = lens;
    let sends = async {
        let mut random = Random::new(seed * 2 + side);
        let mut left = sent;
        while left > 0 {
            let most = random.one_of([100, 5000, LONGEST]);
            let len = (1 + random.index(most)).min(left);
            sender.send(len).await?;
            left -= len;
        }
        sender.to.shutdown().await
    };
    let receives = async {
        receiver.receive(received).await?;
        receiver.ends().await
    };
    tokio::try_join!(sends, receives).map(drop)
}

struct Sender {
    to: OwnedWriteHalf,
    stream: u64,
    position: u64,
}

impl Sender {
    async fn send(&mut self, len: usize) -> Result<()> {
        self.to.write_all(content(self.stream, self.position, len)).await?;
        self.position += len as u64;
        Ok(())
    }
}

struct Receiver {
    from: OwnedReadHalf,
    stream: u64,
    position: u64,
}

impl Receiver {
    /// Receives this many bytes, and checks them.
    async fn receive(&mut self, len: usize) -> Result<()> {
        let mut buffer = vec![0; len.min(LONGEST)];
        let end = self.position + len as u64;
        while self.position < end {
            let most = buffer.len().min((end - self.position) as usize);
            let n = self.from.read(&mut buffer[..most]).await?;
            if n == 0 || buffer[..n] != *content(self.stream, self.position, n) {
                return Err(self.wrong(n));
            }
            self.position += n as u64;
        }
        Ok(())
    }

    /// Checks that the stream ends here.
    async fn ends(&mut self) -> Result<()> {
        match self.from.read(&mut [0; 100]).await? {
            0 => Ok(()),
            n => Err(self.wrong(n)),
        }
    }

    fn wrong(&self, n: usize) -> Error {
        let Self { stream, position, .. } = self;
        Error::new(ErrorKind::InvalidData, format!("stream {stream}: {n} bytes that are wrong at {position}"))
    }
}
