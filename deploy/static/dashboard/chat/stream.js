// Sends a request and reads its answer, a stream of server-sent events.

// An answer of the server that is an error. `error` is its body's.
export class ServerError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message);
    Object.assign(this, { status, code: error.code, param: error.param, retryAfter });
  }
}

// The server is gone. `hasBegun`: after a part of the answer.
export class LostConnection extends Error {
  constructor(hasBegun) {
    super(hasBegun ? "the connection was lost in the middle of the answer" : "the server does not answer");
    this.hasBegun = hasBegun;
  }
}

// Yields the chunks of an answer. Throws `ServerError`, `LostConnection`, or `AbortError` after `signal`.
export async function* chunks(path, body, { headers, signal }) {
  const response = await fetched(path, { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  let [rest, isOver] = ["", false];
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read().catch(lost(signal, true));
    if (done) break;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const data of parts.filter((part) => part.startsWith("data: ")).map((part) => part.slice(6))) {
      if (data === "[DONE]") isOver = true;
      else yield checked(JSON.parse(data));
    }
  }
  if (!isOver) throw new LostConnection(true);
}

// The body of an answer that is not streamed.
export async function ask(path, headers) {
  const response = await fetched(path, { headers });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

const fetched = (path, options) => fetch(path, options).catch(lost(options.signal, false));

const lost = (signal, hasBegun) => (error) => {
  throw signal?.aborted ? error : new LostConnection(hasBegun);
};

function checked(chunk) {
  if (chunk.error) throw new ServerError(chunk.error.status ?? 500, chunk.error);
  return chunk;
}

// NOTE: a proxy between answers with pages of its own.
async function refusal(response) {
  const text = await response.text();
  const retryAfter = response.headers.get("Retry-After");
  try {
    const { error } = JSON.parse(text);
    return new ServerError(response.status, error, retryAfter);
  } catch {
    return new ServerError(response.status, { message: text.replace(/<[^>]*>/g, " ").trim().slice(0, 300) || response.statusText, code: null }, retryAfter);
  }
}
