// The KV cache: tiles by owner and state, the blocks in order of their ids, and the largest owners.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { Grid } from "./block_grid.js";
import { AGES, FIRST_SLOT, KINDS } from "./block_colours.js";
import { Tiles } from "./block_tiles.js";
import { count, percent, seconds, shortId } from "./format.js";
import { Card, Choice, Figure, Legend, Missing, Wide } from "./ui.js";

export const title = "KV blocks";
export const about = "Who holds the blocks of the KV cache.";
export const topics = ({ feed }) => ({ blocks: {}, ...(feed.recording ? { preemptions: {} } : {}) });

const NUM_OWNERS = 8; // in the table

export function View({ app }) {
  const { blocks: map, overview, preemptions } = app.feed.data;
  const [show, setShow] = useState("tiles");
  const [mode, setMode] = useState("state");
  const [zoom, setZoom] = useState(null); // of tiles: { kind } or { slot }; of ids: { first, end }
  if (!map) return html`<${Missing}>${overview && overview.blocks === undefined ? "This model has no KV cache." : "Waiting for the map."}<//>`;
  const nowS = app.feed.nowS() ?? 0;
  const owners = ownersOf(map);
  const ids = zoom && idsOf(map, zoom);
  return html`
    <${Card}>
      <div class="bar">
        <${Choice} label="Show" name="show" value=${show} onchange=${(to) => (setShow(to), setZoom(null))} options=${[["tiles", "By owner"], ["ids", "By block id"]]} />
        ${(show === "ids" || zoom) && html`<${Choice} label="Colour by" name="mode" value=${mode} onchange=${setMode} options=${[["state", "State"], ["owner", "Owner"], ["age", "Age"]]} />`}
        ${zoom && html`<button class="quiet" onClick=${() => setZoom(null)}>◂ all blocks</button>`}
        <p class="note" data-figure="shown_blocks">${zoom ? `${name(map, zoom)}: ${count(ids.length)} of ${count(map.cells.length)} blocks` : `${count(map.cells.length)} blocks of ${map.blockSize} tokens${show === "tiles" ? ", the free ones left out" : ""}`}</p></div>
      ${show === "tiles" && !zoom ? html`<${Tiles} map=${map} owners=${owners} zoom=${setZoom} />` : html`
        <${Grid} map=${map} ids=${ids} mode=${mode} nowS=${nowS} zoom=${(first, end) => setZoom({ first, end })} leave=${() => setZoom(null)} />
        <${Key} mode=${mode} />`}
    <//>
    <${Totals} overview=${overview} />
    ${app.feed.recording && preemptions && html`<${Card} title="Preempted sequences" note=${preemptions.num_preemptions > preemptions.rows.length ? `The last ${preemptions.rows.length} of ${count(preemptions.num_preemptions)} so far, newest first.` : "Up to this time, newest first."}><${Preemptions} app=${app} rows=${preemptions.rows} /><//>`}
    <${Card} title="Largest owners"><${Owners} owners=${owners} zoom=${(slot) => setZoom({ slot })} /><//>`;
}

const name = (map, { kind, slot, first, end }) =>
  kind ? `${kind} blocks` : slot !== undefined ? shortId(map.owners[slot] ?? `slot ${slot}`) : `blocks ${count(first)} to ${count(end - 1)}`;

// [{ slot, id, blocks }], largest first. `id` is undefined for requests of other keys.
function ownersOf(map) {
  const held = new Uint32Array(65536);
  for (const cell of map.cells) held[cell]++;
  const found = [];
  for (let cell = FIRST_SLOT; cell < held.length; cell++)
    if (held[cell]) found.push({ slot: cell - FIRST_SLOT, id: map.owners[cell - FIRST_SLOT], blocks: held[cell] });
  return found.sort((a, b) => b.blocks - a.blocks);
}

function idsOf(map, { kind, slot, first, end }) {
  if (first !== undefined) return Uint32Array.from({ length: end - first }, (_, i) => first + i);
  const wanted = kind ? KINDS[kind] : FIRST_SLOT + slot;
  const found = [];
  map.cells.forEach((cell, i) => cell === wanted && found.push(i));
  return Uint32Array.from(found);
}

