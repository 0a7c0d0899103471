// One round at a time: what the draft proposed, what the target thought of it, and where the time went.

import { depths } from "./answer.js";
import { bar } from "./bars.js";
import { byId, el, ms } from "./dom.js";
import { nameOf } from "./system.js";
import { lanes, phases, spanOf } from "./timeline.js";
import { drawn, fate, own, pastOf, shown, tokenOf } from "./tokens.js";

const STEP_MS = 900; // between rounds of Play: time to read one
const FATES = { accepted: "accepted", rejected: "rejected", skipped: "not looked at" };

export class Replay {
  #answer = null;
  #number = 0; // of the round that is shown, from 1; 0 while there is none
  #timer = null;
  #slider = byId("position");

  #onShown;
  #say;

  /** `onShown` is called with the number of the round that is shown, `say` with what a step by hand came to. */
  constructor(onShown, say) {
    this.#onShown = onShown;
    this.#say = say;
    byId("previous").addEventListener("click", () => this.#step(this.#number - 1));
    byId("next").addEventListener("click", () => this.#step(this.#number + 1));
    byId("play").addEventListener("click", () => this.#toggle());
    this.#slider.addEventListener("input", () => this.go(Number(this.#slider.value)));
    byId("replay").addEventListener("keydown", (event) => this.#pressed(event));
  }

  show(answer) {
    this.#pause();
    this.#answer = answer;
    this.#number = 0;
    byId("step").replaceChildren();
    this.grow();
  }

  /** Take note that the answer has more rounds. What is shown stays. */
  grow() {
    const num = this.#answer.rounds.length;
    this.#slider.max = Math.max(1, num);
    this.#slider.disabled = num === 0;
    if (num > 0 && this.#number === 0) this.go(1);
    this.#tellPlace();
  }

  go(number) {
    const num = this.#answer?.rounds.length ?? 0;
    if (num === 0) return;
    this.#number = Math.min(Math.max(1, number), num);
    this.#slider.value = this.#number;
    this.#tellPlace();
    byId("step").replaceChildren(...stepOf(this.#answer.rounds[this.#number - 1]));
    this.#onShown(this.#number);
  }

  #step(number) {
    this.go(number);
    if (this.#number) this.#say(`Round ${this.#number}. ${sentence(this.#answer.rounds[this.#number - 1])}`);
  }

  #tellPlace() {
    const num = this.#answer.rounds.length;
    const place = num ? `Round ${this.#number} of ${num}` : "no rounds";
    byId("place").textContent = place;
    this.#slider.setAttribute("aria-valuetext", place);
  }

  #pressed(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const num = this.#answer?.rounds.length ?? 0;
    const moves = { ArrowLeft: this.#number - 1, ArrowRight: this.#number + 1, Home: 1, End: num };
    if (event.key in moves) this.#step(moves[event.key]);
    else if (event.key === " " && event.target.localName !== "button") this.#toggle();
    else return;
    event.preventDefault();
  }

  #toggle() {
    if (this.#timer !== null) {
      this.#pause();
      return;
    }
    if (!this.#answer?.rounds.length) return;
    if (this.#number === this.#answer.rounds.length) this.go(1);
    this.#timer = setInterval(() => {
      this.go(this.#number + 1);
      if (this.#number === this.#answer.rounds.length) this.#pause();
    }, STEP_MS);
    byId("play").textContent = "Pause";
  }

  #pause() {
    clearInterval(this.#timer);
    this.#timer = null;
    byId("play").textContent = "Play";
  }
}

function stepOf(round) {
  return [
    el("p", { class: "line" }, pastOf(round), ...drawn(round)),
    el("p", { class: "sentence" }, sentence(round)),
    ...(round.draft.length ? [el("h3", {}, "Proposal"), proposal(round)] : []),
    ...(round.rejection ? [opinions(round)] : []),
    el("h3", {}, `Time: ${ms(spanOf(round.timings))}`),
    lanes([round]),
    phases(round.timings, 1),
  ];
}

function sentence(round) {
  const said = own(round)
    .map((token) => `“${shown(token)}”`)
    .join("");
  const beside = round.batch_size > 1 ? ` The pass served ${round.batch_size} answers.` : "";
  if (!round.num_drafted) return `A plain step: nothing was drafted, and the target said ${said}.${beside}`;
  const who = round.drafter === "model" ? "The draft" : `The drafter ${nameOf(round.drafter)}`;
  const tokens = round.num_drafted === 1 ? "one token" : `${round.num_drafted} tokens`;
  const kept = round.num_accepted === round.num_drafted ? "all" : round.num_accepted || "none";
  const refused = round.draft.filter((token) => fate(token, round) === "rejected").map((token) => `“${shown(token)}”`);
  const last = refused.length
    ? `, refused ${refused.join(" and ")}${said && ` and said ${said} instead`}`
    : said && ` and added ${said}`;
  return `${who} proposed ${tokens}. The target kept ${kept}${last}.${beside}`;
}

function proposal(round) {
  const chip = (token) => {
    const found = fate(token, round);
    return el("li", {}, tokenOf(token, found), el("span", { class: "remark" }, FATES[found]));
  };
  if (round.draft.every((token, index) => token.parent === index - 1)) {
    const last = own(round).map((token) =>
      el("li", {}, tokenOf(token, "own"), el("span", { class: "remark" }, "target")),
    );
    return el("ol", { class: "chain" }, ...round.draft.map(chip), ...last);
  }
  const lines = depths(round.draft).map((depth, index) => {
    const line = chip(round.draft[index]);
    line.style.setProperty("--depth", depth - 1);
    return line;
  });
  return el("ol", { class: "tree" }, ...byBranch(round.draft).map((index) => lines[index]));
}

/** Return the indices of a tree's tokens with each token's children right behind it. */
function byBranch(draft, parent = -1) {
  return draft.flatMap((token, index) => (token.parent === parent ? [index, ...byBranch(draft, index)] : []));
}

/** Draw the target's five best where it refused, and beside them the draft's law or its guesses there. */
function opinions(round) {
  const { rejection } = round;
  const guessed = new Set(round.draft.filter((token) => fate(token, round) === "rejected").map((token) => token.id));
  const remark = ({ id }) =>
    [guessed.has(id) ? "drafted" : "", id === rejection.token.id ? "said" : ""].filter(Boolean).join(", ");
  const look = ({ id }) => (id === rejection.token.id ? "own" : guessed.has(id) ? "rejected" : "other");
  const law = (tokens) =>
    tokens.map((token) => bar(tokenOf(token, look(token)), Math.exp(token.logprob), remark(token)));
  const listed = rejection.target.some(({ id }) => id === rejection.token.id);
  const rest = listed ? "" : `It drew “${shown(rejection.token)}”, which is none of these five.`;
  const target = [el("ol", { class: "bars" }, ...law(rejection.target)), el("p", { class: "hint" }, rest)];
  const columns = [["What the target thought here", ...target]];
  if (rejection.draft_law)
    columns.push(["What the draft drew from", el("ol", { class: "bars" }, ...law(rejection.draft_law))]);
  if (rejection.draft_guesses) {
    const ranked = rejection.draft_guesses.map((token) =>
      el("li", {}, tokenOf(token, look(token)), el("span", { class: "remark" }, remark(token))),
    );
    columns.push(["What the draft guessed, best first", el("ol", { class: "ranks" }, ...ranked)]);
  }
  return el(
    "div",
    { class: "columns" },
    ...columns.map(([title, ...parts]) => el("div", {}, el("h3", {}, title), ...parts)),
  );
}
