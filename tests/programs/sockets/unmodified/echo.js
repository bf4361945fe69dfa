// An HTTP server that sends back what it gets, and clients that keep their connections. Its arguments are "serve" or "talk", and
// the server's address and port.
const http = require('http'), crypto = require('crypto'), fs = require('fs');
const [what, host, port] = process.argv.slice(-3);
const serve = () => {
    process.on('SIGTERM', () => process.exit(0));
    http.createServer((request, response) => {
        const parts = [];
        request.on('data', part => parts.push(part));
        request.on('end', () => response.end(Buffer.concat(parts)));
    }).listen(+port, host);
};
const clients = 4, agent = new http.Agent({ keepAlive: true, maxSockets: clients });
const post = body => new Promise((good, bad) => {
    const request = http.request({ port, host, method: 'POST', agent }, response => {
        const parts = [];
        response.on('data', part => parts.push(part));
        response.on('end', () => Buffer.concat(parts).equals(body) ? good() : bad(new Error('other bytes')));
        response.on('error', bad);
    });
    request.on('error', bad);
    request.end(body);
});
const haveChanged = () => {
    const words = [`"pid":${process.pid},`, '"sent_after_us"', '"received_after_us"'];
    const lines = fs.readFileSync(process.env.GINNEL_SOCKETS_REPORT, 'utf8').split('\n')
        .filter(line => words.every(word => line.includes(word)));
    return new Set(lines.map(line => JSON.parse(line).connection)).size >= clients;
};
const talk = async () => {
    // Sends requests until all connections have changed over, and for some time afterwards.
    for (let turn = 0, after = 0; after < 100; turn++) {
        await post(crypto.randomBytes(turn % 50 == 0 ? 1000000 : 1 + turn * 37 % 5000));
        if (after > 0 || (turn % 10 == 9 && haveChanged())) after++;
    }
};
if (what == 'serve') {
    serve();
} else {
    Promise.all(Array.from({ length: clients }, talk)).then(() => { agent.destroy(); console.log('good'); });
}
