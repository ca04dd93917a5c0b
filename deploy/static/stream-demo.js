import { MillraceSocket } from "./stream.js";

const $ = (id) => document.getElementById(id);
let socket = null;

function connect() {
  if (socket && !socket.isClosed) return socket;
  const url = new URL("v1/stream", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  let numOpened = 0;
  const onstate = (state) => {
    if (state === "open") numOpened++;
    $("state").value = state === "open" && numOpened > 1 ? `reconnected ${numOpened - 1}×` : state;
    if (state === "closed") socket = null;
  };
  socket = new MillraceSocket(url.href, { apiKey: $("key").value || null, onstate });
  return socket;
}

function button(text, onclick) {
  const made = document.createElement("button");
  made.textContent = text;
  made.onclick = onclick;
  return made;
}

async function ask(number) {
  const body = { prompt: $("prompt").value, max_tokens: Number($("tokens").value), temperature: 0.8, seed: number };
  const answer = connect().create("completions", body, { credit: 8 });
  const card = document.createElement("article");
  const text = document.createElement("p");
  const status = document.createElement("output");
  const footer = document.createElement("footer");
  let resume = null; // called to continue; null while not paused
  let paused = Promise.resolve();
  const pause = button("Pause", () => {
    if (resume) resume = resume();
    else paused = new Promise((resolve) => (resume = resolve));
    pause.textContent = resume ? "Continue" : "Pause";
  });
  footer.append(pause, button("Cancel", () => answer.cancel()), status);
  card.append(text, footer);
  $("answers").prepend(card);
  let numChunks = 0;
  try {
    for await (const chunk of answer) {
      text.textContent += chunk.choices[0].text;
      status.value = `${++numChunks} chunks`;
      await paused;
    }
    status.value = `${answer.usage.completion_tokens} tokens in ${numChunks} chunks`;
  } catch (error) {
    status.value = error.message;
  }
  card.dataset.isOver = true;
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  for (let number = 1; number <= Number($("count").value); number++) ask(number);
};
$("cut").onclick = () => socket?.socket.close(4000); // not 1000: a normal closure ends all requests
