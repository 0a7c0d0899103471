// The page: a form becomes a request, its stream an Answer, and the Answer is drawn by those who watch it.

import { ask, hasKey, useKey } from "./api.js";
import { Answer } from "./answer.js";
import { showComparison } from "./compare.js";
import { byId, el, paced, percent } from "./dom.js";
import { showNumbers } from "./numbers.js";
import { Replay } from "./replay.js";
import { RoundList } from "./rounds.js";
import { showNoSystem, showSystem, watch } from "./system.js";
import { lanes, phases } from "./timeline.js";
import { Transcript } from "./transcript.js";

const SAMPLES = {
  chat: "Write a Python function that reads a file and returns its lines.",
  completion: "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
};
const NUM_LANES = 24; // rounds in the picture of time: as many as can be told apart
const SLOW_MS = 250; // between two drawings of what is read, not watched
const SAY_MS = 5000; // between two words of a screen reader on how far an answer is

const rounds = new RoundList((number) => replay.go(number));
const replay = new Replay((number) => rounds.mark(number), say);
const transcript = new Transcript();
let answer = null; // the one that is shown
let messages = []; // of the chat so far
let served = []; // as /v1/models says
let running = null; // AbortController of what is asked now

const mode = () => byId("form").elements.mode.value;
let modeIsChosen = false; // by the user, or by what the first model seen is made for

// --- what is asked ---

function bodyOf() {
  const speculation = {
    explain: true,
    num_draft_tokens: byId("k").value === "auto" ? "auto" : Number(byId("k").value),
  };
  for (const name of ["drafter", "acceptance"]) if (byId(name).value) speculation[name] = byId(name).value;
  const body = { model: byId("model").value, stream: true, max_tokens: Number(byId("max-tokens").value), speculation };
  for (const name of ["temperature", "seed"]) if (byId(name).value !== "") body[name] = Number(byId(name).value);
  if (mode() === "completion") return { ...body, prompt: byId("prompt").value };
  const system = byId("system-prompt").value;
  const before = system ? [{ role: "system", content: system }] : [];
  return { ...body, messages: [...before, ...messages, { role: "user", content: byId("prompt").value }] };
}

/** Ask, and draw the answer while it comes. Returns it; one that was stopped is what there was of it. */
async function run(body, name) {
  answer = new Answer(body.prompt ?? "", performance.now());
  if (!body.messages) transcript.clear();
  transcript.begin(body.prompt ?? body.messages.at(-1).content, name, answer);
  rounds.show(answer);
  replay.show(answer);
  const sayProgress = paced(() => running && say(progress()), SAY_MS);
  try {
    for await (const chunk of ask(body, running.signal)) {
      answer.add(chunk, performance.now());
      transcript.draw();
      rounds.draw();
      drawSlowly();
      sayProgress();
    }
  } catch (error) {
    if (error.name === "AbortError") return answer;
    if (body.messages) transcript.leaveOut();
    throw error;
  } finally {
    drawSlowly();
  }
  return answer;
}

const drawSlowly = paced(() => {
  replay.grow();
  showNumbers(answer);
  const latest = answer.rounds.slice(-NUM_LANES);
  byId("lanes").replaceChildren(...(latest.length ? [lanes(latest)] : []));
  byId("phases").replaceChildren(...(latest.length ? [phases(answer.spent, answer.numPasses)] : []));
}, SLOW_MS);

/** Run `work` as what is going on now: Send becomes Stop, and what goes wrong is shown. */
async function during(work) {
  running = new AbortController();
  byId("send").textContent = "Stop";
  byId("compare").setAttribute("aria-disabled", "true");
  byId("clear").setAttribute("aria-disabled", "true");
  showError(null);
  try {
    await work();
  } catch (error) {
    failed(error);
  } finally {
    running = null;
    byId("send").textContent = "Send";
    byId("compare").removeAttribute("aria-disabled");
    byId("clear").removeAttribute("aria-disabled");
  }
}

async function send() {
  const body = bodyOf();
  say("Asking.");
  document.querySelector(".answer").scrollIntoView({ block: "nearest" }); // on a phone it is below the form
  await during(async () => {
    const got = await run(body, body.model);
    if (body.messages)
      messages = [...body.messages.filter(({ role }) => role !== "system"), { role: "assistant", content: got.text }];
    say(`Done. ${progress()}`);
  });
}

