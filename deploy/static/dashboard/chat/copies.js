// A request as a command of curl, and as a program in Python.

const OPENAI = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n",
  "stop", "response_format", "reasoning_effort", "tools", "tool_choice",
  "parallel_tool_calls",
]);

export function curl(url, path, body, hasKey) {
  const lines = [`curl ${url}${path}`, "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push('-H "Authorization: Bearer $OPENAI_API_KEY"');
  lines.push(`-d '${JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''")}'`);
  return `${lines.join(" \\\n  ")}\n`;
}

export function python(url, body, model, hasKey) {
  const [known, more] = [{ model, ...body }, {}];
  for (const name of Object.keys(known)) {
    if (OPENAI.has(name)) continue;
    more[name] = known[name];
    delete known[name];
  }
  const fields = { ...known, ...(Object.keys(more).length ? { extra_body: more } : {}), stream: true };
  const given = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  const client = `OpenAI(base_url=${JSON.stringify(`${url}v1`)}${hasKey ? "" : ', api_key="none"'})`;
  const [call, text] = body.messages
    ? ["client.chat.completions.create", "chunk.choices[0].delta.content"]
    : ["client.completions.create", "chunk.choices[0].text"];
  return `from openai import OpenAI

client = ${client}
stream = ${call}(
${given})
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
`;
}

function literal(value, depth) {
  const [pad, end] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = isList ? value.map((item) => literal(item, depth + 1)) : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const short = `${open}${parts.join(", ")}${close}`;
  return short.length < 80 && !short.includes("\n") ? short : `${open}\n${parts.map((part) => `${pad}${part},\n`).join("")}${end}${close}`;
}
