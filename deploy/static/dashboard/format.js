// Formatting of numbers: few digits, a unit, and a stable width.

export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));

export const percent = (share) => {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const of100 = 100 * share;
  return `${of100 >= 0.05 && of100 < 0.95 ? of100.toFixed(1) : Math.round(of100)} %`;
};

// Seconds in a suitable unit.
export function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  const a = Math.abs(s);
  if (a === 0) return "0 ms";
  if (a < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (a < 0.01) return `${(s * 1e3).toFixed(1)} ms`;
  if (a < 1) return `${Math.round(s * 1e3)} ms`;
  if (a < 10) return `${s.toFixed(2)} s`;
  if (a < 120) return `${s.toFixed(a < 60 ? 1 : 0)} s`;
  if (a < 7200) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${(s / 3600).toFixed(1)} h`;
}

export const millis = (ms) => seconds(ms / 1000);

export const rate = (n) => (n === null || n === undefined ? "–" : n >= 100 || n === 0 ? count(n) : n.toFixed(n >= 10 ? 0 : 1));

// Two or three digits, with k and M.
export const short = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(n >= 1e7 ? 0 : 1)}M` : n >= 1e4 ? `${Math.round(n / 1e3)}k` : n >= 1e3 ? `${(n / 1e3).toFixed(1)}k` : rate(n));

export const shortId = (id) => (id.length > 18 ? `${id.slice(0, 11)}…${id.slice(-5)}` : id);

// The value that a share `q` of the values do not exceed. `sketch`: bucket -> count, where bucket i has the values in
// (growth ** (i - 1), growth ** i], and -1 the zeros. null if it has no values.
export function sketchQuantile(sketch, growth, q) {
  const places = Object.keys(sketch).map(Number).sort((a, b) => a - b);
  let left = Math.ceil(q * places.reduce((sum, place) => sum + sketch[place], 0));
  for (const place of places) {
    left -= sketch[place];
    if (left <= 0 && sketch[place] > 0) return place < 0 ? 0 : (2 * growth ** place) / (growth + 1);
  }
  return null;
}

export function quantile(sorted, q) {
  if (!sorted.length) return null;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}
