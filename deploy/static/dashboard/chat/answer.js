// An answer as it grows: what the chunks of a stream add to its turn.

import { touch } from "./tree.js";

export const newAnswer = (fields) => ({
  role: "assistant", text: "", thoughts: "", calls: [], refusal: "", tokens: [], promptIds: null, requestId: null, choice: 0,
  chunksMs: [], usage: null, numPrompt: null, numCached: null, end: null, isRunning: true, ...fields,
});

// `answers`: the turns of the request's choices. `sinceMs`: milliseconds since it was sent.
export function takeChunk(answers, chunk, sinceMs) {
  for (const node of answers) {
    node.requestId = chunk.id ?? node.requestId;
    if (chunk.prompt_token_ids) node.promptIds = chunk.prompt_token_ids;
    if (chunk.prompt_progress) takeProgress(node, chunk.prompt_progress);
    if (chunk.usage) takeUsage(node, chunk.usage);
    touch(node);
  }
  for (const choice of chunk.choices ?? []) if (answers[choice.index]) takeChoice(answers[choice.index], choice, sinceMs);
}

function takeChoice(node, choice, sinceMs) {
  const delta = choice.delta ?? { content: choice.text };
  if (choice.prompt_token_ids && !node.promptIds) node.promptIds = choice.prompt_token_ids;
  if (node.raw !== undefined) Object.assign(node, parted((node.raw += delta.content ?? "")));
  else node.text += delta.content ?? "";
  node.thoughts += delta.reasoning ?? delta.reasoning_content ?? "";
  node.refusal += delta.refusal ?? "";
  for (const call of delta.tool_calls ?? []) takeCall(node, call);
  if (delta.content || delta.reasoning || delta.tool_calls) node.chunksMs.push(sinceMs);
  if (choice.logprobs) takeTokens(node, choice.logprobs);
  if (choice.finish_reason) node.end = { kind: "finish", reason: choice.finish_reason, stop: choice.stop_reason ?? null };
}

// The reasoning and the text of an answer that goes on from tokens, which the server does not part.
export function parted(raw) {
  const [thoughts, ...rest] = raw.split("</think>");
  return { raw, thoughts: thoughts.replace(/^\s*<think>\n?/, ""), text: rest.join("</think>").trimStart() };
}

function takeCall(node, { index, id, function: { name, arguments: text = "" } }) {
  const call = (node.calls[index] ??= { id: "", name: "", text: "" });
  if (id) call.id = id;
  if (name) call.name = name;
  call.text += text;
}

// A token: `ms` from the request's arrival at the server, `top`: [id, text, logprob] of the likeliest.
function takeTokens(node, { details = [], content, token_logprobs: scores }) {
  details.forEach((detail, i) => {
    const logprob = content ? content[i].logprob : scores[i];
    const top = detail.top.map(({ token_id: id, token, logprob: score }) => [id, token, score]);
    node.tokens.push({ id: detail.token_id, text: detail.token, logprob, rank: detail.rank, ms: detail.time_ms, isDrafted: detail.is_drafted, top });
  });
  if (details.length && node.tokens.length % 32 < details.length) node.usualGapMs = usualGap(node.tokens);
}

function takeProgress(node, { total, cached, processed }) {
  Object.assign(node, { numPrompt: total, numCached: cached, progress: processed / total });
}

function takeUsage(node, usage) {
  Object.assign(node, { usage, numPrompt: usage.prompt_tokens, numCached: usage.prompt_tokens_details?.cached_tokens ?? null });
}

export function finish(node, end) {
  node.end = end ?? node.end ?? { kind: "lost", hasBegun: true };
  node.isRunning = false;
  node.usualGapMs = usualGap(node.tokens);
  touch(node);
}

// Milliseconds from the token before; null for the first of a request.
export function gapMs(tokens, at) {
  const [token, before] = [tokens[at], tokens[at - 1]];
  if (!token || token.ms === null || !before || before.ms === null || token.ms < before.ms) return null;
  return token.ms - before.ms;
}

// The median gap between tokens; null without any.
export function usualGap(tokens) {
  const gaps = tokens.map((_, i) => gapMs(tokens, i)).filter((gap) => gap !== null && gap > 0.01).sort((a, b) => a - b);
  return gaps.length ? gaps[gaps.length >> 1] : null;
}
