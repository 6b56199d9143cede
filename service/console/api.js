// The service's own HTTP API, called as any other client calls it.

import { events } from "./sse.js";

const KEY = "foreword.key";

export class ApiError extends Error {
  constructor({ status = 0, code = null, message = "", retryAfter = null, requestId = null }) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, retryAfter, requestId });
  }
}

/** No answer came: the network, or the server, is away. */
export class Unreachable extends Error {
  name = "Unreachable";
}

/** Tells `unauthorized`, `unreachable` and `reached`. */
export const signals = new EventTarget();

// Of this tab, gone with it.
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function headers(more = {}) {
  return key.get() ? { authorization: `Bearer ${key.get()}`, ...more } : more;
}

async function request(path, { method = "GET", body, headers: more = {}, signal } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: headers(body === undefined ? more : { "content-type": "application/json", ...more }),
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch (error) {
    throw lost(error);
  }
  signals.dispatchEvent(new Event("reached"));
  if (response.ok) return response;
  throw await refusal(response.status, (header) => response.headers.get(header), () => response.text());
}

/** The error behind a failed fetch or read: an abort stays what it is. */
export function lost(error) {
  if (error.name === "AbortError" || error instanceof ApiError) return error;
  signals.dispatchEvent(new Event("unreachable"));
  return new Unreachable("no answer", { cause: error });
}

/** An ApiError of a response that wasn't 2xx. */
export async function refusal(status, header, text) {
  let error = {};
  try {
    error = JSON.parse(await text()).error ?? {};
  } catch {
    // Not ours: a proxy's page. The status says enough.
  }
  const refused = new ApiError({
    status,
    code: error.code,
    message: error.message ?? `The server answered with status ${status}.`,
    retryAfter: Number(header("retry-after")) || null,
    requestId: header("x-request-id"),
  });
  if (status === 401) signals.dispatchEvent(new Event("unauthorized"));
  return refused;
}

export const get = async (path, options) => (await request(path, options)).json();
export const send = async (method, path, body) => (await request(path, { method, body })).json();

/** Events of a streamed response; an error within the stream is thrown as if it had been its status. */
export async function* stream(path, options) {
  const response = await request(path, options);
  try {
    for await (const event of events(response.body)) {
      if (event.data?.error && event.data.choices === undefined && event.name === "message") {
        throw new ApiError({ status: response.status, ...event.data.error });
      }
      yield event;
    }
  } catch (error) {
    throw lost(error);
  }
}

/** Answered once a request got through again; asks more and more rarely. */
export async function untilReachable(signal) {
  for (let wait = 500; !signal?.aborted; wait = Math.min(5000, wait * 1.5)) {
    await pause(wait, signal);
    try {
      const answer = await fetch("/readyz", { signal, cache: "no-store" });
      if (answer.ok) return signals.dispatchEvent(new Event("reached"));
    } catch {
      // Still away.
    }
  }
}

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** `work`, again whenever the server was away or asked for patience; other errors are the caller's. */
export async function patiently(work, { signal, waiting = () => {} } = {}) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (signal?.aborted) throw error;
      if (error.name === "Unreachable") {
        waiting(error);
        await untilReachable(signal);
      } else if (error.code === "rate_limit_exceeded" || error.code === "request_in_progress" || (error.status === 503 && error.retryAfter)) {
        waiting(error);
        await pause(1000 * (error.retryAfter ?? 1), signal);
      } else {
        throw error;
      }
    }
  }
}