/** Ask twice, plain and then as the form says, with one seed, and prefixes cached for neither. */
async function compare() {
  const body = bodyOf();
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const told = { drawn: body.temperature !== 0, coupled: body.speculation.acceptance === "coupled", done: false };
  const alone = () => ({ ...body, cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-") });
  say("Comparing: without speculation first.");
  await during(async () => {
    const plain = await run({ ...alone(), speculation: { explain: true, enabled: false } }, "Without speculation");
    if (running.signal.aborted) return;
    showComparison(plain, null, told);
    const speculative = await run(alone(), "With speculation");
    showComparison(plain, speculative, { ...told, done: !running.signal.aborted });
    say(byId("comparison").querySelector("p")?.textContent ?? "Stopped.");
  });
}

function progress() {
  const rate = answer.acceptanceRate;
  return `${answer.numTokens} tokens in ${answer.numPasses} passes of the target${rate === null ? "" : `, ${percent(rate)} of the drafts accepted`}.`;
}

// --- what is said ---

function say(text) {
  byId("said").textContent = text;
}

function showError(message) {
  byId("error").hidden = message === null;
  byId("error").textContent = message ?? "";
}

function failed(error) {
  showError(error.message);
  if (error.status === 401) askForKey();
}

// --- the system, and the key ---

let watching = false;

function startWatching() {
  watching = true;
  watch(showServed, (error) => {
    showNoSystem(error.message);
    if (error.status !== 401) return false;
    watching = false;
    askForKey();
    if (hasKey()) showError(error.message);
    return true;
  });
}

function showServed(models, readiness) {
  served = models;
  fill(
    byId("model"),
    models.map(({ id }) => [id, id]),
  );
  showDrafters();
  const chosen = models.find(({ id }) => id === byId("model").value);
  if (chosen && !modeIsChosen) chooseMode(chosen);
  if (chosen) showSystem(chosen, readiness);
  else showNoSystem(readiness.reason ?? "no model is served");
}

function showDrafters() {
  const drafters = served.find(({ id }) => id === byId("model").value)?.drafters ?? [];
  const usable = drafters.filter((drafter) => !drafter.startsWith("prediction")); // those need one in the request
  fill(byId("drafter"), [["", "default"], ...usable.map((drafter) => [drafter, drafter])]);
}

/** Give a select these options, unless it has them already, and keep what is chosen. */
function fill(select, options) {
  if (options.length === select.length && options.every(([value], index) => select.options[index].value === value))
    return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function askForKey() {
  byId("key-form").hidden = false;
  if (document.activeElement === document.body) byId("key").focus(); // else somebody is at work elsewhere
}

// --- what is pressed ---

function pressSend() {
  if (running) running.abort();
  else if (byId("form").reportValidity()) send();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  pressSend();
});
byId("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  pressSend();
});
byId("compare").addEventListener("click", () => {
  if (!running && byId("form").reportValidity()) compare();
});
byId("clear").addEventListener("click", () => {
  if (running) return;
  messages = [];
  transcript.clear();
  byId("prompt").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("prompt").focus();
  showError(null);
  if (!watching) startWatching();
});
byId("model").addEventListener("change", showDrafters);

/** Begin with a chat where the model's template marks turns; a model that continues text gets a text to continue. */
function chooseMode({ chat_template: template }) {
  modeIsChosen = true;
  byId("form").elements.mode.value = template === "turns" ? "chat" : "completion";
  showMode();
}

function showSettings() {
  const [temperature, k, tokens] = ["temperature", "k", "max-tokens"].map((id) => byId(id).value);
  byId("settings-now").textContent = `temperature ${temperature || "default"}, K ${k}, ${tokens} tokens`;
}

function showMode() {
  const chat = mode() === "chat";
  byId("system-row").hidden = !chat;
  byId("clear").hidden = !chat;
  if (["", ...Object.values(SAMPLES)].includes(byId("prompt").value)) byId("prompt").value = SAMPLES[mode()];
}

for (const radio of byId("form").elements.mode) {
  radio.addEventListener("change", () => {
    modeIsChosen = true;
    running?.abort();
    messages = [];
    transcript.clear();
    showMode();
  });
}
byId("settings").addEventListener("input", showSettings);
byId("prompt").addEventListener("input", () => (modeIsChosen = true));
showSettings();
showMode();
startWatching();
