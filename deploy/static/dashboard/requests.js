// The live requests: sorted, filtered and searched by the server. Only the rows in the window are requested and drawn.

import { html, useEffect, useLayoutEffect, useRef } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds, shortId } from "./format.js";
import { Card, Missing, NeedsAdmin } from "./ui.js";

export const title = "Requests";
export const about = "All running and waiting requests. No prompts, no answers.";

const SPARE = 6; // rows above and below the visible ones

// Field of the sort -> its heading, the class of its column, and whether large values come first.
const COLUMNS = {
  id: ["request", "", false], state: ["state", "", false], adapter: ["adapter", "", false], arrival: ["age", "num", false],
  prompt: ["prompt", "num", true], cached: ["cached", "num", true], answer: ["answer", "num", true], ttft: ["TTFT", "num", true],
  blocks: ["blocks", "num", true], priority: ["priority", "num", false], preempted: ["preempted", "num", true],
};

const view = { offset: 0, limit: 40, sort: "arrival", descending: false, search: "", state: null, adapter: null, priority: null };

export const topics = () => ({ requests: { ...view } });

export function View({ app }) {
  const { requests } = app.feed.data;
  useEffect(() => {
    if (app.arg !== null) change(app, { search: app.arg.slice(0, 200) });
  }, [app.arg]);
  if (!requests) return html`<${Missing}>Waiting for the list.<//>`;
  const isPast = app.feed.recording || app.feed.isPast;
  const columns = Object.keys(COLUMNS).filter((field) => field !== "adapter" || app.feed.data.overview?.adapters);
  return html`<${Card} className="requests">
    <${Filters} app=${app} requests=${requests} columns=${columns} />
    ${app.feed.told && html`<p class="told" role="alert">${app.feed.told.message}</p>`}
    <${List} app=${app} requests=${requests} columns=${columns} canCancel=${app.feed.hello?.can_cancel && !isPast} />
    ${isPast ? html`<p class="note">As known to schedule at this time. They cannot be cancelled from here.</p>`
      : !app.feed.hello?.can_cancel && html`<${NeedsAdmin} app=${app} what="To cancel requests" />`}
  <//>`;
}

function change(app, to) {
  Object.assign(view, to, { offset: 0 });
  app.redraw();
}

const sortBy = (app, field) => change(app, { sort: field, descending: view.sort === field ? !view.descending : COLUMNS[field][2] });

function Filters({ app, requests, columns }) {
  const { states = {}, adapters = {}, priorities = {}, total, num_live: found } = requests;
  const isFiltered = view.search || view.state !== null || view.adapter !== null || view.priority !== null;
  const pick = (name, label, options, read = (text) => text) => html`<label>${label} <select value=${view[name] === null ? "all" : `=${view[name]}`}
    onChange=${(event) => change(app, { [name]: event.target.value === "all" ? null : read(event.target.value.slice(1)) })}>
    <option value="all">all</option>${Object.entries(options).map(([value, n]) => html`<option value=${`=${value}`}>${value || "base"} (${count(n)})</option>`)}
    ${view[name] !== null && !(view[name] in options) && html`<option value=${`=${view[name]}`}>${view[name] || "base"} (0)</option>`}</select></label>`;
  useEffect(() => {
    if (app.state.wantsSearch) document.getElementById("find").focus();
    app.state.wantsSearch = false;
  });
  return html`<div class="bar filters">
    <label class="search"><span class="unseen">Search</span><input id="find" type="search" placeholder=${columns.includes("adapter") ? "id or adapter" : "id"} value=${view.search}
      onInput=${(event) => change(app, { search: event.target.value.slice(0, 200) })} /></label>
    ${pick("state", "State", states)}
    ${columns.includes("adapter") && pick("adapter", "Adapter", adapters)}
    ${(Object.keys(priorities).length > 1 || view.priority !== null) && pick("priority", "Priority", priorities, Number)}
    <label class="only-narrow">Sort <select value=${view.sort} onChange=${(event) => sortBy(app, event.target.value)}>${columns.map((field) => html`<option value=${field}>${COLUMNS[field][0]}</option>`)}</select></label>
    <button class="quiet only-narrow" onClick=${() => sortBy(app, view.sort)}>${view.descending ? "▾ descending" : "▴ ascending"}</button>
    ${isFiltered && html`<button class="quiet" onClick=${() => change(app, { search: "", state: null, adapter: null, priority: null })}>Show all</button>`}
    <p class="note" role="status" data-figure="num_live" data-value=${found}>${isFiltered ? `${count(found)} of ${count(total)} requests` : `${count(found)} requests`}</p></div>`;
}

