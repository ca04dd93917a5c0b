// The dashboard's WebSocket: subscribes to topics, keeps their data, and calls `onchange` after each update.
//
// `data` has the server's current state of each topic. A topic comes in full and then as changes. The data of an
// unsubscribed topic stays until it is subscribed again. While the page is hidden it subscribes to nothing.

const RETRY_MS = [250, 1000, 3000, 10000];

export class Feed {
  constructor(url, onchange) {
    Object.assign(this, { url, onchange, data: {}, hello: null, recording: null, state: "connecting", error: null, told: null });
    this.keys = { key: null, admin_key: null };
    this.wanted = {};
    this.clockOffsetS = null; // server's clock minus ours
    this.isPast = false; // the data is of a past moment of the running server
    this.reducers = {};
    this._tries = 0;
    document.addEventListener("visibilitychange", () => this._subscribe());
  }

  // The time that the data is of, on the engine's clock in seconds; null before the first update.
  nowS() {
    return this.recording || this.isPast ? (this.updateS ?? null) : this.liveS();
  }

  // The engine's current clock.
  liveS() {
    return this.clockOffsetS === null ? null : performance.now() / 1000 + this.clockOffsetS;
  }

  connect(keys = this.keys) {
    this.keys = keys;
    clearTimeout(this._timer);
    if (this.socket) this.socket.onclose = null;
    this.socket?.close();
    Object.assign(this, { hello: null, error: null, told: null, isPast: false }); // they are the old connection's
    this._set("connecting");
    const socket = (this.socket = new WebSocket(this.url));
    socket.onopen = () => this._send({ type: "hello", ...this.keys });
    socket.onmessage = (event) => this._hear(JSON.parse(event.data));
    socket.onclose = () => this._lost();
  }

  want(topics) {
    const same = JSON.stringify(topics) === JSON.stringify(this.wanted);
    this.wanted = topics;
    if (!same) this._subscribe();
  }

  // Go to a time, or by a number of steps. Recordings only: play at a multiple of the recorded speed; 0 pauses.
  seek(timeS) {
    this._send({ type: "seek", time_s: timeS });
  }

  step(by) {
    this._send({ type: "seek", steps: by });
  }

  // Of a running server: back to the present.
  goLive() {
    this._send({ type: "seek" });
  }

  play(speed) {
    this._send({ type: "play", speed });
  }

  cancel(id) {
    this.told = null;
    this._send({ type: "cancel", id });
  }

  _subscribe() {
    if (this.hello) this._send({ type: "subscribe", topics: document.hidden ? {} : this.wanted });
  }

  _send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  _hear(message) {
    if (message.type === "hello") {
      this.hello = message;
      this.recording = message.recording ?? null;
      this._tries = 0;
      this._set("live");
      this._subscribe();
    } else if (message.type === "update") {
      this._take(message);
      this.onchange();
    } else if (message.type === "error") {
      if (this.hello) this.told = message.error;
      else this.error = message.error;
      this.onchange();
    }
  }

  _take({ now_s: nowS, live_s: liveS = nowS, past = false, full, patch }) {
    this.isPast = past;
    if (liveS !== null && liveS !== undefined) {
      const offset = liveS - performance.now() / 1000;
      this.clockOffsetS = this.clockOffsetS === null ? offset : Math.max(offset, this.clockOffsetS - 0.001);
    }
    this.updateS = nowS;
    for (const [topic, news] of Object.entries(full)) {
      const reduce = this.reducers[topic];
      this.data[topic] = reduce ? reduce(null, news, this.nowS()) : news;
    }
    for (const [topic, news] of Object.entries(patch)) {
      const reduce = this.reducers[topic] ?? mergePatch;
      this.data[topic] = reduce(this.data[topic], news, this.nowS());
    }
    this.numUpdates = (this.numUpdates ?? 0) + 1;
  }

  _lost() {
    this.hello = null;
    if (this.error?.code === "invalid_api_key") return this._set("locked");
    this._set("cut");
    const wait = RETRY_MS[Math.min(this._tries++, RETRY_MS.length - 1)];
    this._timer = setTimeout(() => this.connect(), wait);
  }

  _set(state) {
    this.state = state;
    this.onchange();
  }
}

// Applies an RFC 7386 merge patch into new objects; unchanged parts stay the same objects.
export function mergePatch(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const merged = target && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete merged[name];
    else merged[name] = mergePatch(merged[name], value);
  }
  return merged;
}
