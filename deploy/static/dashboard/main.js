// The page: connects, routes, and draws the frame around the views.

import { html, render, useEffect, useState } from "../vendor/htm-preact.standalone.module.js";
import { Feed } from "./feed.js";
import { count, percent, rate, seconds } from "./format.js";
import { HistoryStrip } from "./history.js";
import { History, reducers, stepRates } from "./store.js";
import { Scrub } from "./scrub.js";
import { Help, listen } from "./shortcuts.js";
import { Figure } from "./ui.js";
import * as adapters from "./adapters.js";
import * as blocks from "./blocks.js";
import * as config from "./config.js";
import * as fleet from "./fleet.js";
import * as health from "./health.js";
import * as latency from "./latency.js";
import * as load from "./load.js";
import * as pipeline from "./pipeline.js";
import * as playground from "./playground.js";
import * as prefixes from "./prefixes.js";
import * as recorder from "./recorder.js";
import * as requests from "./requests.js";
import * as steps from "./steps.js";
import * as wall from "./wall.js";
import * as waterfall from "./waterfall.js";

// In the order of the navigation. A view exports `title`, `about`, `topics(app)` (its subscriptions) and `View`; with
// `isShown(app)`, it is in the navigation only then.
const VIEWS = { pipeline, steps, requests, waterfall, blocks, prefixes, adapters, fleet, latency, health, playground, load, recorder, config, wall };

const history = new History();
const url = new URL("dashboard/feed", location.href);
url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
const front = new URLSearchParams(location.search).get("front"); // of a server with several; none: whichever answers
if (front !== null) url.searchParams.set("front", front);
const feed = new Feed(url.href, changed);
feed.reducers = reducers;

const app = { feed, history, view: "pipeline", arg: null, state: {}, redraw, askKeys, showHelp, cycleTheme };
let isDue = false;

function changed() {
  if (!feed.isPast) history.note(feed.updateS, app.view === "latency" ? feed.data.latency : null);
  redraw();
}

// Shows the form of the keys, or hides it.
function askKeys(isAsked = true) {
  app.state.asksKeys = isAsked;
  redraw();
}

// Shows the list of shortcuts, or hides it.
function showHelp(isShown) {
  app.state.showsHelp = isShown;
  redraw();
}

// Draws at most once per frame.
function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const began = performance.now();
    feed.want(topics());
    render(html`<${Page} />`, document.getElementById("app"));
    performance.measure("dashboard.update", { start: began, end: performance.now() });
    performance.clearMeasures("dashboard.update");
    app.lastDrawMs = performance.now() - began;
  });
}

const topics = () => ({ overview: {}, pipeline: {}, steps: {}, ...(feed.recording ? {} : { history: {} }), ...VIEWS[app.view].topics(app) });

function route() {
  const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  if (view !== app.view) scrollTo(0, 0);
  app.view = view in VIEWS ? view : "pipeline";
  app.state.showsHelp = false;
  app.arg = rest.length ? decodeURIComponent(rest.join("/")) : null;
  document.title = `${VIEWS[app.view].title} · millrace`;
  redraw();
}

