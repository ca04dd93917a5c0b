// The strip of steps: one bar each, with axes of time, duration and tokens.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { STEP } from "./store.js";
import { Canvas, colour, useWidth } from "./ui.js";

const BAR = 6; // pixels per step, including the gap to the next
const [TOP, TIMES, GAP, TOKENS, BELOW] = [12, 132, 16, 92, 20]; // heights from top to bottom
const LEFT = 58; // of the labels
const HEIGHT = TOP + TIMES + GAP + TOKENS + BELOW;
const COLOURS = ["prefill", "decode", "cached", "wasted", "gap", "preempted", "line", "mark", "muted"];

export function Strip({ rows, at, choose }) {
  const [ref, width] = useWidth();
  const shown = rows.slice(-Math.max(8, Math.floor((width - LEFT) / BAR)));
  const slowest = Math.max(...shown.map((row) => row[STEP.durationUs]), 1);
  const longest = Math.min(2 * slowest, Math.max(...shown.map((row) => row[STEP.durationUs] + row[STEP.gapUs]), 1)); // longer gaps are cut
  const largest = Math.max(...shown.map((row) => row[STEP.prefill] + row[STEP.decode] + row[STEP.cached]), 1);
  const marked = at < 0 ? -1 : at - (rows.length - shown.length);
  const pick = (event) => {
    const x = event.clientX - event.currentTarget.getBoundingClientRect().left;
    const place = shown.length - 1 - Math.floor((width - x) / BAR);
    if (shown[place]) choose(shown[place][STEP.step]);
  };
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "End" || event.key === "Escape") choose(null);
    else if (by === undefined) return;
    else choose(rows.at(Math.max(-rows.length, Math.min(-1, (at < 0 ? -1 : at - rows.length) + by)))[STEP.step]);
    event.preventDefault();
  };
  return html`<div ref=${ref} class="strip">
    <div class="pad" tabindex="0" role="slider" aria-label="Steps: left and right select one" aria-valuemin=${shown[0][STEP.step]} aria-valuemax=${rows.at(-1)[STEP.step]}
      aria-valuenow=${rows.at(at)[STEP.step]} aria-valuetext=${`step ${rows.at(at)[STEP.step]}, ${seconds(rows.at(at)[STEP.durationUs] / 1e6)}`} onKeyDown=${move}>
      <${Canvas} width=${width} height=${HEIGHT} draw=${(context) => draw(context, shown, width, longest, largest, marked)} onMouseMove=${pick} onMouseLeave=${() => choose(null)} onClick=${pick} aria-hidden="true" />
    </div></div>`;
}

// Round values for the ticks of an axis up to `most`, about `n` of them.
export function ticks(most, n) {
  const rough = most / n;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((of) => of * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) }, (_, i) => (i + 1) * step);
}

function draw(context, rows, width, longest, largest, marked) {
  const fill = Object.fromEntries(COLOURS.map((name) => [name, colour(name)]));
  const [timesY, tokensY] = [TOP + TIMES, TOP + TIMES + GAP + TOKENS];
  context.font = "11px system-ui, sans-serif";
  axis(context, fill, width, timesY, TIMES - 8, longest, 3, (us) => seconds(us / 1e6));
  axis(context, fill, width, tokensY, TOKENS - 4, largest, 2, (n) => `${count(n)} tok`, true);
  clock(context, fill, rows, width);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, HEIGHT);
  context.clip();
  rows.forEach((row, i) => {
    const x = width - (rows.length - i) * BAR;
    if (i === marked) {
      context.fillStyle = fill.mark;
      context.fillRect(x - 1, 0, BAR, tokensY);
    }
    drawStep(context, fill, row, x, BAR - 1.5, (TIMES - 8) / longest, (TOKENS - 4) / largest);
  });
  context.restore();
}

function drawStep(context, fill, row, x, w, perUs, perToken) {
  const tokens = row[STEP.prefill] + row[STEP.decode] || 1;
  const high = row[STEP.durationUs] * perUs;
  const bottom = TOP + TIMES;
  bar(context, row[STEP.isVoid] ? fill.wasted : fill.decode, x, bottom, w, high);
  if (!row[STEP.isVoid]) bar(context, fill.prefill, x, bottom, w, (high * row[STEP.prefill]) / tokens);
  bar(context, fill.gap, x, bottom - high, w, Math.min(TIMES - high, row[STEP.gapUs] * perUs));
  if (row[STEP.preempted]) {
    context.fillStyle = fill.preempted;
    context.beginPath();
    context.moveTo(x - 1, 0);
    context.lineTo(x + w + 1, 0);
    context.lineTo(x + w / 2, 8);
    context.fill();
  }
  let y = TOP + TIMES + GAP + TOKENS;
  const parts = [[fill.decode, row[STEP.decode]], [fill.prefill, row[STEP.prefill] - row[STEP.wasted]], [fill.wasted, row[STEP.wasted]], [fill.cached, row[STEP.cached]]];
  for (const [style, n] of parts) {
    const tall = n > 0 ? Math.max(1, n * perToken) : 0;
    bar(context, style, x, y, w, tall);
    y -= tall;
  }
}

// Lines and labels of a vertical axis from 0 at `bottom`.
function axis(context, fill, width, bottom, height, most, n, text, isWhole = false) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [0, ...ticks(most, n)]) {
    if (isWhole && value % 1) continue;
    const y = bottom - (value / most) * height;
    context.fillStyle = fill.line;
    context.fillRect(LEFT, Math.round(y), width - LEFT, 1);
    context.fillStyle = fill.muted;
    context.fillText(value === 0 ? "0" : text(value), LEFT - 7, y);
  }
}

// When the steps ended, before the newest one.
function clock(context, fill, rows, width) {
  const endUs = rows.at(-1)[STEP.endedUs];
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.fillStyle = fill.muted;
  for (let i = rows.length - 1; i >= 0; i -= 20) {
    const x = width - (rows.length - i - 0.5) * BAR;
    if (x < LEFT + 24) break;
    const agoS = (endUs - rows[i][STEP.endedUs]) / 1e6;
    if (i < rows.length - 1) context.fillText(`−${seconds(agoS)}`, x, HEIGHT - 5);
  }
  context.textAlign = "right";
  context.fillText("newest", width, HEIGHT - 5);
}

function bar(context, style, x, bottom, width, height) {
  if (height <= 0) return;
  context.fillStyle = style;
  context.fillRect(x, bottom - height, width, height);
}
