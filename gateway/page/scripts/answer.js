// What is known of one answer: its text, its rounds, and totals that are counted on with each. No DOM.

const PAST_CHARS = 160; // of the text so far that a round keeps: more than a line shows

export class Answer {
  rounds = [];
  text = "";
  reasoning = "";
  numTokens = 0;
  numPasses = 0;
  numPlain = 0;
  numDrafted = 0;
  numAccepted = 0;
  /** By position: proposals that reached it, and those whose token there was accepted. */
  drafted = [];
  accepted = [];
  /** Sums of the rounds' timings, µs, by name. */
  spent = {};
  firstAt = null;
  lastAt = null;

  /** `past` is the text that the output continues; `startedAt` is in ms, as `performance.now()`. */
  constructor(past, startedAt) {
    this.past = past.slice(-PAST_CHARS);
    this.startedAt = startedAt;
  }

  /** Take in one chunk of the stream, which holds one round. */
  add(chunk, now) {
    const choice = chunk.choices[0];
    if (choice === undefined) return;
    this.text += choice.text ?? choice.delta?.content ?? "";
    this.reasoning += choice.delta?.reasoning_content ?? "";
    const tokens = choice.speculation?.tokens ?? [];
    if (tokens.length === 0) return;
    this.numTokens += tokens.length;
    if (this.firstAt === null) {
      this.firstAt = now;
      this.numFirst = tokens.length;
    }
    this.lastAt = now;
    if (choice.speculation.round) this.#addRound(tokens, choice.speculation.round);
    this.past = (this.past + tokens.map((token) => token.text).join("")).slice(-PAST_CHARS);
  }

  #addRound(tokens, round) {
    this.rounds.push({ ...round, number: this.rounds.length + 1, past: this.past, tokens });
    this.numPasses += 1;
    this.numPlain += round.num_drafted === 0 ? 1 : 0;
    this.numDrafted += round.num_drafted;
    this.numAccepted += round.num_accepted;
    const depth = Math.max(0, ...depths(round.draft));
    for (let position = 0; position < depth; position += 1) {
      this.drafted[position] = (this.drafted[position] ?? 0) + 1;
      this.accepted[position] = (this.accepted[position] ?? 0) + (position < round.num_accepted ? 1 : 0);
    }
    for (const [name, us] of Object.entries(round.timings)) this.spent[name] = (this.spent[name] ?? 0) + (us ?? 0);
  }

  get acceptanceRate() {
    return this.numDrafted ? this.numAccepted / this.numDrafted : null;
  }

  get tokensPerPass() {
    return this.numPasses ? this.numTokens / this.numPasses : null;
  }

  get firstTokenMs() {
    return this.firstAt === null ? null : this.firstAt - this.startedAt;
  }

  /** From the first event to the last, so that neither the queue nor the prompt counts. */
  get tokensPerSecond() {
    const span = this.lastAt - this.firstAt;
    return span > 0 ? (1000 * (this.numTokens - this.numFirst)) / span : null;
  }
}

/** Return how deep each token of a proposal lies, from 1. Parents come before their children. */
export function depths(draft) {
  const found = [];
  for (const { parent } of draft) found.push(parent < 0 ? 1 : found[parent] + 1);
  return found;
}
