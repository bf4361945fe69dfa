// A client in JavaScript: memjs, which speaks the binary protocol. Arguments: HOST PORT.
const assert = require("node:assert");
const memjs = require("memjs");

const [host, port] = process.argv.slice(2);
const client = memjs.Client.create(`${host}:${port}`, { retries: 0, failover: false, timeout: 10 });

async function main() {
  await client.flush();
  assert.equal((await client.get("js:none")).value, null);
  for (let i = 0; i < 200; i++) {
    const value = Buffer.alloc(i * 50, String(i % 10));
    assert.equal(await client.set(`js:${i}`, value, { expires: 100 }), true);
    assert.deepEqual((await client.get(`js:${i}`)).value, value);
  }
  // Many requests at a time, whose answers come in order.
  const all = await Promise.all([...Array(200).keys()].map((i) => client.get(`js:${i}`)));
  all.forEach(({ value }, i) => assert.equal(value.length, i * 50));
  assert.equal(await client.add("js:1", "x", {}), false);
  assert.equal(await client.replace("js:none", "x", {}), false);
  assert.equal(await client.append("js:1", "!"), true);
  assert.equal((await client.get("js:1")).value.toString(), "1".repeat(50) + "!");
  assert.equal((await client.increment("js:count", 2, { initial: 40 })).value, 40);
  assert.equal((await client.increment("js:count", 2, { initial: 40 })).value, 42);
  assert.equal((await client.decrement("js:count", 50, { initial: 40 })).value, 0);
  assert.equal(await client.touch("js:1", 0), true);
  assert.equal(await client.delete("js:1"), true);
  assert.equal(await client.delete("js:1"), false);
  assert.equal((await client.get("js:1")).value, null);
  const large = Buffer.alloc(900_000, "l");
  await client.set("js:large", large, {});
  assert.deepEqual((await client.get("js:large")).value, large);
  client.quit();
  console.log("all right");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
