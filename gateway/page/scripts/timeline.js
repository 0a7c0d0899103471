// Where the time of rounds went: lanes of draft, wire and target, and the same as a list.

import { el, ms, percent } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LANES = ["draft", "wire", "target"];
const LANE_HEIGHT = 16;

/** Of a round, in the order in which they follow each other: the name in `timings`, its lane, what it is. */
const PHASES = [
  ["hold_us", "target", "hold", "Target waits for drafts"],
  ["queue_us", "target", "queue", "Queue in the target"],
  ["forward_us", "target", "forward", "Target’s pass"],
  ["accept_us", "target", "accept", "Acceptance"],
  ["other_us", "wire", "other", "Wire and gateway"],
];

/** Return how long a round's parts took: longer than since the round before where the target had run ahead. */
export const spanOf = (timings) => PHASES.reduce((sum, [name]) => sum + timings[name], 0);

/** Draw `rounds` one after the other, each up to its verdict. The draft's work ends where the pass that verifies it begins. */
export function lanes(rounds) {
  const before = rounds.length ? Math.max(0, spanOf(rounds[0].timings) - rounds[0].timings.total_us) : 0;
  const total = rounds.reduce((sum, round) => sum + round.timings.total_us, before) || 1;
  const picture = svg("svg", { viewBox: `0 0 1000 ${LANES.length * LANE_HEIGHT}`, preserveAspectRatio: "none" });
  const scale = 1000 / total;
  const box = (lane, look, from, length) => {
    const x = Math.max(0, from * scale);
    const width = (from + length) * scale - x;
    const y = LANES.indexOf(lane) * LANE_HEIGHT + 2;
    if (width > 0) picture.append(svg("rect", { class: look, x, y, width, height: LANE_HEIGHT - 4 }));
  };
  let end = before;
  for (const { timings } of rounds) {
    end += timings.total_us;
    let at = end - spanOf(timings);
    if (timings.draft_us)
      box("draft", "draft", at + timings.hold_us + timings.queue_us - timings.draft_us, timings.draft_us);
    for (const [name, lane, look] of PHASES) {
      box(lane, look, at, timings[name]);
      at += timings[name];
    }
    picture.append(svg("line", { x1: end * scale, x2: end * scale, y1: 0, y2: LANES.length * LANE_HEIGHT }));
  }
  const told = `${ms(total)} of ${rounds.length === 1 ? "one round" : `${rounds.length} rounds`}; the list has the numbers`;
  const names = el(
    "div",
    { class: "lane-names", "aria-hidden": "true" },
    ...["Draft", "Wire", "Target"].map((name) => el("span", {}, name)),
  );
  return el("div", { class: "lanes", role: "img", "aria-label": told }, names, picture);
}

/** Tell the phases of `numRounds` rounds whose timings sum to `spent`: the mean of a round, and its share. */
export function phases(spent, numRounds) {
  const share = (us) => percent(us / (spanOf(spent) || 1));
  const items = PHASES.map(([name, , look, words]) => item(look, words, spent[name] / numRounds, share(spent[name])));
  if (spent.draft_us) items.push(item("draft", "Draft’s passes", spent.draft_us / numRounds, "alongside"));
  return el("ul", { class: "phases" }, ...items);
}

function item(look, words, us, share) {
  return el("li", {}, el("span", { class: `swatch ${look}` }), `${words} `, el("b", {}, ms(us)), ` ${share}`);
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
