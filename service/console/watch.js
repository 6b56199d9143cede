// A document's progress, from its own events: goes on where it was after any break.

import { pause, patiently, stream } from "./api.js";

/**
 * Follow ingest and prefill until the document is ready or failed; resolves with its view. `told` gets {stage, state,
 * progress, eta, attempt}. Throws ApiError (404: it was deleted), or AbortError.
 */
export async function watch(fileId, { signal, told, waiting }) {
  let last = null;
  const now = { stage: "ingest", state: "queued", progress: 0, eta: null, attempt: 1 };
  for (;;) {
    const view = await patiently(() => follow(), { signal, waiting });
    if (view) return view;
    await pause(500, signal); // the stream ended too soon: the server goes down, or a proxy cut it
    signal.throwIfAborted();
  }

  async function follow() {
    const headers = last ? { "last-event-id": last } : {};
    for await (const event of stream(`/v1/documents/${encodeURIComponent(fileId)}/events`, { headers, signal })) {
      if (event.id) last = event.id;
      if (event.name === "document") return event.data;
      if (event.name === "state") {
        Object.assign(now, { stage: event.data.stage, state: event.data.state, attempt: event.data.attempt });
        if (event.data.state === "running" && event.data.attempt <= 1) Object.assign(now, { progress: 0, eta: null });
      } else if (event.name === "progress") {
        const { stage, progress, eta_s: eta } = event.data;
        Object.assign(now, { stage, state: "running", progress, eta });
      } else {
        continue;
      }
      told({ ...now });
    }
    return null;
  }
}
