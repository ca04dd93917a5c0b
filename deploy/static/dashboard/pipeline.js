// The graph: load of each stage in the last seconds, fill level of the channels, and the bottleneck.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { dotsInWords, Flow, perDot } from "./flow.js";
import { count, percent, rate, seconds, short } from "./format.js";
import { Card, Figure, Legend, Missing, useWidth, Wide } from "./ui.js";
import { WINDOW_S } from "./store.js";

export const title = "Pipeline";
export const about = `Load of the stages and flow between them in the last ${WINDOW_S} seconds, and fill level of the channels.`;
export const topics = () => ({});

export function View({ app }) {
  const { pipeline, overview, position } = app.feed.data;
  if (app.feed.recording) return html`<${Recorded} recording=${app.feed.recording} overview=${overview} position=${position} />`;
  if (!pipeline) return html`<${Missing}>${overview?.health.reason ?? "Waiting for data."}<//>`;
  const shares = sharesOf(pipeline);
  const most = Math.max(0, ...Object.values(pipeline.edges).map((edge) => edge.per_s ?? 0));
  return html`
    <${Bottleneck} bottleneck=${overview?.bottleneck} />
    <${Card} className="graph">
      <${Graph} pipeline=${pipeline} shares=${shares} isStill=${app.feed.isPast} />
      <${Legend} entries=${[["busy", "busy"], ["blocked", "blocked: the next channel is full"], ["idle", "idle: no work"], ["flow-dot", most > 0 ? `messages pass at their real rate: ${dotsInWords(perDot(most))} on the fastest channel` : "messages that pass"]]} />
    <//>
    <div class="columns">
      <${Card} title="Stages" note="Time since the start, and shares of the last seconds."><${Stages} stages=${pipeline.stages} shares=${shares} /><//>
      <${Card} title="Channels" note="The sender waits while a channel is full. This is the only back-pressure."><${Edges} edges=${pipeline.edges} /><//>
    </div>`;
}

// A recording has the inputs and decisions of schedule and allocate; the load of execute is derived from these.
function Recorded({ recording, overview, position }) {
  if (!overview || !position) return html`<${Missing}>Waiting for data.<//>`;
  const { bottleneck } = overview;
  const busy = bottleneck?.busy.execute;
  const { engine } = recording;
  const pipeline = {
    stages: { schedule: {}, allocate: {}, execute: {} },
    edges: {
      "queue -> schedule": { source: "client", target: "schedule", depth: overview.num_waiting, capacity: engine.max_waiting },
      "plans -> allocate": { source: "schedule", target: "allocate" },
      "grants -> execute": { source: "allocate", target: "execute", depth: Math.max(0, position.last_granted - position.completed_step), capacity: engine.steps_in_flight },
    },
  };
  const shares = busy === undefined ? {} : { execute: { busy, blocked: 0, idle: 1 - busy } };
  const figures = [["requests", "num_arrived"], ["plans", "num_plans"], ["granted steps", "num_grants"], ["completed steps", "num_done"], ["void steps", "num_void"], ["last granted step", "last_granted"], ["last completed step", "completed_step"]];
  return html`
    <${Bottleneck} bottleneck=${bottleneck} />
    <${Card} className="graph"><${Graph} pipeline=${pipeline} shares=${shares} isStill=${true} />
      <p class="note">Before schedule: waiting sequences. Before execute: steps in flight. In execute: the share of the last ${WINDOW_S} seconds in which the device was busy.</p><//>
    <div class="columns">
      <${Card} title="Up to this time" note="Inputs and decisions of schedule and allocate."><dl class="figures">${figures.map(([name, id]) => html`<${Figure} name=${name} value=${count(position[id])} id=${`position.${id}`} />`)}</dl><//>
      <${Card} title="Not in a recording" note="It has only the inputs and decisions of schedule and allocate.">
        <p>The load of other stages, the channels, clients and the event loop. The trace of the running server (<code>millrace trace</code>) and its flight files have them. So the bottleneck above can be memory, slots, prompts or the device, but never the tokenizer or a client.</p><//>
    </div>`;
}

// stage -> { idle, busy, blocked }: shares of the last seconds, which add up to 1.
export const sharesOf = ({ stages }) =>
  Object.fromEntries(Object.entries(stages).map(([name, { busy, blocked }]) => [name, { busy, blocked, idle: Math.max(0, 1 - busy - blocked) }]));

