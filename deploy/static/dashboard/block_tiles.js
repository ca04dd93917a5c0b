// A treemap of the KV blocks that are not free: one tile per owner and per state, its area in proportion to its blocks.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { hueOf, KINDS, ownerColour } from "./block_colours.js";
import { count, percent } from "./format.js";
import { colour, useWidth } from "./ui.js";

const HEIGHT = 400;
const MOST_OWNERS = 40; // those with fewer blocks are one tile
const GAP = 2;

export function Tiles({ map, owners, zoom }) {
  const [ref, width] = useWidth();
  const total = map.cells.length;
  const counts = new Uint32Array(4);
  for (const cell of map.cells) if (cell < 4) counts[cell]++;
  const items = owners.slice(0, MOST_OWNERS).map(({ slot, id, blocks }) => ({ key: `slot ${slot}`, name: id ?? `slot ${slot}`, blocks, zoom: { slot }, fill: ownerColour(hueOf(slot), "owner-tile"), kind: "owner" }));
  const others = owners.slice(MOST_OWNERS).reduce((sum, { blocks }) => sum + blocks, 0);
  if (others) items.push({ key: "others", name: `${count(owners.length - MOST_OWNERS)} other requests`, blocks: others, zoom: null, fill: colour("kv-used"), kind: "others" });
  for (const [kind, cell] of Object.entries(KINDS)) if (counts[cell]) items.push({ key: kind, name: kind, blocks: counts[cell], zoom: { kind }, fill: colour(`kv-${kind}`), kind });
  if (!items.length) return html`<div ref=${ref}><p class="missing">All blocks are free.</p></div>`;
  items.sort((a, b) => b.blocks - a.blocks);
  const held = items.reduce((sum, { blocks }) => sum + blocks, 0);
  const tall = width < 520 ? 1.15 * HEIGHT : HEIGHT;
  const boxes = squarified(items.map(({ blocks }) => (blocks / held) * width * tall), width, tall);
  return html`<div ref=${ref} class="tiles" style=${{ height: `${tall}px` }}>${items.map((item, i) => {
    const { x, y, w, h } = boxes[i];
    const hasName = w > 44 && h > 26;
    const words = `${item.name}: ${count(item.blocks)} blocks, ${percent(item.blocks / total)}`;
    return html`<button key=${item.key} class=${`tile ${item.kind}`} data-tile=${item.key} data-blocks=${item.blocks} disabled=${!item.zoom} title=${words} aria-label=${words} onClick=${() => zoom(item.zoom)}
      style=${{ left: `${x}px`, top: `${y}px`, width: `${Math.max(1, w - GAP)}px`, height: `${Math.max(1, h - GAP)}px`, background: item.fill }}>${
      hasName && html`<span class="name">${ending(item.name, w)}</span>${h > 44 && html`<span>${count(item.blocks)}${w > 110 ? ` · ${percent(item.blocks / total)}` : ""}</span>`}`}</button>`;
  })}</div>`;
}

// As much of the end of a name as fits, as ids differ there.
function ending(name, width) {
  const most = Math.max(4, Math.floor((width - 16) / 7.2));
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

// The rectangles of `areas`, which are sorted and fill width x height: rows along the shorter side, each as square as
// it gets (Bruls, Huizing and van Wijk, 2000).
export function squarified(areas, width, height) {
  const boxes = [];
  let [x, y, w, h, i] = [0, 0, width, height, 0];
  while (i < areas.length) {
    const side = Math.max(1e-9, Math.min(w, h));
    let [sum, end] = [areas[i], i + 1];
    const worst = (sum_, last) => Math.max((side ** 2 * areas[i]) / sum_ ** 2, sum_ ** 2 / (side ** 2 * areas[last]));
    while (end < areas.length && worst(sum + areas[end], end) <= worst(sum, end - 1)) sum += areas[end++];
    const thick = sum / side;
    let along = 0;
    for (; i < end; i++) {
      const long = areas[i] / thick;
      boxes.push(w >= h ? { x, y: y + along, w: thick, h: long } : { x: x + along, y, w: long, h: thick });
      along += long;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
  }
  return boxes;
}
