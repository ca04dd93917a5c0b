// Runs requests: the answer to a turn, a further one, the rest of one, and a branch at a token.

import { finish, newAnswer, parted, takeChunk } from "./answer.js";
import { chatBody, completionBody, inspected, isChat, tokensBody } from "./body.js";
import { endOf } from "./endings.js";
import { chat, save } from "./state.js";
import { ask, chunks } from "./stream.js";
import { touch } from "./tree.js";

const MOST_ANSWERS = 128;

export const headersOf = (app) => (app.feed.keys.key ? { Authorization: `Bearer ${app.feed.keys.key}` } : {});

export const offeredBy = (app) => app.feed.hello?.chat ?? null;

// Adds a turn of the user below `last` and answers it. In a plain completion an empty text is no turn of its own. After an
// answer without text, the turn is another version of the one before that.
export function say(app, last, text) {
  const asked = last && chat.tree.parentOf(last);
  const isVain = text && last?.mode === "chat" && !last.text && !last.calls.length && asked?.role === "user";
  const parent = isVain ? chat.tree.parentOf(asked) : last;
  const node = text ? chat.tree.add(parent, { role: "user", text }) : parent;
  answer(app, node);
}

// Answers what is shown up to `node`, beside the answers that it has. `node` may be null: only a system prompt.
export function answer(app, node) {
  const path = chat.tree.pathTo(node);
  start(app, node, { mode: isChat(chat.settings, offeredBy(app)) ? "chat" : "completion" }, (settings) => {
    const offered = offeredBy(app);
    return isChat(settings, offered) ? ["v1/chat/completions", chatBody(settings, path, offered)] : ["v1/completions", completionBody(settings, path)];
  });
}

// Goes on in a new turn with another token in place `at` of an answer: exact, as the server gets the ids of all tokens.
export function branch(app, node, at, [id, text, logprob]) {
  const kept = node.tokens.slice(0, at).map((token) => ({ ...token, ms: null }));
  const chosen = { ...node.tokens[at], id, text, logprob, ms: null, isDrafted: false, isChosen: true, rank: null };
  const tokens = [...kept, chosen];
  const fields = { tokens, ...written(node, tokens), promptIds: node.promptIds, branchOf: { id: node.id, at }, mode: node.mode };
  start(app, chat.tree.parentOf(node), fields, (settings) => ["v1/completions", tokensBody(settings, node.promptIds, idsOf(tokens), maxModelLen(settings))]);
}

// Goes on where an answer ended early. Without any text it begins again.
export function more(app, node) {
  const isExact = node.promptIds && node.tokens.length > 0 && !node.hasUnknown;
  if (isExact && !node.calls.length) {
    const tokens = withoutEnd(node);
    return resume(app, node, { tokens: tokens.map((token) => ({ ...token, ms: null })), ...written(node, tokens) }, (settings) => ["v1/completions", tokensBody(settings, node.promptIds, idsOf(tokens), maxModelLen(settings))]);
  }
  const path = chat.tree.pathTo(node);
  if (node.mode === "completion") return resume(app, node, { hasUnknown: Boolean(node.text) }, (settings) => ["v1/completions", completionBody(settings, path)]);
  const isBegun = Boolean(node.text);
  const fields = isBegun ? { hasUnknown: true } : { thoughts: "", raw: undefined, calls: [], tokens: [], promptIds: null, hasUnknown: false };
  const asked = isBegun ? { add_generation_prompt: false, continue_final_message: true } : {};
  return resume(app, node, fields, (settings) => ["v1/chat/completions", { ...chatBody(settings, path, offeredBy(app)), ...asked }]);
}

export const stop = () => chat.running?.controller.abort();

// The models and adapters that are served.
export async function readModels(app) {
  try {
    const { data } = await ask("v1/models", headersOf(app));
    Object.assign(chat, { models: data, modelsError: null });
    if (!data.some(({ id }) => id === chat.settings.model)) chat.settings.model = "";
  } catch (error) {
    Object.assign(chat, { models: [], modelsError: error.message });
  }
  app.redraw();
}

export const textOf = (tokens) => tokens.map(({ text }) => text).join("");

// What `tokens` say, which begin an answer like `node`.
const written = (node, tokens) => (node.thoughts ? parted(textOf(tokens)) : { text: textOf(tokens) });

const idsOf = (tokens) => tokens.map(({ id }) => id);

// The tokens without the one that ended the turn.
const withoutEnd = ({ tokens, end }) => (end?.reason === "stop" && tokens.at(-1)?.text === "" ? tokens.slice(0, -1) : tokens);

const maxModelLen = ({ model }) => (chat.models?.find(({ id }) => id === model) ?? chat.models?.[0])?.max_model_len;

function start(app, parent, fields, makeBody) {
  const asked = Number(chat.settings.n);
  const n = !fields.branchOf && asked >= 1 && asked <= MOST_ANSWERS ? Math.floor(asked) : 1; // the server refuses more
  const answers = Array.from({ length: n }, (_, choice) => chat.tree.add(parent, newAnswer({ ...fields, choice }), choice === 0));
  return run(app, answers, makeBody);
}

function resume(app, node, fields, makeBody) {
  Object.assign(node, fields, { isRunning: true, end: null, explained: null, usage: null, choice: 0 });
  return run(app, [node], makeBody);
}

let isLeaving = false; // the page ends, and with it the answer

addEventListener("pagehide", () => {
  isLeaving = true;
  save();
});
addEventListener("pageshow", () => {
  isLeaving = false;
});

async function run(app, answers, makeBody) {
  stop();
  const controller = new AbortController();
  const running = (chat.running = { controller, nodes: answers });
  const settings = { ...chat.settings };
  const name = `chat-${Date.now().toString(36)}${Math.floor(1296 * Math.random()).toString(36)}`;
  const shown = { max_tokens: settings.max_tokens, model: settings.model };
  for (const node of answers) Object.assign(node, { sentMs: performance.now(), endedMs: null, settings: shown, error: null });
  Object.assign(chat, { watched: answers[0].id, token: null, editing: null, said: "The answer begins.", note: "", sticks: true });
  delete app.feed.data.request;
  app.redraw();
  let end = null;
  try {
    const [path, body] = makeBody(settings);
    const options = { headers: { ...headersOf(app), "X-Request-Id": name }, signal: controller.signal };
    for await (const chunk of chunks(path, inspected(body, settings, offeredBy(app)), options)) {
      takeChunk(answers, chunk, performance.now() - answers[0].sentMs);
      app.redraw();
    }
  } catch (error) {
    end = isLeaving ? { kind: "reload" } : endOf(error);
  }
  for (const node of answers) {
    node.endedMs = performance.now();
    node.hasUnknown ||= !settings.inspects; // has text whose tokens are not known
    finish(node, node.end ?? end);
  }
  if (chat.running === running) chat.running = null;
  Object.assign(chat, { said: said(answers[0]), settlesMs: performance.now() + 300 });
  save();
  app.redraw();
}

function said({ end, text, calls }) {
  if (end.kind !== "finish") return end.kind === "stopped" ? "The answer was stopped." : "The answer failed.";
  return calls.length ? `The model calls ${calls.map(({ name }) => name).join(", ")}.` : `The answer is complete: ${text.slice(0, 400)}`;
}

export function setText(node, text) {
  Object.assign(node, { text });
  touch(node);
}
