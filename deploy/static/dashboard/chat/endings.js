// How an answer ended, in words: what happened, and what to do. `tone`: "", "warn", "bad". `actions`: names of buttons.

import { ServerError } from "./stream.js";

// The `end` of a turn for an error.
export function endOf(error) {
  if (error.name === "AbortError") return { kind: "stopped" };
  if (error instanceof ServerError) {
    const { status, code, param, message, retryAfter } = error;
    return { kind: "error", status, code, param, message, retryAfter };
  }
  return error.hasBegun === undefined ? { kind: "page", message: error.message } : { kind: "lost", hasBegun: error.hasBegun };
}

export function explainEnd({ end, text, thoughts, calls, refusal, tokens, isRunning, settings = {} }) {
  if (isRunning || !end) return null;
  const isEmpty = !text && !calls?.length;
  if (end.kind === "stopped") return told("warn", isEmpty ? "Stopped before the first text." : "Stopped.", isEmpty ? ["again"] : ["more", "again"]);
  if (end.kind === "reload") return told("warn", "The page was reloaded during this answer, which ended it.", ["more", "again"]);
  if (end.kind === "lost") return lost(end);
  if (end.kind === "page") return told("bad", end.message, ["again"]);
  if (end.kind === "error") return failed(end);
  if (refusal) return told("warn", `The model refused: ${refusal}`, ["again"]);
  return finished(end, { isEmpty, thoughts, tokens, settings });
}

function finished({ reason, stop }, { isEmpty, thoughts, tokens, settings }) {
  const most = settings.max_tokens ? ` after ${tokens?.length || settings.max_tokens} tokens` : ", as the context is full";
  if (reason === "length") {
    if (isEmpty && thoughts) return told("warn", `Cut off${most}, while the model still reasoned. Allow more tokens, or go on.`, ["more"]);
    return told("warn", `Cut off${most} (max tokens).`, ["more"]);
  }
  if (reason === "abort") return told("warn", "The server ended this answer: it was cancelled there, or the server is stopping.", ["more", "again"]);
  if (reason === "content_filter") return told("warn", "The server's filter ended this answer.", ["again"]);
  if (typeof stop === "string" && !isEmpty) return told("", `Stopped at ${JSON.stringify(stop)}.`, []);
  if (!isEmpty) return null;
  if (typeof stop === "string") return told("warn", `An empty answer: it began with the stop text ${JSON.stringify(stop)}. Remove that from the stop texts.`, ["again"]);
  if (thoughts) return told("warn", "The model reasoned, and then ended its turn without an answer.", ["again"]);
  const first = tokens?.length ? " Its first token was the end of the turn: click it for what else was likely." : "";
  return told("warn", `An empty answer.${first} Ask in other words, raise the temperature, or try again with another seed.`, ["again"]);
}

const ADVICE = {
  context_length_exceeded: ["Begin a new conversation, or shorten it, or lower max tokens.", []],
  model_not_found: ["Choose another model above.", ["models"]],
  invalid_api_key: ["Enter a key of this server.", ["keys"]],
  empty_prompt: ["Write something first.", []],
  request_timeout: ["The server was too busy to begin. Try again.", ["again"]],
  deadline_exceeded: ["Allow fewer tokens, or try again when less is running.", ["again"]],
};
const BY_STATUS = {
  401: ["Enter a key of this server.", ["keys"]],
  403: ["Enter another key.", ["keys"]],
  429: ["The server is full. Try again in a moment.", ["again"]],
  503: ["The server is starting, stopping or overloaded. Try again in a moment.", ["again"]],
};

function failed({ status, code, param, message, retryAfter }) {
  let [advice, actions] = ADVICE[code] ?? BY_STATUS[status] ?? (status < 500 ? ["Change the settings or the turn, and try again.", ["again"]] : ["Try again; the server's log has the details.", ["again"]]);
  if (/no chat template/.test(message)) [advice, actions] = ["This is a base model: have it complete a text instead.", ["complete"]];
  if (retryAfter && actions.includes("again")) advice = `Try again in ${retryAfter} s.`;
  const where = [status, code, param && `field ${param}`].filter(Boolean).join(", ");
  return told("bad", `${message} (${where})`, actions, advice);
}

const lost = ({ hasBegun }) =>
  hasBegun
    ? told("bad", "The connection was lost in the middle of the answer.", ["more", "again"], "What arrived is kept. Is the server still running? Go on from here, or try again.")
    : told("bad", "The server does not answer.", ["again"], "Is it still running, and reachable from here? Then try again.");

const told = (tone, what, actions, advice = "") => ({ tone, what, actions, advice });
