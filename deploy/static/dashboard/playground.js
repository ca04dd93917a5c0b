// The playground: a conversation with the served model, in which each token can be looked at.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.standalone.module.js";
import { Branches } from "./chat/branches.js";
import { isChat as chats } from "./chat/body.js";
import { legend, MODES } from "./chat/colours.js";
import { Composer } from "./chat/composer.js";
import { offeredBy, readModels, stop } from "./chat/run.js";
import { Side } from "./chat/side.js";
import { chat, restart, save } from "./chat/state.js";
import { keepExplained } from "./chat/strip.js";
import { Take } from "./chat/take.js";
import { Turns } from "./chat/turns.js";
import { Choice, Legend, Missing } from "./ui.js";

export const title = "Playground";
export const about = "Talk with the model, and look into each token of its answers.";

export const topics = () => {
  const id = chat.tree.nodes[chat.watched]?.requestId;
  return id ? { request: { id } } : {};
};

export const View = ({ app }) =>
  app.feed.recording
    ? html`<${Missing}>Not available for a recording. Use the dashboard of a running server: <code>millrace serve</code>.<//>`
    : html`<${Chat} app=${app} />`;

function Chat({ app }) {
  const [isSideOpen, openSide] = useState(false);
  app.state.chat = chat; // for the browser's console and the tests
  const path = chat.tree.path();
  const offered = offeredBy(app);
  const isChat = chats(chat.settings, offered);
  keepExplained(app);
  useEffect(() => void readModels(app), [app.feed.keys.key, Boolean(app.feed.hello)]);
  useEffect(() => listen(app), []);
  useEffect(follow);
  const done = useRef(null);
  const close = () => {
    openSide(false);
    document.getElementById("chat-settings")?.focus();
  };
  useEffect(() => void (isSideOpen && done.current.focus({ preventScroll: true })), [isSideOpen]);
  return html`<div class="chat">
    <section class="talk card" aria-label="Conversation">
      <${Top} app=${app} path=${path} isChat=${isChat} offered=${offered} openSide=${openSide} />
      ${path.length ? html`<${Turns} app=${app} path=${path} />` : html`<${Welcome} app=${app} isChat=${isChat} />`}
      <div class="foot"><${Composer} app=${app} path=${path} isChat=${isChat} /></div>
      <p class="unseen" role="status" aria-live="polite">${chat.said}</p>
    </section>
    <aside class=${`chat-side card ${isSideOpen ? "open" : ""}`} aria-label="Settings of the conversation" onKeyDown=${(event) => { if (isSideOpen && event.key === "Escape") { event.preventDefault(); close(); } }}>
      <button class="quiet only-narrow" ref=${done} onClick=${close}>Done</button>
      ${chat.tree.hasBranches && html`<${Branches} app=${app} />`}
      <${Side} app=${app} isChat=${isChat} offered=${offered} />
    </aside></div>`;
}

function Top({ app, path, isChat, offered, openSide }) {
  const { settings, models } = chat;
  const set = (name) => (value) => {
    chat.settings[name] = value;
    save();
    app.redraw();
  };
  const last = path.findLast(({ role }) => role === "assistant");
  const entries = legend(settings.colours, last);
  return html`<div class="chat-top"><div class="bar">
      <label class="model"><span class="unseen">Model</span><select id="chat-model" value=${settings.model} onChange=${(event) => set("model")(event.target.value)}>
        ${(models ?? []).map(({ id, parent }, i) => html`<option value=${i ? id : ""}>${id}${parent ? " (adapter)" : ""}</option>`)}</select></label>
      <${Choice} label=${html`<span class="unseen">Mode</span>`} name="chat-mode" value=${isChat ? "chat" : "completion"} onchange=${set("mode")} options=${[["chat", "Chat"], ["completion", "Completion"]]} />
      <span class="right"><button class="quiet only-narrow" id="chat-settings" onClick=${() => openSide(true)}>Settings</button><${Take} app=${app} path=${path} isChat=${isChat} offered=${offered} />
        <button class="quiet" disabled=${!path.length} onClick=${() => { stop(); restart(); app.redraw(); document.getElementById("chat-draft")?.focus(); }}>New</button></span></div>
    ${chat.modelsError && html`<p class="told" role="alert">The list of models cannot be read: ${chat.modelsError}</p>`}
    ${chat.note && html`<p class="note" role="status">${chat.note}</p>`}
    ${last && settings.inspects && html`<div class="bar colours"><${Choice} label="Colour" name="chat-colours" value=${settings.colours} onchange=${set("colours")} options=${MODES} />${entries.length > 0 && html`<${Legend} entries=${entries} />`}</div>`}
  </div>`;
}

const IDEAS = ["Write a haiku about a mill on a river.", "Explain in two sentences how a water wheel works.", "List three words that rhyme with stone."];
const OPENINGS = ["Once upon a time", "The miller opened the gate and", "1, 1, 2, 3, 5, 8,"];

function Welcome({ app, isChat }) {
  const use = (text) => () => {
    chat.draft = text;
    app.redraw();
    document.getElementById("chat-draft")?.focus();
  };
  return html`<div class="welcome"><p>${isChat ? "Ask something. Each token of the answer tells when it came, how likely it was, and what else was likely; click one to go on from there in another way." : "This is a plain completion: the model goes on with your text."}</p>
    <div class="ideas">${(isChat ? IDEAS : OPENINGS).map((text) => html`<button class="quiet" onClick=${use(text)}>${text}</button>`)}</div>
    <p class="note">Kept in this tab only, until it is closed.</p></div>`;
}

// Escape closes the inspected token, else it stops the answer.
function listen(app) {
  const onKeyDown = (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || event.target.closest?.("dialog")) return;
    if (chat.token) chat.token = null;
    else stop();
    app.redraw();
  };
  const onClick = (event) => {
    for (const menu of document.querySelectorAll(".take[open]")) if (!menu.contains(event.target)) menu.open = false;
    if (!chat.token?.isPinned || event.target.closest(".tokens, .inspector")) return;
    chat.token = null;
    app.redraw();
  };
  addEventListener("keydown", onKeyDown);
  addEventListener("click", onClick);
  addEventListener("scroll", scrolled);
  return () => {
    removeEventListener("keydown", onKeyDown);
    removeEventListener("click", onClick);
    removeEventListener("scroll", scrolled);
  };
}

// The page goes to the end of the conversation with a new answer, and stays there while that grows, unless it is scrolled.
function follow() {
  if (chat.sticks && (chat.running || performance.now() < chat.settlesMs)) document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

let lastTop = 0;

// NOTE: a page that has grown since it was scrolled to its end is not there any more, so only a way up unsticks it.
function scrolled() {
  const { scrollHeight, scrollTop, clientHeight } = document.scrollingElement;
  if (scrollTop < lastTop - 4) chat.sticks = false;
  else if (scrollHeight - scrollTop - clientHeight < 60) chat.sticks = true;
  lastTop = scrollTop;
}
