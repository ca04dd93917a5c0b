// The branches of the conversation as a small tree, to switch between them.

import { html } from "../../vendor/htm-preact.standalone.module.js";
import { shown } from "./inspector.js";
import { chat, save } from "./state.js";

export function Branches({ app }) {
  const path = new Set(chat.tree.path().map(({ id }) => id));
  const go = (node) => {
    chat.token = null;
    chat.tree.pick(node);
    save();
    app.redraw();
  };
  return html`<nav class="branches" aria-label="Branches"><${Level} parent=${null} path=${path} go=${go} /></nav>`;
}

// Turns without siblings stand below each other; a level is indented only where there is a choice.
function Level({ parent, path, go }) {
  const children = chat.tree.childrenOf(parent);
  if (!children.length) return null;
  const items = children.map((node) => html`<li key=${node.id}><${Item} node=${node} isShown=${path.has(node.id)} go=${go} /><${Level} parent=${node} path=${path} go=${go} /></li>`);
  return html`<ul class=${children.length > 1 ? "fork" : ""}>${items}</ul>`;
}

function Item({ node, isShown, go }) {
  return html`<button class=${`quiet ${node.role}`} aria-current=${isShown ? "true" : null} onClick=${() => go(node)}>${label(node)}</button>`;
}

function label(node) {
  if (node.branchOf) return html`<code>${shown(node.tokens[node.branchOf.at]?.text ?? "")}</code> ${cut(node.tokens.slice(node.branchOf.at + 1).map(({ text }) => text).join(""))}`;
  if (node.role === "tool") return `result: ${cut(node.text)}`;
  return cut(node.text) || (node.calls?.length ? `calls ${node.calls.map(({ name }) => name).join(", ")}` : "(empty)");
}

const cut = (text) => (text.trim().length > 44 ? `${text.trim().slice(0, 42)}…` : text.trim());
