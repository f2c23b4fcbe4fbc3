// A client of omniq's line protocol for Node 18 and newer, in one file and without dependencies.
//
//   import { Client } from "./omniq.mjs";
//   const client = new Client({ port: 12345 });
//   const id = await client.push("resize", { width: 100 }, { queue: "images" });
//   const task = await client.fetch(["images"], { timeout: "5s" });   // null if there is none
//   await client.ack(task.id);
//   await client.close();
//
// Commands are sent at once and answered in order, so several may be under way: await Promise.all([...]) shares round trips.
// A task that was fetched belongs to the connection. When that is lost, everything under way is rejected with ConnectionLost,
// the server counts a failure of what was held, and the next command connects again, with growing pauses.

import { connect as connectTcp } from "node:net";
import { connect as connectTls } from "node:tls";

/** The root of all errors of this client. */
export class ClientError extends Error {
  constructor(message) {
    super(message);
    this.name = new.target.name;
  }
}
/** There is no connection, or it broke before the answer came; what was sent may have been carried out. */
export class ConnectionLost extends ClientError {}
/** The server answered ERR. */
export class ErrorReply extends ClientError {}
/** This connection does not hold the task, or holds it no more. */
export class TaskNotAcquired extends ErrorReply {}
/** The server wants a token, or another one. */
export class AuthenticationFailed extends ErrorReply {}
/** The server is shutting down. */
export class ServerStopping extends ErrorReply {}

