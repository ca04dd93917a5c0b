// The figures for a big screen on a wall: no menu, large numbers, and the last 15 minutes.

import { html, useEffect, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, rate, seconds } from "./format.js";
import { Lines } from "./lines.js";
import { Bottleneck, Graph, sharesOf } from "./pipeline.js";
import { stepRates } from "./store.js";

export const title = "Wall";
export const about = "";
export const topics = () => ({ quantiles: {}, latency: {} });
export const isBare = true; // without menu and strip

const CYCLE_S = 20; // of each page
const BIN_S = 5; // of the curves
const [TIME, RUNNING, WAITING, HELD, GENERATED, , PREEMPTED] = [0, 1, 2, 3, 4, 5, 6];
const PAGES = ["figures", "flow"];

export function View({ app }) {
  const [page, setPage] = useState(0);
  const [isCycling, setCycling] = useState(false);
  useEffect(() => {
    if (!isCycling) return;
    const timer = setInterval(() => setPage((before) => (before + 1) % PAGES.length), 1000 * CYCLE_S);
    return () => clearInterval(timer);
  }, [isCycling]);
  const { overview, pipeline } = app.feed.data;
  if (!overview) return html`<p class="missing">Waiting for the server.</p>`;
  const isFlow = PAGES[page] === "flow" && pipeline;
  return html`
    <div class="bar wall-bar"><a class="brand" href="#/pipeline"><img src="static/dashboard/icon.svg" alt="" width="30" height="30" /><span>${app.feed.hello?.models?.join(", ") || "millrace"}</span></a>
      <span class="wall-state"><span class=${`dot ${overview.health.state === "ready" ? "good" : "bad"}`}></span>${overview.health.state}</span>
      <label class="check"><input type="checkbox" checked=${isCycling} onChange=${(event) => setCycling(event.target.checked)} /> change every ${CYCLE_S} s</label>
      <button class="quiet" onClick=${() => setPage((page + 1) % PAGES.length)}>${isFlow ? "Figures" : "Flow"}</button><a class="quiet-link" href="#/pipeline">Leave (w)</a></div>
    <${Bottleneck} bottleneck=${overview.bottleneck} />
    ${isFlow ? html`<div class="wall-flow"><${Graph} pipeline=${pipeline} shares=${sharesOf(pipeline)} isStill=${app.feed.isPast} /></div>` : html`<${Figures} app=${app} overview=${overview} />`}`;
}

function Figures({ app, overview }) {
  const { steps, quantiles, history } = app.feed.data;
  const now = app.feed.nowS();
  const rates = stepRates(steps, now);
  const of = (name, place) => (quantiles?.rows ?? []).findLast(([, figures]) => figures[name])?.[1][name][place] / 1e6; // the newest
  const kv = overview.blocks;
  const preempted = (history?.rows ?? []).reduce((sum, row) => sum + row[PREEMPTED], 0);
  const cache = overview.prefix_cache;
  const tiles = [
    ["tokens/s", rates ? rate(rates.decodePerS) : "0", ""],
    ["running", count(overview.num_running ?? overview.num_live), ""],
    ["waiting", count(overview.num_waiting), overview.num_waiting ? "warn" : ""],
    ["TTFT p50", seconds(of("time_to_first_token", 1)), ""],
    ["TTFT p99", seconds(of("time_to_first_token", 2)), ""],
    ["ITL p50", seconds(of("inter_token_latency", 1)), ""],
    ["ITL p99", seconds(of("inter_token_latency", 2)), ""],
    ["KV in use", kv ? percent(kv.in_use / kv.num_blocks) : "–", kv && kv.in_use / kv.num_blocks > 0.95 ? "warn" : ""],
    ["prefix hits", cache?.num_queries ? percent(cache.num_hits / cache.num_queries) : "–", ""],
    ["preempted, 15 min", count(preempted), preempted ? "warn" : ""],
  ];
  return html`<dl class="wall-figures">${tiles.map(([name, value, tone]) => html`<div class=${`wall-figure ${tone}`} key=${name}><dt>${name}</dt><dd data-wall=${name}>${value}</dd></div>`)}</dl>
    <${Curves} rows=${history?.rows ?? []} liveS=${app.feed.liveS()} />`;
}

function Curves({ rows, liveS }) {
  const bins = new Map();
  for (const row of rows) {
    const bin = Math.round((row[TIME] - liveS) / BIN_S) * BIN_S;
    bins.set(bin, [...(bins.get(bin) ?? []), row]);
  }
  const x = [...bins.keys()].sort((a, b) => a - b);
  if (x.length < 2) return html`<p class="note">The curves begin after ${2 * BIN_S} seconds.</p>`;
  const of = (field) => x.map((bin) => bins.get(bin).reduce((sum, row) => sum + row[field], 0) / bins.get(bin).length);
  const tall = Math.max(180, Math.min(340, innerHeight - 560));
  return html`<div class="wall-curves"><${Lines} x=${x} height=${tall} series=${[{ label: "tokens/s", colour: "decode", values: of(GENERATED) }]} />
    <${Lines} x=${x} height=${tall} series=${[{ label: "running", colour: "busy", values: of(RUNNING) }, { label: "waiting", colour: "blocked", values: of(WAITING) }]} />
    <${Lines} x=${x} height=${tall} unit="%" series=${[{ label: "KV in use", colour: "mark-strong", values: of(HELD).map((share) => 100 * share) }]} /></div>`;
}
