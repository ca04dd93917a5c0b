// Downloads and files: the recording, the flight recorder, and the trace for Perfetto.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { Card, Figure, NeedsAdmin } from "./ui.js";

export const title = "Recorder";
export const about = "Files for offline analysis: recordings, flight files and traces.";
export const topics = () => ({ config: {} });

export function View({ app }) {
  const rows = app.feed.data.config?.rows ?? [];
  if (app.feed.recording) return html`<${Opened} recording=${app.feed.recording} />`;
  const setting = (name) => rows.find((row) => row.name === name);
  return html`<div class="columns">
    <${Recording} setting=${setting("record")} />
    <${Flight} app=${app} setting=${setting("flight_recorder_dir")} />
    <${Perfetto} app=${app} />
  </div>`;
}

// The loaded recording.
const Opened = ({ recording }) => html`
  <${Card} title=${recording.name} note=${`Made on ${new Date(recording.began_wall_s * 1000).toLocaleString()}`}>
    ${recording.trouble && html`<p class="told" role="alert">${recording.trouble}</p>`}
    <dl class="figures">
      <${Figure} name="duration" value=${seconds(recording.duration_s)} />
      <${Figure} name="requests" value=${count(recording.num_requests)} id="recording.num_requests" />
      <${Figure} name="steps" value=${count(recording.num_steps)} id="recording.num_steps" />
      <${Figure} name="decisions" value=${count(recording.num_decisions)} id="recording.num_decisions" />
    </dl>
    <p class="hash">Decision hash <code data-figure="decision_hash">${recording.decision_hash}</code></p>
    <p class="note">Compare each decision: <code>millrace replay ${recording.path}</code></p>
    <p class="note">Simulate other settings: <code>millrace simulate --trace ${recording.path} --cost-model fit-from-recording --sweep max_num_seqs=16,32,64</code></p>
  <//>
  <${Card} title="Not in a recording"><p>Flight files and the trace for Perfetto need a running server.</p><//>`;

const Recording = ({ setting }) => html`<${Card} title="Recording" note="Inputs and decisions of schedule and allocate, to replay or to simulate other settings. No prompts.">
  ${!setting ? html`<p>This version makes no recordings.</p>`
    : setting.value ? html`<p><span class="badge good">recording</span> to <code>${setting.value}</code></p><p class="note">Replay it: <code>millrace replay ${setting.value}</code></p>`
    : html`<p>Not recording.</p><p class="note">Start the server with <code>--record FILE</code>.</p>`}<//>`;

function Flight({ app, setting }) {
  const [told, setTold] = useState(null);
  const write = async () => {
    const answer = await fetch("admin/flight", { method: "POST", headers: { Authorization: `Bearer ${app.feed.keys.admin_key}` } });
    const body = await answer.json();
    setTold(answer.ok ? `Written to ${body.file}.` : body.error.message);
  };
  return html`<${Card} title="Flight recorder" note="The last seconds of the trace, stacks and queues, written at a stall, at a crash, or on demand.">
    ${!setting ? html`<p>This version has no flight recorder.</p>`
      : !setting.value ? html`<p>Off.</p><p class="note">Start the server with <code>--flight-recorder-dir FOLDER</code>.</p>`
      : html`<p>Files go to <code>${setting.value}</code>.</p>${app.feed.hello?.can_cancel ? html`<p><button onClick=${write}>Write one now</button></p>` : html`<${NeedsAdmin} app=${app} what="To write a file now" />`}`}
    ${told && html`<p role="status">${told}</p>`}<//>`;
}

function Perfetto({ app }) {
  const [told, setTold] = useState(null);
  const save = async () => {
    setTold("Reading the trace…");
    const answer = await fetch("admin/trace?seconds=30", { headers: { Authorization: `Bearer ${app.feed.keys.admin_key}` } });
    if (!answer.ok) return setTold((await answer.json()).error.message);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "millrace-trace.json";
    link.click();
    URL.revokeObjectURL(link.href);
    setTold("Saved.");
  };
  return html`<${Card} title="Trace for Perfetto" note="The last 30 seconds with one track per stage and per request, for ui.perfetto.dev or chrome://tracing.">
    ${app.feed.hello?.can_cancel ? html`<p><button onClick=${save}>Download the trace</button></p>` : html`<p class="note">It covers the requests of all clients.</p><${NeedsAdmin} app=${app} what="To download it" />`}
    ${told && html`<p role="status">${told}</p>`}<//>`;
}
