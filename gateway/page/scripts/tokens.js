// Tokens as they are drawn everywhere: a colour, and a shape that says the same without it.

import { el } from "./dom.js";

const LOOKS = {
  accepted: "accepted",
  predicted: "accepted", // from the request's prediction
  forced: "accepted", // the grammar left no choice
  recovered: "own",
  bonus: "own",
  plain: "own",
};

/** Return a token's text on one line; one without text, such as an end of sequence, shows its id. */
export function shown({ id, text }) {
  return text === "" ? `‹${id}›` : onOneLine(text);
}

const onOneLine = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

/** Return the text before a round on one line, without its indentation: it is there to be recognised. */
export const pastOf = (round) => el("span", { class: "past" }, el("span", {}, round.past.replace(/\s*\n\s*/g, "↵")));

/** Draw a token; `look` is accepted, rejected, skipped, own or other. */
export function tokenOf(token, look) {
  return el("span", { class: `token ${look}` }, shown(token));
}

/** Draw the committed tokens of a round, with the rejected ones where they were refused. */
export function drawn(round) {
  const parts = [];
  const kept = round.tokens.filter((token) => LOOKS[token.kind] !== "own");
  const refused = round.draft.filter((token) => fate(token, round) === "rejected");
  for (const [look, said, tokens] of [
    ["accepted", "accepted: ", kept],
    ["rejected", "rejected: ", refused],
    ["own", "target: ", own(round)],
  ]) {
    if (tokens.length === 0) continue;
    parts.push(el("span", { class: "unseen" }, said), ...tokens.map((token) => tokenOf(token, look)), " ");
  }
  return parts;
}

/** Return the tokens of a round that are the target's own: in place of a refused one, after the last kept one, or plain. */
export const own = (round) => round.tokens.filter((token) => LOOKS[token.kind] === "own");

/** Return what became of a draft token: accepted, rejected, or never looked at since one before it was refused. */
export function fate(token, round) {
  if (token.accepted) return "accepted";
  return round.rejection !== null && token.parent === round.rejection.parent ? "rejected" : "skipped";
}
