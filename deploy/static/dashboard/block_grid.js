// Blocks in order of their ids, one cell each. Of many blocks a cell stands for a group, filled in the shares of its
// blocks' colours; a click or Enter goes into the group.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.standalone.module.js";
import { colours, FIRST_SLOT, NUM_COLOURS, placeOf } from "./block_colours.js";
import { count, seconds, shortId } from "./format.js";
import { useWidth } from "./ui.js";

const MOST_CELLS = [1_024, 4_096]; // of all blocks, and of some
const HEIGHT = 400; // about, in pixels
const STATES = ["free", "cached", "quarantined", "shared"];

// `ids`: the shown blocks, or null for all. `zoom(first, end)` shows a range of ids only, `leave()` all.
export function Grid({ map, ids, mode, nowS, zoom, leave }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const [at, setAt] = useState(null);
  const total = ids ? ids.length : map.cells.length;
  let group = 1;
  while (total / group > MOST_CELLS[ids ? 1 : 0]) group *= 2;
  const num = Math.max(1, Math.ceil(total / group));
  const size = Math.max(3, Math.min(26, Math.floor(Math.sqrt((width * HEIGHT) / num))));
  const columns = Math.max(1, Math.floor(width / size));
  const grid = { map, ids, mode, nowS, total, group, num, size, columns, rows: Math.ceil(num / columns) };
  useEffect(() => paint(canvas.current, grid));
  const chosen = at === null || at >= num ? null : at;
  const pick = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const place = Math.floor((event.clientY - box.top) / size) * columns + Math.floor((event.clientX - box.left) / size);
    setAt(place < num ? place : null);
    return place < num ? place : null;
  };
  const enter = (place) => {
    if (place === null || group === 1 || ids) return;
    setAt(null);
    zoom(place * group, Math.min(total, (place + 1) * group));
  };
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -num, End: num }[event.key];
    if (event.key === "Escape") return chosen === null ? leave() : setAt(null);
    if (event.key === "Enter") return enter(chosen);
    if (by === undefined) return;
    setAt(Math.max(0, Math.min(num - 1, (chosen ?? 0) + by)));
    event.preventDefault();
  };
  const words = chosen === null ? null : describe(grid, chosen);
  const box = { width: `${columns * size}px`, height: `${grid.rows * size}px` };
  return html`<div ref=${ref} class="map" tabindex="0" role="slider" aria-label=${group > 1 ? "Blocks: arrows move, Enter goes into them" : "Block"} aria-valuemin="0" aria-valuemax=${num - 1}
      aria-valuenow=${chosen ?? 0} aria-valuetext=${words ?? "none selected"} onKeyDown=${move}>
      <canvas ref=${canvas} style=${box} onMouseMove=${pick} onMouseLeave=${() => setAt(null)} onClick=${(event) => enter(pick(event))} aria-hidden="true"></canvas>
      ${chosen !== null && html`<span class="cursor" style=${{ left: `${(chosen % columns) * size - 1}px`, top: `${Math.floor(chosen / columns) * size - 1}px`, width: `${size + 1}px`, height: `${size + 1}px` }}></span>`}
    </div>
    <p class="detail-line" aria-live="off">${words ?? (group > 1 ? `Each cell stands for ${count(group)} blocks: point at it${ids ? "" : ", click to go into it"}.` : "Point at a block, or use the arrow keys.")}</p>`;
}

// The number of blocks of each colour in each cell: [num, NUM_COLOURS].
function shares({ map, ids, mode, nowS, total, group, num }) {
  const found = new Uint32Array(num * NUM_COLOURS);
  for (let i = 0; i < total; i++) {
    const id = ids ? ids[i] : i;
    found[Math.floor(i / group) * NUM_COLOURS + placeOf(mode, map.cells[id], nowS - map.since[id])]++;
  }
  return found;
}

function paint(canvas, grid) {
  const { size, columns, rows, num, total, group } = grid;
  const scale = devicePixelRatio || 1;
  const [wide, high] = [Math.round(columns * size * scale), Math.round(rows * size * scale)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, columns * size, rows * size);
  const [found, palette] = [shares(grid), colours()];
  const side = size - (size > 8 ? 2 : 1);
  for (let cell = 0; cell < num; cell++) {
    const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
    const here = Math.min(group, total - cell * group);
    let bottom = y + side;
    for (let place = NUM_COLOURS - 1; place >= 0; place--) {
      const n = found[cell * NUM_COLOURS + place];
      if (!n) continue;
      const tall = (n / here) * side;
      context.fillStyle = palette[place];
      context.fillRect(x, bottom - tall, side, tall);
      bottom -= tall;
    }
    const kind = group === 1 && !grid.ids && grid.map.slabs ? grid.map.slabs.of[Math.floor(cell / grid.map.slabs.cells_per_slab)] : 255;
    if (kind && kind !== 255 && size > 5) { // a line below the cells of kinds after the first, one for each
      context.fillStyle = palette[NUM_COLOURS - 1];
      for (let line = 0; line < Math.min(kind, 2); line++) context.fillRect(x, y + side - 1 - 2 * line, side, 1);
    }
  }
}

// With several kinds of memory a cell is a part of a slab, which one kind has.
function placeOfCell({ slabs }, id) {
  if (!slabs) return `Block ${count(id)}`;
  const slab = Math.floor(id / slabs.cells_per_slab);
  return `Slab ${count(slab)}, ${slabs.of[slab] === 255 ? "of no kind" : `of kind ${slabs.kinds[slabs.of[slab]]}`}`;
}

function describe({ map, ids, nowS, total, group }, at) {
  if (group > 1) {
    const [first, end] = [at * group, Math.min(total, (at + 1) * group)];
    const counts = { "in use": 0, shared: 0, quarantined: 0, cached: 0, free: 0 };
    const owners = new Set();
    for (let i = first; i < end; i++) {
      const cell = map.cells[ids ? ids[i] : i];
      counts[cell >= FIRST_SLOT ? "in use" : STATES[cell]]++;
      if (cell >= FIRST_SLOT) owners.add(cell);
    }
    const parts = Object.entries(counts).filter(([, n]) => n).map(([state, n]) => `${count(n)} ${state}`);
    const number = (i) => count(ids ? ids[i] : i);
    return `Blocks ${number(first)} to ${number(end - 1)}: ${parts.join(", ")}${owners.size ? `, of ${count(owners.size)} ${owners.size === 1 ? "request" : "requests"}` : ""}`;
  }
  const id = ids ? ids[at] : at;
  const cell = map.cells[id];
  const state = cell >= FIRST_SLOT ? `in use by ${shortId(map.owners[cell - FIRST_SLOT] ?? `slot ${cell - FIRST_SLOT}`)}` : STATES[cell];
  const atLeast = map.since[id] <= map.openedS ? "at least " : "";
  return `${placeOfCell(map, id)}: ${state}, unchanged for ${atLeast}${seconds(Math.max(0, nowS - map.since[id]))}`;
}
