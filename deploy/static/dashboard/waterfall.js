// Where one request's time went: a bar for each thing that happened to it, a tick for each token.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds, shortId } from "./format.js";
import { Canvas, Card, colour, Figure, Legend, Missing, useWidth, Wide } from "./ui.js";

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
  const isRecorded = Boolean(app.feed.recording);
  return html`
    ${id && html`<${Card} title=${html`<code>${id}</code>`}><${Explained} explained=${request} id=${id} nowS=${app.feed.nowS()} isRecorded=${isRecorded} /><//>`}
    <${Card} title="Choose a request" note=${isRecorded ? "Those under way at this moment, and the last that had ended." : "Those under way, and the last that ended."}><${Chooser} live=${requests?.rows ?? []} recent=${recent?.rows ?? []} chosen=${id} nowS=${app.feed.nowS()} /><//>`;
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
export function Explained({ explained, id, nowS, isRecorded }) {
  if (!explained || explained.id !== id) return html`<p class="note">Looking it up in the trace…</p>`;
  if (!explained.sequences && isRecorded) return html`<p class="missing">It has not arrived yet at this moment, or the recording does not know it.</p>`;
  if (!explained.sequences) return html`<p class="missing">The trace knows nothing of this request: it has not arrived yet, or it was so long ago that newer events took its place.</p>`;
  const isOver = explained.ended_us !== null && explained.ended_us !== undefined;
  const nowUs = nowS === null ? 0 : (nowS - explained.arrival_s) * 1e6;
  const last = Math.max(...explained.sequences.flatMap(({ pieces }) => pieces.map(([, begin, end]) => end ?? begin)), 1);
  const span = isOver ? explained.ended_us : Math.max(last, nowUs);
  return html`<div class="waterfall">
    ${explained.explained && html`<p class="sentence">${explained.explained.sentence}</p>`}
    ${explained.sequences.map((sequence, i) => html`<${Sequence} key=${sequence.sequence_id} sequence=${sequence} span=${span} name=${explained.sequences.length > 1 ? `choice ${i + 1}` : null} isOver=${isOver} cause=${explained.cause} isExplained=${Boolean(explained.explained)} />`)}
    ${explained.explained && html`<${Inside} explained=${explained.explained} />`}
    ${isRecorded && html`<p class="note">A recording tells a token when schedule heard of it: what came after that (its text, the network) is not here, and sampling is part of execute.</p>`}
  </div>`;
}

function Sequence({ sequence, span, name, isOver, cause, isExplained }) {
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
    <div class="rows">${kinds.map((kind) => html`<div class="row" key=${kind}>
      <span title=${KINDS[kind][1]}>${KINDS[kind][0]}</span>
      <span class="track" role="img" aria-label=${`${KINDS[kind][0]}: ${seconds(sum(kind) / 1e6)}`}>${pieces.filter((piece) => piece.kind === kind).map(({ begin, end, tokens }) => html`<span class=${`piece ${kind}`} title=${`${seconds(begin / 1e6)} to ${seconds(end / 1e6)}${tokens ? `, ${tokens} tokens` : ""}`}
        style=${{ left: `${(100 * begin) / span}%`, width: `${(100 * (end - begin)) / span}%` }}></span>`)}</span>
      <span class="took" data-piece=${kind} data-value=${sum(kind)}>${seconds(sum(kind) / 1e6)}</span></div>`)}
      <div class="row"><span>tokens</span><${Ticks} ticks=${ticks} span=${span} /><span class="took">${count(ticks.length)}</span></div>
      <div class="row scale"><span></span><span class="ends"><span>0</span><span>${seconds(span / 2e6)}</span><span>${seconds(span / 1e6)}</span></span><span></span></div>
    </div>
    ${!isExplained && html`<p class="story">${story(kinds, sum, span, isOver)}</p>`}
  </section>`;
}

const KIND_WORDS = { service: "in it", wait: "waiting for it", blocked: "waiting for room behind it", preempted: "preempted", client: "its client did not read" };

// Where it was at each moment: bars that follow each other without a hole, and the causes that they add up to.
function Inside({ explained }) {
  const stages = [...new Set(explained.rows.map(({ stage, kind }) => (kind === "preempted" || kind === "client" ? KIND_WORDS[kind] : stage)))];
  const ofStage = (name) => explained.rows.filter(({ stage, kind }) => name === (kind === "preempted" || kind === "client" ? KIND_WORDS[kind] : stage));
  return html`<section class="inside"><h3>Stage by stage</h3>
    <div class="rows">${stages.map((name) => html`<${Stage} key=${name} name=${name} rows=${ofStage(name)} span=${explained.total_us} />`)}</div>
    <${Legend} entries=${[["decode", "in a stage"], ["wait", "waiting for it"], ["blocked", "waiting for room behind it"]]} />
    <h3>Why</h3>
    <table><tbody>${explained.causes.filter(({ share }) => share >= 0.001).map(({ name, us, share, sentence }) => html`<tr key=${name}><th scope="row">${name}</th><td class="free">${sentence}</td><td class="num only-wide">${seconds(us / 1e6)}</td><td class="num">${percent(share)}</td></tr>`)}</tbody></table>
  </section>`;
}

function Stage({ name, rows, span }) {
  const total = (kind) => rows.filter((row) => row.kind === kind).reduce((sum, row) => sum + row.total_us, 0);
  const words = rows.map(({ kind, total_us: us }) => `${KIND_WORDS[kind]} ${seconds(us / 1e6)}`).join(", ");
  const shown = total("service") || rows[0].total_us;
  return html`<div class="row"><span>${name}</span>
    <span class="track" role="img" aria-label=${`${name}: ${words}`} title=${words}>${rows.map(({ kind, pieces }) => pieces.map(([begin, end, filled]) => html`<span class=${`piece ${kind}`}
      style=${{ left: `${(100 * begin) / span}%`, width: `${(100 * (end - begin)) / span}%`, opacity: Math.max(0.25, Math.min(1, filled / (end - begin || 1))) }}></span>`))}</span>
    <span class="took" data-service=${name} data-value=${total("service")}>${seconds(shown / 1e6)}</span></div>`;
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
