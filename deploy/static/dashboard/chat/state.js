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

export function save() {
  const { tree, settings, draft, watched } = chat;
  const whole = () => JSON.stringify({ tree, settings, draft, watched });
  try {
    sessionStorage.setItem(KEY, whole());
  } catch {
    dropAlternatives(tree); // they are the most of it
    try {
      sessionStorage.setItem(KEY, whole());
    } catch {
      chat.note = "This conversation is too long to be kept over a reload.";
    }
  }
}

function dropAlternatives(tree) {
  for (const node of Object.values(tree.nodes)) for (const token of node.tokens ?? []) token.top = [];
}

export function restart() {
  Object.assign(chat, { tree: new Tree(), watched: null, token: null, editing: null, said: "New conversation", note: "" });
  save();
}
