// Health: the last progress of each stage, recent incidents, and the lag of the event loop.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds, sketchQuantile } from "./format.js";
import { Card, Figure, Missing, Wide } from "./ui.js";

export const title = "Health";
export const about = "Progress of each stage, and recent incidents.";
export const topics = () => ({ incidents: {}, loop: {} });

// Kind of event -> its description for an operator, from its fields.
const WORDS = {
  STALL: (e) => `${e.source} made no progress for ${seconds(e.waited_us / 1e6)} with ${count(e.num_waiting)} waiting`,
  STAGE_RESTART: (e) => `${e.source} crashed${e.error_name ? ` (${e.error_name})` : ""} and was restarted (restart ${count(e.num_restarts)})`,
  STEP_VOID: (e) => `step ${count(e.step)} with ${count(e.num_rows)} rows was void${e.reason_name && e.reason_name !== "NoneType" ? `: ${e.reason_name}` : ""}`,
  REQUEST_SHED: (e) => `a request was refused${e.reason_name ? `: ${e.reason_name}` : ""}; ${count(e.num_waiting)} were waiting`,
  PREEMPTED: (e) => `slot ${e.slot} was preempted: ${e.how_name}`,
  PARKED: (e) => `slot ${e.slot} was parked: its client does not read`,
  LOOP_LAG: (e) => `the event loop was ${seconds(e.lag_us / 1e6)} late`,
  GC_PAUSE: (e) => `garbage collection took ${seconds(e.pause_us / 1e6)} (generation ${e.generation})`,
};
const GRAVE = new Set(["STALL", "STAGE_RESTART", "STEP_VOID"]);

export function View({ app }) {
  const { overview, pipeline, incidents, loop } = app.feed.data;
  if (!overview) return html`<${Missing}>Waiting for the server.<//>`;
  const { state, stage, reason } = overview.health;
  const tone = state === "ready" ? "good" : state === "dead" || state === "stalled" ? "bad" : "warn";
  const rows = [...(incidents?.rows ?? [])].reverse();
  if (app.feed.recording) return html`<${Recorded} recording=${app.feed.recording} rows=${rows} app=${app} />`;
  return html`
    <p class="sentence"><span class=${`dot ${tone === "warn" ? "warn" : tone}`}></span>${
      state === "ready" ? "Ready: the server accepts requests." : `Not ready (${state})${stage ? ` at ${stage}` : ""}${reason ? `: ${reason}` : ""}.`}</p>
    ${loop?.stall && html`<p class="told" role="alert">${loop.stall.reason}; ${count(loop.stall.num_waiting)} items are waiting.</p>`}
    <div class="columns">
      ${pipeline && html`<${Card} title="Stages" note="A stage without work makes no progress."><${Signs} app=${app} pipeline=${pipeline} /><//>`}
      <${Card} title="Event loop" note="Timer lag, and pauses for garbage collection.">
        ${loop ? html`<dl class="figures">
          <${Figure} name="stalls so far" value=${count(loop.num_stalls)} tone=${loop.num_stalls ? "bad" : ""} id="num_stalls" />
          ${["lag", "pause"].map((kind) => html`<${Spread} name=${kind === "lag" ? "timer lag" : "GC pause"} of=${loop[kind]} />`)}</dl>
          <details open=${Boolean(loop.stall)}><summary>Current stack of each stage</summary><pre tabindex="0">${stacks(loop)}</pre></details>` : html`<p class="note">Waiting for data.</p>`}
      <//>
    </div>
    <${Card} title="Incidents" note="Stalls, restarts, void steps, preemptions, parked answers and pauses in the trace; newest first.">
      ${rows.length ? html`<${Incidents} rows=${rows} app=${app} />` : html`<p class="missing">No incidents.</p>`}
    <//>`;
}

// A recording has no stacks and no event loop, but the incidents of steps and memory.
const Recorded = ({ recording, rows, app }) => html`
  ${recording.trouble ? html`<p class="told" role="alert">${recording.trouble}</p>` : html`<p class="sentence"><span class="dot good"></span>Every decision is as recorded, up to the end.</p>`}
  <${Card} title="Incidents" note="Void steps, preemptions and parked answers up to this time; newest first.">
    ${rows.length ? html`<${Incidents} rows=${rows} app=${app} />` : html`<p class="missing">No incidents so far.</p>`}<//>
  <${Card} title="Not in a recording"><p>The stacks of stages, the lag of the event loop and pauses for garbage collection. A flight file of the server has them (<code>--flight-recorder-dir</code>).</p><//>`;

// Mean, p99 and maximum of a histogram.
function Spread({ name, of }) {
  const total = of.counts.reduce((sum, n) => sum + n, 0);
  const at = (q) => (total ? seconds(sketchQuantile(of.sketch, of.growth, q) / 1e6) : "–");
  return html`<${Figure} name=${`${name}, mean`} value=${total ? seconds(of.total_us / 1e6 / total) : "–"} />
    <${Figure} name=${`${name}, p99`} value=${at(0.99)} /><${Figure} name=${`${name}, max`} value=${at(1)} />`;
}

const stacks = (loop) => Object.entries(loop.stacks).map(([task, stack]) => `${task}${task === loop.stall?.name ? "  ← stalled" : ""}\n${stack.map((place) => `    ${short(place)}`).join("\n")}`).join("\n");

const short = (place) => place.replace(/^.*[/\\](?=[^/\\]+[/\\][^/\\]+:\d+ )/, "");

function Signs({ app, pipeline }) {
  const now = app.feed.nowS();
  const waiting = {};
  for (const edge of Object.values(pipeline.edges)) waiting[edge.target] = (waiting[edge.target] ?? 0) + edge.depth;
  return html`<${Wide} label="Progress of stages"><table><thead><tr><th scope="col">stage</th><th scope="col" class="num">last progress</th><th scope="col" class="num">waiting</th><th scope="col" class="num">restarts</th><th scope="col" class="num">dropped</th></tr></thead>
    <tbody>${Object.entries(pipeline.stages).map(([name, stage]) => html`<tr key=${name}><th scope="row">${name}</th><td class="num">${now === null ? "–" : `${seconds(Math.max(0, now - stage.last_progress_s))} ago`}</td>
      <td class="num">${count(waiting[name] ?? 0)}</td><td class="num">${count(stage.num_restarts)}</td><td class="num" title="items of requests that had ended already">${count(stage.num_dropped)}</td></tr>`)}</tbody></table><//>`;
}

const Incidents = ({ rows, app }) => html`<${Wide} label="Incidents"><table><thead><tr><th scope="col" class="num">time</th><th scope="col">incident</th></tr></thead>
  <tbody>${rows.slice(0, 60).map((row) => html`<tr key=${`${row.time_ns} ${row.kind}`}><td class="num">${app.feed.nowS() === null ? "–" : `${seconds(Math.max(0, app.feed.nowS() - row.time_ns / 1e9))} ago`}</td>
    <td class="free"><span class=${`badge ${GRAVE.has(row.kind) ? "bad" : "warn"}`}>${row.kind.toLowerCase().replace("_", " ")}</span> ${WORDS[row.kind]?.(row) ?? ""}</td></tr>`)}</tbody></table><//>`;