export function Bottleneck({ bottleneck }) {
  if (!bottleneck) return html`<p class="sentence unknown">The bottleneck is not known yet.</p>`;
  return html`<p class="sentence" data-figure="bottleneck"><span class=${`dot ${bottleneck.stage && bottleneck.situation !== "execute" ? "warn" : "good"}`}></span>${bottleneck.sentence}</p>`;
}

// -- the drawing

const NODE_HEIGHT = 100;

export function Graph({ pipeline, shares, isStill }) {
  const [ref, width] = useWidth();
  const names = Object.keys(pipeline.stages);
  const isWide = width >= 820;
  const place = isWide ? across(names, width) : down(names, width);
  const edges = Object.entries(pipeline.edges).map(([name, edge]) => ({ ...edge, name }));
  const inLine = (edge) => edge.source === "client" || names.indexOf(edge.target) === names.indexOf(edge.source) + 1;
  const back = edges.filter((edge) => !inLine(edge));
  const height = place.height + (isWide ? 6 + 26 * back.length : 4);
  return html`<div ref=${ref} class="graph-area">
    <svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img" aria-label=${spoken(names, shares)}>
      ${edges.filter(inLine).map((edge) => html`<${Pipe} key=${edge.name} edge=${edge} line=${place.between(edge)} />`)}
      ${back.map((edge, i) => html`<${Return} key=${edge.name} edge=${edge} place=${place} level=${i} isWide=${isWide} bottom=${place.height} width=${width} />`)}
      ${names.map((name) => html`<${Node} key=${name} name=${name} box=${place.boxes[name]} share=${shares?.[name]} />`)}
    </svg>
    ${!isStill && html`<${Flow} width=${width} height=${height} pipes=${Object.fromEntries(edges.filter(inLine).map((edge) => [edge.name, { perS: edge.per_s ?? 0, line: place.between(edge) }]))} />`}
    </div>`;
}

const spoken = (names, shares) =>
  `The stages in order: ${names
    .map((name) => (shares?.[name] ? `${name}, ${percent(shares[name].busy)} busy, ${percent(shares[name].blocked)} blocked` : name))
    .join("; ")}. The tables below have all values.`;

function across(names, width) {
  const gap = Math.min(66, Math.max(44, width / 20));
  const w = (width - gap * names.length - 2) / names.length;
  const boxes = {};
  names.forEach((name, i) => (boxes[name] = { x: gap + i * (w + gap), y: 14, w, h: NODE_HEIGHT }));
  const between = ({ source, target }) => {
    const to = boxes[target];
    const x1 = source === "client" ? to.x - gap : boxes[source].x + w;
    return { x1, y1: 14 + 46, x2: to.x, y2: 14 + 46, isWide: true };
  };
  return { boxes, between, height: NODE_HEIGHT + 20 };
}

function down(names, width) {
  const gap = 46;
  const h = 58;
  const w = width - 46;
  const boxes = {};
  names.forEach((name, i) => (boxes[name] = { x: 0, y: gap + i * (h + gap), w, h, isFlat: true }));
  const between = ({ source, target }) => {
    const to = boxes[target];
    const y1 = source === "client" ? to.y - gap : boxes[source].y + h;
    return { x1: 36, y1, x2: 36, y2: to.y, isWide: false };
  };
  return { boxes, between, height: names.length * (h + gap) };
}

