// The waterfall of one request: a bar for each period, a tick for each token.

import { html } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds, shortId } from "./format.js";
import { Canvas, Card, colour, Figure, Legend, Missing, useWidth, Wide } from "./ui.js";

export const title = "Waterfall";
export const about = "The time of one request from its arrival to its end, token by token.";
export const topics = ({ arg }) => ({ recent: {}, requests: { offset: 0, limit: 12, newest_first: true }, ...(arg ? { request: { id: arg } } : {}) });

// Kind of period -> its name and meaning.
const KINDS = {
  wait: ["waiting", "from its arrival to its first step"],
  prefill: ["prefill", "its prompt is computed"],
  decode: ["decode", "one or more tokens per step"],
  gap: ["not in a step", "steps ran without it"],
  preempted: ["preempted", "it had no blocks or no slot"],
  after: ["after the last step", "its text is made and sent, or a step is running"],
};

export function View({ app }) {
  const { request, recent, requests } = app.feed.data;
  const id = app.arg;
  const isRecorded = Boolean(app.feed.recording);
  return html`
    ${id && html`<${Card} title=${html`<code>${id}</code>`}><${Explained} explained=${request} id=${id} nowS=${app.feed.nowS()} isRecorded=${isRecorded} /><//>`}
    <${Card} title="Select a request" note=${isRecorded ? "Live requests at this time, and the last ended ones." : "Live requests, and the last ended ones."}><${Chooser} live=${requests?.rows ?? []} recent=${recent?.rows ?? []} chosen=${id} nowS=${app.feed.nowS()} /><//>`;
}

function Chooser({ live, recent, chosen, nowS }) {
  const rows = [
    ...live.map((row) => ({ ...row, how: row.state, took_s: nowS === null ? null : nowS - row.arrival_s })),
    ...[...recent].reverse().slice(0, 24).map((row) => ({ ...row, how: row.cause === "finish" ? "finished" : row.cause })),
  ];
  if (!rows.length) return html`<${Missing}>No requests yet.<//>`;
  return html`<${Wide} label="Requests"><table><thead><tr><th scope="col">request</th><th scope="col">state</th><th scope="col" class="num">time</th><th scope="col" class="num">first token</th><th scope="col" class="num only-wide">prompt</th><th scope="col" class="num">answer</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id}><th scope="row"><a href=${`#/waterfall/${encodeURIComponent(row.id)}`} title=${row.id} aria-current=${row.id === chosen ? "true" : null}>${shortId(row.id)}</a></th>
      <td>${row.how}</td><td class="num">${seconds(row.took_s)}</td><td class="num">${seconds(row.ttft_s)}</td><td class="num only-wide">${count(row.num_prompt_tokens)}</td><td class="num">${count(row.num_generated_tokens)}</td></tr>`)}</tbody></table><//>`;
}

// One request in the format of deploy/dashboard/timeline.py. Also used by the playground.
export function Explained({ explained, id, nowS, isRecorded }) {
  if (!explained || explained.id !== id) return html`<p class="note">Reading the trace…</p>`;
  if (!explained.sequences && isRecorded) return html`<p class="missing">The request has not arrived at this time, or is not in the recording.</p>`;
  if (!explained.sequences) return html`<p class="missing">The trace does not cover this request: it has not arrived yet, or newer events have replaced its own.</p>`;
  const isOver = explained.ended_us !== null && explained.ended_us !== undefined;
  const nowUs = nowS === null ? 0 : (nowS - explained.arrival_s) * 1e6;
  const last = Math.max(...explained.sequences.flatMap(({ pieces }) => pieces.map(([, begin, end]) => end ?? begin)), 1);
  const span = isOver ? explained.ended_us : Math.max(last, nowUs);
  return html`<div class="waterfall">
    ${explained.explained && html`<p class="sentence">${explained.explained.sentence}</p>`}
    ${explained.sequences.map((sequence, i) => html`<${Sequence} key=${sequence.sequence_id} sequence=${sequence} span=${span} name=${explained.sequences.length > 1 ? `choice ${i + 1}` : null} isOver=${isOver} cause=${explained.cause} isExplained=${Boolean(explained.explained)} />`)}
    ${explained.explained && html`<${Inside} explained=${explained.explained} />`}
    ${isRecorded && html`<p class="note">In a recording, the time of a token is that of schedule's step result. Detokenization and the network are not included, and sampling is part of execute.</p>`}
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
      <${Figure} name=${isOver ? "total" : "so far"} value=${seconds(span / 1e6)} id="altogether" />
      <${Figure} name="first token after" value=${ticks.length ? seconds(ticks[0] / 1e6) : "–"} />
      <${Figure} name="tokens" value=${count(ticks.length)} id="ticks" />
      <${Figure} name="inter-token latency" value=${gaps.length ? seconds(gaps.reduce((a, b) => a + b, 0) / gaps.length / 1e6) : "–"} unit="mean" />
      <${Figure} name="longest gap" value=${gaps.length ? seconds(Math.max(...gaps) / 1e6) : "–"} />
      <${Figure} name="from the prefix cache" value=${count(sequence.num_cached_tokens)} unit="tokens" />
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

const KIND_WORDS = { service: "in the stage", wait: "waiting for the stage", blocked: "blocked by the next channel", preempted: "preempted", client: "client did not read" };

// The request's stage at each time, as consecutive bars, and the causes that add up to its time.
function Inside({ explained }) {
  const stages = [...new Set(explained.rows.map(({ stage, kind }) => (kind === "preempted" || kind === "client" ? KIND_WORDS[kind] : stage)))];
  const ofStage = (name) => explained.rows.filter(({ stage, kind }) => name === (kind === "preempted" || kind === "client" ? KIND_WORDS[kind] : stage));
  return html`<section class="inside"><h3>Stage by stage</h3>
    <div class="rows">${stages.map((name) => html`<${Stage} key=${name} name=${name} rows=${ofStage(name)} span=${explained.total_us} />`)}</div>
    <${Legend} entries=${[["decode", "in the stage"], ["wait", "waiting for the stage"], ["blocked", "blocked by the next channel"]]} />
    <h3>Causes</h3>
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

// The largest parts of the time, in words.
function story(kinds, sum, span, isOver) {
  const parts = kinds.map((kind) => [sum(kind) / span, kind]).filter(([share]) => share > 0.03).sort((a, b) => b[0] - a[0]);
  const words = parts.map(([share, kind]) => `${percent(share)} ${KINDS[kind][0]} (${KINDS[kind][1]})`);
  return `${isOver ? "Time" : "So far"}: ${words.join("; ")}.`;
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
