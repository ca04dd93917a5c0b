// Sends a prompt to this server and shows the answer with its waterfall while it is generated.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { Canvas, Card, colour, Figure, Missing, useWidth } from "./ui.js";
import { Explained } from "./waterfall.js";

export const title = "Playground";
export const about = "Try a prompt, and see the answer with its waterfall.";

const run = { id: null, text: "", ticks: [], begunMs: 0, endedMs: null, error: null, usage: null, controller: null };

export const topics = () => (run.id ? { request: { id: run.id } } : {});

export const View = ({ app }) =>
  app.feed.recording
    ? html`<${Missing}>Not available for a recording. Use the dashboard of a running server: <code>millrace serve</code>.<//>`
    : html`<${Ask} app=${app} />`;

function Ask({ app }) {
  const [prompt, setPrompt] = useState("Once upon a time");
  const [maxTokens, setMaxTokens] = useState(120);
  const [temperature, setTemperature] = useState(0.8);
  const [priority, setPriority] = useState(0);
  const isRunning = run.controller !== null;
  const send = (event) => {
    event.preventDefault();
    ask(app, { prompt, max_tokens: Number(maxTokens), temperature: Number(temperature), priority: Number(priority) });
  };
  const now = run.endedMs ?? performance.now();
  const first = run.ticks[0];
  return html`<div class="columns">
    <${Card} title="Prompt"><form class="ask" onSubmit=${send}>
      <textarea aria-label="Prompt" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} required></textarea>
      <div class="bar"><label>Tokens <input type="number" min="1" value=${maxTokens} onInput=${(event) => setMaxTokens(event.target.value)} /></label>
        <label>Temperature <input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(event) => setTemperature(event.target.value)} /></label>
        <label>Priority <input type="number" value=${priority} onInput=${(event) => setPriority(event.target.value)} /></label>
        ${isRunning ? html`<button type="button" onClick=${() => run.controller.abort()}>Stop</button>` : html`<button>Send</button>`}</div></form>
      ${run.error && html`<p class="told" role="alert">${run.error}</p>`}
      <div class="answer" aria-live="off" data-figure="answer">${run.text || html`<span class="note">${isRunning ? "Waiting for the first token…" : "The answer appears here. It is not stored."}</span>`}</div>
    <//>
    <${Card} title="Client side" note=${run.id ? html`Request <code>${run.id}</code>` : "Times measured by this page, including the network."}>
      <dl class="figures">
        <${Figure} name="first chunk after" value=${first === undefined ? "–" : seconds(first / 1000)} />
        <${Figure} name="chunks" value=${count(run.ticks.length)} id="chunks" />
        <${Figure} name="tokens" value=${run.usage ? count(run.usage.completion_tokens) : "–"} id="completion_tokens" />
        <${Figure} name="total" value=${run.id ? seconds((now - run.begunMs) / 1000) : "–"} />
      </dl>
      <${Ticks} ticks=${run.ticks} spanMs=${run.id ? now - run.begunMs : 0} />
    <//></div>
    ${run.id && html`<${Card} title="Waterfall" note="From the server's trace."><${Explained} explained=${app.feed.data.request} id=${run.id} nowS=${app.feed.nowS()} /><//>`}`;
}

function Ticks({ ticks, spanMs }) {
  const [ref, width] = useWidth(300);
  const draw = (context) => {
    context.fillStyle = colour("idle");
    context.fillRect(0, 12, width, 8);
    if (!spanMs) return;
    context.fillStyle = colour("cached");
    context.fillRect(0, 12, ticks.length ? (ticks[0] / spanMs) * width : width, 8);
    context.fillStyle = colour("mark-strong");
    for (const tick of ticks) context.fillRect(Math.min(width - 1.5, (tick / spanMs) * width), 4, 1.5, 24);
  };
  return html`<div ref=${ref}><${Canvas} width=${width} height=${32} draw=${draw} role="img" aria-label=${`${ticks.length} chunks over ${seconds(spanMs / 1000)}`} /></div>`;
}

async function ask(app, body) {
  const controller = new AbortController();
  const name = `playground-${Date.now().toString(36)}`;
  Object.assign(run, { id: `cmpl-${name}`, text: "", ticks: [], begunMs: performance.now(), endedMs: null, error: null, usage: null, controller });
  delete app.feed.data.request;
  app.redraw();
  try {
    const headers = { "Content-Type": "application/json", "X-Request-Id": name };
    if (app.feed.keys.key) headers.Authorization = `Bearer ${app.feed.keys.key}`;
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    const answer = await fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(asked), signal: controller.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) run.usage = chunk.usage;
      const text = chunk.choices[0]?.text;
      if (text) {
        run.text += text;
        run.ticks.push(performance.now() - run.begunMs);
      }
      app.redraw();
    }
  } catch (error) {
    if (error.name !== "AbortError") run.error = error.message;
  } finally {
    Object.assign(run, { endedMs: performance.now(), controller: null });
    app.redraw();
  }
}

// Yields the parsed data of a stream of server-sent events.
async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}
