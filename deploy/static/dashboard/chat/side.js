// The settings of the conversation's requests.

import { html } from "../../vendor/htm-preact.standalone.module.js";
import { readTools } from "./body.js";
import { chat, save, saveSoon } from "./state.js";

const SAMPLING = [
  ["max_tokens", "Max tokens", { min: 1 }], ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0 }], ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }], ["seed", "Seed", {}],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }], ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }], ["n", "Answers", { min: 1, max: 8 }], ["priority", "Priority", {}],
];
const EXAMPLE = JSON.stringify({ name: "get_weather", description: "The weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }, null, 2);
const SCHEMA = JSON.stringify({ type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] }, null, 2);

export function Side({ app, isChat, offered }) {
  const { settings } = chat;
  const set = (name) => (event) => {
    chat.settings[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value;
    saveSoon();
    app.redraw();
  };
  const wrong = problem(settings.tools);
  return html`
    ${isChat && html`<${Fold} title="System prompt" isOpen=${true}><textarea aria-label="System prompt" rows="3" placeholder="How the model should behave" value=${settings.system} onInput=${set("system")}></textarea><//>`}
    <${Fold} title="Sampling" isOpen=${true}>
      <div class="fields">${SAMPLING.map(([name, label, limits]) => html`<label>${label}<input type="number" step="any" ...${limits} value=${settings[name]} placeholder=${name === "n" ? "1" : name === "seed" ? "random" : "default"} onInput=${set(name)} /></label>`)}
        ${isChat && html`<label>Reasoning effort<select value=${settings.reasoning_effort} onChange=${set("reasoning_effort")}>${["", "none", "minimal", "low", "medium", "high", "xhigh"].map((name) => html`<option value=${name}>${name || "default"}</option>`)}</select></label>`}</div>
      <label>Stop texts <small>one a line; \\n is a line break</small><textarea rows="2" value=${settings.stop} onInput=${set("stop")}></textarea></label>
    <//>
    <${Fold} title="Format" isOpen=${settings.format !== "text"}>
      <label>Answer as <select value=${settings.format} onChange=${set("format")}><option value="text">text</option><option value="json_object">any JSON object</option><option value="json_schema">JSON of a schema</option></select></label>
      ${settings.format === "json_schema" && html`<label>JSON schema<textarea rows="7" class="code" spellcheck="false" value=${settings.schema} onInput=${set("schema")}></textarea></label>
        ${!settings.schema && html`<button class="quiet" onClick=${() => { settings.schema = SCHEMA; save(); app.redraw(); }}>Insert an example</button>`}`}
    <//>
    ${isChat && html`<${Fold} title="Tools" isOpen=${Boolean(settings.tools)}>
      ${offered?.shows_tools === false && html`<p class="note warn">This model's chat template shows no tools: it would not see them. Serve it with --chat-template FILE.</p>`}
      <label>Tools <small>JSON: a list of functions</small><textarea rows="7" class="code" spellcheck="false" value=${settings.tools} onInput=${set("tools")} aria-invalid=${wrong ? "true" : null}></textarea></label>
      ${wrong && html`<p class="note warn" role="status">${wrong}</p>`}
      ${!settings.tools && html`<button class="quiet" onClick=${() => { settings.tools = EXAMPLE; save(); app.redraw(); }}>Insert an example</button>`}
      <label>Tool choice <select value=${settings.tool_choice} onChange=${set("tool_choice")}><option value="auto">the model decides</option><option value="required">at least one</option><option value="none">none</option>${names(settings.tools).map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      ${settings.tool_choice === "auto" && offered?.has_auto_tools === false && html`<p class="note">This server lets no model decide by itself (--tool-call-parser): choose at least one.</p>`}
      <label class="check"><input type="checkbox" checked=${settings.has_parallel_calls} onChange=${set("has_parallel_calls")} /> several calls at once</label>
      <p class="note">A forced call is asked for once: after its result the model answers.</p>
    <//>`}
    <${Fold} title="Inspection" isOpen=${false}>
      <label class="check"><input type="checkbox" checked=${settings.inspects} onChange=${set("inspects")} /> time and probability of each token</label>
      <p class="note">Without it the server sends plain text, as to any client.</p>
    <//>`;
}

const Fold = ({ title, isOpen, children }) => html`<details class="fold" open=${isOpen}><summary>${title}</summary><div>${children}</div></details>`;

function problem(tools) {
  try {
    readTools(tools);
    return "";
  } catch (error) {
    return error.message;
  }
}

function names(tools) {
  try {
    return readTools(tools).map((tool) => tool.function.name).filter(Boolean);
  } catch {
    return [];
  }
}
