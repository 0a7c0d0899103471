// Which target and draft there are, and whether they are there, asked again and again.

import { models, readiness } from "./api.js";
import { byId, el } from "./dom.js";

const POLL_MS = 1000;

/** Ask every second while the page is seen. `onModels` gets the served models, `onError` what was wrong. */
export function watch(onModels, onError) {
  const look = async () => {
    if (!document.hidden) {
      try {
        onModels(await models(), await readiness());
      } catch (error) {
        if (onError(error)) return; // until `watch` is called again
      }
    }
    setTimeout(look, POLL_MS);
  };
  look();
}

const NAMES = { auto: "whoever promises most", ngram: "n-grams", lookup: "lookup in earlier answers", prediction: "the request’s prediction" };

/** Return how a drafter is called on this page. */
export const nameOf = (drafter) => NAMES[drafter] ?? drafter;

/** Show the state of one served model's target and of what drafts. Nothing is touched while it stays the same. */
export function showSystem(model, { ready, reason, refused }) {
  const parts = [["Target", model.id, ready ? "ready" : "away", ready ? "ready" : `not ready: ${reason}`]];
  const asksModel = model.drafters.some((drafter) => drafter === "model" || drafter.includes("+model"));
  if (model.draft !== null) parts.push(["Draft", model.draft, "ready", "ready"]);
  else if (asksModel) parts.push(["Draft", "", "away", "away: the target goes on without it"]);
  else if (model.drafter !== null) parts.push(["Draft", `${nameOf(model.drafter)}, in the target`, "ready", "ready"]);
  else parts.push(["Draft", "", "none", "none: one token a pass"]);
  for (const refusal of refused) parts.push(["Not used", refusal, "away", ""]);
  show(parts);
}

export function showNoSystem(message) {
  show([["Gateway", "", "away", message]]);
}

let last = "";

function show(parts) {
  const said = JSON.stringify(parts);
  if (said === last) return;
  last = said;
  byId("system").replaceChildren(
    ...parts.map(([role, name, state, words]) =>
      el(
        "div",
        { "data-state": state },
        el("dt", {}, role),
        el("dd", {}, el("span", { class: "name" }, name), el("span", { class: "state" }, words)),
      ),
    ),
  );
}
