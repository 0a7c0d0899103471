// Shares as bars. The number stands beside each, so nothing is said by length alone.

import { el, percent } from "./dom.js";

/** Draw one line of a list of bars: `label` is an element, `remark` text such as whose token it is. */
export function bar(label, share, remark = "") {
  const fill = el("span", { class: "fill" });
  fill.style.setProperty("--share", share);
  return el(
    "li",
    {},
    label,
    el("span", { class: "track", "aria-hidden": "true" }, fill),
    el("span", { class: "share" }, percent(share)),
    el("span", { class: "remark" }, remark),
  );
}
