// The step strip: one bar per step, with its computed, cached and wasted tokens.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, quantile, rate, seconds } from "./format.js";
import { STEP, stepRates } from "./store.js";
import { Canvas, Card, colour, Figure, Legend, Missing, useWidth } from "./ui.js";
import { Lines } from "./lines.js";

export const title = "Steps";
export const about = "One bar per step, newest at the right: its duration and its tokens.";
export const topics = () => ({});

const BAR = 6; // pixels per step, including the gap to the next
const TIMES = 132;
const TOKENS = 92;

export function View({ app }) {
  const { steps, overview } = app.feed.data;
  const [chosen, choose] = useState(null); // a step's number; null: the newest
  if (!steps?.rows.length)
    return html`<${Missing}>${overview && overview.blocks === undefined ? "This model does not generate, so it has no steps." : "No steps yet. They appear as soon as a request runs."}<//>`;
  const rows = steps.rows;
  const at = chosen === null ? -1 : rows.findIndex((row) => row[STEP.step] === chosen);
  return html`
    <${Card}>
      <${Strip} rows=${rows} at=${at} choose=${choose} />
      <${Legend} entries=${[["prefill", "prefill"], ["decode", "decode"], ["cached", "cached, not computed"], ["wasted", "wasted: void or computed again"], ["gap", "gap: device idle"], ["preempted", "preemption"]]} />
      <${Detail} row=${rows.at(at)} isNewest=${at < 0} release=${() => choose(null)} />
    <//>
    <${Summary} app=${app} rows=${rows} />
    <${Card} title="Over time" note="Tokens per second and mean step time, by second."><${OverTime} rows=${rows} /><//>`;
}