function Node({ name, box, share }) {
  const { x, y, w, h, isFlat } = box;
  const inset = w < 80 ? 5 : 9;
  const left = x + inset;
  const bar = w - 2 * inset;
  const barY = isFlat ? y + 34 : y + 62;
  const parts = share ? [["busy", share.busy], ["blocked", share.blocked]] : [];
  let at = left;
  return html`<g class=${`node ${share && share.blocked > 0.2 ? "is-blocked" : ""}`}>
    <title>${name}: ${share ? `${percent(share.busy)} busy, ${percent(share.blocked)} blocked` : "no data yet"}</title>
    <rect class="box" x=${x} y=${y} width=${w} height=${h} rx="9" />
    <text class="name" x=${left} y=${y + 22} font-size=${Math.min(13.5, bar / (0.6 * name.length))}>${name}</text>
    <text class="big" x=${isFlat ? x + w - 10 : left} y=${isFlat ? y + 22 : y + 50} text-anchor=${isFlat ? "end" : "start"}>${share ? percent(share.busy) : "–"}${isFlat && html`<tspan class="unit"> busy</tspan>`}</text>
    <rect class="idle" x=${left} y=${barY} width=${bar} height="8" rx="4" />
    ${parts.map(([kind, part]) => {
      const drawn = html`<rect class=${kind} x=${at} y=${barY} width=${Math.max(0, part * bar)} height="8" rx=${part > 0.02 ? 4 : 0} />`;
      at += part * bar;
      return drawn;
    })}
    ${!isFlat && html`<text class=${`small ${share?.blocked > 0.005 ? "warn" : ""}`} x=${left} y=${y + h - 12}>${share?.blocked > 0.005 ? `blocked ${percent(share.blocked)}` : "busy"}</text>`}
  </g>`;
}

