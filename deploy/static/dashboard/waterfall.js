import { html } from "../vendor/htm-preact.standalone.module.js";
import { Missing } from "./ui.js";
export const title = "Waterfall";
export const about = "Where one request's time went: waiting, in each stage, in each step.";
export const topics = () => ({});
export const Explained = () => html`<p class="note">Not recorded by this server.</p>`;
export const View = () => html`<${Missing}>Waterfalls are not recorded by this server.<//>`;
