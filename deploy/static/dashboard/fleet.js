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
    ${found.engines.length > 0 && html`<${Card} title="Engines" note="Requests of this front, and their work in tokens of a prompt."><div class="wide"><table>
      <thead><tr><th scope="col">engine</th><th scope="col">state</th><th scope="col" class="num">requests</th><th scope="col">work</th><th scope="col" class="num">deaths</th></tr></thead>
      <tbody>${found.engines.map((engine) => html`<tr key=${engine.index} data-engine=${engine.index}>
        <th scope="row">${engine.index}${engine.address && html` <span class="note">${engine.address}</span>`}${Object.entries(engine.labels).map(([name, value]) => html` <span class="badge" key=${name}>${name}=${value}</span>`)}</th>
        <td><${State} of=${engine} /></td><td class="num">${count(engine.num_requests)}</td>
        <td><meter min="0" max=${most} value=${engine.work} aria-label=${`work of engine ${engine.index}`}></meter> ${count(engine.work)}</td>
        <td class="num">${count(engine.num_deaths)}</td></tr>`)}</tbody></table></div><//>`}
    ${found.traffic?.split && html`<${Split} of=${found.traffic} />`}
    ${found.traffic?.shadow && html`<${Shadow} of=${found.traffic} />`}
    ${found.fronts.length > 0 && html`<${Card} title="Fronts" note=${`This page shows front ${found.front}.`}><table>
      <thead><tr><th scope="col">front</th><th scope="col">state</th><th scope="col" class="num">process</th><th scope="col" class="num">restarts</th></tr></thead>
      <tbody>${found.fronts.map((front) => html`<tr key=${front.number} data-front=${front.number}>
        <th scope="row">${front.number === found.front ? front.number : html`<a href=${`?front=${front.number}#/fleet`}>${front.number}</a>`}</th>
        <td><${State} of=${front} /></td><td class="num">${front.pid || "–"}</td><td class="num">${count(front.num_restarts)}</td></tr>`)}</tbody></table><//>`}
    ${found.engines.length > 0 && html`<${Warm} engines=${found.engines} prefixes=${found.prefixes} />`}
    ${found.engines.length > 0 && html`<${Card} title="Why there" note=${`The last requests, with each engine's score in seconds and the tokens of the prompt that it had cached. ${MAY_BE_CLOSE}`}>
      ${found.choices.length === 0 ? html`<p class="note">No request yet.</p>` : html`<div class="wide"><table>
      <thead><tr><th scope="col">request</th><th scope="col" class="num">prompt</th><th scope="col" class="num">engine</th>${found.engines.map((engine) => html`<th scope="col" key=${engine.index} class="num">score of ${engine.index}</th>`)}<th scope="col" class="num">age</th></tr></thead>
      <tbody>${found.choices.map((choice) => html`<tr key=${choice.request_id} data-choice=${choice.request_id}>
        <th scope="row">${choice.is_live ? html`<a href=${`#/waterfall/${encodeURIComponent(choice.request_id)}`}>${choice.request_id}</a>` : choice.request_id}</th>
        <td class="num">${count(choice.num_prompt_tokens)}</td><td class="num"><strong>${choice.engine}</strong></td>
        ${found.engines.map((engine) => html`<${Candidate} key=${engine.index} of=${choice.engines.find((one) => one.index === engine.index)} isChosen=${engine.index === choice.engine} />`)}
        <td class="num">${seconds(Math.max(0, (app.feed.nowS() ?? 0) - choice.at_s))}</td></tr>`)}</tbody></table></div>`}<//>`}`;
}

// Which engine has how much of each prefix that the last prompts share. Prefixes are named by a hash: no prompts.
function Warm({ engines, prefixes }) {
  const rows = [...inOrder(prefixes)];
  return html`<${Card} title="Warm prefixes" note="The prefixes of the last 64 prompts, as a tree, and the tokens of each that every engine has cached.">
    ${rows.length === 0 ? html`<p class="note">No prompt yet of at least one block, or no prefix cache.</p>` : html`<div class="wide"><table class="warm">
      <thead><tr><th scope="col">prefix</th><th scope="col" class="num">tokens</th><th scope="col" class="num">prompts</th>${engines.map((engine) => html`<th scope="col" key=${engine.index}>engine ${engine.index}</th>`)}</tr></thead>
      <tbody>${rows.map(({ node, level }) => html`<tr key=${node.id} data-prefix=${node.id}>
        <th scope="row" style=${{ "padding-left": `${Math.min(level, 12) * 20}px` }}><code>${node.id}</code></th>
        <td class="num">${count(node.num_tokens)}</td><td class="num">${count(node.num_prompts)}</td>
        ${engines.map((engine) => {
          const warm = node.warm.find((one) => one.index === engine.index)?.num_tokens ?? 0;
          return html`<td key=${engine.index} data-warm=${warm}><meter min="0" max=${node.num_tokens} value=${warm} aria-label=${`prefix ${node.id} in engine ${engine.index}`}></meter> <span class=${warm ? "" : "note"}>${warm ? count(warm) : "cold"}</span></td>`;
        })}</tr>`)}</tbody></table></div>`}<//>`;
}

// Each prefix before those that begin with it, the most used ones first.
function* inOrder(prefixes, parent = null, level = 0) {
  const children = prefixes.filter((node) => node.parent === parent);
  for (const node of children.sort((a, b) => b.num_prompts - a.num_prompts || b.num_tokens - a.num_tokens || (a.id < b.id ? -1 : 1))) {
    yield { node, level };
    yield* inOrder(prefixes, node.id, level + 1);
  }
}

// The requests of both sides of a split, to judge one version by the other.
function Split({ of }) {
  const label = of.split.slice(0, of.split.lastIndexOf(":"));
  const names = { labelled: label, rest: "the others" };
  const ms = (value) => (value === null ? "–" : seconds(value / 1000));
  return html`<${Card} title="Split" note=${`${of.split.slice(label.length + 1)} % of the requests go to engines with ${label}, by session. Counts of this front, since the split has this label.`}><div class="wide"><table>
    <thead><tr><th scope="col">engines</th><th scope="col" class="num">requests</th><th scope="col" class="num" title="drawn for these engines, and sent to the others, which alone could take them">moved away</th><th scope="col" class="num">finished</th><th scope="col" class="num">failed</th><th scope="col" class="num">first token, median</th><th scope="col" class="num">p99</th></tr></thead>
    <tbody>${Object.entries(of.sides).map(([side, counts]) => html`<tr key=${side} data-side=${side}>
      <th scope="row">${names[side]}</th><td class="num">${count(counts.num_requests)}</td><td class="num">${count(counts.num_moved)}</td><td class="num">${count(counts.num_finished)}</td>
      <td class="num">${count(counts.num_failed)}</td><td class="num">${ms(counts.ttft_p50_ms)}</td><td class="num">${ms(counts.ttft_p99_ms)}</td></tr>`)}</tbody></table></div><//>`;
}

// What became of copies of requests, whose answers are compared with the real ones.
const RESULTS = {
  equal: "the same tokens and the same end",
  different: "other tokens, or another end",
  failed: "the engine failed the copy, or was lost",
  late: "no answer half a minute after the real one",
  shed: "not sent, or ended, as the engines had no room",
  uncompared: "not greedy, or the client did not wait for the whole answer",
};

function Shadow({ of }) {
  return html`<${Card} title="Shadow" note=${`Copies of requests to engines with ${of.shadow.replace(/:([^:]*)$/, ", $1 % of all")}. Their answers are compared with the real ones, and dropped.`}><dl class="figures">
    ${Object.entries(of.copies).map(([result, number]) => html`<${Figure} key=${result} name=${html`<span title=${RESULTS[result]}>${result}</span>`} value=${count(number)} id=${`fleet.copies.${result}`} />`)}
  </dl><//>`;
}

const State = ({ of }) => html`<span class=${`badge ${TONES[of.state] ?? ""}`}>${of.state}</span>${of.reason && html`<span class="note only-wide"> ${of.reason}</span>`}`;

// What was known of one engine at the moment of the choice.
function Candidate({ of, isChosen }) {
  if (!of) return html`<td class="num note">not asked</td>`;
  const score = of.score_s === null ? `work ${count(of.work)}` : seconds(of.score_s);
  return html`<td class="num">${isChosen ? html`<strong>${score}</strong>` : score}<br /><span class="note">${count(of.num_cached_tokens)} cached</span></td>`;
}
