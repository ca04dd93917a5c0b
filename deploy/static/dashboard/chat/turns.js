// The turns that are shown, each with what one can do with it.

import { html, useState } from "../../vendor/htm-preact.standalone.module.js";
import { Calls } from "./calls.js";
import { explainEnd } from "./endings.js";
import { answer, more, say, setText, textOf } from "./run.js";
import { chat, save } from "./state.js";
import { Strip } from "./strip.js";
import { Tokens } from "./tokens.js";

export const Turns = ({ app, path }) => html`<ol class="turns" aria-label="Conversation">${path.map((node) => html`<${Turn} key=${node.id} app=${app} node=${node} isLast=${node === path.at(-1)} />`)}</ol>`;

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

function Turn({ app, node, isLast }) {
  const isAnswer = node.role === "assistant";
  const name = node.role === "tool" ? `Result of ${node.name}` : NAMES[node.role];
  return html`<li class=${`turn ${node.role}`} data-turn=${node.role}>
    <header><h2>${name}</h2>${isAnswer && node.settings?.model && html`<span class="note">${node.settings.model}</span>`}${node.branchOf && html`<span class="badge">branch at token ${node.branchOf.at + 1}</span>`}<${Switcher} app=${app} node=${node} />${!isAnswer && chat.editing !== node.id && html`<${Actions} app=${app} node=${node} />`}</header>
    ${chat.editing === node.id ? html`<${Editor} app=${app} node=${node} />` : isAnswer ? html`<${Answer} app=${app} node=${node} />` : html`<div class="text">${node.text}</div>`}
    ${isAnswer && html`<${End} app=${app} node=${node} isLast=${isLast} />`}
    ${isAnswer && (node.requestId || node.isRunning) && html`<${Strip} app=${app} node=${node} />`}
    ${isAnswer && chat.editing !== node.id && !node.isRunning && html`<${Actions} app=${app} node=${node} />`}
  </li>`;
}

// The reasoning, the text and the calls of an answer; its raw tokens apart where its text is not all of them.
function Answer({ app, node }) {
  const raw = textOf(node.tokens);
  const thoughtsAt = node.thoughts && node.tokens.length ? raw.indexOf(node.thoughts) : -1;
  const begin = node.text ? raw.lastIndexOf(node.text) : 0;
  const isRaw = node.tokens.length > 0 && (raw === node.text || (!node.calls.length && !node.thoughts && !node.text));
  const hasPart = !isRaw && node.text && node.tokens.length > 0 && begin >= 0;
  const isEmpty = !node.text && !node.thoughts && !node.calls.length;
  return html`<div class="text" data-figure="answer">
    ${node.thoughts && html`<details class="thoughts" open=${node.isRunning && !node.text}><summary>Reasoning</summary><div>${thoughtsAt < 0 ? node.thoughts : html`<${Tokens} app=${app} node=${node} from=${thoughtsAt} upto=${thoughtsAt + node.thoughts.length} label="Reasoning" />`}</div></details>`}
    ${isRaw ? html`<${Tokens} app=${app} node=${node} label="Answer" />` : hasPart ? html`<${Tokens} app=${app} node=${node} from=${begin} upto=${begin + node.text.length} label="Answer" />` : node.text}
    ${isEmpty && !isRaw && node.isRunning && html`<span class="caret" aria-hidden="true"></span>`}
    ${node.calls.length > 0 && html`<${Calls} app=${app} node=${node} />`}
    ${!isRaw && !hasPart && node.tokens.length > 0 && html`<${RawTokens} app=${app} node=${node} />`}
    ${hasPart && html`<${RawTokens} app=${app} node=${node} />`}
  </div>`;
}

function RawTokens({ app, node }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="raw" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}><summary>All ${node.tokens.length} tokens, as the model wrote them</summary>
    ${isOpen && html`<${Tokens} app=${app} node=${node} label="All tokens" />`}</details>`;
}

function Switcher({ app, node }) {
  const siblings = chat.tree.siblingsOf(node);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(node);
  const go = (by) => {
    chat.token = null;
    chat.tree.pick(siblings[at + by]);
    chat.said = `${at + by + 1} of ${siblings.length}`;
    save();
    app.redraw();
  };
  return html`<span class="switcher"><button class="quiet" aria-label="Earlier version" disabled=${at === 0} onClick=${() => go(-1)}>‹</button>
    <span data-figure="version">${at + 1} / ${siblings.length}</span><button class="quiet" aria-label="Later version" disabled=${at === siblings.length - 1} onClick=${() => go(1)}>›</button></span>`;
}

function Editor({ app, node }) {
  const [text, setDraft] = useState(node.text);
  const done = () => {
    chat.editing = null;
    app.redraw();
  };
  const send = (event) => {
    event?.preventDefault();
    if (node.role === "user") return say(app, chat.tree.parentOf(node), text);
    if (node.role === "tool") return answer(app, chat.tree.add(chat.tree.parentOf(node), { role: "tool", name: node.name, callId: node.callId, text }));
    const { calls, mode } = node;
    setText(chat.tree.add(chat.tree.parentOf(node), { role: "assistant", calls, tokens: [], thoughts: "", chunksMs: [], mode, isEdited: true }), text);
    save();
    return done();
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    else if (event.key === "Escape") done();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<form class="editor" onSubmit=${send}><textarea aria-label="Text of the turn" value=${text} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown} ref=${(area) => area && !area.dataset.seen && ((area.dataset.seen = "1"), area.focus())}></textarea>
    <div class="bar"><button>${node.role === "assistant" ? "Save as a version" : "Send"}</button><button type="button" class="quiet" onClick=${done}>Cancel</button></div></form>`;
}

const BUTTONS = {
  more: ["Go on", (app, node) => more(app, node)],
  again: ["Try again", (app, node) => answer(app, chat.tree.parentOf(node))],
  keys: ["Keys", (app) => app.askKeys()],
  models: ["Choose a model", () => document.getElementById("chat-model")?.focus()],
  complete: ["Complete text instead", (app, node) => { chat.settings.mode = "completion"; answer(app, chat.tree.parentOf(node)); }],
};

function End({ app, node, isLast }) {
  const end = explainEnd(node);
  if (!end) return null;
  const tone = isLast || end.tone === "bad" ? end.tone : "";
  return html`<div class=${`end ${tone}`} role=${end.tone === "bad" ? "alert" : null} data-figure="end"><p>${end.what}${end.advice && html` <span>${end.advice}</span>`}</p>
    ${isLast && end.actions.map((name) => html`<button class="quiet" onClick=${() => BUTTONS[name][1](app, node)}>${BUTTONS[name][0]}</button>`)}</div>`;
}

function Actions({ app, node }) {
  const edit = () => {
    chat.editing = node.id;
    app.redraw();
  };
  const copy = () => navigator.clipboard?.writeText(node.text).then(() => { chat.said = "Copied"; app.redraw(); });
  return html`<div class="actions">
    ${node.role === "assistant" && html`<button class="quiet" onClick=${() => answer(app, chat.tree.parentOf(node))}>Regenerate</button>`}
    <button class="quiet" onClick=${edit}>Edit</button>
    ${node.text && html`<button class="quiet" onClick=${copy}>Copy</button>`}
    ${node.role === "assistant" && node.requestId && html`<a href=${`#/waterfall/${encodeURIComponent(node.requestId)}`}>Waterfall</a>`}
  </div>`;
}

