// Against a real server: OMNIQ_TEST_PORT=12345 node --test omniq.test.mjs

import assert from "node:assert/strict";
import { createServer } from "node:net";
import { after, before, test } from "node:test";

import { Client, ConnectionLost, ErrorReply, TaskNotAcquired } from "./omniq.mjs";

const port = Number(process.env.OMNIQ_TEST_PORT ?? 12345);
let client;

before(() => {
  client = new Client({ port });
});
after(() => client.close());

test("a task is pushed, fetched and acknowledged", async () => {
  await client.ping();
  const id = await client.push("resize", { width: 100, text: "größe" }, { queue: "node-1" });
  assert.deepEqual(
    (await client.info()).find((queue) => queue.name === "node-1"),
    { name: "node-1", ready: 1, delayed: 0, to_ack: 0 },
  );
  const task = await client.fetch(["node-1"]);
  assert.deepEqual(task, { id, queue: "node-1", name: "resize", payload: { width: 100, text: "größe" } });
  await client.ack(id, { ok: true });
  assert.deepEqual((await client.result(id)).result, { ok: true });
  assert.equal(await client.fetch(["node-1"], { timeout: "20ms" }), null);
});

test("commands under way at the same time are answered in order", async () => {
  const ids = await Promise.all(Array.from({ length: 500 }, (_, n) => client.push("x", n, { queue: "node-2" })));
  assert.deepEqual(ids, [...ids].sort((a, b) => a - b));
  const tasks = await client.fetchMany(1000, ["node-2"]);
  assert.deepEqual(tasks.map((task) => task.payload), Array.from({ length: 500 }, (_, n) => n));
  await Promise.all(tasks.map((task) => client.ack(task.id)));
});

test("a transaction is whole or not at all", async () => {
  await client.push("zero", undefined, { queue: "node-3" });
  const held = await client.fetch(["node-3"]);
  const ids = await client.transaction((tx) => {
    tx.push("one", 1, { queue: "node-3" });
    tx.push("two", 2, { queue: "node-3", blocked_by: [-1] });
    tx.ack(held.id);
  });
  assert.equal(ids.length, 2);
  const first = await client.fetch(["node-3"]);
  assert.equal(first.name, "one");
  assert.equal(await client.fetch(["node-3"], { timeout: "20ms" }), null);
  await client.ack(first.id);
  assert.equal((await client.fetch(["node-3"])).name, "two");
  await assert.rejects(
    client.transaction((tx) => {
      tx.push("three", 3, { queue: "node-3" });
      tx.push("not good");
    }),
    ErrorReply,
  );
});

test("errors have types", async () => {
  await assert.rejects(client.ack(123456789), TaskNotAcquired);
  await assert.rejects(client.push("not good"), /invalid task name/);
  await client.ping();
});

test("a waiting fetch gets what another client pushes", async () => {
  const other = new Client({ port });
  const fetching = client.fetch(["node-4"], { timeout: "5s" });
  const id = await other.push("x", undefined, { queue: "node-4" });
  assert.equal((await fetching).id, id);
  await client.nack(id, "not today");
  await other.close();
});

test("cancel and extend", async () => {
  const id = await client.push("x", undefined, { queue: "node-5" });
  assert.equal((await client.fetch(["node-5"])).id, id);
  assert.equal(await client.extend(id), false);
  assert.equal(await client.cancel(id), false);
  assert.equal(await client.extend(id), true);
  await client.nack(id);
  assert.equal((await client.result(id)).status, "CANCELLED");
});

test("a lost connection rejects what is under way, and the next command connects again", async () => {
  let connections = 0;
  const proxy = createServer((socket) => {
    connections += 1;
    socket.on("error", () => {});
    if (connections === 1) socket.once("data", () => socket.destroy());
    else socket.on("data", () => socket.write("PONG {}\n"));
  });
  await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
  const shaky = new Client({ port: proxy.address().port });
  await assert.rejects(shaky.ping(), ConnectionLost);
  await shaky.ping();
  assert.equal(connections, 2);
  await shaky.close();
  await assert.rejects(shaky.ping(), ConnectionLost);
  proxy.close();
});

test("no server is an error after some tries", async () => {
  const nobody = new Client({ port: 1, reconnectMs: 100 });
  await assert.rejects(nobody.ping(), ConnectionLost);
});
