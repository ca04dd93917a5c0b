// The LoRA adapters in device slots, and those that requests wait for.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count } from "./format.js";
import { Card, Figure, Missing } from "./ui.js";

export const title = "Adapters";
export const about = "LoRA adapters in device slots, and the requests that wait for one.";
export const topics = () => ({});
export const isShown = ({ feed }) => Boolean(feed.data.overview?.adapters);

const TONES = { resident: "good", loading: "wait", draining: "warn" };
const STATES = {
  empty: "free to be loaded", loading: "being loaded, with a step", resident: "requests may use it",
  draining: "its requests run on, then another adapter is loaded",
};

export function View({ app }) {
  const found = app.feed.data.overview?.adapters;
  if (!found) return html`<${Missing}>${app.feed.data.overview ? "No adapters are served: --enable-lora." : "Waiting for the server."}<//>`;
  return html`
    <${Card}><dl class="figures">
      <${Figure} name="device slots" value=${count(found.num_slots)} id="adapters.num_slots" />
      <${Figure} name="loads" value=${count(found.num_loads)} id="adapters.num_loads" />
      <${Figure} name="waiting for an adapter" value=${count(found.num_waiting)} tone=${found.num_waiting ? "warn" : ""} id="adapters.num_waiting" />
      <${Figure} name="of them passed by 50" value=${count(found.num_owed)} tone=${found.num_owed ? "warn" : ""} id="adapters.num_owed" />
    </dl><//>
    <${Card} title="Device slots" note=${found.num_slots > found.slots.length ? `The first ${found.slots.length} of ${count(found.num_slots)}.` : ""}><table>
      <thead><tr><th scope="col" class="num">slot</th><th scope="col">adapter</th><th scope="col">state</th><th scope="col" class="num">running</th></tr></thead>
      <tbody>${found.slots.map((slot) => html`<tr key=${slot.slot} data-slot=${slot.slot}><td class="num">${slot.slot}</td>
        <th scope="row">${slot.adapter ? html`<${Name} of=${slot.adapter} />` : "–"}</th>
        <td><span class=${`badge ${TONES[slot.state] ?? ""}`}>${slot.state}</span><span class="note only-wide"> ${STATES[slot.state]}</span></td>
        <td class="num">${count(slot.num_running)}</td></tr>`)}</tbody></table><//>
    <${Card} title="Waited for">${found.waiting.length === 0 ? html`<p class="note">No request waits for an adapter's slot.</p>` : html`<table>
      <thead><tr><th scope="col">adapter</th><th scope="col" class="num">waiting</th></tr></thead>
      <tbody>${found.waiting.map((row) => html`<tr key=${row.adapter} data-waiting=${row.adapter}><th scope="row"><${Name} of=${row.adapter} /></th><td class="num">${count(row.num_waiting)}</td></tr>`)}</tbody></table>`}<//>`;
}

// A name that leads to the requests of that adapter.
const Name = ({ of }) => html`<a href=${`#/requests/${encodeURIComponent(of)}`}>${of}</a>`;
