// What is known of one token, and the alternatives to branch to.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact.standalone.module.js";
import { count, percent, seconds } from "../format.js";
import { gapMs } from "./answer.js";
import { branch } from "./run.js";
import { chat } from "./state.js";

const WIDTH = 320; // pixels, as in the style sheet

// A token in a line of text: quoted, with its white space visible.
export const shown = (text) => (text === "" ? "end of turn" : JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replace(/^ | $/g, "␣"));

const probability = (logprob) => (Math.exp(logprob) < 0.0005 ? "<0.1 %" : percent(Math.exp(logprob)));

export function describe(node, at) {
  const { text, ms, logprob, isDrafted } = node.tokens[at];
  const gap = gapMs(node.tokens, at);
  const parts = [`Token ${at + 1} of ${node.tokens.length}: ${shown(text)}`, ms !== null && `after ${seconds(ms / 1e3)}`, gap !== null && `gap ${seconds(gap / 1e3)}`, `probability ${probability(logprob)}`, isDrafted && "drafted"];
  return parts.filter(Boolean).join(", ");
}

export function Inspector({ app, node, at, isPinned, box }) {
  const card = useRef(null);
  const [place, setPlace] = useState({ left: 0, top: 0 });
  useLayoutEffect(() => {
    const span = box.current?.querySelector(`[data-at="${at}"]`);
    if (!span) return;
    const left = Math.max(0, Math.min(span.offsetLeft, box.current.clientWidth - WIDTH));
    const [line, height] = [span.getBoundingClientRect(), card.current.offsetHeight + 12];
    const isAbove = line.bottom + height > innerHeight && line.top > height;
    setPlace({ left, top: isAbove ? span.offsetTop - height + 6 : span.offsetTop + span.offsetHeight + 6 });
  }, [at, node.id, isPinned]);
  useEffect(() => {
    if (getComputedStyle(card.current).position === "fixed") box.current.querySelector(`[data-at="${at}"]`)?.scrollIntoView({ block: "start" }); // above the sheet
    if (isPinned) card.current.querySelector("button:not(:disabled)")?.focus({ preventScroll: true });
  }, [at, isPinned]);
  const close = () => {
    chat.token = null;
    box.current?.focus({ preventScroll: true });
    app.redraw();
  };
  const token = node.tokens[at];
  if (!token) return null;
  const onKeyDown = (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") step(card.current, event.key === "ArrowDown" ? 1 : -1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class=${`inspector ${isPinned ? "pinned" : ""}`} ref=${card} role="group" aria-label=${`Token ${at + 1}`} onKeyDown=${onKeyDown} onClick=${(event) => event.stopPropagation()}
      style=${{ left: `${place.left}px`, top: `${place.top}px` }}>
    <header><code class="text">${shown(token.text)}</code><span class="note">token ${count(at + 1)} of ${count(node.tokens.length)} · id ${token.id}</span>
      ${isPinned && html`<button class="quiet close" aria-label="Close" onClick=${close}>×</button>`}</header>
    <${Facts} node=${node} at=${at} />
    ${token.top.length > 0 && html`<${Alternatives} app=${app} node=${node} at=${at} token=${token} isPinned=${isPinned} />`}
  </div>`;
}

function Facts({ node, at }) {
  const { ms, logprob, rank, isDrafted, isChosen } = node.tokens[at];
  const gap = gapMs(node.tokens, at);
  const facts = [
    ["since request", ms === null ? "in an earlier answer" : seconds(ms / 1e3)],
    ["gap", gap === null ? "–" : seconds(gap / 1e3)],
    ["probability", `${probability(logprob)} (log ${logprob.toFixed(2)})`],
    ["rank", isChosen ? "your choice" : count(rank)],
    ["drafted", isDrafted ? "yes, accepted" : "no"],
    ["prompt cached", node.numPrompt === null ? "–" : `${count(node.numCached)} of ${count(node.numPrompt)}`],
  ];
  return html`<dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd data-fact=${name}>${value}</dd></div>`)}</dl>`;
}

function Alternatives({ app, node, at, token, isPinned }) {
  const canBranch = isPinned && !chat.running && node.promptIds !== null && !node.hasUnknown;
  const go = (event, other) => {
    branch(app, node, at, other);
    if (event.detail === 0) document.getElementById("chat-draft")?.focus({ preventScroll: true }); // by keyboard: its button is gone
  };
  return html`<ol class="alternatives">${token.top.map((other) => {
    const [id, text, logprob] = other;
    const inside = html`<code>${shown(text)}</code><span class="share"><span style=${{ width: `${100 * Math.exp(logprob)}%` }}></span></span><span class="num">${probability(logprob)}</span>`;
    if (id === token.id) return html`<li class="taken" key=${id}>${inside}</li>`;
    return html`<li key=${id}>${isPinned ? html`<button disabled=${!canBranch} title="Go on from here with this token, as a new branch" onClick=${(event) => go(event, other)}>${inside}</button>` : inside}</li>`;
  })}</ol>
  <p class="note">${!isPinned ? "Click for a branch with another token." : chat.running ? "Wait for the answer, or stop it, to branch." : !canBranch ? "No branch here: the page does not know all tokens of this answer." : "Choose a token to go on with it, as a new branch."}</p>`;
}

function step(card, by) {
  const buttons = [...card.querySelectorAll("button:not(:disabled)")];
  buttons[(buttons.indexOf(document.activeElement) + by + buttons.length) % buttons.length]?.focus();
}
