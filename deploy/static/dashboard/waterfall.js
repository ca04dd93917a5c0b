// Where one request's time went: a bar for each thing that happened to it, a tick for each token.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds, shortId } from "./format.js";
import { Canvas, Card, colour, Figure, Missing, useWidth, Wide } from "./ui.js";

export const title = "Waterfall";
export const about = "Where one request's time went, from its arrival to its end, token by token.";
export const topics = ({ arg }) => ({ recent: {}, requests: { offset: 0, limit: 12, newest_first: true }, ...(arg ? { request: { id: arg } } : {}) });

// Kind -> what it is called, and what it means.
const KINDS = {
  wait: ["waiting", "from its arrival until the device began with it"],
  prefill: ["prefill", "its prompt is computed"],
  decode: ["decode", "it gets a token a step"],
  gap: ["left out", "steps that ran without it"],
  preempted: ["preempted", "it had lost its blocks, or its slot"],
  after: ["after the last step", "text made and sent, or a step under way"],
};

export function View({ app }) {
  const { request, recent, requests } = app.feed.data;
  const id = app.arg;
  return html`
    ${id && html`<${Card} title=${html`<code>${id}</code>`}><${Explained} explained=${request} id=${id} nowS=${app.feed.nowS()} /><//>`}
    <${Card} title="Choose a request" note="Those under way, and the last that ended."><${Chooser} live=${requests?.rows ?? []} recent=${recent?.rows ?? []} chosen=${id} nowS=${app.feed.nowS()} /><//>`;
}

function Chooser({ live, recent, chosen, nowS }) {
  const rows = [
    ...live.map((row) => ({ ...row, how: row.state, took_s: nowS === null ? null : nowS - row.arrival_s })),
    ...[...recent].reverse().slice(0, 24).map((row) => ({ ...row, how: row.cause === "finish" ? "finished" : row.cause })),
  ];
  if (!rows.length) return html`<${Missing}>No request yet.<//>`;
  return html`<${Wide} label="Requests"><table><thead><tr><th scope="col">request</th><th scope="col">state</th><th scope="col" class="num">took</th><th scope="col" class="num">first token</th><th scope="col" class="num only-wide">prompt</th><th scope="col" class="num">answer</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id}><th scope="row"><a href=${`#/waterfall/${encodeURIComponent(row.id)}`} title=${row.id} aria-current=${row.id === chosen ? "true" : null}>${shortId(row.id)}</a></th>
      <td>${row.how}</td><td class="num">${seconds(row.took_s)}</td><td class="num">${seconds(row.ttft_s)}</td><td class="num only-wide">${count(row.num_prompt_tokens)}</td><td class="num">${count(row.num_generated_tokens)}</td></tr>`)}</tbody></table><//>`;
}

// One request as the feed tells it (see deploy/dashboard/timeline.py). Also shown beside the playground.
export function Explained({ explained, id, nowS }) {
  if (!explained || explained.id !== id) return html`<p class="note">Looking it up in the trace…</p>`;
  if (!explained.sequences) return html`<p class="missing">The trace knows nothing of this request: it has not arrived yet, or it was so long ago that newer events took its place.</p>`;
  const isOver = explained.ended_us !== null && explained.ended_us !== undefined;
  const nowUs = nowS === null ? 0 : (nowS - explained.arrival_s) * 1e6;
  const last = Math.max(...explained.sequences.flatMap(({ pieces }) => pieces.map(([, begin, end]) => end ?? begin)), 1);
  const span = isOver ? explained.ended_us : Math.max(last, nowUs);
  return html`<div class="waterfall">
    ${explained.causes && html`<ul class="causes">${explained.causes.map((cause) => html`<li>${cause}</li>`)}</ul>`}
    ${explained.sequences.map((sequence, i) => html`<${Sequence} key=${sequence.sequence_id} sequence=${sequence} stages=${i === 0 ? explained.stages : []} span=${span} name=${explained.sequences.length > 1 ? `choice ${i + 1}` : null} isOver=${isOver} cause=${explained.cause} />`)}
  </div>`;
}

