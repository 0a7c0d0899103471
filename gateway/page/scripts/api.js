// The gateway's HTTP interface. The API key lives in this module's memory and nowhere else.

import { events } from "./stream.js";

let key = "";

export function useKey(given) {
  key = given;
}

export const hasKey = () => key !== "";

/** An answer of the gateway that is no success. `status` is HTTP's. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the gateway does not answer", 0);
  }
  return response;
}

async function failure(response) {
  const said = await response.json().catch(() => null);
  return new ApiError(said?.error?.message ?? `the gateway answered with status ${response.status}`, response.status);
}

/** Return the served models. */
export async function models() {
  const response = await request("v1/models");
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

/** Return `{ready, reason, refused}`. */
export async function readiness() {
  return (await request("readyz")).json();
}

/** Yield the chunks of a streamed answer to a chat, where `body` has messages, or of a completion. Throws ApiError, also for an error that comes as an event. */
export async function* ask(body, signal) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  for await (const chunk of events(response)) {
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    yield chunk;
  }
}
