//! A test of a server, in this process, that runs out of file descriptors.

mod support;

use ginnel::Endpoint;
use ginnel_cache::engine::Engine;
use ginnel_cache::numbers::Settings;
use ginnel_cache::server::{Door, Server, listen};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_shmem::Mapping;
use kit::wait::wait_until;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use support::World;

const LEN: usize = 16 << 20;

fn serve(endpoint: Endpoint, door: Door, stop: UnixStream) {
    let memory = Mapping::anonymous(LEN).unwrap();
    let store = Store::create(memory, plan(LEN, 1 << 20, 200).unwrap(), [1, 2], 1000).unwrap();
    let settings = Settings {
        place: "s/main".into(),
        item_size: 1 << 20,
        connections: 100,
        verbosity: 0,
        listens: Vec::new(),
        unix: None,
    };
    let engine = Engine::new(store, settings, 0);
    Server::new(engine, endpoint, vec![door], Vec::new(), &stop).unwrap().run().unwrap();
}

/// Clients that the server could not accept are accepted once descriptors are free again, even if no client has left.
#[test]
fn a_server_without_descriptors_gets_over_it() {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopper) = UnixStream::pair().unwrap();
    let world = World::new();
    let endpoint = world.attach("items");
    let server = std::thread::spawn(move || serve(endpoint, Door::Tcp(listener), stop));
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    };
    let ask = |mut stream: TcpStream| {
        stream.write_all(b"mn\r\n").unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"MN\r\n");
        stream
    };
    let first = ask(connect());
    let before = descriptors();
    drop(first);
    wait_until("the server's end of the first connection is closed", || descriptors() == before - 2);
    let limit = getrlimit(Resource::Nofile);
    let client = connect_without_descriptors(&connect);
    // By then the server has most likely tried to accept the client. It must serve the client in either case.
    std::thread::sleep(Duration::from_millis(200));
    setrlimit(Resource::Nofile, limit).unwrap();
    ask(client);
    drop(stopper);
    server.join().unwrap();
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Connects after setting the limit of descriptors so that this connection takes the last one.
fn connect_without_descriptors(connect: &dyn Fn() -> TcpStream) -> TcpStream {
    let probe = UnixStream::pair().unwrap();
    let next = std::os::fd::AsRawFd::as_raw_fd(&probe.0) as u64;
    drop(probe);
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(next + 1);
    setrlimit(Resource::Nofile, limit).unwrap();
    connect()
}
