// Boxes that say what happened and what to do next.

import { el } from "./dom.js";
import { explain } from "./words.js";

/** `actions` are {label, run}. */
export function notice(error, actions = []) {
  const { what, next, detail } = explain(error);
  return el(
    "div",
    { class: `notice ${error.name === "Unreachable" ? "waiting" : "bad"}`, role: "alert" },
    el("p", { class: "notice-what" }, what),
    el("p", {}, next),
    detail ? el("p", { class: "notice-detail" }, detail) : null,
    error.requestId ? el("p", { class: "notice-detail" }, `Request ${error.requestId}`) : null,
    actions.length
      ? el("p", { class: "row" }, actions.map(({ label, run }) => el("button", { type: "button", onclick: run }, label)))
      : null,
  );
}
