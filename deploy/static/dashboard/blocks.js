// The map of the KV cache: every block, coloured by state, owner or age.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds, shortId } from "./format.js";
import { Card, Choice, colour, Figure, Legend, Missing, useWidth, Wide } from "./ui.js";

export const title = "KV blocks";
export const about = "All blocks of the KV cache, in order of their ids.";
export const topics = ({ feed }) => ({ blocks: {}, ...(feed.recording ? { preemptions: {} } : {}) });

const [FREE, CACHED, QUARANTINED, SHARED, FIRST_SLOT] = [0, 1, 2, 3, 4];
const STATES = ["free", "cached", "quarantined", "shared"];
const AGES = [1, 10, 60, 600]; // seconds
const NUM_HUES = 24;

export function View({ app }) {
  const { blocks: map, overview, preemptions } = app.feed.data;
  const nowS = app.feed.nowS() ?? 0;
  const [mode, setMode] = useState("state");
  const [at, setAt] = useState(null);
  if (!map) return html`<${Missing}>${overview && overview.blocks === undefined ? "This model has no KV cache." : "Waiting for the map."}<//>`;
  const kv = overview?.blocks;
  const host = overview?.host_blocks;
  return html`
    <${Card}>
      <div class="bar"><${Choice} label="Colour by" name="mode" value=${mode} onchange=${setMode} options=${[["state", "State"], ["owner", "Owner"], ["age", "Age"]]} />
        <p class="note">${count(map.cells.length)} blocks of ${map.blockSize} tokens</p></div>
      <${Map} map=${map} mode=${mode} at=${at} setAt=${setAt} nowS=${nowS} />
      <${Key} mode=${mode} />
      <p class="detail-line" aria-live="off">${at === null ? "Point at a block, or use the arrow keys." : describe(map, at, nowS)}</p>
    <//>
    ${kv && html`<${Card} title="Blocks"><dl class="figures">
      ${["free", "in_use", "shared", "cached", "quarantined"].map(
        (name) => html`<${Figure} name=${name.replace("_", " ")} value=${count(kv[name])} unit=${percent(kv[name] / kv.num_blocks)} id=${`blocks.${name}`} />`)}
      ${host && html`<${Figure} name="in host memory" value=${count(host.in_use + host.cached)} unit=${`of ${count(host.num_blocks)}`} />`}
    </dl><//>`}
    ${app.feed.recording && preemptions && html`<${Card} title="Preempted sequences" note=${preemptions.num_preemptions > preemptions.rows.length ? `The last ${preemptions.rows.length} of ${count(preemptions.num_preemptions)} so far, newest first.` : "Up to this time, newest first."}><${Preemptions} app=${app} rows=${preemptions.rows} /><//>`}
    <${Card} title="Largest owners"><${Owners} map=${map} /><//>`;
}

const Key = ({ mode }) =>
  mode === "state"
    ? html`<${Legend} entries=${[["kv-free", "free"], ["kv-used", "in use"], ["kv-shared", "shared by several"], ["kv-cached", "cached"], ["kv-quarantined", "quarantined: in use by a step in flight"]]} />`
    : mode === "owner"
      ? html`<${Legend} entries=${[["kv-free", "free"], ["kv-cached", "cached or quarantined"], ["kv-owners", "one colour per request"], ["kv-shared", "shared by several"]]} />`
      : html`<${Legend} entries=${[["kv-free", "free"], ...AGES.map((age, i) => [`age-${i}`, `unchanged for under ${seconds(age)}`]), ["age-4", "longer"]]} />`;

// An image with one pixel per block, enlarged without smoothing: a change costs one pixel at any size of the cache.
function Map({ map, mode, at, setAt, nowS }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const kept = useRef({});
  const total = map.cells.length;
  const size = Math.max(2, Math.min(24, Math.floor(Math.sqrt((width * 420) / total))));
  const columns = Math.max(1, Math.floor(width / size));
  const rows = Math.ceil(total / columns);
  useEffect(() => paint(canvas.current, kept.current, map, mode, columns, rows, nowS));
  const pick = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const place = Math.floor((event.clientY - box.top) / size) * columns + Math.floor((event.clientX - box.left) / size);
    setAt(place < total ? place : null);
  };
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -total, End: total }[event.key];
    if (event.key === "Escape") return setAt(null);
    if (by === undefined) return;
    setAt(Math.max(0, Math.min(total - 1, (at ?? 0) + by)));
    event.preventDefault();
  };
  return html`<div ref=${ref} class="map" tabindex="0" role="slider" aria-label="Block" aria-valuemin="0" aria-valuemax=${total - 1} aria-valuenow=${at ?? 0}
      aria-valuetext=${at === null ? "none selected" : describe(map, at, nowS)} onKeyDown=${move}>
    <canvas ref=${canvas} style=${{ width: `${columns * size}px`, height: `${rows * size}px` }} onMouseMove=${pick} onMouseLeave=${() => setAt(null)} onClick=${pick} aria-hidden="true"></canvas>
    ${size >= 6 && html`<span class="grid" style=${{ width: `${columns * size}px`, height: `${rows * size}px`, "background-size": `${size}px ${size}px` }}></span>`}
    ${at !== null && html`<span class="cursor" style=${{ left: `${(at % columns) * size - 1}px`, top: `${Math.floor(at / columns) * size - 1}px`, width: `${size + 2}px`, height: `${size + 2}px` }}></span>`}
  </div>`;
}

