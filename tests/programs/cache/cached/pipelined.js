// Sends requests of many kinds over Node's sockets, some at once and in parts. Prints "good" if the answers are correct.
const net = require('net');
const port = Number(process.argv[1]);

function talk(number) {
  return new Promise((done, fail) => {
    const client = net.connect({port, host: '127.0.0.1'});
    client.setNoDelay(true);
    const key = 'node' + number;
    let value = 'x', round = 0, expected = '', got = '';
    client.on('error', fail);
    client.on('close', () => done());
    function next() {
      if (round === 400) return client.end();
      round++;
      let text = '';
      const get = () => {
        text += `get ${key}\r\n`;
        expected += `VALUE ${key} 0 ${value.length}\r\n${value}\r\nEND\r\n`;
      };
      const set = (quiet) => {
        value = 'v'.repeat(1 + (round * 7) % 300) + round;
        text += `set ${key} 0 0 ${value.length}${quiet ? ' noreply' : ''}\r\n${value}\r\n`;
        expected += quiet ? '' : 'STORED\r\n';
      };
      if (round === 1) set(false);
      if (round % 10 === 0) { get(); set(round % 20 === 0); get(); }
      if (round % 11 === 0) { text += 'get none\r\nversion\r\n'; expected += 'END\r\nVERSION\r\n'; }
      get();
      if (round % 5 === 0) get();
      if (round % 3) return client.write(text);
      const middle = text.length >> 1;
      client.write(text.slice(0, middle));
      setImmediate(() => client.write(text.slice(middle)));
    }
    client.on('data', (data) => {
      got += data.toString('latin1').replace(/VERSION [^\r]*/, 'VERSION');
      if (!expected.startsWith(got) && !got.includes('VERSION')) return fail(new Error(`${got} for ${expected}`));
      if (got.length < expected.length) return;
      if (got !== expected) return fail(new Error(`${got} for ${expected}`));
      expected = got = '';
      next();
    });
    client.on('connect', next);
  });
}

Promise.all([0, 1, 2, 3, 4].map(talk)).then(() => console.log('good'), (error) => {
  console.log(error);
  process.exit(1);
});
