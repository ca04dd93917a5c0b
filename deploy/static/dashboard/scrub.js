// The position in a recording, and the bar to change it. Each page has its own position.

import { html, useState } from "../vendor/htm-preact.standalone.module.js";
import { count, seconds } from "./format.js";
import { Canvas, colour, useWidth } from "./ui.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 50];
const HEIGHT = 44;
const INSET = 8; // pixels: half the handle, which stays within the ends of the bar

export function Scrub({ app }) {
  const { recording } = app.feed;
  const { position } = app.feed.data;
  const [speed, setSpeed] = useState(1); // of playback
  const [wanted, want] = useState(null); // the requested position, until the server has reached it
  const timeS = wanted ?? position?.time_s ?? 0;
  const isPlaying = Boolean(position?.speed);
  if (wanted !== null && position && (isPlaying || Math.abs(position.time_s - wanted) < 1e-4 * recording.duration_s + 1e-6)) want(null);
  const seek = (to) => {
    want(to);
    app.feed.seek(to);
  };
  const by = (steps) => {
    want(null);
    app.feed.step(steps);
  };
  const choose = (to) => {
    setSpeed(to);
    if (isPlaying) app.feed.play(to);
  };
  const toggle = () => {
    want(null);
    app.feed.play(isPlaying ? 0 : speed);
  };
  const move = (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") by((event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 20 : 1));
    else if (event.key === " ") toggle();
    else return;
    event.preventDefault();
  };
  const clock = new Date((recording.began_wall_s + timeS) * 1000).toLocaleTimeString();
  const step = position?.completed_step ?? -1;
  const where = `${precise(timeS, recording.duration_s)} of ${seconds(recording.duration_s)}${step >= 0 ? `, step ${count(step)} done` : ""}`;
  return html`<section class="card scrub" aria-label="Position in the recording">
    <div class="bar">
      <button class="play" onClick=${toggle}>${isPlaying ? "Pause" : "Play"}</button>
      <div class="steps"><button class="quiet" aria-label="One step back" onClick=${() => by(-1)}>◂ step</button><button class="quiet" aria-label="One step on" onClick=${() => by(1)}>step ▸</button></div>
      <label>Speed <select value=${speed} onChange=${(event) => choose(Number(event.target.value))}>${SPEEDS.map((one) => html`<option value=${one}>${one} ×</option>`)}</select></label>
      <p class="moment"><strong data-figure="time_s" data-value=${position?.time_s}>${precise(timeS, recording.duration_s)}</strong> <span class="note">of ${seconds(recording.duration_s)}, at ${clock}</span>${" "}
        <span class="note">· ${step >= 0 ? `step ${count(step)} done` : "before the first step"}</span></p>
    </div>
    <${Curves} curves=${recording.curves} share=${recording.duration_s ? timeS / recording.duration_s : 0} />
    <input type="range" aria-label="Time: left and right move by steps, space plays" min="0" max=${recording.duration_s} step="any" value=${timeS} aria-valuetext=${where}
      onInput=${(event) => seek(Number(event.target.value))} onKeyDown=${move} />
    ${recording.trouble && html`<p class="note warn">${recording.trouble}</p>`}
  </section>`;
}

// More digits for a shorter recording.
const precise = (s, durationS) => (durationS < 600 ? `${s.toFixed(3)} s` : `${Math.floor(s / 60)} min ${(s % 60).toFixed(1)} s`);

// Running and waiting sequences and held blocks over the whole recording.
function Curves({ curves, share }) {
  const [ref, width] = useWidth();
  const { running, waiting, held, preempted } = curves;
  const most = Math.max(1, ...running, ...waiting);
  const across = width - 2 * INSET;
  const x = (i) => INSET + (i / running.length) * across;
  const trace = (context, values, top) => {
    context.beginPath();
    values.forEach((value, i) => context.lineTo(x(i + 0.5), HEIGHT - 2 - (value / top) * (HEIGHT - 10)));
  };
  const draw = (context) => {
    trace(context, running, most);
    context.lineTo(x(running.length), HEIGHT - 2);
    context.lineTo(x(0), HEIGHT - 2);
    context.globalAlpha = 0.35;
    context.fillStyle = colour("busy");
    context.fill();
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    for (const [values, top, name] of [[waiting, most, "blocked"], [held, 1, "mark-strong"]]) {
      trace(context, values, top);
      context.strokeStyle = colour(name);
      context.stroke();
    }
    context.fillStyle = colour("wasted");
    for (const i of preempted) context.fillRect(x(i), 0, Math.max(1.5, across / running.length), 5);
    context.fillStyle = colour("ink");
    context.fillRect(INSET + share * across - 0.75, 0, 1.5, HEIGHT);
  };
  return html`<div ref=${ref} class="curves"><${Canvas} width=${width} height=${HEIGHT} draw=${draw} role="img" aria-label=${`Maxima of the whole recording: ${count(Math.max(...running))} running sequences, ${count(Math.max(...waiting))} waiting sequences, ${Math.round(100 * Math.max(...held))} % of the blocks held`} />
    <ul class="legend"><li><span class="swatch busy"></span>running</li><li><span class="swatch blocked"></span>waiting</li><li><span class="swatch held"></span>blocks held</li>${preempted.length > 0 && html`<li><span class="swatch wasted"></span>preemptions</li>`}</ul></div>`;
}
