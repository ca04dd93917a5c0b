// The API page: fetches the document of this server, with a key if it wants one, and hands it to Scalar.
// The key stays in this page's memory. Nothing is asked of any other server.

const home = new URL(".", location.href).href; // before /docs, whatever stands there
const form = document.getElementById("key");
const told = document.getElementById("told");

const messages = [{ role: "user", content: "What colour is the sky?" }];
const examples = {
  "/v1/chat/completions": { messages, max_tokens: 60 },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 60 },
  "/v1/responses": { input: "What colour is the sky?", max_output_tokens: 60 },
  "/v1/messages": { messages, max_tokens: 60 },
  "/v1/embeddings": { input: ["the sky", "a dog"] },
  "/api/chat": { messages, stream: false },
  "/api/generate": { prompt: "What colour is the sky?", stream: false },
  "/generate": { token_ids: [1, 2, 3], sampling_params: { max_tokens: 8 } },
  "/tokenize": { prompt: "Once upon a time" },
};

async function fetchDocument(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { headers });
  if (!answer.ok) throw Object.assign(new Error((await answer.json()).error.message), { status: answer.status });
  return answer.json();
}

function show(content, key) {
  form.hidden = true;
  for (const [path, example] of Object.entries(examples)) {
    const body = content.paths[path]?.post?.requestBody?.content["application/json"];
    if (body) body.example = example;
  }
  content.servers = [{ url: home.replace(/\/$/, "") }];
  const token = { token: key ?? "" };
  globalThis.Scalar.createApiReference("#app", {
    content,
    authentication: { preferredSecurityScheme: key ? "key" : null, securitySchemes: { key: token } },
    operationTitleSource: "path",
    documentDownloadType: "none", // openapi.json is beside this page
    withDefaultFonts: false, // they would come from elsewhere
    telemetry: false,
    agent: { disabled: true }, // would ask a service of Scalar's
    hideClientButton: true,
    showDeveloperTools: "never",
    persistAuth: false,
  });
}

async function open(key) {
  try {
    show(await fetchDocument(key), key);
  } catch (error) {
    if (error.status !== 401) document.getElementById("app").textContent = error.message;
    form.hidden = error.status !== 401;
    told.textContent = error.status === 401 && key === undefined ? "" : error.message;
    document.getElementById("key-field").focus();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  open(document.getElementById("key-field").value);
});
open();
