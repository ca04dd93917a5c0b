// The steps: the strip, the figures of one step and of all, and tokens per second over time.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, quantile, rate, seconds } from "./format.js";
import { STEP, stepRates } from "./store.js";
import { Card, Figure, Legend, Missing } from "./ui.js";
import { Lines } from "./lines.js";
import { Strip } from "./steps_strip.js";

export const title = "Steps";
export const about = "One bar per step, newest at the right: above its duration, below its tokens.";
export const topics = () => ({});

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
