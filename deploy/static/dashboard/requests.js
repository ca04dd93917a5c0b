// The live requests. Only the visible rows are requested and drawn.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds, shortId } from "./format.js";
import { Card, Choice, Missing, NeedsAdmin } from "./ui.js";

export const title = "Requests";
export const about = "All running and waiting requests, in order of arrival. No prompts, no answers.";

const ROW = 40; // pixels
const SPARE = 4; // rows above and below the visible ones

const view = { offset: 0, limit: 40, newest_first: false, search: "" };

export const topics = () => ({ requests: { ...view } });

export function View({ app }) {
  const { requests } = app.feed.data;
  const canCancel = app.feed.hello?.can_cancel;
  const hasAdapters = Boolean(app.feed.data.overview?.adapters);
  const [order, setOrder] = useState(view.newest_first ? "newest" : "oldest");
  const box = useRef(null);
  const look = () => {
    const first = Math.max(0, Math.floor(box.current.scrollTop / ROW) - SPARE);
    view.offset = first - (first % SPARE); // so that a small scroll needs no new rows
    view.limit = Math.min(200, Math.ceil(box.current.clientHeight / ROW) + 3 * SPARE);
    app.redraw();
  };
  useEffect(() => {
    if (box.current) look();
  }, [Boolean(requests)]);
  useEffect(() => {
    if (app.arg !== null) find(app.arg);
  }, [app.arg]);
  const find = (text) => {
    view.search = text.slice(0, 200);
    view.offset = 0;
    if (box.current) box.current.scrollTop = 0;
    app.redraw();
  };
  if (!requests) return html`<${Missing}>Waiting for the list.<//>`;
  const sort = (to) => {
    setOrder(to);
    view.newest_first = to === "newest";
    box.current.scrollTop = 0;
    look();
  };
  const { rows, offset, num_live: total } = requests;
  return html`<${Card}>
    <div class="bar"><${Choice} label="Order" name="order" value=${order} onchange=${sort} options=${[["oldest", "Oldest first"], ["newest", "Newest first"]]} />
      <label class="search"><span class="unseen">Search</span><input type="search" placeholder=${hasAdapters ? "id or adapter" : "id"} value=${view.search} onInput=${(event) => find(event.target.value)} /></label>
      <p class="note" data-figure="num_live" data-value=${total}>${count(total)} requests${view.search && " found"}</p></div>
    ${app.feed.told && html`<p class="told" role="alert">${app.feed.told.message}</p>`}
    <div class="list" ref=${box} onScroll=${look} tabindex="0" role="region" aria-label="Live requests">
      ${total === 0 && html`<p class="missing">No requests${view.search ? ` with "${view.search}"` : ""}${app.feed.recording ? " at this time" : ""}.</p>`}
      <table aria-rowcount=${total + 1} hidden=${total === 0}>
        <thead><tr aria-rowindex="1"><th scope="col">request</th><th scope="col">state</th>${hasAdapters && html`<th scope="col">adapter</th>`}<th scope="col" class="num">age</th><th scope="col" class="num only-wide">prompt</th>
          <th scope="col" class="num">answer</th><th scope="col" class="num only-wide">first token</th><th scope="col" class="num only-wide">blocks</th>
          <th scope="col" class="num only-wide">priority</th><th scope="col" class="num only-wide">preempted</th>${canCancel && html`<th scope="col"><span class="unseen">cancel</span></th>`}</tr></thead>
        <tbody>
          ${offset > 0 && html`<tr class="spacer" aria-hidden="true" key="above" style=${{ height: `${offset * ROW}px` }}></tr>`}
          ${rows.map((row, i) => html`<${Row} key=${row.id} row=${row} index=${offset + i + 2} app=${app} canCancel=${canCancel} hasAdapters=${hasAdapters} />`)}
          <tr class="spacer" aria-hidden="true" key="below" style=${{ height: `${Math.max(0, total - offset - rows.length) * ROW}px` }}></tr>
        </tbody>
      </table>
    </div>
    ${!canCancel && (app.feed.recording
      ? html`<p class="note">As known to schedule at this time. Requests of a recording cannot be cancelled.</p>`
      : html`<${NeedsAdmin} app=${app} what="To cancel requests" />`)}
  <//>`;
}

const TONES = { running: "good", waiting: "wait", swapped: "warn", preempted: "warn", parked: "warn", finishing: "good", arriving: "wait" };

function Row({ row, index, app, canCancel, hasAdapters }) {
  const age = app.feed.nowS() === null ? null : Math.max(0, app.feed.nowS() - row.arrival_s);
  const share = row.max_tokens ? row.num_generated_tokens / row.max_tokens : 0;
  return html`<tr aria-rowindex=${index} data-request=${row.id}>
    <th scope="row"><a href=${`#/waterfall/${encodeURIComponent(row.id)}`} title=${row.id}>${shortId(row.id)}</a></th>
    <td><span class=${`badge ${TONES[row.state] ?? ""}`}>${row.state}</span><span class="note only-wide"> ${row.stage}</span></td>
    ${hasAdapters && html`<td data-figure="adapter">${row.adapter ?? html`<span class="note">base</span>`}${row.waits_for_adapter && html` <span class="badge warn" title="not in a device slot">waits for it</span>`}</td>`}
    <td class="num">${seconds(age)}</td>
    <td class="num only-wide" data-figure="num_prompt_tokens">${count(row.num_prompt_tokens)}${row.num_cached_tokens > 0 && html`<small title="of them from the prefix cache"> −${count(row.num_cached_tokens)}</small>`}</td>
    <td class="num"><span class="progress" style=${{ "background-size": `${100 * share}% 2px` }}>${count(row.num_generated_tokens)}${row.max_tokens && html`<small> / ${count(row.max_tokens)}</small>`}</span></td>
    <td class="num only-wide">${seconds(row.ttft_s)}</td>
    <td class="num only-wide">${count(row.num_blocks)}</td>
    <td class="num only-wide">${row.priority}</td>
    <td class="num only-wide">${count(row.num_preempted)}</td>
    ${canCancel && html`<td class="num"><button class="quiet danger" aria-label=${`Cancel ${row.id}`} onClick=${() => app.feed.cancel(row.id)}>Cancel</button></td>`}
  </tr>`;
}
