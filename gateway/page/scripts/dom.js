// Elements out of names, attributes and text. Whatever a model, a user or a server said becomes a text node here.

/** Make an element. Children are elements or strings, and a string is text, never HTML. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Return a function that runs `draw` once, no sooner than the next frame and `pauseMs` after the last time. */
export function paced(draw, pauseMs = 0) {
  let waiting = false;
  let last = 0;
  const run = () => {
    waiting = false;
    last = performance.now();
    draw();
  };
  return () => {
    if (waiting) return;
    waiting = true;
    const pause = last + pauseMs - performance.now();
    if (pause > 0) setTimeout(() => requestAnimationFrame(run), pause);
    else requestAnimationFrame(run);
  };
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
export const ms = (us) => `${(us / 1000).toFixed(us < 10_000 ? 2 : 1)} ms`;