function Sequence({ sequence, stages, span, name, isOver, cause }) {
  const pieces = sequence.pieces.map(([kind, begin, end, tokens]) => ({ kind, begin, end: end ?? span, tokens }));
  const kinds = Object.keys(KINDS).filter((kind) => pieces.some((piece) => piece.kind === kind));
  const sum = (kind) => pieces.filter((piece) => piece.kind === kind).reduce((total, { begin, end }) => total + end - begin, 0);
  const ticks = sequence.ticks_us;
  const gaps = ticks.slice(1).map((tick, i) => tick - ticks[i]);
  return html`<section>
    ${name && html`<h3>${name}</h3>`}
    <dl class="figures">
      <${Figure} name=${isOver ? "altogether" : "so far"} value=${seconds(span / 1e6)} id="altogether" />
      <${Figure} name="first token after" value=${ticks.length ? seconds(ticks[0] / 1e6) : "–"} />
      <${Figure} name="tokens" value=${count(ticks.length)} id="ticks" />
      <${Figure} name="between tokens" value=${gaps.length ? seconds(gaps.reduce((a, b) => a + b, 0) / gaps.length / 1e6) : "–"} unit="mean" />
      <${Figure} name="longest gap" value=${gaps.length ? seconds(Math.max(...gaps) / 1e6) : "–"} />
      <${Figure} name="found in the cache" value=${count(sequence.num_cached_tokens)} unit="tokens" />
      ${isOver && html`<${Figure} name="ended by" value=${cause} tone=${cause === "finish" ? "good" : "warn"} />`}
    </dl>
    <div class="rows">${[...new Set(stages.map(([stage]) => stage))].map((stage) => html`<${Stage} key=${stage} name=${stage} batches=${stages.filter((batch) => batch[0] === stage)} span=${span} />`)}
    ${kinds.map((kind) => html`<div class="row" key=${kind}>
      <span title=${KINDS[kind][1]}>${KINDS[kind][0]}</span>
      <span class="track" role="img" aria-label=${`${KINDS[kind][0]}: ${seconds(sum(kind) / 1e6)}`}>${pieces.filter((piece) => piece.kind === kind).map(({ begin, end, tokens }) => html`<span class=${`piece ${kind}`} title=${`${seconds(begin / 1e6)} to ${seconds(end / 1e6)}${tokens ? `, ${tokens} tokens` : ""}`}
        style=${{ left: `${(100 * begin) / span}%`, width: `${(100 * (end - begin)) / span}%` }}></span>`)}</span>
      <span class="took" data-piece=${kind} data-value=${sum(kind)}>${seconds(sum(kind) / 1e6)}</span></div>`)}
      <div class="row"><span>tokens</span><${Ticks} ticks=${ticks} span=${span} /><span class="took">${count(ticks.length)}</span></div>
      <div class="row scale"><span></span><span class="ends"><span>0</span><span>${seconds(span / 2e6)}</span><span>${seconds(span / 1e6)}</span></span><span></span></div>
    </div>
    <p class="story">${story(kinds, sum, span, isOver)}</p>
  </section>`;
}

// A stage through which the request went as a message of its own: waiting for it, in it, and waiting for room behind it.
function Stage({ name, batches, span }) {
  const inside = batches.reduce((sum, [, , , service]) => sum + service, 0);
  const at = (from, width, kind, words) => width > 0 && html`<span class=${`piece ${kind}`} title=${`${words} ${seconds(width / 1e6)}`} style=${{ left: `${(100 * from) / span}%`, width: `${(100 * width) / span}%` }}></span>`;
  return html`<div class="row"><span>${name}</span><span class="track" role="img" aria-label=${`in ${name}: ${seconds(inside / 1e6)}`}>${batches.map(([, begin, wait, service, blocked]) => [
    at(begin, wait, "wait", "waited for it"), at(begin + wait, service, "service", "in it"), at(begin + wait + service, blocked, "blocked", "waited for room behind it")])}</span>
    <span class="took" data-stage-service=${name} data-value=${inside}>${seconds(inside / 1e6)}</span></div>`;
}

// Which parts of the time matter, in words.
function story(kinds, sum, span, isOver) {
  const parts = kinds.map((kind) => [sum(kind) / span, kind]).filter(([share]) => share > 0.03).sort((a, b) => b[0] - a[0]);
  const words = parts.map(([share, kind]) => `${percent(share)} ${KINDS[kind][0]} (${KINDS[kind][1]})`);
  return `${isOver ? "Of its time" : "So far"}: ${words.join("; ")}.`;
}

function Ticks({ ticks, span }) {
  const [ref, width] = useWidth(300);
  const draw = (context) => {
    context.fillStyle = colour("mark-strong");
    const w = ticks.length > width / 3 ? 1 : 1.75;
    for (const tick of ticks) context.fillRect(Math.min(width - w, (tick / span) * width), 1, w, 16);
  };
  return html`<span ref=${ref} class="ticks"><${Canvas} width=${width} height=${18} draw=${draw} role="img" aria-label=${`${ticks.length} tokens`} /></span>`;
}
