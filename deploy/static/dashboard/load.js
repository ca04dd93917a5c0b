// A synthetic load from this page: so many requests at a time for so long. It stops by itself, and with the page.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, rate, seconds } from "./format.js";
import { Card, Figure, Missing, NeedsAdmin } from "./ui.js";

export const title = "Load";
export const about = "A synthetic load, to see how this server behaves. Its requests are marked in the list.";
export const topics = () => ({});

const PROTOCOLS = ["millrace.v1", "openai-insecure-api-key."]; // of /v1/stream; the second one takes the key
const MOST = { requests: 64, seconds: 120, prompt: 2000, tokens: 500 };
const START = "The wheel turns as the water falls, and the stones grind what the miller brings. ".repeat(30); // a shared prefix
const WORDS = "river mill wheel stone grain flour water race gate sluice weir pond bank reed".split(" ");
const TELLS_MS = 250;

const run = { socket: null, endsMs: 0, asked: null, numSent: 0, numDone: 0, numTokens: 0, numFailed: 0, error: null, beganMs: 0, tookS: 0, timer: null };
export const isRunning = () => run.socket !== null;

// Above all views while it runs.
export const Banner = ({ app }) =>
  isRunning() && html`<p class="load-banner" role="status"><span><strong>Synthetic load</strong> from this page: ${count(run.asked.requests)} requests at a time, ${Math.max(0, Math.ceil((run.endsMs - performance.now()) / 1000))} s left</span><button class="quiet" onClick=${() => stop(app)}>Stop</button></p>`;

export function View({ app }) {
  const { hello, recording } = app.feed;
  const [asked, setAsked] = useState({ requests: 16, seconds: 30, prompt: 200, tokens: 120, shared: 50 });
  if (recording) return html`<${Missing}>A recording takes no load.<//>`;
  const mayStart = hello?.can_cancel || hello?.has_keys === false;
  const lacksKey = hello?.has_keys && !app.feed.keys.key;
  const field = (name, label, most, least = 1) => html`<label>${label} <input type="number" min=${least} max=${most} value=${asked[name]} required
    onInput=${(event) => setAsked({ ...asked, [name]: Number(event.target.value) })} /></label>`;
  const tookS = isRunning() ? (performance.now() - run.beganMs) / 1000 : run.tookS;
  return html`<${Card} title="Load" note=${`Completions on ${hello?.models?.[0] ?? "the model"}, over one WebSocket. At most ${MOST.requests} at a time and ${MOST.seconds} seconds; then what still runs is cancelled.`}>
    ${!mayStart ? html`<${NeedsAdmin} app=${app} what="To start a load" />` : lacksKey ? html`<p class="note">The requests need an API key as well: <button class="quiet" onClick=${() => app.askKeys()}>enter it</button>.</p>` : html`
      <form class="ask" onSubmit=${(event) => { event.preventDefault(); start(app, asked); }}><div class="bar">
        ${field("requests", "Requests at a time", MOST.requests)}${field("seconds", "Seconds", MOST.seconds)}${field("prompt", "Characters of a prompt", MOST.prompt)}${field("shared", "% shared", 100, 0)}${field("tokens", "Tokens of an answer", MOST.tokens)}
        ${isRunning() ? html`<button type="button" onClick=${() => stop(app)}>Stop</button>` : html`<button>Start the load</button>`}</div></form>`}
    ${run.error && html`<p class="told" role="alert">${run.error}</p>`}
    ${run.asked && html`<dl class="figures">
      <${Figure} name="sent" value=${count(run.numSent)} id="load.sent" /><${Figure} name="completed" value=${count(run.numDone)} id="load.done" />
      <${Figure} name="refused or failed" value=${count(run.numFailed)} tone=${run.numFailed ? "warn" : ""} />
      <${Figure} name="tokens" value=${count(run.numTokens)} id="load.tokens" /><${Figure} name="tokens/s here" value=${tookS ? rate(run.numTokens / tookS) : "–"} /><${Figure} name="for" value=${seconds(tookS)} /></dl>
      <p class="note">${isRunning() ? "Look at the other views meanwhile: the load goes on." : "The load is over."}</p>`}
  <//>`;
}

function start(app, wanted) {
  const asked = Object.fromEntries(Object.entries(wanted).map(([name, value]) => [name, Math.max(0, Math.min(MOST[name] ?? 100, Math.round(value)))]));
  const { key } = app.feed.keys;
  const url = new URL("v1/stream", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(url, key ? [PROTOCOLS[0], PROTOCOLS[1] + key] : [PROTOCOLS[0]]);
  const beganMs = performance.now();
  Object.assign(run, { socket, asked, beganMs, endsMs: beganMs + 1000 * asked.seconds, numSent: 0, numDone: 0, numTokens: 0, numFailed: 0, error: null });
  const name = Date.now().toString(36);
  const send = () => {
    if (run.socket !== socket || performance.now() >= run.endsMs) return;
    const body = { prompt: prompt(asked), max_tokens: asked.tokens, temperature: 0.8, ignore_eos: true, stream_options: { include_usage: true } };
    socket.send(JSON.stringify({ type: "create", id: `synthetic-${name}-${++run.numSent}`, endpoint: "completions", body }));
  };
  socket.onopen = () => {
    for (let i = 0; i < asked.requests; i++) send();
  };
  socket.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (message.type === "usage") run.numTokens += message.usage.completion_tokens;
    else if (message.type === "done") {
      run.numDone++;
      send();
    } else if (message.type === "error") {
      run.numFailed++;
      run.error = message.error.message;
      setTimeout(send, 1000 * Math.max(1, message.retry_after_s ?? 1)); // as a client that heeds Retry-After
    }
  };
  socket.onclose = () => run.socket === socket && stop(app);
  run.timer = setInterval(() => (performance.now() >= run.endsMs ? stop(app) : app.redraw()), TELLS_MS);
  app.redraw();
}

function prompt({ prompt: size, shared }) {
  const kept = Math.round((size * shared) / 100);
  let text = START.repeat(Math.ceil(kept / START.length)).slice(0, kept);
  while (text.length < size) text += `${WORDS[Math.floor(Math.random() * WORDS.length)]} `;
  return text.slice(0, size) || "The";
}

function stop(app) {
  clearInterval(run.timer);
  const { socket } = run;
  Object.assign(run, { socket: null, tookS: (performance.now() - run.beganMs) / 1000 });
  socket?.close(1000); // cancels what still runs
  app.redraw();
}
