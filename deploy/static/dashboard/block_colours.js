// The colours of KV blocks: by state, by owner, or by the time since the last change.

import { colour } from "./ui.js";

export const [FREE, CACHED, QUARANTINED, SHARED, FIRST_SLOT] = [0, 1, 2, 3, 4]; // the server's numbers of cells
export const KINDS = { shared: SHARED, cached: CACHED, quarantined: QUARANTINED }; // blocks without a single owner that are not free
export const AGES = [1, 10, 60, 600]; // seconds
const NUM_HUES = 24;
const STATES = ["free", "cached", "quarantined", "shared", "used"];
const [ALL_AGES, ALL_HUES] = [STATES.length, STATES.length + AGES.length + 1]; // places of the first age, the first hue

// All colours, in one order for all modes: the states, the ages, the hues.
export const colours = () => [
  ...STATES.map((name) => colour(`kv-${name}`)),
  ...Array.from({ length: AGES.length + 1 }, (_, i) => colour(`age-${i}`)),
  ...Array.from({ length: NUM_HUES }, (_, i) => ownerColour(i)),
];

export const NUM_COLOURS = ALL_HUES + NUM_HUES;

// A colour of owners: "owner", or "owner-tile" below text.
export const ownerColour = (hue, kind = "owner") => colour(kind).replace("HUE", Math.round((hue * 360) / NUM_HUES));
// Neighbouring slots differ much.
export const hueOf = (slot) => (slot * 7) % NUM_HUES;

// The place in `colours` of a block with number `cell`, unchanged for `ageS`.
export function placeOf(mode, cell, ageS) {
  if (mode === "age" && cell !== FREE) {
    const age = AGES.findIndex((limit) => ageS < limit);
    return ALL_AGES + (age < 0 ? AGES.length : age);
  }
  if (mode === "owner") return cell >= FIRST_SLOT ? ALL_HUES + hueOf(cell - FIRST_SLOT) : cell === QUARANTINED ? CACHED : cell;
  return Math.min(cell, FIRST_SLOT);
}
