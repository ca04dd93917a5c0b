// The field in which one writes the next turn.

import { html } from "../../vendor/htm-preact.standalone.module.js";
import { say, stop } from "./run.js";
import { chat, save } from "./state.js";

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);

export function Composer({ app, path, isChat }) {
  const last = path.at(-1) ?? null;
  const isRunning = chat.running !== null;
  const waits = last?.role === "assistant" && last.calls?.length > 0; // for the results of its calls
  const canSend = () => chat.draft.trim() !== "" || (!isChat && path.length > 0) || (isChat && last?.role !== "assistant" && path.length > 0);
  const send = (event) => {
    event?.preventDefault();
    if (chat.running || waits || !canSend()) return;
    const text = chat.draft;
    chat.draft = "";
    say(app, last, text);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const onInput = (event) => {
    chat.draft = event.target.value;
    app.redraw();
  };
  const hint = waits ? "Give the results of the calls above, or edit a turn." : isChat ? "Say something to the model" : path.length ? "More text, or nothing, and the model goes on" : "A text that the model completes";
  return html`<form class="composer" onSubmit=${send}>
    <label class="unseen" for="chat-draft">${isChat ? "Message" : "Text"}</label>
    <textarea id="chat-draft" rows="1" placeholder=${hint} value=${chat.draft} onInput=${onInput} onKeyDown=${onKeyDown} onBlur=${save} disabled=${waits}></textarea>
    ${isRunning ? html`<button type="button" class="stop" onClick=${stop} title="Escape">Stop</button>` : html`<button disabled=${waits || !canSend()} title=${IS_MAC ? "⌘ Enter" : "Ctrl+Enter"}>Send <kbd aria-hidden="true">${IS_MAC ? "⌘" : "Ctrl"} ⏎</kbd></button>`}
  </form>`;
}
