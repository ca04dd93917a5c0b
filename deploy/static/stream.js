// A client for many requests over one WebSocket, with flow control by credit and resumption after a lost connection.
//
//   const socket = new MillraceSocket("ws://127.0.0.1:8000/v1/stream", { apiKey: "..." });
//   for await (const chunk of socket.create("chat", { messages: [{ role: "user", content: "Hi" }] }))
//     print(chunk.choices[0].delta.content ?? "");
//
// An answer that is not read gets no credit, so the server parks it. Leaving its loop cancels the request.

const PROTOCOL = "millrace.v1";
const KEY_PROTOCOL = "openai-insecure-api-key."; // a browser's WebSocket takes no headers
const RETRY_MS = [100, 300, 1000, 3000, 10000];

export class MillraceError extends Error {
  constructor({ message, type, code, param }, status, retryAfter) {
    super(message);
    Object.assign(this, { type, code, param, status, retryAfter });
  }
}

class Answer {
  // The answer to one request: an async iterable of chunks. `usage` and `stats` are set at its end.
  constructor(socket, id, credit) {
    Object.assign(this, { socket, id, credit, last: 0, token: null, isOver: false, usage: null, stats: null });
    this.chunks = [];
    this.numTaken = 0; // since the last grant
    this.error = null;
    this.wake = () => {};
  }

  cancel() {
    if (!this.isOver) this.socket._send({ type: "cancel", id: this.id });
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.chunks.length) {
          yield this.chunks.shift();
          if (++this.numTaken * 2 >= this.credit) this._grant();
        }
        if (this.error) throw this.error;
        if (this.isOver) return;
        await new Promise((resolve) => (this.wake = resolve));
      }
    } finally {
      this.cancel();
    }
  }

  _grant() {
    if (!this.isOver && this.socket._send({ type: "credit", id: this.id, n: this.numTaken, last: this.last }))
      this.numTaken = 0;
  }

  _resumption() {
    this.numTaken = 0; // grants may have been lost, so `resume` states the whole credit
    const credit = this.credit - this.chunks.length;
    return { type: "resume", id: this.id, token: this.token, last: this.last, credit };
  }

  _take(message) {
    if (message.seq !== undefined) {
      if (message.seq <= this.last) return; // a repeated chunk
      this.last = message.seq;
    }
    if (message.type === "created") this.token = message.token ?? null;
    else if (message.type === "chunk") this.chunks.push(message.body);
    else if (message.type === "usage") this.usage = message.usage;
    else if (message.type === "stats") this.stats = message;
    else if (message.type === "done") this._end(null);
    else if (message.type === "error" && message.in_reply_to !== "credit" && message.in_reply_to !== "cancel")
      this._end(new MillraceError(message.error, message.status, message.retry_after_s));
    this.wake();
  }

  _end(error) {
    if (this.isOver) return;
    if (this.token) this.socket._send({ type: "credit", id: this.id, last: this.last }); // the server may drop its buffer
    this.isOver = true;
    this.error = error;
    this.socket._answers.delete(this.id);
    this.wake();
  }
}

export class MillraceSocket {
  // `onstate` is called with "open", "cut" or "closed".
  constructor(url, { apiKey = null, onstate = () => {} } = {}) {
    Object.assign(this, { url, apiKey, onstate, numCreated: 0, numTries: 0, isClosed: false });
    this._answers = new Map();
    this._waiting = []; // messages to send once it is open
    this._connect();
  }

  create(endpoint, body, { credit = 64, resume = true, stats = false } = {}) {
    const answer = new Answer(this, `r${++this.numCreated}`, credit);
    this._answers.set(answer.id, answer);
    const message = { type: "create", id: answer.id, endpoint, body, credit, resume, stats };
    if (!this._send(message)) this._waiting.push(message);
    return answer;
  }

  close() {
    this.isClosed = true;
    this.socket.close(1000);
  }

  _send(message) {
    if (this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  _connect() {
    this.socket = new WebSocket(this.url, this.apiKey ? [PROTOCOL, KEY_PROTOCOL + this.apiKey] : [PROTOCOL]);
    this.socket.onopen = () => this._opened();
    this.socket.onmessage = (event) => this._heard(JSON.parse(event.data));
    this.socket.onclose = (event) => this._lost(event);
  }

  _opened() {
    this.numTries = 0;
    for (const answer of this._answers.values()) if (answer.token) this._send(answer._resumption());
    for (const message of this._waiting.splice(0)) this._send(message);
    this.onstate("open");
  }

  _heard(message) {
    this._answers.get(message.id)?._take(message);
    if (message.type === "error" && !message.id) this.error = message.error; // the reason of the closure that follows
  }

  _lost(event) {
    const isRefused = [1000, 1002, 1003, 1007, 1008, 1009].includes(event.code);
    const isFinal = this.isClosed || isRefused || this.numTries >= RETRY_MS.length;
    const waiting = new Set(this._waiting.map((message) => message.id));
    const error = this.error ?? { message: `the connection is closed (${event.code})`, code: "connection_closed" };
    for (const answer of [...this._answers.values()])
      if (isFinal || !(answer.token || waiting.has(answer.id))) answer._end(new MillraceError(error, null, null));
    this.error = undefined;
    this.onstate(isFinal ? "closed" : "cut");
    if (!isFinal) setTimeout(() => this._connect(), RETRY_MS[this.numTries++]);
  }
}