const Key = ({ mode }) =>
  mode === "state"
    ? html`<${Legend} entries=${[["kv-free", "free"], ["kv-used", "in use"], ["kv-shared", "shared by several"], ["kv-cached", "cached"], ["kv-quarantined", "quarantined: in use by a step in flight"]]} />`
    : mode === "owner"
      ? html`<${Legend} entries=${[["kv-free", "free"], ["kv-cached", "cached or quarantined"], ["kv-owners", "one colour per request"], ["kv-shared", "shared by several"]]} />`
      : html`<${Legend} entries=${[["kv-free", "free"], ...AGES.map((age, i) => [`age-${i}`, `unchanged for under ${seconds(age)}`]), ["age-4", "longer"]]} />`;

function Totals({ overview }) {
  const kv = overview?.blocks;
  const host = overview?.host_blocks;
  if (!kv) return null;
  const parts = [["kv-used", kv.in_use - kv.shared], ["kv-shared", kv.shared], ["kv-quarantined", kv.quarantined], ["kv-cached", kv.cached]];
  return html`<${Card} title="Blocks">
    <div class="stack" role="img" aria-label=${`${percent(kv.in_use / kv.num_blocks)} of the blocks in use, ${percent(kv.cached / kv.num_blocks)} cached`}>${parts.map(([kind, n]) => html`<span class=${kind} style=${{ width: `${(100 * n) / kv.num_blocks}%` }}></span>`)}</div>
    <dl class="figures">
      ${["free", "in_use", "shared", "cached", "quarantined"].map(
        (name) => html`<${Figure} name=${name.replace("_", " ")} value=${count(kv[name])} unit=${percent(kv[name] / kv.num_blocks)} id=${`blocks.${name}`} />`)}
      ${host && html`<${Figure} name="in host memory" value=${count(host.in_use + host.cached)} unit=${`of ${count(host.num_blocks)}`} />`}
    </dl><//>`;
}

function Owners({ owners, zoom }) {
  const most = owners.slice(0, NUM_OWNERS);
  if (!most.length) return html`<p class="note">No running requests.</p>`;
  return html`<table><thead><tr><th scope="col">request</th><th scope="col" class="num">slot</th><th scope="col" class="num">own blocks</th><th scope="col" class="only-wide"></th><th scope="col"><span class="unseen">blocks</span></th></tr></thead>
    <tbody>${most.map(({ id, slot, blocks }) => html`<tr key=${slot}><th scope="row">${id ? html`<a href=${`#/waterfall/${encodeURIComponent(id)}`} title=${id}>${shortId(id)}</a>` : html`<span class="note">of another key</span>`}</th><td class="num">${slot}</td><td class="num">${count(blocks)}</td>
      <td class="only-wide"><span class="split"><span class="busy" style=${{ width: `${(100 * blocks) / most[0].blocks}%` }}></span></span></td>
      <td class="num"><button class="quiet" aria-label=${`Show the blocks of slot ${slot}`} onClick=${() => zoom(slot)}>show</button></td></tr>`)}</tbody></table>`;
}

// Recordings only: each preemption with its time and a button to go there.
function Preemptions({ app, rows }) {
  if (!rows.length) return html`<p class="missing">No preemptions so far.</p>`;
  return html`<${Wide} label="Preemptions"><table><thead><tr><th scope="col" class="num">at</th><th scope="col">request</th><th scope="col">reason</th></tr></thead>
    <tbody>${rows.slice(0, 40).map((row) => html`<tr key=${`${row.time_s} ${row.sequence_id}`} data-preemption=${row.sequence_id}>
      <td class="num"><button class="quiet" aria-label=${`Go to ${seconds(row.time_s)}, when sequence ${row.sequence_id} was preempted`} onClick=${() => app.feed.seek(row.time_s)}>${seconds(row.time_s)}</button></td>
      <td>${row.request_id ? html`<a href=${`#/waterfall/${encodeURIComponent(row.request_id)}`}>${shortId(row.request_id)}</a>` : "ended"}</td><td class="free">${row.sentence}</td></tr>`)}</tbody></table><//>`;
}