function Page() {
  const { View, title, about, isBare } = VIEWS[app.view];
  document.getElementById("app").className = isBare ? "bare" : "";
  if (feed.state === "locked" || app.state.asksKeys) return html`<${Lock} />`;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the view</a>
    ${app.state.showsHelp && html`<${Help} app=${app} views=${shown()} />`}
    ${isBare ? html`<main id="main" tabindex="-1" class="wall"><h1 class="unseen">${title}</h1><${View} key=${app.view} app=${app} /></main>` : html`<${Side} />
    <main id="main" tabindex="-1">
      <${load.Banner} app=${app} />
      ${feed.recording ? html`<${Scrub} app=${app} />` : html`<${HistoryStrip} app=${app} />`}
      <${Vitals} />
      <header class="view"><h1>${title}</h1><p>${about}</p></header>
      <${View} key=${app.view} app=${app} />
    </main>`}`;
}

// [name, view] of those in the navigation.
const shown = () => Object.entries(VIEWS).filter(([, view]) => !view.isShown || view.isShown(app));

function Side() {
  useEffect(() => document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [app.view]);
  return html`
    <div class="side">
      <a class="brand" href="#/pipeline"><img src="static/dashboard/icon.svg" alt="" width="26" height="26" /><span>millrace</span></a>
      <nav aria-label="Views"><ul>${shown().map(
        ([name, view]) => html`<li><a href=${`#/${name}`} aria-current=${name === app.view ? "page" : null}>${view.title}</a></li>`,
      )}</ul></nav>
      <footer><${Connection} />${!feed.recording && html`<button class="quiet" onClick=${() => askKeys()}>Keys</button>`}<${Theme} /><button class="quiet only-wide" onClick=${() => showHelp(true)}>Shortcuts <kbd>?</kbd></button></footer>
    </div>`;
}

const STATES = {
  connecting: ["wait", "connecting"], live: ["good", "live"], cut: ["bad", "connection lost, reconnecting"], locked: ["bad", "locked"],
};

function Connection() {
  const [tone, words] = feed.recording ? ["good", "recording"] : STATES[feed.state];
  const what = feed.hello && [feed.recording?.name ?? feed.hello.models.join(", "), feed.hello.version].join(" · ");
  return html`<p class="connection" role="status"><span class=${`dot ${tone}`}></span>${words}${
    feed.hello && html`<br /><span class="model">${what}</span>`}${
    feed.hello?.fronts?.length > 0 && html`<br /><span class="model" id="front">front ${feed.hello.front} of ${feed.hello.fronts.length}</span>`}</p>`;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = () => localStorage.getItem("millrace.theme") ?? "auto";

const THEMES = ["auto", "light", "dark"];

function chooseTheme(theme) {
  localStorage.setItem("millrace.theme", theme);
  paint();
  redraw();
}

function cycleTheme() {
  chooseTheme(THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
}

// Follows the system's theme unless one is chosen.
function paint() {
  const theme = chosenTheme();
  document.documentElement.dataset.theme = theme !== "auto" ? theme : dark.matches ? "dark" : "light";
}

function Theme() {
  return html`<label class="theme"><span>Theme</span> <select aria-label="Theme" value=${chosenTheme()} onChange=${(event) => chooseTheme(event.target.value)}>
    ${THEMES.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`;
}

// The figures above every view.
function Vitals() {
  const { overview, steps: log } = feed.data;
  if (!overview) return html`<dl class="vitals" aria-hidden="true"><${Figure} name="waiting for the server" value="…" /></dl>`;
  const rates = stepRates(log, feed.nowS());
  const { health: state, blocks: kv } = overview;
  const tone = state.state === "replay" ? "" : state.state === "ready" ? "good" : state.state === "loading" || state.state === "draining" ? "warn" : "bad";
  return html`<dl class="vitals">
    <${Figure} name="state" value=${state.state} tone=${tone} id="state" />
    <${Figure} name="running" value=${count(overview.num_running ?? overview.num_live)} unit=${overview.max_num_seqs && `of ${count(overview.max_num_seqs)}`} id="num_running" />
    <${Figure} name="waiting" value=${count(overview.num_waiting)} tone=${overview.num_waiting ? "warn" : ""} id="num_waiting" />
    <${Figure} name="decoded" value=${rates ? rate(rates.decodePerS) : "0"} unit="tokens/s" />
    <${Figure} name="prefilled" value=${rates ? rate(rates.prefillPerS) : "0"} unit="tokens/s" />
    <${Figure} name="step" value=${rates ? seconds(rates.meanUs / 1e6) : "–"} />
    <${Figure} name="KV in use" value=${kv ? percent(kv.in_use / kv.num_blocks) : "–"} tone=${kv && kv.in_use / kv.num_blocks > 0.95 ? "warn" : ""} />
    <${Figure} name="preemptions" value=${count(overview.num_preemptions)} tone=${overview.num_preemptions ? "warn" : ""} id="num_preemptions" />
  </dl>`;
}

function Lock() {
  const [key, setKey] = useState(feed.keys.key ?? "");
  const [adminKey, setAdminKey] = useState(feed.keys.admin_key ?? "");
  const unlock = (event) => {
    event.preventDefault();
    const keys = { key: key || null, admin_key: adminKey || null };
    for (const [name, value] of Object.entries(keys)) sessionStorage.setItem(`millrace.${name}`, value ?? "");
    app.state.asksKeys = false;
    feed.connect(keys);
  };
  const isLocked = feed.state === "locked";
  return html`<main class="lock"><form class="card" onSubmit=${unlock}>
    <a class="brand"><img src="static/dashboard/icon.svg" alt="" width="26" height="26" /><span>millrace</span></a>
    <h1>${isLocked && !feed.keys.key && !feed.keys.admin_key ? "This server needs a key" : "Keys"}</h1>
    <p class="note" role="alert">${feed.error?.message}</p>
    <label>API key <input id="key" type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
    <label>Admin key <small>to see and cancel all requests, and for files${feed.hello?.has_admin_key === false && "; this server has none (--admin-key)"}</small>
      <input id="admin-key" type="password" autocomplete="off" value=${adminKey} onInput=${(event) => setAdminKey(event.target.value)} /></label>
    <button>Open the dashboard</button>
    ${!isLocked && html`<button type="button" class="quiet" onClick=${() => askKeys(false)}>Back</button>`}
  </form></main>`;
}

addEventListener("hashchange", route);
listen(app, shown);
dark.addEventListener("change", () => { paint(); redraw(); });
setInterval(() => { if (!document.hidden && feed.state === "live") redraw(); }, 1000); // updates ages without other changes
paint();
globalThis.millraceDashboard = app; // for the browser's console and the tests
route();
feed.connect({ key: sessionStorage.getItem("millrace.key") || null, admin_key: sessionStorage.getItem("millrace.admin_key") || null });
