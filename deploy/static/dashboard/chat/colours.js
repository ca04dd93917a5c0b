// The colours of tokens: by the gap before each, by its probability, or by who found it.

import { percent, seconds } from "../format.js";
import { gapMs } from "./answer.js";

export const MODES = [["plain", "None"], ["gap", "Gap"], ["logprob", "Probability"], ["draft", "Drafts"]];

const PROBABILITIES = [0.9, 0.5, 0.2, 0.05]; // below: one class further
const SLOW = [1.5, 2.5, 5, 10]; // times the usual gap

// The class of a token, for the style sheet.
export function tokenClass(node, at, mode) {
  const token = node.tokens[at];
  if (token.isChosen) return "tok chosen";
  if (mode === "draft") return token.isDrafted ? "tok drafted" : "tok";
  if (mode === "logprob") return `tok heat-${PROBABILITIES.filter((share) => Math.exp(token.logprob) < share).length}`;
  if (mode !== "gap") return "tok";
  const gap = gapMs(node.tokens, at);
  if (gap === null || !node.usualGapMs) return "tok";
  return `tok slow-${SLOW.filter((times) => gap > times * node.usualGapMs).length}`;
}

// [class, words] of the legend.
export function legend(mode, node) {
  const chosen = ["chosen", "your choice"];
  if (mode === "draft") return [["drafted", "an accepted draft"], chosen];
  if (mode === "logprob") return [...["heat-1", "heat-2", "heat-3", "heat-4"].map((name, i) => [name, `below ${percent(PROBABILITIES[i])}`]), chosen];
  if (mode !== "gap") return [];
  const usual = node?.usualGapMs ?? null;
  const words = (times) => (usual === null ? `over ${times} × the usual` : `over ${seconds((times * usual) / 1e3)}`);
  return [...SLOW.map((times, i) => [`slow-${i + 1}`, words(times)]), chosen];
}