// A channel: a line with a fill gauge and the number of items.
function Pipe({ edge, line }) {
  const { x1, y1, x2, y2, isWide } = line;
  const middle = { x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
  const isKnown = edge.capacity !== undefined; // a recording has no data of most channels
  const fill = isKnown ? edge.depth / edge.capacity : 0;
  const tone = edge.full > 0.05 ? "full" : "";
  const w = isWide ? Math.min(26, x2 - x1 - 14) : 30;
  const flows = [edge.per_s > 0 && `${rate(edge.per_s)}/s`, edge.tokens_per_s > 0 && `${short(edge.tokens_per_s)} tok${isWide && x2 - x1 < 56 ? "" : "/s"}`].filter(Boolean);
  return html`<g class=${`pipe ${tone}`}>
    <title>${edge.name}${isKnown ? `: ${edge.depth} of ${edge.capacity} items` : ""}${edge.full === undefined ? "" : `, full ${percent(edge.full)} of the time`}</title>
    <line x1=${x1} y1=${y1} x2=${x2} y2=${y2} />
    <path class="arrow" d=${isWide ? `M${x2 - 5} ${y2 - 4}L${x2} ${y2}L${x2 - 5} ${y2 + 4}` : `M${x2 - 4} ${y2 - 5}L${x2} ${y2}L${x2 + 4} ${y2 - 5}`} />
    ${isKnown && html`<rect class="vessel" x=${middle.x - w / 2} y=${middle.y - 6} width=${w} height="12" rx="6" />`}
    ${fill > 0 && html`<rect class="fill" x=${middle.x - w / 2 + 2} y=${middle.y - 4} width=${Math.max(3, fill * (w - 4))} height="8" rx="4" />`}
    ${isWide
      ? html`<text class="small" x=${middle.x} y=${middle.y - 12} text-anchor="middle">${edge.depth ?? ""}</text>
             ${flows.map((text, i) => html`<text class="tiny" x=${middle.x} y=${middle.y + 20 + 13 * i} text-anchor="middle">${text}</text>`)}
             ${edge.full > 0.005 && html`<text class="tiny warn" x=${middle.x} y=${middle.y + 20 + 13 * flows.length} text-anchor="middle">full ${percent(edge.full)}</text>`}`
      : html`<text class="small" x=${middle.x + 24} y=${middle.y + 4}>${[isKnown && `${edge.depth} of ${edge.capacity}`, ...flows, edge.full > 0.005 && `full ${percent(edge.full)}`].filter(Boolean).join(" · ")}</text>`}
  </g>`;
}

// A channel that leads back: below the stages on wide screens, else beside them.
function Return({ edge, place, level, isWide, bottom, width }) {
  const from = place.boxes[edge.source];
  const to = place.boxes[edge.target];
  const label = `${edge.name.split(".").at(1)?.split("-")[0] ?? "back"} ${edge.depth}`;
  if (!isWide) {
    const x = from.x + from.w;
    const out = x + 14 + 14 * level;
    const [y1, y2] = [from.y + from.h / 2, to.y + to.h / 2 + 8 * level];
    return html`<g class="pipe back"><title>${edge.name}: ${edge.depth} of ${edge.capacity}</title>
      <path class="line" d=${`M${x} ${y1}H${out - 8}Q${out} ${y1} ${out} ${y1 - 8}V${y2 + 8}Q${out} ${y2} ${out - 8} ${y2}H${x}`} />
      <path class="arrow" d=${`M${x + 5} ${y2 - 4}L${x} ${y2}L${x + 5} ${y2 + 4}`} /></g>`;
  }
  const y = bottom + 12 + 26 * level;
  const x1 = from.x + from.w * (0.5 - 0.1 * level);
  const x2 = to.x + to.w * (0.66 - 0.34 * level);
  const top = from.y + from.h;
  return html`<g class="pipe back"><title>${edge.name}: ${edge.depth} of ${edge.capacity}</title>
    <path class="line" d=${`M${x1} ${top}V${y - 10}Q${x1} ${y} ${x1 - 10} ${y}H${x2 + 10}Q${x2} ${y} ${x2} ${y - 10}V${top}`} />
    <path class="arrow" d=${`M${x2 - 4} ${top + 6}L${x2} ${top + 1}L${x2 + 4} ${top + 6}`} />
    <text class="small label" x=${(x1 + x2) / 2} y=${y + 4} text-anchor="middle">${label}</text></g>`;
}

// -- the figures

const Stages = ({ stages, shares }) => html`<${Wide} label="Stages"><table>
  <thead><tr><th scope="col">stage</th><th scope="col" class="num">busy</th><th scope="col" class="num">blocked</th><th scope="col" class="num">idle</th><th scope="col">last ${WINDOW_S} s</th><th scope="col" class="num">restarts</th></tr></thead>
  <tbody>${Object.entries(stages).map(
    ([name, stage]) => html`<tr key=${name} data-stage=${name}><th scope="row">${name}</th>
      <td class="num" data-figure="busy_s" data-value=${stage.busy_s}>${seconds(stage.busy_s)}</td>
      <td class="num" data-figure="blocked_s" data-value=${stage.blocked_s}>${seconds(stage.blocked_s)}</td>
      <td class="num" data-figure="idle_s" data-value=${stage.idle_s}>${seconds(stage.idle_s)}</td>
      <td><${Split} share=${shares?.[name]} /></td>
      <td class="num" data-figure="num_restarts" data-value=${stage.num_restarts}>${count(stage.num_restarts)}</td></tr>`,
  )}</tbody></table><//>`;

const Split = ({ share }) =>
  share
    ? html`<span class="split" role="img" aria-label=${`${percent(share.busy)} busy, ${percent(share.blocked)} blocked, ${percent(share.idle)} idle`}>
        <span class="busy" style=${{ width: `${100 * share.busy}%` }}></span><span class="blocked" style=${{ width: `${100 * share.blocked}%` }}></span></span>`
    : "–";

// Channels from the client first.
const inOrder = (edges) => Object.entries(edges).sort(([, a], [, b]) => (b.source === "client") - (a.source === "client"));

const Edges = ({ edges }) => html`<${Wide} label="Channels"><table>
  <thead><tr><th scope="col">channel</th><th scope="col" class="num">items</th><th scope="col" class="num">capacity</th><th scope="col" class="num">peak</th><th scope="col" class="num">sent</th><th scope="col" class="num">msg/s</th><th scope="col" class="num">tok/s</th><th scope="col" class="num">full</th></tr></thead>
  <tbody>${inOrder(edges).map(
    ([name, edge]) => html`<tr key=${name} data-edge=${name}><th scope="row" title=${name}>${edge.source} → ${edge.target}</th>
      <td class="num" data-figure="depth" data-value=${edge.depth}>${count(edge.depth)}</td>
      <td class="num" data-figure="capacity" data-value=${edge.capacity}>${count(edge.capacity)}</td>
      <td class="num" data-figure="high_water" data-value=${edge.high_water}>${count(edge.high_water)}</td>
      <td class="num" data-figure="num_sent" data-value=${edge.num_sent}>${count(edge.num_sent)}</td>
      <td class="num" data-rate="messages">${rate(edge.per_s)}</td>
      <td class="num" data-rate="tokens">${rate(edge.tokens_per_s)}</td>
      <td class="num" data-figure="seconds_full" data-value=${edge.seconds_full}>${seconds(edge.seconds_full)}${edge.full > 0.005 ? ` (${percent(edge.full)})` : ""}</td></tr>`,
  )}</tbody></table><//>`;
