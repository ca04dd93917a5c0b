// The text of an answer as its tokens: each can be looked at by mouse, touch and keyboard.

import { html, useEffect, useMemo, useRef } from "../../vendor/htm-preact.standalone.module.js";
import { tokenClass } from "./colours.js";
import { describe, Inspector } from "./inspector.js";
import { marksAt } from "./marks.js";
import { chat } from "./state.js";

const GROUP = 48; // tokens that are drawn again together

// The tokens of [from, upto) characters of the answer's raw text.
export function Tokens({ app, node, from = 0, upto = Infinity, label }) {
  const box = useRef(null);
  const inspected = chat.token?.node === node.id && chat.token.part === label ? chat.token : null;
  const parts = useMemo(() => cut(node.tokens, from, upto), [node.tokens.length, from, upto, node.id]);
  const groups = [];
  for (let i = 0; i < parts.length; i += GROUP) groups.push(parts.slice(i, i + GROUP));
  const look = (at, isPinned) => {
    chat.token = at === null ? null : { node: node.id, part: label, at, isPinned };
    app.redraw();
  };
  const here = (event) => {
    const place = event.target.closest("[data-at]")?.dataset.at;
    return place === undefined ? null : Number(place);
  };
  const onKeyDown = (event) => {
    if (event.target !== box.current) return;
    const at = moved(event.key, inspected?.at ?? null, parts, box.current);
    if (at !== null) look(at, false);
    else if (event.key === "Enter" && inspected) look(inspected.at, true);
    else if (event.key !== "Escape" || !inspected) return;
    else look(null);
    event.preventDefault();
    event.stopPropagation();
    if (at !== null) chat.said = describe(node, at);
  };
  useEffect(() => mark(box.current, inspected?.at ?? null), [inspected?.at, node.version]);
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label=${`${label}, ${node.tokens.length} tokens: arrow keys go from one to the next, Enter shows what else was likely`}
      onMouseOver=${(event) => { const at = here(event); if (at !== null && !chat.token?.isPinned) look(at, false); }}
      onMouseLeave=${() => chat.token && !chat.token.isPinned && look(null)}
      onClick=${(event) => { const at = here(event); if (at !== null) look(inspected?.isPinned && inspected.at === at ? null : at, true); }}
      onKeyDown=${onKeyDown}>
    ${groups.map((group, i) => html`<${Group} key=${i} node=${node} group=${group} mode=${chat.settings.colours} scale=${node.usualGapMs} />`)}${
    node.isRunning && html`<span class="caret" aria-hidden="true"></span>`}
    ${inspected && html`<${Inspector} app=${app} node=${node} at=${inspected.at} isPinned=${inspected.isPinned} box=${box} />`}
  </div>`;
}

function Group({ node, group, mode, scale }) {
  const [last, only, marks] = [group.at(-1), mode === "gap" ? scale : null, group.map(([, , mark]) => mark).join()];
  return useMemo(
    () => html`<span>${group.map(([at, text, mark]) => html`<span class=${`${tokenClass(node, at, mode)} ${mark}`} data-at=${at}>${text || (isEnd(node, at) ? html`<span class="ending">end of turn</span>` : "")}</span>`)}</span>`,
    [node.id, group.length, last[0], last[1], mode, only, marks, isEnd(node, last[0])],
  );
}

const isEnd = (node, at) => at === node.tokens.length - 1 && node.end?.reason === "stop" && node.tokens[at].text === "";

// [place, text, mark] of the tokens with characters in [from, upto); tokens without text belong to what is before them.
function cut(tokens, from, upto) {
  const parts = [];
  let at = 0;
  tokens.forEach(({ text }, i) => {
    const [begin, end] = [at, (at += text.length)];
    if (end > from ? begin < upto : end === from && begin === end && from === 0) parts.push([i, text.slice(Math.max(0, from - begin), upto - begin)]);
    else if (begin === end && begin > from && begin <= upto) parts.push([i, ""]);
  });
  let place = 0;
  const places = parts.map(([, { length }]) => (place += length) - length + Math.max(0, Math.min(1, length - 1))); // often after a space
  const marks = marksAt(parts.map(([, text]) => text).join(""), places);
  return parts.map(([i, text], n) => [i, text, marks[n]]);
}

// The token that a key goes to; null for other keys.
function moved(key, at, parts, box) {
  const places = parts.map(([place]) => place);
  if (!places.length) return null;
  const now = places.indexOf(at);
  if (key === "ArrowRight") return places[Math.min(places.length - 1, now + 1)];
  if (key === "ArrowLeft") return places[Math.max(0, now - 1)];
  if (key === "Home") return places[0];
  if (key === "End") return places.at(-1);
  if (key === "ArrowDown" || key === "ArrowUp") return inNextLine(key === "ArrowDown" ? 1 : -1, at ?? places[0], box);
  return null;
}

function inNextLine(step, at, box) {
  const spans = [...box.querySelectorAll("[data-at]")].filter((span) => span.offsetWidth);
  const from = spans.find((span) => Number(span.dataset.at) === at) ?? spans[0];
  const beyond = spans.filter((span) => step * (span.offsetTop - from.offsetTop) > 4);
  const line = beyond.length ? (step > 0 ? beyond[0] : beyond.at(-1)).offsetTop : null;
  const found = beyond.filter((span) => Math.abs(span.offsetTop - line) <= 4).sort((a, b) => Math.abs(a.offsetLeft - from.offsetLeft) - Math.abs(b.offsetLeft - from.offsetLeft))[0];
  return Number((found ?? from).dataset.at);
}

function mark(box, at) {
  for (const span of box.querySelectorAll(".tok.at")) span.classList.remove("at");
  if (at !== null) box.querySelector(`[data-at="${at}"]`)?.classList.add("at");
}
