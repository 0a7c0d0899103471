// The conversation, as text. An answer grows line by line, so that a long one is not laid out again with each token.

import { byId, el, paced } from "./dom.js";

const LINE_CHARS = 2000; // a line without breaks is cut here, for the same reason

class GrowingText {
  #numShown = 0;
  #line = null;

  constructor(element) {
    this.element = element;
  }

  /** Show all of `text`, which begins with what is shown already. */
  grow(text) {
    const lines = text.slice(this.#numShown).split("\n");
    this.#numShown = text.length;
    lines.forEach((line, index) => {
      if (index > 0 || this.#line === null || this.#line.length > LINE_CHARS) this.#begin();
      this.#line.appendData(line);
    });
  }

  #begin() {
    this.#line = document.createTextNode("");
    this.element.append(el("div", {}, this.#line));
  }
}

export class Transcript {
  #root = byId("transcript");
  #answer = null;
  #empty = byId("answer-empty");
  draw = paced(() => this.#draw());

  clear() {
    this.#root.replaceChildren(this.#empty);
    this.#answer = null;
  }

  /** Show what was asked, and begin an answer to it. `name` says whose it is. */
  begin(asked, name, answer) {
    this.#draw(); // the end of the one before, whose frame may be still to come
    const reasoning = el("div", { class: "text reasoning" });
    const text = el("div", { class: "text" });
    this.#empty.remove();
    this.#root.append(
      message("asked", "You", el("div", { class: "text" }, asked)),
      message("answered", name, reasoning, text),
    );
    this.#answer = answer;
    this.#reasoning = new GrowingText(reasoning);
    this.#text = new GrowingText(text);
    this.#root.scrollTop = this.#root.scrollHeight;
  }

  /** Say that what was asked last, and what there is of its answer, is not sent along with what is asked next. */
  leaveOut() {
    this.#text.element.after(el("p", { class: "hint" }, "This failed, and is not part of the chat."));
  }

  #reasoning;
  #text;

  #draw() {
    if (this.#answer === null) return;
    const atEnd = this.#root.scrollHeight - this.#root.scrollTop - this.#root.clientHeight < 40;
    this.#reasoning.grow(this.#answer.reasoning);
    this.#text.grow(this.#answer.text);
    if (atEnd) this.#root.scrollTop = this.#root.scrollHeight;
  }
}

function message(look, name, ...text) {
  return el("div", { class: `message ${look}` }, el("h3", {}, name), ...text);
}
