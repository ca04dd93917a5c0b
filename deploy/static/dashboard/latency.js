// Latency histograms with the exact counts of /metrics, quantiles, and both over time.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds, sketchQuantile } from "./format.js";
import { Lines } from "./lines.js";
import { LATENCY_S } from "./store.js";
import { Canvas, Card, Choice, colour, Figure, Missing, useWidth, Wide } from "./ui.js";

export const title = "Latency";
export const about = "TTFT, ITL, queue time and end-to-end latency: p50, p90 and p99 within 1 %, over time, and the histograms of /metrics.";
export const topics = () => ({ latency: {}, quantiles: {} });

const MOST_S = 800; // shown of p50 and p99 over time

const NAMES = {
  time_to_first_token: ["Time to first token (TTFT)", "From a request's arrival to its first token."],
  inter_token_latency: ["Inter-token latency (ITL, TPOT)", "From each token of an answer to the next."],
  request_queue_time: ["Queue time", "From a request's arrival to its first step."],
  e2e_request_latency: ["End-to-end latency (E2E)", "From a request's arrival to its end."],
};

export function View({ app }) {
  const { latency, quantiles } = app.feed.data;
  const [span, setSpan] = useState("all");
  if (!latency) return html`<${Missing}>This server does not measure latencies.<//>`;
  const names = Object.keys(latency);
  if (!names.length) return html`<${Missing}>No measurements yet.<//>`;
  return html`
    ${app.feed.recording && html`<p class="note">Up to this time, as seen by schedule: the time of a token is that of its step's result. A recording does not include the way to the client. The heat maps cover what this page has played.</p>`}
    <div class="bar"><${Choice} label="Show" name="span" value=${span} onchange=${setSpan} options=${[["all", "Since the start"], ["seen", "Since this page opened"]]} /></div>
    <div class="columns">${names.map((name) => html`<${OfOne} key=${name} one=${{ ...latency[name], title: (NAMES[name] ?? [name])[0], help: (NAMES[name] ?? [])[1] }} readings=${app.history.latencies} rows=${quantiles?.rows ?? []} nowS=${app.feed.nowS()} name=${name} span=${span} />`)}</div>`;
}

function OfOne({ one, readings, rows, nowS, name, span }) {
  const first = readings[0]?.latency[name];
  const counts = span === "seen" && first ? one.counts.map((n, i) => n - first.counts[i]) : one.counts;
  const total = counts.reduce((sum, n) => sum + n, 0);
  const sketch = span === "seen" && first ? Object.fromEntries(Object.entries(one.sketch).map(([place, n]) => [place, n - (first.sketch[place] ?? 0)])) : one.sketch;
  const sumUs = span === "seen" && first ? one.total_us - first.total_us : one.total_us;
  return html`<${Card} title=${one.title} note=${one.help}>
    <dl class="figures quantiles">
      <${Figure} name="measured" value=${count(total)} id=${`${name}.count`} />
      <${Figure} name="mean" value=${total ? seconds(sumUs / 1e6 / total) : "–"} />
      ${[0.5, 0.9, 0.99].map((q) => html`<${Figure} name=${`p${100 * q}`} value=${total ? seconds(sketchQuantile(sketch, one.growth, q) / 1e6) : "–"} id=${`${name}.p${100 * q}`} />`)}
    </dl>
    <${OverTime} rows=${rows} nowS=${nowS} name=${name} />
    ${total > 0 && html`<${Bars} bounds=${one.bounds_us} counts=${counts} total=${total} title=${one.title} /><${Heat} one=${one} readings=${readings} name=${name} />`}
    ${total === 0 && html`<p class="missing">No measurements yet.</p>`}
    <details><summary>As a table</summary><${Wide} label=${`${one.title}, counts by bucket`}><table><thead><tr><th scope="col" class="num">≤</th><th scope="col" class="num">measured</th><th scope="col" class="num">share</th></tr></thead>
      <tbody>${counts.map((n, i) => html`<tr key=${i}><th scope="row" class="num">${i < one.bounds_us.length ? seconds(one.bounds_us[i] / 1e6) : "more"}</th><td class="num" data-bucket=${`${name}.${i}`}>${count(n)}</td><td class="num">${total ? percent(n / total) : "–"}</td></tr>`)}</tbody></table><//></details>
  <//>`;
}

