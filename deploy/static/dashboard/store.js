// State derived from the feed: past steps, the map of blocks, the history, and rates over the last seconds.

export const WINDOW_S = 5;
export const LATENCY_S = 2; // between two readings of the latencies
const KEPT_LATENCIES = 400;
const KEPT_STEPS = 1200;
const KEPT_INCIDENTS = 200;
const KEPT_HISTORY = 900;

export const STEP = {
  step: 0, endedUs: 1, durationUs: 2, gapUs: 3, rows: 4, prefill: 5, decode: 6, cached: 7, wasted: 8, preempted: 9,
  waiting: 10, freeBlocks: 11, isVoid: 12,
};

const grown = (kept) => (before, news) => ({
  rows: [...(before?.rows ?? []), ...news.rows].slice(-kept),
  numSkipped: news.num_skipped,
});

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const u16 = (text) => new Uint16Array(bytes(text).buffer);
const u32 = (text) => new Uint32Array(bytes(text).buffer);

// The map of blocks. `cells`: the server's number of each block. `since`: the time of its last change in seconds on the
// engine's clock, as seen by this page from `openedS` on, or from the recording. `changed`: indices changed by the last
// update; null: all. `slabs`: with several kinds of memory, the kind of each slab of `cells_per_slab` cells (255: none).
function blocks(before, news, now) {
  const owners = news.owners ?? before?.owners ?? {};
  const slabs = news.slabs ? { ...news.slabs, of: bytes(news.slabs.of) } : before?.slabs;
  if (news.cells) {
    const cells = u16(news.cells);
    const since = new Float64Array(cells.length).fill(now);
    if (news.changed_s) return { cells, since: told(news), owners, slabs, openedS: news.began_s, changed: null, blockSize: news.block_size };
    if (before?.cells.length === cells.length)
      for (let i = 0; i < cells.length; i++) if (cells[i] === before.cells[i]) since[i] = before.since[i];
    return { cells, since, owners, slabs, openedS: before?.openedS ?? now, changed: null, blockSize: news.block_size };
  }
  if (!before) return before;
  let changed = new Uint32Array(0);
  if (news.at) {
    changed = u32(news.at);
    const to = u16(news.to);
    for (let i = 0; i < changed.length; i++) {
      before.cells[changed[i]] = to[i];
      before.since[changed[i]] = now;
    }
  }
  return { ...before, owners, slabs, changed, since: news.changed_s ? told(news) : before.since };
}

const told = ({ began_s: began, changed_s: changed }) =>
  Float64Array.from(new Float32Array(bytes(changed).buffer), (after) => began + after);

// The rows of the history, and the times of its first and last frame.
const history = (before, news) => ({ ...before, ...news, rows: [...(before?.rows ?? []), ...news.rows].slice(-KEPT_HISTORY) });

export const reducers = { history, steps: grown(KEPT_STEPS), incidents: grown(KEPT_INCIDENTS), quantiles: grown(KEPT_LATENCIES), blocks };

export class History {
  // Past readings of the latencies, for the heat maps.
  constructor() {
    this.latencies = [];
  }

  note(nowS, latency) {
    const last = this.latencies.at(-1);
    if (nowS < last?.nowS || nowS - last?.nowS > 5 * LATENCY_S) this.latencies = []; // gone back, or the view was closed meanwhile
    if (latency && nowS && (!last || nowS - last.nowS >= LATENCY_S)) this.latencies = [...this.latencies, { nowS, latency }].slice(-KEPT_LATENCIES);
  }
}

// Rates of the steps in the last `spanS` seconds; null if there were none.
export function stepRates(steps, nowS, spanS = WINDOW_S) {
  if (!steps || nowS === null) return null;
  const from = (nowS - spanS) * 1e6;
  const rows = steps.rows.filter((row) => row[STEP.endedUs] >= from);
  if (!rows.length) return null;
  const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
  if (rows.length === steps.rows.length && rows.length >= KEPT_STEPS) spanS = nowS - rows[0][STEP.endedUs] / 1e6; // older steps of the span are not kept
  return {
    perS: rows.length / spanS,
    decodePerS: sum(STEP.decode) / spanS,
    prefillPerS: sum(STEP.prefill) / spanS,
    meanUs: sum(STEP.durationUs) / rows.length,
    busy: Math.min(1, sum(STEP.durationUs) / 1e6 / spanS),
    gap: Math.min(1, sum(STEP.gapUs) / 1e6 / spanS),
  };
}
