// The tree of the prefix cache: the largest nodes, their blocks, and the requests that use them. No prompts.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, shortId } from "./format.js";
import { Card, Figure, Missing } from "./ui.js";

export const title = "Prefix cache";
export const about = "Blocks of prompts and answers that requests share, as a tree: the largest nodes. No prompts.";
export const topics = () => ({ prefixes: {} });

const OPEN_LEVELS = 3; // open at first

export function View({ app }) {
  const { prefixes: tree, overview } = app.feed.data;
  const [toggled, setToggled] = useState(new Set());
  if (!tree) return html`<${Missing}>Waiting for the tree.<//>`;
  if (!tree.nodes) return html`<${Missing}>${app.feed.isPast ? "The tree of this time is not known: it is read only while this view is open." : overview?.prefix_cache === undefined && overview?.blocks ? "This server has no prefix cache: --enable-prefix-caching." : "Waiting for the tree."}<//>`;
  const cache = overview?.prefix_cache;
  const children = byParent(tree.nodes);
  const most = Math.max(1, ...Object.values(tree.nodes).map((node) => node.total_blocks));
  const rows = [...listed(children, null, 0, toggled)];
  const toggle = (id) => setToggled((before) => new Set(before.has(id) ? [...before].filter((one) => one !== id) : [...before, id]));
  const shown = Object.values(tree.nodes);
  return html`
    <${Card}><dl class="figures">
      <${Figure} name="hit rate" value=${cache?.num_queries ? percent(cache.num_hits / cache.num_queries) : "–"} unit="of prompt tokens" id="prefixes.hit_rate" />
      <${Figure} name="tokens found" value=${count(cache?.num_hits)} />
      <${Figure} name="cached blocks" value=${count(tree.num_blocks)} id="prefixes.num_blocks" />
      <${Figure} name="nodes" value=${count(tree.num_nodes)} unit=${tree.num_nodes > shown.length ? `${shown.length} shown` : ""} />
      <${Figure} name="shared by 2 or more" value=${count(shown.filter((node) => node.num_users > 1).reduce((sum, node) => sum + node.num_blocks, 0))} unit="blocks" />
    </dl><//>
    <${Card} title="Tree" note="A node is a run of blocks without a branch. Its bar: the blocks of the node, and paler those below it.">
      ${rows.length === 0 ? html`<p class="missing">The cache is empty.</p>` : html`<table class="tree" role="treegrid" aria-label="Prefix cache">
        <thead><tr role="row"><th role="columnheader" scope="col">blocks</th><th role="columnheader" scope="col" class="only-wide"><span class="unseen">share</span></th><th role="columnheader" scope="col" class="num">tokens</th><th role="columnheader" scope="col" class="num">below</th><th role="columnheader" scope="col">used by</th></tr></thead>
        <tbody>${rows.map((row) => html`<${Row} key=${row.id} ...${row} most=${most} toggle=${toggle} />`)}</tbody></table>`}
    <//>`;
}

// parent -> its children, largest first; `null`: the roots.
function byParent(nodes) {
  const found = new Map();
  for (const [id, node] of Object.entries(nodes)) {
    const parent = node.parent ?? null;
    found.set(parent, [...(found.get(parent) ?? []), { id, ...node }]);
  }
  for (const list of found.values()) list.sort((a, b) => b.total_blocks - a.total_blocks || a.id - b.id);
  return found;
}

function* listed(children, parent, level, toggled) {
  for (const node of children.get(parent) ?? []) {
    const below = children.get(node.id) ?? [];
    const isOpen = level < OPEN_LEVELS !== toggled.has(node.id);
    yield { id: node.id, node, level, isOpen, hasChildren: below.length > 0 };
    if (isOpen) yield* listed(children, node.id, level + 1, toggled);
  }
}

function Row({ id, node, level, isOpen, hasChildren, most, toggle }) {
  const indent = { "padding-left": `${Math.min(level, 12) * 20}px` };
  const others = node.num_users - node.users.length;
  return html`<tr role="row" aria-level=${level + 1} aria-expanded=${hasChildren ? String(isOpen) : null} data-node=${id}>
    <th role="rowheader" scope="row" style=${indent}>${hasChildren ? html`<button class="fold" aria-label=${`${isOpen ? "Close" : "Open"} the node of ${count(node.num_blocks)} blocks`} onClick=${() => toggle(id)}>${isOpen ? "▾" : "▸"}</button>` : html`<span class="fold"></span>`}
      <span data-figure="num_blocks">${count(node.num_blocks)}</span>${node.adapter && html` <span class="badge">${node.adapter}</span>`}${node.is_salted && html` <span class="badge" title="only requests with the same cache_salt share it">salted</span>`}</th>
    <td role="gridcell" class="only-wide"><span class="split below" style=${{ width: `${(100 * node.total_blocks) / most}%` }}><span class=${node.num_users > 1 ? "shared" : "busy"} style=${{ width: `${(100 * node.num_blocks) / node.total_blocks}%` }}></span></span></td>
    <td role="gridcell" class="num">${count(node.num_tokens)}</td>
    <td role="gridcell" class="num">${node.total_blocks > node.num_blocks ? count(node.total_blocks - node.num_blocks) : "–"}</td>
    <td role="gridcell" class="free">${node.num_users === 0 ? html`<span class="note">${node.num_hidden ? `no request now; ${count(node.num_hidden)} smaller below` : "no request now"}</span>` : html`${node.num_users > 1 && html`<strong>${count(node.num_users)}</strong> `}${node.users.slice(0, 4).map((user, i) => html`${i > 0 && ", "}<a href=${`#/waterfall/${encodeURIComponent(user)}`} title=${user}>${shortId(user)}</a>`)}${(others > 0 || node.users.length > 4) && html` <span class="note">and ${count(node.num_users - Math.min(4, node.users.length))} more</span>`}`}</td></tr>`;
}