// p50 and p99 of the measurements of each interval, as the server has kept them.
function OverTime({ rows, nowS, name }) {
  const shown = rows.filter(([endS, of]) => of[name] && nowS !== null && nowS - endS < MOST_S);
  if (shown.length < 2) return null;
  const x = shown.map(([endS]) => Math.round(endS - nowS));
  const series = [["p50", 1, "decode"], ["p99", 2, "mark-strong"]];
  return html`<${Lines} x=${x} height=${150} unit="ms" isLog=${true} series=${series.map(([label, place, colour]) => ({ label, colour, values: shown.map(([, of]) => of[name][place] / 1e3) }))} />`;
}

const used = (counts) => {
  const first = counts.findIndex((n) => n > 0);
  const last = counts.length - 1 - [...counts].reverse().findIndex((n) => n > 0);
  return [Math.max(0, first - 1), Math.min(counts.length - 1, last + 1)];
};

function Bars({ bounds, counts, total, title: name }) {
  const [ref, width] = useWidth();
  const [first, last] = used(counts);
  const most = Math.max(...counts);
  const n = last - first + 1;
  const w = width / n;
  return html`<div ref=${ref} class="bars"><svg viewBox=${`0 0 ${width} 150`} width=${width} height="150" role="img" aria-label=${`${name} as a histogram; the table below has its figures`}>
    ${counts.slice(first, last + 1).map((value, i) => {
      const high = (value / most) * 104;
      return html`<g key=${i}><rect class="fill" x=${i * w + 1} y=${122 - high} width=${Math.max(1, w - 2)} height=${high} rx="2" />
        ${value / total >= 0.0005 && w > 34 && html`<text class="small" x=${i * w + w / 2} y=${117 - high} text-anchor="middle">${percent(value / total)}</text>`}
        ${(i + 1) % Math.ceil(48 / w) === 0 && html`<text class="small" x=${(i + 1) * w - 1} y="140" text-anchor="end">${first + i < bounds.length ? seconds(bounds[first + i] / 1e6) : "more"}</text>`}</g>`;
    })}
    <line x1="0" x2=${width} y1="122.5" y2="122.5" class="base" /></svg></div>`;
}

// One column per LATENCY_S seconds, one row per bucket; darker cells have more measurements.
function Heat({ one, readings, name }) {
  const [ref, width] = useWidth();
  const columns = [];
  for (let i = 1; i < readings.length; i++) {
    const [before, after] = [readings[i - 1].latency[name], readings[i].latency[name]];
    columns.push(after.counts.map((n, k) => n - before.counts[k]));
  }
  const [first, last] = used(one.counts);
  const rows = last - first + 1;
  const cell = Math.max(6, Math.min(16, Math.floor(132 / rows)));
  const wide = 9;
  const shown = columns.slice(-Math.floor(width / wide));
  const most = Math.max(1, ...shown.flat());
  const draw = (context) => {
    const ink = colour("heat");
    context.fillStyle = `rgb(${ink} / 0.05)`;
    context.fillRect(0, 0, width, rows * cell);
    shown.forEach((column, i) => {
      for (let k = first; k <= last; k++) {
        if (!column[k]) continue;
        context.fillStyle = `rgb(${ink} / ${0.15 + 0.85 * Math.sqrt(column[k] / most)})`;
        context.fillRect(width - (shown.length - i) * wide, (last - k) * cell, wide - 1, cell - 1);
      }
    });
  };
  return html`<div ref=${ref}><p class="note">Over time, newest at the right, ${LATENCY_S} seconds per column; slower is higher (up to ${last < one.bounds_us.length ? seconds(one.bounds_us[last] / 1e6) : "more"}).</p>
    <${Canvas} width=${width} height=${rows * cell} draw=${draw} role="img" aria-label=${`${one.title} over time`} /></div>`;
}