// The rows scroll with the page: spacers stand for those outside of the window.
function List({ app, requests, columns, canCancel }) {
  const { rows, offset, num_live: total } = requests;
  const body = useRef(null);
  const height = () => (body.current && matchMedia("(max-width: 760px)").matches ? 82 : 34); // as in the style sheet
  const look = () => {
    if (!body.current) return;
    const top = body.current.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / height()) - SPARE);
    const to = { offset: first - (first % SPARE), limit: Math.min(200, Math.ceil(innerHeight / height()) + 4 * SPARE) }; // so that a small scroll needs no new rows
    if (to.offset === view.offset && to.limit === view.limit) return;
    Object.assign(view, to);
    app.redraw();
  };
  useLayoutEffect(() => {
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [total]);
  const tall = height();
  return html`
    ${total === 0 && html`<p class="missing">No requests${requests.total ? " match" : app.feed.recording || app.feed.isPast ? " at this time" : ""}.</p>`}
    <table class="list" role="table" aria-label="Live requests" aria-rowcount=${total + 1} hidden=${total === 0}>
      <thead role="rowgroup"><tr role="row" aria-rowindex="1">${columns.map((field) => html`<th key=${field} role="columnheader" scope="col" class=${COLUMNS[field][1]}
        aria-sort=${field === view.sort ? (view.descending ? "descending" : "ascending") : null}><button class="sort" onClick=${() => sortBy(app, field)}>${COLUMNS[field][0]}${field === view.sort ? (view.descending ? " ▾" : " ▴") : ""}</button></th>`)}
        ${canCancel && html`<th role="columnheader" scope="col"><span class="unseen">cancel</span></th>`}</tr></thead>
      <tbody role="rowgroup" ref=${body}>
        ${offset > 0 && html`<tr class="spacer" aria-hidden="true" key="above" style=${{ height: `${offset * tall}px` }}></tr>`}
        ${rows.map((row, i) => html`<${Row} key=${row.id} row=${row} index=${offset + i + 2} app=${app} canCancel=${canCancel} columns=${columns} />`)}
        <tr class="spacer" aria-hidden="true" key="below" style=${{ height: `${Math.max(0, total - offset - rows.length) * tall}px` }}></tr>
      </tbody>
    </table>`;
}

const TONES = { running: "good", waiting: "wait", swapped: "warn", preempted: "warn", parked: "warn", finishing: "good", arriving: "wait" };
const SYNTHETIC = /^cmpl-synthetic-/; // the load of this page

const CELLS = {
  id: (row) => html`<th role="rowheader" scope="row"><a href=${`#/waterfall/${encodeURIComponent(row.id)}`} title=${row.id}>${shortId(row.id)}</a>${SYNTHETIC.test(row.id) && html` <span class="badge" title="of the synthetic load of a page">load</span>`}</th>`,
  state: (row) => html`<td role="cell"><span class=${`badge ${TONES[row.state] ?? ""}`}>${row.state}</span>${row.stage !== "execute" && html`<span class="note"> ${row.stage}</span>`}</td>`,
  adapter: (row) => html`<td role="cell" data-figure="adapter">${row.adapter ?? html`<span class="note">base</span>`}${row.waits_for_adapter && html` <span class="badge warn" title="not in a device slot">waits for it</span>`}</td>`,
  arrival: (row, app) => number("age", seconds(app.feed.nowS() === null ? null : Math.max(0, app.feed.nowS() - row.arrival_s))),
  prompt: (row) => number("prompt", count(row.num_prompt_tokens), "num_prompt_tokens"),
  cached: (row) => number("cached", row.num_cached_tokens ? count(row.num_cached_tokens) : "–"),
  answer: (row) => html`<td role="cell" class="num" data-label="answer"><span class="progress" style=${{ "background-size": `${row.max_tokens ? Math.min(100, (100 * row.num_generated_tokens) / row.max_tokens) : 0}% 2px` }}>${count(row.num_generated_tokens)}${row.max_tokens && html`<small> / ${count(row.max_tokens)}</small>`}</span></td>`,
  ttft: (row) => number("TTFT", seconds(row.ttft_s)),
  blocks: (row) => number("blocks", count(row.num_blocks)),
  priority: (row) => number("priority", row.priority),
  preempted: (row) => number("preempted", row.num_preempted ? html`<span class="warn">${count(row.num_preempted)}</span>` : "–"),
};

const number = (label, value, id) => html`<td role="cell" class="num" data-label=${label} data-figure=${id}>${value}</td>`;

const Row = ({ row, index, app, canCancel, columns }) => html`<tr role="row" aria-rowindex=${index} data-request=${row.id}>
  ${columns.map((field) => CELLS[field](row, app))}
  ${canCancel && html`<td role="cell" class="num"><button class="quiet danger" aria-label=${`Cancel ${row.id}`} onClick=${() => app.feed.cancel(row.id)}>Cancel</button></td>`}
</tr>`;
