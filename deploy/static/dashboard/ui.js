// Components shared by all views.

import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.standalone.module.js";

export const Card = ({ title, note, children, className = "" }) => html`
  <section class=${`card ${className}`}>
    ${title && html`<header><h2>${title}</h2>${note && html`<p class="note">${note}</p>`}</header>`}
    ${children}
  </section>`;

export const Missing = ({ children }) => html`<p class="missing">${children}</p>`;

// A scrollable container for tables wider than the screen; keyboard scrolling works.
export const Wide = ({ label, children }) =>
  html`<div class="wide" role="region" aria-label=${label} tabindex="0">${children}</div>`;

// A value with its name. `tone`: "", "good", "warn", "bad".
export const Figure = ({ name, value, unit, tone = "", id }) => html`
  <div class=${`figure ${tone}`}><dt>${name}</dt><dd data-figure=${id}>${value}${unit && html`<small> ${unit}</small>`}</dd></div>`;

// What needs the admin key: asks for it, or says that the server has none. `what`: "To cancel requests".
export const NeedsAdmin = ({ app, what }) => html`<p class="note">${
  app.feed.hello?.has_admin_key === false
    ? html`${what}, start the server with <code>--admin-key</code>.`
    : html`${what}, <button class="quiet" onClick=${() => app.askKeys()}>enter the admin key</button>.`}</p>`;

export const Legend = ({ entries }) => html`
  <ul class="legend">${entries.map(
    ([kind, text]) => html`<li><span class=${`swatch ${kind}`}></span>${text}</li>`,
  )}</ul>`;

// Radio buttons that look like a switch.
export function Choice({ label, name, options, value, onchange }) {
  return html`<fieldset class="choice"><legend>${label}</legend>${options.map(
    ([key, text]) => html`<label class=${key === value ? "on" : ""}><input type="radio" name=${name} value=${key}
      checked=${key === value} onChange=${() => onchange(key)} />${text}</label>`,
  )}</fieldset>`;
}

// The width of an element, in CSS pixels, as it changes.
export function useWidth(initial = 800) {
  const ref = useRef(null);
  const [width, setWidth] = useState(initial);
  useLayoutEffect(() => {
    setWidth(ref.current.clientWidth); // at once, so that the initial width is never visible
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

// The value of a colour of the style sheet, for canvases.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A canvas of CSS size `width` x `height` that `draw(context)` fills; drawn again with each render.
export function Canvas({ width, height, draw, ...others }) {
  const ref = useRef(null);
  useLayoutEffect(() => {
    const canvas = ref.current;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context);
  });
  return html`<canvas ref=${ref} ...${others}></canvas>`;
}
