// The calls of tools in an answer, as cards in which one gives their results.

import { html, useState } from "../../vendor/htm-preact.standalone.module.js";
import { answer } from "./run.js";
import { chat, save } from "./state.js";

export function Calls({ app, node }) {
  const results = chat.tree.childrenOf(node);
  const isAnswered = results.length > 0;
  const [texts, setTexts] = useState({});
  const send = (event) => {
    event.preventDefault();
    let last = node;
    node.calls.forEach((call, i) => {
      last = chat.tree.add(last, { role: "tool", name: call.name, callId: call.id, text: texts[i] ?? "" });
    });
    save();
    answer(app, last);
  };
  return html`<form class="calls" onSubmit=${send}>
    ${node.calls.map((call, i) => html`<section class="call" key=${i} aria-label=${`Call of ${call.name}`}>
      <header><span class="badge">tool call</span> <code>${call.name}</code></header>
      <pre data-figure="arguments">${pretty(call.text)}</pre>
      ${!isAnswered && !node.isRunning && html`<label>Result of ${call.name}
        <textarea rows="2" placeholder="What the tool gives back, e.g. JSON" value=${texts[i] ?? ""} onInput=${(event) => setTexts({ ...texts, [i]: event.target.value })} required></textarea></label>`}
    </section>`)}
    ${!isAnswered && !node.isRunning && html`<div class="bar"><button>Send ${node.calls.length === 1 ? "the result" : `${node.calls.length} results`}</button></div>`}
  </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is not complete, or no JSON
  }
}
