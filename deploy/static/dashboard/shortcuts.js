// Keyboard shortcuts, and the overlay that lists them.

import { html, useEffect, useRef } from "../vendor/htm-preact.standalone.module.js";

const TEXT = "input:not([type=radio]):not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]";

// [key, what it does in words, and does]. `views`: [name, view] of those shown, in order.
const shortcuts = (app, views) => [
  ...views.slice(0, 10).map(([name, view], i) => [String((i + 1) % 10), view.title, () => go(name)]),
  ["/", "search the requests", () => search(app)],
  ["[", "two seconds back", () => app.feed.step(-1)],
  ["]", "two seconds on", () => app.feed.step(1)],
  ["l", "back to live", () => app.feed.goLive()],
  ["w", "wall: the figures on a big screen, and back", () => go(app.view === "wall" ? "pipeline" : "wall")],
  ["t", "theme: auto, light, dark", () => app.cycleTheme()],
  ["?", "this list", () => app.showHelp(!app.state.showsHelp)],
];

const go = (view) => (location.hash = `#/${view}`);

function search(app) {
  app.state.wantsSearch = true; // until the field is there
  if (app.view !== "requests") go("requests");
  app.redraw();
}

// `views()`: those shown now.
export function listen(app, views) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(TEXT)) return;
    const isTime = "[]l".includes(event.key) && event.key.length === 1;
    if (isTime && app.feed.recording) return;
    const found = shortcuts(app, views()).find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}

export function Help({ app, views }) {
  const box = useRef(null);
  useEffect(() => box.current.showModal(), []);
  const own = [["← →", "in a strip, a map or the time: one on; Page up and down: many"], ["Enter", "in the map of blocks: go into a cell"], ["Esc", "let go; close this list"]];
  return html`<dialog ref=${box} class="card help" aria-label="Keyboard shortcuts" onClose=${() => app.showHelp(false)} onClick=${(event) => event.target === box.current && box.current.close()}>
    <header><h2>Keyboard</h2></header>
    <dl>${[...shortcuts(app, views), ...own].map(([key, words]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`)}</dl>
    <form method="dialog"><button class="quiet">Close</button></form></dialog>`;
}
