//! The two programs of a load test: a server and a client, with many connections one after another, in several threads.

use super::talk::{End, Plan, Sums};
use std::fs;
use std::io::{BufWriter, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of connections at a time.
const THREADS: usize = 4;
/// The environment variables that tell a program its role.
pub const ROLE: &str = "GINNEL_TEST_LOAD_ROLE";
pub const PHASES: &str = "GINNEL_TEST_LOAD_PHASES";

kit::program! {
    /// A program that is controlled through a folder. It is told the number of its first connection, and
    /// the number of connections in each phase. After each phase it writes the bytes that it has sent and received, and
    /// waits.
    fn talks() {
        let role = std::env::var(ROLE).unwrap();
        let phases: Vec<u64> = std::env::var(PHASES).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
        let listener = (role == "server").then(|| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            fs::write("port.part", port.to_string()).unwrap();
            fs::rename("port.part", "port").unwrap();
            listener
        });
        let port = match &listener {
            Some(_) => 0,
            None => fs::read_to_string("port").unwrap().parse().unwrap(),
        };
        let [first, phases @ ..] = &phases[..] else { panic!("no phases") };
        let mut first = *first;
        for (phase, count) in phases.iter().enumerate() {
            let next = AtomicU64::new(first);
            first += count;
            // Written as they end, because data that is kept would look like a leak.
            let part = PathBuf::from(format!("{role}.part"));
            let sums = Mutex::new(BufWriter::new(fs::File::create(&part).unwrap()));
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        loop {
                            let number = next.fetch_add(1, Ordering::Relaxed);
                            if number >= first {
                                return;
                            }
                            let (number, (sent, received)) = match &listener {
                                Some(listener) => serve(listener),
                                None => (number, talk(port, number)),
                            };
                            writeln!(sums.lock().unwrap(), "{number} {sent} {received}").unwrap();
                        }
                    });
                }
            });
            sums.into_inner().unwrap().into_inner().unwrap();
            fs::rename(&part, format!("{role}.{phase}")).unwrap();
            // Waits until it may continue.
            while !Path::new(&format!("go.{phase}")).exists() {
                assert!(Path::new("port").exists(), "the test is over");
                look_at_daemon();
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// Makes a command that runs another one run this program.
pub fn run_by(command: &mut Command) -> &mut Command {
    kit::program::run_by(command, talks)
}

/// Makes the library read the daemon's messages: opens a connection that is worth a report and leads to nothing.
fn look_at_daemon() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    drop(listener.accept().unwrap());
    let _ = stream.write_all(b"x");
}

fn talk(port: u16, number: u64) -> Sums {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.write_all(&number.to_ne_bytes()).unwrap();
    End::new(&stream, Plan::new(number), 0).run()
}

fn serve(listener: &TcpListener) -> (u64, Sums) {
    let mut stream = listener.accept().unwrap().0;
    let mut number = [0; 8];
    stream.read_exact(&mut number).unwrap();
    let number = u64::from_ne_bytes(number);
    (number, End::new(&stream, Plan::new(number), 1).run())
}
