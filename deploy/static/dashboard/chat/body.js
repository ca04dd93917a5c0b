// The bodies of requests: of a chat, of a plain completion, and of an answer that goes on from given tokens.

const NUMBERS = [
  "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
  "seed", "n", "priority",
];
const NUM_ALTERNATIVES = 8;

// Is `mode` auto, a model with a chat template chats. `offered`: `chat` of the feed's hello.
export const isChat = (settings, offered) =>
  settings.mode === "auto" ? offered?.has_template !== false : settings.mode === "chat";

// `path`: the turns to answer. Throws `SyntaxError` with the field's name for JSON that is none.
export function chatBody(settings, path, offered) {
  const messages = path.filter(({ role, text, calls }) => role !== "assistant" || text || calls?.length).map(message);
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { ...common(settings), messages };
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const tools = readTools(settings.tools);
  if (tools.length) Object.assign(body, { tools, tool_choice: toolChoice(settings, path, offered) });
  if (tools.length && !settings.has_parallel_calls) body.parallel_tool_calls = false;
  return body;
}

export function completionBody(settings, path) {
  return { ...common(settings), prompt: path.map(({ text }) => text).join("") };
}

// An answer that goes on after the ids of its prompt and its first tokens. A form is of whole answers, so it is left out.
export function tokensBody(settings, promptIds, answerIds, maxModelLen) {
  const { response_format: form, n, max_tokens: most, ...body } = common(settings);
  const room = Math.max(1, (maxModelLen ?? 4096) - promptIds.length - answerIds.length);
  const left = most === undefined ? room : Math.min(room, most > answerIds.length ? most - answerIds.length : most); // all used up: as many again
  return { ...body, prompt: [...promptIds, ...answerIds], max_tokens: left };
}

// Adds what the page reads beside the text. `offered`: as for `isChat`.
export function inspected(body, settings, offered) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  if (!settings.inspects) return streamed;
  const most = Math.min(NUM_ALTERNATIVES, offered?.max_logprobs ?? NUM_ALTERNATIVES);
  const scores = body.messages ? { logprobs: true, top_logprobs: most } : { logprobs: most };
  return { ...streamed, ...scores, return_token_ids: true, return_token_details: true, return_progress: true };
}

function common(settings) {
  const body = {};
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stops = settings.stop.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
  if (stops.length) body.stop = stops;
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", settings.schema) } };
  return body;
}

function message({ role, text, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content: text };
  if (role !== "assistant" || !calls?.length) return { role, content: text };
  return { role, content: text || null, tool_calls: calls.map(({ id, name, text: given }) => ({ id, type: "function", function: { name, arguments: given } })) };
}

// A list of tools, of functions, or one of either.
export function readTools(text) {
  if (!text.trim()) return [];
  const read = parsed("Tools", text);
  const tools = Array.isArray(read) ? read : [read];
  if (tools.some((tool) => typeof (tool?.function ?? tool)?.name !== "string")) throw new SyntaxError('Tools: must be a list of functions, each an object with a name, such as [{"name": "get_weather"}]');
  return tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

// A forced call is forced once: after its result the model answers.
function toolChoice({ tool_choice: choice }, path, offered) {
  const isForced = choice !== "auto" && choice !== "none";
  if (isForced && path.at(-1)?.role === "tool") return offered?.has_auto_tools === false ? "none" : "auto";
  return ["auto", "none", "required"].includes(choice) ? choice : { type: "function", function: { name: choice } };
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}
