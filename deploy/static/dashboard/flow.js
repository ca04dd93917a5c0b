// Dots that run along the channels, as many in a second as messages pass; at high rates a dot stands for 10, 100 or more.

import { html, useEffect, useRef } from "../vendor/htm-preact.standalone.module.js";
import { count } from "./format.js";
import { colour } from "./ui.js";

const TRAVEL_S = 0.9; // along one channel
const MOST_PER_S = 6; // dots on a channel; more would be a blur
const FRAME_MS = 50; // a drawing at each frame of the screen would cost the page several times as much
const RADIUS = 2.6;

const still = matchMedia("(prefers-reduced-motion: reduce)");

// Messages that one dot stands for: a power of ten.
export const perDot = (perS) => 10 ** Math.max(0, Math.ceil(Math.log10(perS / MOST_PER_S)));

export const dotsInWords = (n) => (n === 1 ? "a dot is one message" : `a dot is ${count(n)} messages`);

// A canvas over the drawing of the graph. `pipes`: name -> { perS, line: { x1, y1, x2, y2 } }.
export function Flow({ pipes, width, height }) {
  const canvas = useRef(null);
  const state = useRef({ pipes, dots: {}, owed: {} });
  Object.assign(state.current, { pipes, width, height });
  useEffect(() => {
    if (still.matches) return;
    let [frame, lastMs] = [0, performance.now()];
    const tick = (nowMs) => {
      frame = requestAnimationFrame(tick);
      if (nowMs - lastMs < FRAME_MS) return;
      const passedS = Math.min(0.2, (nowMs - lastMs) / 1000);
      lastMs = nowMs;
      if (advance(state.current, passedS)) draw(canvas.current, state.current);
    };
    frame = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(frame);
  }, []);
  return html`<canvas ref=${canvas} class="flow" width=${width} height=${height} style=${{ width: `${width}px`, height: `${height}px` }} aria-hidden="true"></canvas>`;
}

// Moves all dots and starts new ones; whether there are any, or were.
function advance({ pipes, dots, owed }, passedS) {
  let isMoving = false;
  for (const [name, { perS }] of Object.entries(pipes)) {
    const here = (dots[name] ??= []);
    isMoving ||= here.length > 0;
    for (let i = 0; i < here.length; i++) here[i] += passedS / TRAVEL_S;
    while (here[0] >= 1) here.shift();
    owed[name] = (owed[name] ?? 0) + (perS > 0 ? (perS / perDot(perS)) * passedS : 0);
    for (; owed[name] >= 1; owed[name] -= 1) here.push(0);
    isMoving ||= here.length > 0;
  }
  return isMoving;
}

function draw(canvas, { pipes, dots, width, height }) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  context.fillStyle = colour("accent");
  context.beginPath();
  for (const [name, { line }] of Object.entries(pipes)) {
    for (const share of dots[name] ?? []) {
      const [x, y] = [line.x1 + share * (line.x2 - line.x1), line.y1 + share * (line.y2 - line.y1)];
      context.moveTo(x + RADIUS, y);
      context.arc(x, y, RADIUS, 0, 2 * Math.PI);
    }
  }
  context.fill();
}
