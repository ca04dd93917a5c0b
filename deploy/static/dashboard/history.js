// The last 15 minutes above every view: running, waiting, KV use and tokens per second, with a cursor to go back.

import { html, useRef, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, percent, rate, seconds } from "./format.js";
import { Canvas, colour, useWidth } from "./ui.js";

const [LEAST_S, SPAN_S] = [60, 900]; // shown
const HEIGHT = 46;
const STEP_S = 2; // between two frames of the server
const [TIME, RUNNING, WAITING, HELD, GENERATED, , PREEMPTED] = [0, 1, 2, 3, 4, 5, 6];

export const HistoryStrip = ({ app }) =>
  app.feed.data.history && app.feed.liveS() !== null ? html`<${Strip} app=${app} />` : html`<div class="history" aria-hidden="true"></div>`;

function Strip({ app }) {
  const [ref, width] = useWidth();
  const [isDragged, setDragged] = useState(false);
  const asked = useRef(null); // the time last asked for
  const liveS = app.feed.liveS();
  const { rows, first_frame_s: firstS, last_frame_s: lastS } = app.feed.data.history;
  const spanS = Math.min(SPAN_S, Math.max(LEAST_S, 1.15 * (liveS - (rows[0]?.[TIME] ?? liveS)))); // grows with what is known
  const fromS = liveS - spanS;
  const isPast = app.feed.isPast;
  const atS = isPast ? app.feed.nowS() : liveS;
  const x = (s) => ((s - fromS) / spanS) * width;
  const seek = (toS) => {
    const to = Math.min(lastS ?? liveS, Math.max(firstS ?? liveS, toS));
    if (firstS === null || toS > liveS - STEP_S) return app.feed.goLive();
    if (asked.current !== null && Math.abs(asked.current - to) < 0.5 && isPast) return;
    asked.current = to;
    app.feed.seek(to);
  };
  const at = (event) => fromS + ((event.clientX - event.currentTarget.getBoundingClientRect().left) / width) * spanS;
  const down = (event) => {
    event.currentTarget.setPointerCapture(event.pointerId);
    setDragged(true);
    seek(at(event));
  };
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15 }[event.key];
    if (event.key === "End" || event.key === "Escape") app.feed.goLive();
    else if (event.key === "Home" && firstS !== null) seek(firstS);
    else if (by === undefined) return;
    else app.feed.step(by);
    event.preventDefault();
  };
  const words = isPast ? `${seconds(liveS - atS)} ago, at ${clock(atS - liveS)}` : "live";
  const row = nearest(rows, atS);
  return html`<section class=${`history ${isPast ? "past" : ""}`} aria-label="The last 15 minutes">
    <div class="bar"><p><strong data-figure="moment">${words}</strong>${row && html` <span class="note">${count(row[RUNNING])} running · ${count(row[WAITING])} waiting · ${rate(row[GENERATED])} tokens/s · KV ${percent(row[HELD])}</span>`}</p>
      <ul class="legend"><li><span class="swatch busy"></span>running</li><li><span class="swatch blocked"></span>waiting</li><li><span class="swatch held"></span>KV in use</li><li><span class="swatch decode-line"></span>tokens/s</li></ul>
      ${isPast ? html`<button class="live" onClick=${() => app.feed.goLive()}>Live</button>` : ""}</div>
    <div ref=${ref} class="track" title="drag to go back in all views" tabindex="0" role="slider" aria-label="Time: left and right go by two seconds, End is live" aria-valuemin=${-SPAN_S} aria-valuemax="0" aria-valuenow=${Math.round(atS - liveS)} aria-valuetext=${words}
      onPointerDown=${down} onPointerMove=${(event) => isDragged && seek(at(event))} onPointerUp=${() => setDragged(false)} onPointerCancel=${() => setDragged(false)} onKeyDown=${move}>
      <${Canvas} width=${width} height=${HEIGHT} draw=${(context) => draw(context, rows, x, width, firstS)} aria-hidden="true" />
      <span class="since">${spanS < 90 ? `${Math.round(spanS)} s` : `${Math.round(spanS / 60)} min`} ago</span><span class="cursor" style=${{ left: `${Math.max(0, Math.min(width - 2, x(atS) - 1))}px` }}></span></div>
  </section>`;
}

const clock = (agoS) => new Date(Date.now() + 1000 * agoS).toLocaleTimeString();

// The last row that is not after `atS`.
function nearest(rows, atS) {
  for (let i = rows.length - 1; i >= 0; i--) if (rows[i][TIME] <= atS + 0.5) return rows[i];
  return null;
}

function draw(context, rows, x, width, firstS) {
  if (firstS !== null) {
    context.fillStyle = colour("mark"); // where the cursor can go
    context.fillRect(Math.max(0, x(firstS)), HEIGHT - 3, width, 3);
  }
  const shown = rows.filter((row) => x(row[TIME]) >= -2);
  if (!shown.length) return;
  const most = (field) => Math.max(1, ...shown.map((row) => row[field]));
  const requests = Math.max(most(RUNNING), most(WAITING));
  const line = (field, top, name, isFilled) => {
    context.beginPath();
    let last = null;
    for (const row of shown) {
      const [px, py] = [x(row[TIME]), HEIGHT - 4 - (row[field] / top) * (HEIGHT - 12)];
      if (last === null || row[TIME] - last > 5) context.moveTo(px, isFilled ? HEIGHT - 4 : py);
      context.lineTo(px, py);
      last = row[TIME];
    }
    if (isFilled) {
      context.lineTo(x(last), HEIGHT - 4);
      context.lineTo(x(shown[0][TIME]), HEIGHT - 4);
      context.globalAlpha = 0.3;
      context.fillStyle = colour(name);
      context.fill();
      context.globalAlpha = 1;
      return;
    }
    context.strokeStyle = colour(name);
    context.lineWidth = 1.4;
    context.stroke();
  };
  line(RUNNING, requests, "busy", true);
  line(WAITING, requests, "blocked");
  line(HELD, 1, "mark-strong");
  line(GENERATED, most(GENERATED), "decode");
  context.fillStyle = colour("wasted");
  for (const row of shown) if (row[PREEMPTED]) context.fillRect(x(row[TIME]), 0, 1.5, 5);
}