function errorOf(text) {
  if (text === "no heartbeat") return new ConnectionLost("the server heard nothing for longer than its heartbeat");
  if (text.endsWith("not acquired")) return new TaskNotAcquired(text);
  if (text.startsWith("authentication")) return new AuthenticationFailed(text);
  if (text === "server is shutting down") return new ServerStopping(text);
  return new ErrorReply(text);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Client {
  #options;
  #socket = null;
  #connecting = null;
  #waiting = []; // one { resolve, reject } per reply that is due
  #received = [];
  #pinging = null;
  #closed = false;

  /**
   * @param {object} [options] host, port, token, tls (true, or options of tls.connect), heartbeatMs (silence after which a
   *   sign of life is sent), reconnectMs (how long to try to get a connection)
   */
  constructor(options = {}) {
    this.#options = { host: "127.0.0.1", port: 12345, heartbeatMs: 5000, reconnectMs: 30000, ...options };
  }

  async ping() {
    await this.#ask("PING");
  }

  /** Store a task; its id. Options are those of the protocol: queue, deadqueue, retry, execute_at, blocked_by, interval, ... */
  async push(name, payload, options = {}) {
    return (await this.#ask("PUSH", pushBody(name, payload, options))).id;
  }

  /** The next task of the first queue that has one, or null. `timeout` is like "5s" or "200ms". */
  async fetch(queues = ["default"], options = {}) {
    return this.#ask("FETCH", { queues, ...options });
  }

  /** Up to `count` tasks, as soon as there is one. */
  async fetchMany(count, queues = ["default"], options = {}) {
    return (await this.#ask("FETCH", { queues, ...options, count }))?.tasks ?? [];
  }

  async ack(id, result) {
    await this.#ask("ACK", { id, result });
  }

  async nack(id, error) {
    await this.#ask("NACK", { id, error });
  }

  /** Renew the lease of a task; whether somebody asked for it to be cancelled. */
  async extend(id) {
    return (await this.#ask("EXTEND", { id })).cancel_requested;
  }

  async cancel(id) {
    return (await this.#ask("CANCEL", { id })).cancelled;
  }

  async result(id, options = {}) {
    return this.#ask("RESULT", { id, ...options });
  }

  async info() {
    return (await this.#ask("INFO")).queues;
  }

  /**
   * Run `fill` with an object that has push and ack; what it gathered is sent together, and takes effect whole or not at
   * all. The ids of what was pushed. In blocked_by, -1 is the last push of the transaction.
   */
  async transaction(fill) {
    const lines = [];
    const gather = {
      push: (name, payload, options = {}) => void lines.push(line("PUSH", pushBody(name, payload, options))),
      ack: (id, result) => void lines.push(line("ACK", { id, result })),
    };
    await fill(gather);
    await this.#connected();
    return (await this.#send(["ATOMIC\n", ...lines, "DONE\n"].join(""))).ids ?? [];
  }

  /** Disconnect. What is still held counts as failed. */
  async close() {
    if (this.#closed) return;
    this.#closed = true;
    clearInterval(this.#pinging);
    if (this.#socket !== null) {
      await this.#send("QUIT\n").catch(() => {});
      this.#socket?.destroy();
    }
  }

  async #ask(verb, body) {
    await this.#connected();
    return this.#send(line(verb, body));
  }

  #send(data) {
    return new Promise((resolve, reject) => {
      if (this.#socket === null) {
        reject(new ConnectionLost("the connection was lost"));
        return;
      }
      this.#waiting.push({ resolve, reject });
      this.#socket.write(data);
    });
  }

  async #connected() {
    if (this.#closed) throw new ConnectionLost("this client was closed; make a new one");
    if (this.#socket !== null) return;
    this.#connecting ??= this.#connect().finally(() => (this.#connecting = null));
    await this.#connecting;
  }

  async #connect() {
    const { reconnectMs, token, heartbeatMs } = this.#options;
    const deadline = Date.now() + reconnectMs;
    for (let wait = 50; ; wait = Math.min(wait * 2, 5000)) {
      try {
        await this.#open();
        break;
      } catch (error) {
        if (Date.now() + wait >= deadline) throw new ConnectionLost(`cannot connect: ${error.message}`);
        await pause(wait * (0.5 + Math.random() / 2));
      }
    }
    if (token !== undefined) await this.#send(line("AUTH", { token }));
    this.#pinging ??= setInterval(() => this.#stayAlive(), heartbeatMs / 2).unref();
  }

  #open() {
    const { host, port, tls } = this.#options;
    return new Promise((resolve, reject) => {
      const where = { host, port, noDelay: true };
      const socket = tls ? connectTls({ servername: host, ...where, ...(tls === true ? {} : tls) }) : connectTcp(where);
      socket.once(tls ? "secureConnect" : "connect", () => {
        socket.off("error", reject);
        this.#socket = socket;
        this.#received = [];
        socket.on("data", (data) => this.#read(data));
        socket.on("error", () => {});
        socket.on("close", () => this.#lose(socket));
        resolve();
      });
      socket.once("error", reject);
    });
  }

  #read(data) {
    for (;;) {
      const end = data.indexOf(10);
      if (end < 0) break;
      this.#received.push(data.subarray(0, end));
      const text = Buffer.concat(this.#received).toString("utf8");
      this.#received = [];
      data = data.subarray(end + 1);
      this.#answer(text);
    }
    if (data.length > 0) this.#received.push(data);
  }

  #answer(text) {
    const space = text.indexOf(" ");
    const word = text.slice(0, space);
    const body = JSON.parse(text.slice(space + 1));
    const waiting = this.#waiting.shift();
    if (waiting === undefined) return; // said unasked, just before the server closes the connection
    if (word === "ERR") waiting.reject(errorOf(body.msg));
    else waiting.resolve(word === "EMPTY" ? null : body);
  }

  #lose(socket) {
    if (this.#socket !== socket) return;
    this.#socket = null;
    for (const { reject } of this.#waiting.splice(0)) reject(new ConnectionLost("the connection was lost"));
  }

  #stayAlive() {
    if (this.#socket !== null && this.#waiting.length === 0) this.#send("PING\n").catch(() => {});
  }
}

function line(verb, body) {
  return body === undefined ? `${verb}\n` : `${verb} ${JSON.stringify(body)}\n`;
}

function pushBody(name, payload, options) {
  return payload === undefined ? { name, ...options } : { name, payload, ...options };
}
