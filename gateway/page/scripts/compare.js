// The same prompt without speculation and with it, one run each.

import { byId, el } from "./dom.js";

const SAME = 0.05; // of two single runs: smaller differences are a machine's noise
const COLUMNS = ["", "Time to first token", "Tokens/s", "Target passes", "Tokens"];

/** Show what has been measured so far; `speculative` is null before its run. `drawn` = at a temperature above 0. */
export function showComparison(plain, speculative, { drawn, coupled, done }) {
  const runs = [["Without", plain], ...(speculative ? [["With", speculative]] : [])];
  const head = el("tr", {}, ...COLUMNS.map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))));
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...runs.map(([name, run]) => rowOf(name, run))));
  const said = done ? [el("p", { class: "sentence" }, verdict(plain, speculative, drawn, coupled))] : [];
  byId("comparison").replaceChildren(table, ...said);
}

function rowOf(name, run) {
  const cells = [
    run.firstTokenMs === null ? "–" : `${run.firstTokenMs.toFixed(0)} ms`,
    run.tokensPerSecond === null ? "–" : run.tokensPerSecond.toFixed(0),
    `${run.numPasses}`,
    `${run.numTokens}`,
  ];
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((text) => el("td", {}, text)));
}

/** Say which of two rates, in tokens/s, is the higher and by how much; nothing where one is unknown. */
function inWords(plain, speculative) {
  if (!(plain > 0 && speculative > 0)) return "";
  const rates = `${speculative.toFixed(0)} tokens/s with, ${plain.toFixed(0)} without`;
  const factor = speculative / plain;
  if (Math.abs(factor - 1) < SAME) return `About as fast with speculation as without: ${rates}. `;
  const word = factor > 1 ? "faster" : "slower";
  const times = factor > 1 ? factor : 1 / factor;
  return `${times.toFixed(2)} times ${word} with speculation: ${rates}. `;
}

function verdict(plain, speculative, drawn, coupled) {
  const speed = inWords(plain.tokensPerSecond, speculative.tokensPerSecond);
  if (plain.text === speculative.text) return `${speed}The texts are equal.`;
  if (drawn && !coupled) {
    return `${speed}The texts differ, as they may: at a temperature above 0 they follow the same law, and are equal only under coupled.`;
  }
  return `${speed}The texts differ: two tokens all but tied somewhere, and the passes had different shapes.`;
}
