// Server-sent events of a POST, which EventSource cannot do.

/** Yield the parsed data of each event up to `[DONE]`. Throws where the stream ends before. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let complete = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done && complete) return;
      if (done) throw new Error("the stream broke off before its end");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith(":")) continue; // a comment, which keeps the connection alive
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") complete = true;
        else yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
