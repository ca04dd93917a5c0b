// Files for offline analysis, started, stopped and fetched here: traces, profiles, flight files and recordings.

import { html, useEffect, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { Card, Figure, NeedsAdmin, Wide } from "./ui.js";

export const title = "Recorder";
export const about = "Files for offline analysis: traces, profiles, flight files and recordings.";
export const topics = () => ({ config: {} });

const LAST_S = 30; // of a trace without a start
const MOST_S = 3600; // of a trace
const PROFILE_S = 10;
const KINDS = { recording: "recording", flight: "flight file", profile: "profile" };

const trace = { beganMs: null }; // also while another view is shown

export function View({ app }) {
  const rows = app.feed.data.config?.rows ?? [];
  const [numWritten, note] = useState(0);
  if (app.feed.recording) return html`<${Opened} recording=${app.feed.recording} />`;
  const setting = (name) => rows.find((row) => row.name === name);
  const isAdmin = app.feed.hello?.can_cancel && Boolean(app.feed.keys.admin_key);
  return html`<div class="columns">
    <${Perfetto} app=${app} isAdmin=${isAdmin} />
    <${Flight} app=${app} isAdmin=${isAdmin} setting=${setting("flight_recorder_dir")} onWritten=${() => note(numWritten + 1)} />
    <${Profile} app=${app} isAdmin=${isAdmin} setting=${setting("profiler_dir")} onWritten=${() => note(numWritten + 1)} />
    <${Recording} setting=${setting("record")} />
  </div>
  <${Files} app=${app} isAdmin=${isAdmin} numWritten=${numWritten} />`;
}

// Of an admin route; throws with the server's message.
async function ask(app, path, method = "GET") {
  const answer = await fetch(path, { method, headers: { Authorization: `Bearer ${app.feed.keys.admin_key}` } });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

async function save(answer, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

// [text, run]: what became of the last action, and a function that makes a handler of one.
function useTold() {
  const [told, setTold] = useState(null);
  const run = (action) => async () => {
    try {
      setTold(await action(setTold));
    } catch (error) {
      setTold(error.message);
    }
  };
  return [told && html`<p role="status">${told}</p>`, run];
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
    : setting.value ? html`<p><span class="badge good">recording</span> to <code>${setting.value}</code></p><p class="note">Fetch it below and replay it: <code>millrace replay FILE --dashboard</code></p>`
    : html`<p>Not recording.</p><p class="note">Start the server with <code>--record FILE</code>: a replay needs every decision from the start on, so a recording cannot begin later.</p>`}<//>`;

function Flight({ app, isAdmin, setting, onWritten }) {
  const [told, run] = useTold();
  const write = run(async () => {
    const { file } = await (await ask(app, "admin/flight", "POST")).json();
    onWritten();
    return file === null ? "One was written seconds ago." : `Written to ${file}.`;
  });
  return html`<${Card} title="Flight recorder" note="The last seconds of the trace, stacks and queues, written at a stall, at a crash, or on demand.">
    ${!setting ? html`<p>This version has no flight recorder.</p>`
      : !setting.value ? html`<p>Off.</p><p class="note">Start the server with <code>--flight-recorder-dir FOLDER</code>.</p>`
      : isAdmin ? html`<p><button onClick=${write}>Write one now</button></p>` : html`<${NeedsAdmin} app=${app} what="To write a file now" />`}
    ${told}<//>`;
}

function Profile({ app, isAdmin, setting, onWritten }) {
  const [told, run] = useTold();
  const start = run(async () => `Profiling for ${(await (await ask(app, `admin/profiler/start?seconds=${PROFILE_S}`, "POST")).json()).seconds} s.`);
  const stop = run(async () => {
    const { file, num_bytes: size } = await (await ask(app, "admin/profiler/stop", "POST")).json();
    onWritten();
    return `Written to ${file}, ${count(size / 1024)} KiB.`;
  });
  return html`<${Card} title="Profiler" note=${`torch's profile of the model's kernels, at most ${PROFILE_S} seconds, for ui.perfetto.dev.`}>
    ${!setting?.value ? html`<p>Off.</p><p class="note">Start the server with <code>--profiler-dir FOLDER</code>.</p>`
      : isAdmin ? html`<p class="bar"><button onClick=${start}>Start</button><button onClick=${stop}>Stop and write</button></p>` : html`<${NeedsAdmin} app=${app} what="To profile" />`}
    ${told}<//>`;
}

function Perfetto({ app, isAdmin }) {
  const [told, run] = useTold();
  const fetchTrace = (lastS) => async (tell) => {
    tell("Reading the trace…");
    await save(await ask(app, `admin/trace?seconds=${lastS}`), "millrace-trace.json");
    return `Saved ${seconds(lastS)} of the trace; a busy server may keep less.`;
  };
  const start = () => {
    trace.beganMs = performance.now();
    app.redraw();
  };
  const stop = () => {
    const tookS = Math.min(MOST_S, Math.max(1, Math.ceil((performance.now() - trace.beganMs) / 1000)));
    trace.beganMs = null;
    run(fetchTrace(tookS))();
  };
  const isOn = trace.beganMs !== null;
  return html`<${Card} title="Trace for Perfetto" note="One track per stage and per request, for ui.perfetto.dev or chrome://tracing. The server always traces: start and stop choose the part.">
    ${isAdmin ? html`<p class="bar">${isOn ? html`<button onClick=${stop}>Stop and save</button><span class="badge good">since ${seconds((performance.now() - trace.beganMs) / 1000)}</span>` : html`<button onClick=${start}>Start</button>`}
        <button class="quiet" onClick=${run(fetchTrace(LAST_S))}>Download the trace of the last ${LAST_S} s</button></p>`
      : html`<p class="note">It covers the requests of all clients.</p><${NeedsAdmin} app=${app} what="To download it" />`}
    ${told}<//>`;
}

function Files({ app, isAdmin, numWritten }) {
  const [files, setFiles] = useState(null);
  const [told, run] = useTold();
  const read = run(async () => {
    setFiles((await (await ask(app, "admin/files")).json()).data);
    return null;
  });
  useEffect(() => {
    if (isAdmin) read();
  }, [isAdmin, numWritten]);
  if (!isAdmin) return null;
  const get = (name) => run(async () => {
    await save(await ask(app, `admin/files/${encodeURIComponent(name)}`), name);
    return `Saved ${name}.`;
  });
  return html`<${Card} title="Files on the server" note="Recordings, flight files and profiles, newest first.">
    <div class="bar"><button class="quiet" onClick=${read}>Read again</button></div>
    ${files?.length === 0 && html`<p class="missing">No files.</p>`}
    ${files?.length > 0 && html`<${Wide} label="Files"><table><thead><tr><th scope="col">file</th><th scope="col">kind</th><th scope="col" class="num">size</th><th scope="col">changed</th><th scope="col"><span class="unseen">fetch</span></th></tr></thead>
      <tbody>${files.map((file) => html`<tr key=${file.name} data-file=${file.name}><th scope="row">${file.name}</th><td>${KINDS[file.kind]}</td><td class="num">${count(Math.ceil(file.num_bytes / 1024))} KiB</td><td>${new Date(1000 * file.modified_s).toLocaleString()}</td>
        <td class="num"><button class="quiet" aria-label=${`Fetch ${file.name}`} onClick=${get(file.name)}>Fetch</button></td></tr>`)}</tbody></table><//>`}
    ${told}<//>`;
}
