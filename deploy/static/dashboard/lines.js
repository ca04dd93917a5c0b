// Line charts over time with uPlot, in the page's colours.

import { html, useEffect, useRef } from "../vendor/htm-preact.standalone.module.js";
import uPlot from "../vendor/uPlot.esm.js";
import { colour, useWidth } from "./ui.js";

// `x` in seconds before now; `series`: label, colour, values, and `scale` "ms" for the axis at the right. `unit`: of the
// axis at the left, which is logarithmic with `isLog`.
export function Lines({ x, series, height, unit = "", isLog = false }) {
  const [ref, width] = useWidth();
  const plot = useRef(null);
  const look = `${width} ${colour("ink")} ${series.map(({ label }) => label)}`;
  useEffect(() => {
    plot.current?.destroy();
    plot.current = new uPlot(options(width, height, series, unit, isLog), data(x, series), ref.current);
    return () => {
      plot.current?.destroy();
      plot.current = null;
    };
  }, [look]);
  useEffect(() => plot.current?.setData(data(x, series)));
  return html`<div ref=${ref} class="lines" role="img" aria-label=${`${series.map(({ label }) => label).join(", ")}, over time`}></div>`;
}

const data = (x, series) => [x, ...series.map(({ values }) => values)];

function options(width, height, series, unit, isLog) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const hasRight = series.some(({ scale }) => scale === "ms");
  return {
    width,
    height,
    legend: { live: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false }, y: isLog ? { distr: 3, range: (_, least, most) => [10 ** Math.floor(Math.log10(least > 0 ? least : 1)), 10 ** Math.ceil(Math.log10(most > 0 ? 1.01 * most : 10))] } : { range: (_, __, most) => [0, most > 0 ? 1.1 * most : 1] }, ms: { range: (_, __, most) => [0, most > 0 ? 1.1 * most : 1] } },
    axes: [
      { ...axis, size: 30, gap: 8, incrs: [1, 2, 5, 10, 25, 50, 100, 200, 500], values: (_, ticks) => ticks.map((t) => (t === 0 ? "now" : `${t} s`)) },
      { ...axis, size: 56, ...(unit && { values: (_, ticks) => ticks.map((t) => (t === null ? null : `${t} ${unit}`)) }) },
      ...(hasRight ? [{ ...axis, scale: "ms", side: 1, grid: { show: false }, size: 52, values: (_, ticks) => ticks.map((t) => `${t} ms`) }] : []),
    ],
    series: [
      { label: "seconds" },
      ...series.map(({ label, colour: name, scale }) => ({ label, stroke: colour(name), width: 1.75, points: { show: false }, scale: scale ?? "y" })),
    ],
  };
}
