import { html } from "../vendor/htm-preact.standalone.module.js";
import { Missing } from "./ui.js";
export const title = "Health";
export const about = "Whether everything moves, and what held it up.";
export const topics = () => ({});
export const View = () => html`<${Missing}>Not recorded by this server.<//>`;
