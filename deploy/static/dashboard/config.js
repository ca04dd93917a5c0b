// Every effective setting with its source and meaning.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count } from "./format.js";
import { Card, Missing, Wide } from "./ui.js";

export const title = "Settings";
export const about = "All effective settings and their sources. Keys are never shown.";
export const topics = () => ({ config: {} });

export function View({ app }) {
  const rows = app.feed.data.config?.rows;
  const [wanted, setWanted] = useState("");
  const [isShort, setShort] = useState(false);
  if (!rows) return html`<${Missing}>Waiting for the settings.<//>`;
  const words = wanted.toLowerCase().split(/\s+/);
  const shown = rows.filter((row) => (!isShort || (row.source && row.source !== "default")) && words.every((word) => `${row.name} ${row.help} ${row.source}`.toLowerCase().includes(word)));
  const groups = [...new Set(shown.map((row) => row.group))];
  return html`<${Card}>
    <div class="bar"><label>Find <input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} placeholder="name, meaning or source" /></label>
      <label class="check"><input type="checkbox" checked=${isShort} onChange=${(event) => setShort(event.target.checked)} /> only non-defaults</label>
      <p class="note" role="status">${count(shown.length)} of ${count(rows.length)}</p></div>
    <${Wide} label="Settings"><table class="settings">
      <thead><tr><th scope="col">setting</th><th scope="col">value</th><th scope="col">source</th><th scope="col" class="only-wide">meaning</th></tr></thead>
      ${groups.map((group) => html`<tbody key=${group}><tr class="group"><th scope="rowgroup" colspan="4">${group}</th></tr>
        ${shown.filter((row) => row.group === group).map((row) => html`<tr key=${row.name} data-setting=${row.name} title=${row.help}><th scope="row"><code>${row.name}</code></th>
          <td><code>${show(row.value)}</code></td><td><span class=${row.source && row.source !== "default" ? "set" : "note"}>${row.source || "set in code"}</span></td>
          <td class="only-wide note">${row.help}</td></tr>`)}</tbody>`)}
    </table><//>
    ${!shown.length && html`<p class="missing">No setting matches.</p>`}
  <//>`;
}

const show = (value) =>
  value === null || value === undefined ? "–" : Array.isArray(value) ? value.join(", ") || "none" : typeof value === "number" ? value.toLocaleString("en-US") : String(value);