function paint(canvas, kept, map, mode, columns, rows, nowS) {
  const look = `${mode} ${columns} ${rows} ${colour("surface")}`;
  const isSame = kept.look === look && kept.cells === map.cells;
  if (!isSame) {
    canvas.width = columns;
    canvas.height = rows;
    Object.assign(kept, { look, cells: map.cells, palette: palette(mode), image: new ImageData(columns, rows) });
    kept.pixels = new Uint32Array(kept.image.data.buffer);
  }
  const { pixels, palette: colours } = kept;
  const now = nowS;
  const one = mode === "age" ? (i) => colours.age(map.cells[i], now - map.since[i]) : (i) => colours.of(map.cells[i]);
  if (isSame && mode !== "age" && map.changed) for (const i of map.changed) pixels[i] = one(i);
  else for (let i = 0; i < map.cells.length; i++) pixels[i] = one(i);
  canvas.getContext("2d").putImageData(kept.image, 0, 0);
}

// Colours in the format of ImageData: ABGR on little-endian machines, the only ones that browsers run on.
function palette(mode) {
  const states = [..."free cached quarantined shared used".split(" ").map((name) => pixel(colour(`kv-${name}`)))];
  const ages = Array.from({ length: 5 }, (_, i) => pixel(colour(`age-${i}`)));
  const hues = Array.from({ length: NUM_HUES }, (_, i) => pixel(colour("owner").replace("HUE", Math.round((i * 360) / NUM_HUES))));
  const owner = (cell) => (cell >= FIRST_SLOT ? hues[((cell - FIRST_SLOT) * 7) % NUM_HUES] : states[cell === QUARANTINED ? CACHED : cell]);
  return {
    of: mode === "owner" ? owner : (cell) => states[Math.min(cell, FIRST_SLOT)],
    age: (cell, ageS) => (cell === FREE ? states[FREE] : ages[AGES.findIndex((limit) => ageS < limit) + (ageS >= AGES.at(-1) ? 5 : 0)]),
  };
}

function pixel(text) {
  const context = (pixel.context ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true }));
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

function describe(map, at, nowS) {
  const cell = map.cells[at];
  const state = cell >= FIRST_SLOT ? `in use by ${shortId(map.owners[cell - FIRST_SLOT] ?? `slot ${cell - FIRST_SLOT}`)}` : STATES[cell];
  const age = seconds(Math.max(0, nowS - map.since[at]));
  const atLeast = map.since[at] <= map.openedS ? "at least " : "";
  return `Block ${count(at)}: ${state}, unchanged for ${atLeast}${age}`;
}

function Owners({ map }) {
  const held = new Uint32Array(65536);
  for (const cell of map.cells) held[cell]++;
  const found = Object.entries(map.owners).map(([slot, id]) => [id, slot, held[FIRST_SLOT + Number(slot)]]);
  const most = found.sort((a, b) => b[2] - a[2]).slice(0, 8);
  if (!most.length) return html`<p class="note">No running requests.</p>`;
  const largest = Math.max(1, most[0][2]);
  return html`<table><thead><tr><th scope="col">request</th><th scope="col" class="num">slot</th><th scope="col" class="num">own blocks</th><th scope="col" class="only-wide"></th></tr></thead>
    <tbody>${most.map(([id, slot, blocks_]) => html`<tr key=${slot}><th scope="row"><a href=${`#/waterfall/${encodeURIComponent(id)}`} title=${id}>${shortId(id)}</a></th><td class="num">${slot}</td><td class="num">${count(blocks_)}</td>
      <td class="only-wide"><span class="split"><span class="busy" style=${{ width: `${(100 * blocks_) / largest}%` }}></span></span></td></tr>`)}</tbody></table>`;
}

// Recordings only: each preemption with its time and a button to go there.
function Preemptions({ app, rows }) {
  if (!rows.length) return html`<p class="missing">No preemptions so far.</p>`;
  return html`<${Wide} label="Preemptions"><table><thead><tr><th scope="col" class="num">at</th><th scope="col">request</th><th scope="col">reason</th></tr></thead>
    <tbody>${rows.slice(0, 40).map((row) => html`<tr key=${`${row.time_s} ${row.sequence_id}`} data-preemption=${row.sequence_id}>
      <td class="num"><button class="quiet" aria-label=${`Go to ${seconds(row.time_s)}, when sequence ${row.sequence_id} was preempted`} onClick=${() => app.feed.seek(row.time_s)}>${seconds(row.time_s)}</button></td>
      <td>${row.request_id ? html`<a href=${`#/waterfall/${encodeURIComponent(row.request_id)}`}>${shortId(row.request_id)}</a>` : "ended"}</td><td class="free">${row.sentence}</td></tr>`)}</tbody></table><//>`;
}
