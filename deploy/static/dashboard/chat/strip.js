// The waterfall of an answer in one line, live: its periods, a tick for each token, and the inspected token.

import { html } from "../../vendor/htm-preact.standalone.module.js";
import { count, rate, seconds } from "../format.js";
import { Canvas, colour, useWidth } from "../ui.js";
import { Explained } from "../waterfall.js";
import { chat } from "./state.js";

const WORDS = { wait: "waiting", prefill: "prefill", decode: "decode", gap: "not in a step", preempted: "preempted", after: "after the last step" };

export function Strip({ app, node }) {
  const isWatched = chat.watched === node.id;
  const sequence = node.explained?.sequences?.[node.choice] ?? node.explained?.sequences?.[0];
  const ticks = node.tokens.length ? node.tokens.filter(({ ms }) => ms !== null).map(({ ms }) => ms) : node.chunksMs;
  const nowMs = node.isRunning ? performance.now() - node.sentMs : (node.endedMs ?? 0) - node.sentMs;
  const endUs = node.explained?.ended_us ?? null;
  const spanMs = Math.max(endUs === null ? nowMs : endUs / 1e3, ticks.at(-1) ?? 0, 1);
  const unfold = (event) => {
    node.isUnfolded = event.target.open;
    if (node.isUnfolded) chat.watched = node.id;
    app.redraw();
  };
  return html`<details class="timing" open=${Boolean(node.isUnfolded)} onToggle=${unfold}>
    <summary><span class="unseen">Waterfall: </span><${Line} node=${node} pieces=${sequence?.pieces ?? []} ticks=${ticks} spanMs=${spanMs} />
      <span class="words" data-figure="timing">${words(node, ticks, spanMs)}</span></summary>
    ${node.isUnfolded && node.requestId && html`<${Explained} explained=${node.explained ?? (isWatched ? app.feed.data.request : null)} id=${node.requestId} nowS=${app.feed.nowS()} />`}
  </details>`;
}

// Keeps what the feed says of the watched answer.
export function keepExplained(app) {
  const node = chat.tree.nodes[chat.watched];
  const told = app.feed.data.request;
  if (app.feed.isPast || !node || !told?.sequences || told.id !== node.requestId) return;
  for (const other of Object.values(chat.tree.nodes)) if (other.requestId === told.id) other.explained = told;
}

function Line({ node, pieces, ticks, spanMs }) {
  const [ref, width] = useWidth(300);
  const place = (us) => `${Math.min(100, Math.max(0, us / 10 / spanMs))}%`;
  const inspected = chat.token?.node === node.id ? node.tokens[chat.token.at] : null;
  const draw = (context) => {
    context.fillStyle = colour("ink");
    for (const tick of ticks) context.fillRect(Math.min(width - 1, (tick / spanMs) * width), 3, 1, 8);
    if (!inspected || inspected.ms === null) return;
    context.fillStyle = colour("mark-strong");
    context.fillRect(Math.min(width - 3, (inspected.ms / spanMs) * width - 1), 0, 3, 14);
  };
  return html`<span class="line" ref=${ref} aria-hidden="true">${pieces.map(([kind, begin, end]) => html`<span class=${`piece ${kind}`} title=${WORDS[kind]} style=${{ left: place(begin), right: `calc(100% - ${place(end ?? spanMs * 1e3)})` }}></span>`)}
    <${Canvas} width=${width} height=${14} draw=${draw} /></span>`;
}

function words(node, ticks, spanMs) {
  const num = node.usage?.completion_tokens ?? ticks.length;
  const decodeMs = (ticks.at(-1) ?? 0) - (ticks[0] ?? 0);
  const drafted = node.tokens.filter(({ isDrafted }) => isDrafted).length;
  if (!ticks.length && node.isRunning) return node.progress > 0 && node.progress < 1 ? `reading the prompt: ${Math.round(100 * node.progress)} % of ${count(node.numPrompt)} tokens` : "waiting for the first token";
  const parts = [
    `${count(num)} ${num === 1 ? "token" : "tokens"}`,
    ticks.length > 0 && `first after ${seconds(ticks[0] / 1e3)}`,
    ticks.length > 2 && decodeMs > 0 && `${rate((1e3 * (ticks.length - 1)) / decodeMs)} tokens/s`,
    node.numCached > 0 && `${count(node.numCached)} of ${count(node.numPrompt)} prompt tokens cached`,
    drafted > 0 && `${count(drafted)} drafted`,
    `${seconds(spanMs / 1e3)} in all`,
  ];
  return parts.filter(Boolean).join(" · ");
}
