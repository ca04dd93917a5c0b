// What a program does with the openai package of npm, unmodified but for where it looks.
//
//   node openai_client.mjs NODE_MODULES BASE_URL KEY PATH_OF_A_CASE
//
// runs one case and prints what came back as JSON, for test_openai_npm.py to judge.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [, , nodeModules, baseURL, apiKey, name] = process.argv;
const require = createRequire(pathToFileURL(join(nodeModules, "here.js")));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });

const messages = [{ role: "user", content: "What colour is the sky?" }];
const asked = { model: "demo", messages, temperature: 0, max_tokens: 200 };
const coat = {
  type: "object",
  properties: { colour: { enum: ["red", "green", "blue"] }, layers: { type: "integer", minimum: 1, maximum: 3 } },
  required: ["colour", "layers"],
  additionalProperties: false,
};
const paint = { type: "function", function: { name: "paint", parameters: coat, strict: true } };

async function collect(stream) {
  const all = [];
  for await (const each of stream) all.push(each);
  return all;
}

const cases = {
  async models() {
    return { ids: (await collect(client.models.list())).map((model) => model.id) };
  },

  async chat() {
    const whole = await client.chat.completions.create(asked);
    const chunks = await collect(
      await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
    );
    return { whole, streamed: chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), last: chunks.at(-1) };
  },

  async completions() {
    const prompted = { model: "demo", prompt: "Once upon a time", temperature: 0, max_tokens: 12, logprobs: 2 };
    const whole = await client.completions.create(prompted);
    const chunks = await collect(await client.completions.create({ ...prompted, stream: true }));
    return { whole, streamed: chunks.map((chunk) => chunk.choices[0].text).join("") };
  },

  async logprobs() {
    const short = { ...asked, max_tokens: 4, logprobs: true, top_logprobs: 2 };
    const whole = await client.chat.completions.create(short);
    const chunks = await collect(await client.chat.completions.create({ ...short, stream: true }));
    return { whole, streamed: chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []) };
  },

  async tools() {
    const called = { ...asked, tools: [paint], tool_choice: "required", parallel_tool_calls: false };
    const first = await client.chat.completions.create(called);
    const streamed = await client.chat.completions.stream(called).finalChatCompletion();
    const message = first.choices[0].message;
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "dry" };
    const turns = [...messages, message, result];
    const final = await client.chat.completions.create({ ...asked, messages: turns, tools: [paint], tool_choice: "none" });
    return { first, streamed, final };
  },

  // The package's own loop of an agent: it runs the tool and goes on until there is an answer without a call.
  async run_tools() {
    const content = 'On it. <tool_call>{"name": "paint", "arguments": {"colour": "red", "layers": 2}}</tool_call>';
    const painted = [];
    const run = (given) => {
      painted.push(given);
      return "dry";
    };
    const runner = client.chat.completions.runTools(
      {
        model: "demo",
        messages: [{ role: "user", content }],
        tools: [{ type: "function", function: { ...paint.function, function: run, parse: JSON.parse } }],
      },
      { maxChatCompletions: 1 },
    );
    await runner.done();
    return { painted, messages: runner.messages };
  },

  async parse() {
    const response_format = { type: "json_schema", json_schema: { name: "coat", schema: coat, strict: true } };
    return { whole: await client.chat.completions.parse({ ...asked, response_format }) };
  },

  async embeddings() {
    const input = ["the sky", "a dog"];
    const floats = await client.embeddings.create({ model: "demo", input, encoding_format: "float" });
    return { floats, unsaid: await client.embeddings.create({ model: "demo", input }) };
  },

  async responses() {
    const told = { model: "demo", input: messages, temperature: 0, max_output_tokens: 200 };
    const whole = await client.responses.create(told);
    const final = await client.responses.stream(told).finalResponse();
    const again = await client.responses.retrieve(whole.id);
    const format = { type: "json_schema", name: "coat", schema: coat, strict: true };
    const parsed = await client.responses.parse({ ...told, text: { format } });
    return { whole, streamed: final.output_text, again: again.output_text, parsed: parsed.output_parsed };
  },

  async errors() {
    const wrong = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    const attempts = {
      key: () => wrong.models.list(),
      model: () => client.chat.completions.create({ ...asked, model: "other" }),
      temperature: () => client.chat.completions.create({ ...asked, temperature: 9 }),
    };
    const found = {};
    for (const [attempt, act] of Object.entries(attempts)) {
      await act().catch((error) => {
        found[attempt] = { class: error.constructor.name, status: error.status, code: error.code, param: error.param };
      });
    }
    return found;
  },

  // A program that has seen enough of a stream leaves it.
  async leave() {
    const long = { model: "demo", prompt: "Once", max_tokens: 1500, ignore_eos: true, stream: true };
    const stream = await client.completions.create(long);
    const pieces = [];
    for await (const chunk of stream) if (pieces.push(chunk.choices[0].text) === 3) break;
    return { pieces };
  },
};

console.log(JSON.stringify(await cases[name]()));
