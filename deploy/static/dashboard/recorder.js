import { html } from "../vendor/htm-preact.standalone.module.js";
import { Missing } from "./ui.js";
export const title = "Recorder";
export const about = "Take what happened home.";
export const topics = () => ({});
export const View = () => html`<${Missing}>Not recorded by this server.<//>`;
