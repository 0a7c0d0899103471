// Totals of the answer that is shown, and acceptance by position.

import { bar } from "./bars.js";
import { byId, el, percent } from "./dom.js";

const told = (value, digits, unit = "") => (value === null ? "–" : `${value.toFixed(digits)}${unit}`);

export function showNumbers(answer) {
  const rate = answer.acceptanceRate;
  const numbers = [
    ["Tokens per target pass", told(answer.tokensPerPass, 2)],
    ["Drafts accepted", rate === null ? "–" : `${percent(rate)}`, `${answer.numAccepted} of ${answer.numDrafted} tokens`],
    ["Tokens", `${answer.numTokens}`],
    ["Target passes", `${answer.numPasses}`, `${answer.numPlain} plain`],
    ["First token", told(answer.firstTokenMs, 0, " ms")],
    ["Tokens/s", told(answer.tokensPerSecond, 0)],
  ];
  byId("numbers").replaceChildren(...numbers.map(([name, value, more]) => number(name, value, more)));
  const bars = answer.drafted.map((drafted, position) => {
    const accepted = answer.accepted[position];
    const label = el("span", { class: "position" }, `draft token ${position + 1}`);
    return bar(label, accepted / drafted, `${accepted} of ${drafted}`);
  });
  byId("positions").replaceChildren(...bars);
}

function number(name, value, more = "") {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, more)));
}
