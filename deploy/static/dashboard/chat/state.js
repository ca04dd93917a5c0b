// What the playground keeps: the conversation and its settings, in this tab's sessionStorage only.

import { Tree } from "./tree.js";

const KEY = "millrace.chat";

export const DEFAULTS = {
  model: "", mode: "auto", system: "", max_tokens: "400", temperature: "", top_p: "", top_k: "", min_p: "",
  presence_penalty: "", frequency_penalty: "", repetition_penalty: "", seed: "", n: "", priority: "", stop: "",
  format: "text", schema: "", reasoning_effort: "", tools: "", tool_choice: "auto", has_parallel_calls: true, inspects: true, colours: "plain",
};

const saved = read();

export const chat = {
  tree: new Tree(saved.tree),
  settings: { ...DEFAULTS, ...saved.settings },
  draft: saved.draft ?? "",
  models: null, // of /v1/models
  modelsError: null,
  running: null, // { controller, nodes }
  watched: saved.watched ?? null, // id of the turn whose waterfall is subscribed
  token: null, // { node, at, isPinned }: the inspected token
  editing: null, // id of the turn that is edited
  sticks: true, // whether the page stays at the end of the conversation while it grows
  settlesMs: 0, // when an answer that is over has its last height
  said: "", // for screen readers
  note: "", // e.g. copied
};

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

let later = null; // the timer of `saveSoon`

export function save() {
  clearTimeout(later);
  const { tree, settings, draft, watched } = chat;
  const whole = (replacer) => JSON.stringify({ tree, settings, draft, watched }, replacer);
  try {
    sessionStorage.setItem(KEY, whole());
  } catch {
    try {
      sessionStorage.setItem(KEY, whole((name, value) => (name === "top" ? [] : value))); // alternatives are the most of it
    } catch {
      chat.note = "This conversation is too long to be kept over a reload.";
    }
  }
}

// For each key that is pressed: a long conversation takes long to write.
export function saveSoon() {
  clearTimeout(later);
  later = setTimeout(save, 400);
}

export function restart() {
  Object.assign(chat, { tree: new Tree(), watched: null, token: null, editing: null, said: "New conversation", note: "" });
  save();
}
