// The engines and fronts of this server, and why each request went to its engine.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { Card, Figure, Missing } from "./ui.js";

export const title = "Fleet";
export const about = "Engines and fronts, and why each request went where it is.";
export const topics = () => ({ fleet: {} });
export const isShown = ({ feed }) => Boolean(feed.data.overview?.num_engines || feed.hello?.fronts?.length);

const TONES = { ready: "good", loading: "wait", draining: "warn", dead: "bad", stopped: "bad" };
const MAY_BE_CLOSE = "The least score wins. Among close ones, the engine that has more of the prompt cached.";

export function View({ app }) {
  const found = app.feed.data.fleet;
  if (!found) return html`<${Missing}>${app.feed.recording ? "A recording has one engine." : "Waiting for the server."}<//>`;
  const ready = (rows) => `${count(rows.filter((row) => row.state === "ready").length)} of ${count(rows.length)}`;
  const most = Math.max(1, ...found.engines.map((engine) => engine.work));
  return html`
    <${Card}><dl class="figures">
      <${Figure} name="engines ready" value=${ready(found.engines)} id="fleet.engines" />
      ${found.fronts.length > 0 && html`<${Figure} name="fronts ready" value=${ready(found.fronts)} id="fleet.fronts" />`}
      <${Figure} name="rule" value=${found.policy} id="fleet.policy" />
    </dl><//>
    ${found.engines.length > 0 && html`<${Card} title="Engines" note="Requests of this front, and their work in tokens of a prompt."><table>
      <thead><tr><th scope="col">engine</th><th scope="col">state</th><th scope="col" class="num">requests</th><th scope="col">work</th><th scope="col" class="num">deaths</th></tr></thead>
      <tbody>${found.engines.map((engine) => html`<tr key=${engine.index} data-engine=${engine.index}>
        <th scope="row">${engine.index}${engine.address && html` <span class="note">${engine.address}</span>`}${Object.entries(engine.labels).map(([name, value]) => html` <span class="badge" key=${name}>${name}=${value}</span>`)}</th>
        <td><${State} of=${engine} /></td><td class="num">${count(engine.num_requests)}</td>
        <td><meter min="0" max=${most} value=${engine.work} aria-label=${`work of engine ${engine.index}`}></meter> ${count(engine.work)}</td>
        <td class="num">${count(engine.num_deaths)}</td></tr>`)}</tbody></table><//>`}
    ${found.fronts.length > 0 && html`<${Card} title="Fronts" note=${`This page shows front ${found.front}.`}><table>
      <thead><tr><th scope="col">front</th><th scope="col">state</th><th scope="col" class="num">process</th><th scope="col" class="num">restarts</th></tr></thead>
      <tbody>${found.fronts.map((front) => html`<tr key=${front.number} data-front=${front.number}>
        <th scope="row">${front.number === found.front ? front.number : html`<a href=${`?front=${front.number}#/fleet`}>${front.number}</a>`}</th>
        <td><${State} of=${front} /></td><td class="num">${front.pid || "–"}</td><td class="num">${count(front.num_restarts)}</td></tr>`)}</tbody></table><//>`}
    ${found.engines.length > 0 && html`<${Card} title="Why there" note=${`The last requests, with each engine's score in seconds and the tokens of the prompt that it had cached. ${MAY_BE_CLOSE}`}>
      ${found.choices.length === 0 ? html`<p class="note">No request yet.</p>` : html`<div class="wide"><table>
      <thead><tr><th scope="col">request</th><th scope="col" class="num">prompt</th><th scope="col" class="num">engine</th>${found.engines.map((engine) => html`<th scope="col" key=${engine.index} class="num">score of ${engine.index}</th>`)}<th scope="col" class="num">age</th></tr></thead>
      <tbody>${found.choices.map((choice) => html`<tr key=${choice.request_id} data-choice=${choice.request_id}>
        <th scope="row">${choice.is_live ? html`<a href=${`#/waterfall/${encodeURIComponent(choice.request_id)}`}>${choice.request_id}</a>` : choice.request_id}</th>
        <td class="num">${count(choice.num_prompt_tokens)}</td><td class="num"><strong>${choice.engine}</strong></td>
        ${found.engines.map((engine) => html`<${Candidate} key=${engine.index} of=${choice.engines.find((one) => one.index === engine.index)} isChosen=${engine.index === choice.engine} />`)}
        <td class="num">${seconds(Math.max(0, (app.feed.nowS() ?? 0) - choice.at_s))}</td></tr>`)}</tbody></table></div>`}<//>`}`;
}

const State = ({ of }) => html`<span class=${`badge ${TONES[of.state] ?? ""}`}>${of.state}</span>${of.reason && html`<span class="note only-wide"> ${of.reason}</span>`}`;

// What was known of one engine at the moment of the choice.
function Candidate({ of, isChosen }) {
  if (!of) return html`<td class="num note">not asked</td>`;
  const score = of.score_s === null ? `work ${count(of.work)}` : seconds(of.score_s);
  return html`<td class="num">${isChosen ? html`<strong>${score}</strong>` : score}<br /><span class="note">${count(of.num_cached_tokens)} cached</span></td>`;
}
