// Takes the next request away: as a command of curl, or as a program in Python.

import { html } from "../../vendor/htm-preact.standalone.module.js";
import { chatBody, completionBody } from "./body.js";
import { curl, python } from "./copies.js";
import { chat } from "./state.js";

export function Take({ app, path, isChat, offered }) {
  const take = (make) => async (event) => {
    event.target.closest("details").open = false;
    try {
      const asked = chat.draft.trim() ? [...path, { role: "user", text: chat.draft }] : upToQuestion(path, isChat);
      const text = make(isChat ? chatBody(chat.settings, asked, offered) : completionBody(chat.settings, asked));
      await navigator.clipboard.writeText(text);
      chat.note = chat.said = "Copied.";
    } catch (error) {
      chat.note = error instanceof SyntaxError ? error.message : "The browser does not let this page copy: it does so over https, and on localhost.";
    }
    app.redraw();
  };
  const url = new URL(".", location.href).href;
  const hasKey = Boolean(app.feed.keys.key);
  const name = chat.settings.model || (chat.models?.[0]?.id ?? "");
  return html`<details class="take"><summary class="quiet">Copy as</summary><div>
    <button class="quiet" onClick=${take((body) => curl(url, isChat ? "v1/chat/completions" : "v1/completions", { model: name, ...body }, hasKey))}>curl</button>
    <button class="quiet" onClick=${take((body) => python(url, body, name, hasKey))}>Python</button></div></details>`;
}

// The request that gave the last answer.
function upToQuestion(path, isChat) {
  const last = path.at(-1);
  return last?.role === "assistant" && isChat ? path.slice(0, -1) : path;
}
