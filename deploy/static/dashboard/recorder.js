// What can be taken home: the settings' recording, the flight recorder, and the trace for Perfetto.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count } from "./format.js";
import { Card } from "./ui.js";

export const title = "Recorder";
export const about = "Take what happened home, and look at it there.";
export const topics = () => ({ config: {}, steps: {} });

export function View({ app }) {
  const rows = app.feed.data.config?.rows ?? [];
  const setting = (name) => rows.find((row) => row.name === name);
  return html`<div class="columns">
    <${Recording} setting=${setting("record")} />
    <${Flight} app=${app} setting=${setting("flight_recorder_dir")} />
    <${Perfetto} app=${app} />
  </div>`;
}

const Recording = ({ setting }) => html`<${Card} title="Recording" note="All that schedule and allocate are told and decide, to run again with other settings. No prompts.">
  ${!setting ? html`<p>Recordings are not made by this version.</p>`
    : setting.value ? html`<p><span class="badge good">recording</span> to <code>${setting.value}</code></p><p class="note">Run it again: <code>millrace replay ${setting.value}</code></p>`
    : html`<p>Not recording.</p><p class="note">Start the server with <code>--record FILE</code>.</p>`}<//>`;

function Flight({ app, setting }) {
  const [told, setTold] = useState(null);
  const write = async () => {
    const answer = await fetch("admin/flight", { method: "POST", headers: { Authorization: `Bearer ${app.feed.keys.admin_key}` } });
    const body = await answer.json();
    setTold(answer.ok ? `Written to ${body.file}.` : body.error.message);
  };
  return html`<${Card} title="Flight recorder" note="The last seconds of the trace, the stacks and what waits where, written at a stall or a crash, or now.">
    ${!setting ? html`<p>There is no flight recorder in this version.</p>`
      : !setting.value ? html`<p>Off.</p><p class="note">Start the server with <code>--flight-recorder-dir FOLDER</code>.</p>`
      : html`<p>Files go to <code>${setting.value}</code>.</p>${app.feed.hello?.can_cancel ? html`<p><button onClick=${write}>Write one now</button></p>` : html`<p class="note">To write one now takes the admin key.</p>`}`}
    ${told && html`<p role="status">${told}</p>`}<//>`;
}

function Perfetto({ app }) {
  const skipped = app.feed.data.steps?.numSkipped ?? 0;
  const [told, setTold] = useState(null);
  const save = async () => {
    const headers = app.feed.keys.key ? { Authorization: `Bearer ${app.feed.keys.key}` } : {};
    const answer = await fetch("v1/trace", { headers });
    if (!answer.ok) return setTold(answer.status === 404 ? "This version does not export the trace." : (await answer.json()).error.message);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "millrace-trace.json";
    link.click();
    URL.revokeObjectURL(link.href);
    setTold("Saved.");
  };
  return html`<${Card} title="Trace for Perfetto" note="What the rings hold now, one track a stage and one a request, for ui.perfetto.dev or chrome://tracing.">
    <p><button onClick=${save}>Download the trace</button></p>${told && html`<p role="status">${told}</p>`}
    ${skipped > 0 && html`<p class="note">${count(skipped)} older events were not read by this page.</p>`}<//>`;
}
