//! Python's asyncio, with many connections at once.

use crate::stage::{MODES, PYTHON, Stage, changed, free_port, have};
use crate::world::World;

const CONNECTIONS: usize = 1000;

/// All talk until each has changed over, and for some time afterwards.
const ECHO: &str = r#"
import asyncio, os, random, resource, sys
what, port, connections = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
all_have_changed = asyncio.Event()
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def talk(seed):
    r = random.Random(seed)
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    turn = after = 0
    while after < 10:
        turn += 1
        after += all_have_changed.is_set()
        data = r.randbytes(r.choice([1, 10, 1000, 10000, 300000]) if turn % 9 == 0 else r.randint(1, 3000))
        writer.write(data)
        await writer.drain()
        assert await reader.readexactly(len(data)) == data, (seed, turn)
    writer.write_eof()
    assert await reader.read() == b''
    writer.close()
    await writer.wait_closed()
async def look():
    words = ['"pid":%d,' % os.getpid(), '"sent_after_us"', '"received_after_us"']
    while True:
        lines = [line for line in open(os.environ['GINNEL_SOCKETS_REPORT']) if all(word in line for word in words)]
        if len({line.split('"connection":')[1].split(',')[0] for line in lines}) == connections:
            return all_have_changed.set()
        await asyncio.sleep(0.1)
async def main():
    if what == 'serve':
        server = await asyncio.start_server(serve, '127.0.0.1', port, backlog=connections)
        await server.serve_forever()
    await asyncio.gather(look(), *[talk(seed) for seed in range(connections)])
asyncio.run(main())
"#;

#[test]
fn asyncio() {
    if !have(&[PYTHON]) {
        return;
    }
    for mode in MODES {
        // Two rings for each connection.
        let mut stage = Stage::in_world(mode, World::with("size = '640M'"));
        let port = free_port();
        let (at, connections) = (port.to_string(), CONNECTIONS.to_string());
        stage.serve(port, &[PYTHON, "-c", ECHO, "serve", &at, &connections]);
        stage.client(&[PYTHON, "-c", ECHO, "talk", &at, &connections]);
        let connections = stage.end();
        // Both ends of each.
        assert_eq!(changed(&connections, "python3").len(), 2 * CONNECTIONS, "{mode}");
    }
}
