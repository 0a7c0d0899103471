// The same prompt without speculation and with it, one run each.

import { byId, el } from "./dom.js";

const COLUMNS = ["", "Time to first token", "Tokens/s", "Target passes", "Tokens"];

/** Show what has been measured so far; `speculative` is null before its run. `drawn` = at a temperature above 0. */
export function showComparison(plain, speculative, { drawn, coupled, done }) {
  const runs = [["Plain", plain], ...(speculative ? [["Speculative", speculative]] : [])];
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

function verdict(plain, speculative, drawn, coupled) {
  const faster = speculative.tokensPerSecond / plain.tokensPerSecond;
  const speed = Number.isFinite(faster) && faster > 0 ? `${faster.toFixed(2)} times the speed. ` : "";
  if (plain.text === speculative.text) return `${speed}The texts are equal.`;
  if (drawn && !coupled) {
    return `${speed}The texts differ, as they may: at a temperature above 0 they follow the same law, and are equal only under coupled.`;
  }
  return `${speed}The texts differ: two tokens all but tied somewhere, and the passes had different shapes.`;
}
