// The rounds as they happen, a line each, in the manner of Figure 1 of Leviathan et al. (2023).

import { byId, el, paced } from "./dom.js";
import { drawn, pastOf } from "./tokens.js";

const LINES = 120; // kept in the document; the replay has all rounds

export class RoundList {
  #list = byId("rounds");
  #answer = null;
  #numDrawn = 0;
  #marked = 0;
  draw = paced(() => this.#draw());

  /** `onPick` is called with the number of a round whose line is clicked. */
  constructor(onPick) {
    this.#list.addEventListener("click", (event) => {
      const line = event.target.closest("li");
      if (line) onPick(Number(line.value));
    });
  }

  show(answer) {
    this.#answer = answer;
    this.#numDrawn = 0;
    this.#list.replaceChildren();
    this.draw();
  }

  /** Mark the line of the round that the replay shows, where it is in the list. */
  mark(number) {
    this.#marked = number;
    this.#list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    this.#list.querySelector(`[value="${number}"]`)?.setAttribute("aria-current", "true");
  }

  #draw() {
    const { rounds } = this.#answer;
    byId("rounds-empty").hidden = rounds.length > 0;
    const from = Math.max(this.#numDrawn, rounds.length - LINES);
    this.#list.append(...rounds.slice(from).map(lineOf));
    this.#numDrawn = rounds.length;
    this.mark(this.#marked);
    while (this.#list.childElementCount > LINES) this.#list.firstElementChild.remove();
    const earlier = rounds.length - this.#list.childElementCount;
    byId("rounds-note").textContent = earlier
      ? `The latest ${LINES}; the ${earlier} before them are in the replay.`
      : "";
  }
}

function lineOf(round) {
  const did = round.num_drafted ? `${round.num_accepted} of ${round.num_drafted}` : "plain";
  return el(
    "li",
    { value: round.number },
    el("span", { class: "number" }, `${round.number}`),
    el("span", { class: "text" }, pastOf(round), el("span", { class: "new" }, ...drawn(round))),
    el("span", { class: "did" }, did),
  );
}