function Strip({ rows, at, choose }) {
  const [ref, width] = useWidth();
  const shown = rows.slice(-Math.max(8, Math.floor(width / BAR)));
  const longest = Math.max(...shown.map((row) => row[STEP.durationUs] + row[STEP.gapUs]), 1);
  const largest = Math.max(...shown.map((row) => row[STEP.prefill] + row[STEP.decode] + row[STEP.cached]), 1);
  const marked = at < 0 ? -1 : at - (rows.length - shown.length);
  const draw = (context) => drawStrip(context, shown, { width, longest, largest, marked });
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
    <div class="axis"><span>${seconds(longest / 1e6)}</span><span>${count(largest)} tokens</span></div>
    <div class="pad" tabindex="0" role="slider" aria-label="Steps: left and right select one" aria-valuemin=${shown[0][STEP.step]} aria-valuemax=${rows.at(-1)[STEP.step]}
      aria-valuenow=${rows.at(at)[STEP.step]} aria-valuetext=${`step ${rows.at(at)[STEP.step]}, ${seconds(rows.at(at)[STEP.durationUs] / 1e6)}`} onKeyDown=${move}>
      <${Canvas} width=${width} height=${TIMES + TOKENS + 8} draw=${draw} onMouseMove=${pick} onMouseLeave=${() => choose(null)} onClick=${pick} aria-hidden="true" />
    </div></div>`;
}

function drawStrip(context, rows, { width, longest, largest, marked }) {
  const fill = Object.fromEntries(["prefill", "decode", "cached", "wasted", "gap", "preempted", "line", "mark"].map((name) => [name, colour(name)]));
  context.fillStyle = fill.line;
  context.fillRect(0, TIMES, width, 1);
  context.fillRect(0, TIMES + 7 + TOKENS, width, 1);
  rows.forEach((row, i) => {
    const x = width - (rows.length - i) * BAR;
    const w = BAR - 1.5;
    if (i === marked) {
      context.fillStyle = fill.mark;
      context.fillRect(x - 1, 0, BAR, TIMES + TOKENS + 8);
    }
    const tokens = row[STEP.prefill] + row[STEP.decode] || 1;
    const high = (row[STEP.durationUs] / longest) * (TIMES - 12);
    const prefill = (high * row[STEP.prefill]) / tokens;
    bar(context, row[STEP.isVoid] ? fill.wasted : fill.decode, x, TIMES, w, high);
    if (!row[STEP.isVoid]) bar(context, fill.prefill, x, TIMES, w, prefill);
    bar(context, fill.gap, x, TIMES - high, w, (row[STEP.gapUs] / longest) * (TIMES - 12));
    if (row[STEP.preempted]) {
      context.fillStyle = fill.preempted;
      context.beginPath();
      context.moveTo(x - 1, 0);
      context.lineTo(x + w + 1, 0);
      context.lineTo(x + w / 2, 7);
      context.fill();
    }
    const scale = (TOKENS - 2) / largest;
    let y = TIMES + 7 + TOKENS;
    const parts = [[fill.decode, row[STEP.decode]], [fill.prefill, row[STEP.prefill] - row[STEP.wasted]], [fill.wasted, row[STEP.wasted]], [fill.cached, row[STEP.cached]]];
    for (const [style, count_] of parts) {
      const tall = count_ > 0 ? Math.max(1, count_ * scale) : 0;
      bar(context, style, x, y, w, tall);
      y -= tall;
    }
  });
}

function bar(context, style, x, bottom, width, height) {
  if (height <= 0) return;
  context.fillStyle = style;
  context.fillRect(x, bottom - height, width, height);
}

function Detail({ row, isNewest, release }) {
  const facts = [
    ["took", seconds(row[STEP.durationUs] / 1e6)], ["gap before", seconds(row[STEP.gapUs] / 1e6)], ["rows", count(row[STEP.rows])],
    ["prefill", count(row[STEP.prefill])], ["decode", count(row[STEP.decode])], ["cached", count(row[STEP.cached])],
    ["wasted", count(row[STEP.wasted])], ["preempted", count(row[STEP.preempted])], ["waiting", count(row[STEP.waiting])], ["free blocks", count(row[STEP.freeBlocks])],
  ];
  return html`<div class="detail"><p><strong>Step ${count(row[STEP.step])}</strong>${row[STEP.isVoid] ? " (void)" : ""}
    ${isNewest ? html`<span class="note"> newest</span>` : html` <button class="quiet" onClick=${release}>follow the newest</button>`}</p>
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></div>`;
}

function Summary({ app, rows }) {
  const durations = rows.map((row) => row[STEP.durationUs] / 1e6).sort((a, b) => a - b);
  const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
  const rates = stepRates(app.feed.data.steps, app.feed.nowS());
  const { pipeline, overview } = app.feed.data;
  const busy = pipeline?.stages.execute?.busy ?? overview?.bottleneck?.busy.execute; // a recording has no stages
  const computed = sum(STEP.prefill) + sum(STEP.decode);
  return html`<${Card} title=${`The last ${count(rows.length)} steps`}><dl class="figures">
    <${Figure} name="step time p50" value=${seconds(quantile(durations, 0.5))} />
    <${Figure} name="step time p99" value=${seconds(quantile(durations, 0.99))} />
    <${Figure} name="steps per second" value=${rates ? rate(rates.perS) : "0"} />
    <${Figure} name="execute busy" value=${percent(busy)} />
    <${Figure} name="tokens computed" value=${count(computed)} id="tokens_computed" />
    <${Figure} name="tokens cached" value=${count(sum(STEP.cached))} />
    <${Figure} name="wasted" value=${computed ? percent(sum(STEP.wasted) / computed) : "–"} tone=${sum(STEP.wasted) ? "warn" : ""} />
    <${Figure} name="preemptions" value=${count(sum(STEP.preempted))} tone=${sum(STEP.preempted) ? "warn" : ""} />
  </dl><//>`;
}

function OverTime({ rows }) {
  const end = rows.at(-1)[STEP.endedUs] / 1e6;
  const bins = new Map();
  for (const row of rows) {
    const second = Math.ceil(row[STEP.endedUs] / 1e6 - end) + 0; // the last whole second is 0
    const bin = bins.get(second) ?? { decode: 0, prefill: 0, duration: 0, steps: 0 };
    bin.decode += row[STEP.decode];
    bin.prefill += row[STEP.prefill];
    bin.duration += row[STEP.durationUs] / 1e3;
    bin.steps += 1;
    bins.set(second, bin);
  }
  const first = Math.max(-119, Math.min(0, Math.min(...bins.keys()) + 1)); // without the first second, which may be incomplete
  const x = Array.from({ length: 1 - first }, (_, i) => first + i);
  if (x.length < 2) return html`<p class="missing">The kept steps cover less than two whole seconds.</p>`;
  const of = (tell) => x.map((second) => (bins.has(second) ? tell(bins.get(second)) : null));
  return html`<${Lines} x=${x} height=${170} series=${[
    { label: "decoded tokens/s", colour: "decode", values: of((bin) => bin.decode) },
    { label: "prefilled tokens/s", colour: "prefill", values: of((bin) => bin.prefill) },
    { label: "mean step, ms", colour: "mark-strong", values: of((bin) => bin.duration / bin.steps), scale: "ms" },
  ]} />`;
}
