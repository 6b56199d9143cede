// Server-sent events over fetch, which unlike EventSource can send a key and a body.

/** Events of a response body as {id, name, data, comment}; ends with the stream, throws what reading throws. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parse(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function parse(block) {
  const event = { id: null, name: "message", data: null, comment: null };
  const data = [];
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const field = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (field === "") event.comment = value;
    else if (field === "id") event.id = value;
    else if (field === "event") event.name = value;
    else if (field === "data") data.push(value);
  }
  const text = data.join("\n");
  if (text === "[DONE]") event.name = "end";
  else if (text) event.data = JSON.parse(text);
  return event;
}
