// One document: what state it is in, what it cost, where its words are.

import { get, patiently, send } from "./api.js";
import { chart } from "./chart.js";
import { announce, el, find, name } from "./dom.js";
import { readFiles } from "./files.js";
import { bytes, count, left, plural, seconds, share, when } from "./format.js";
import { FileMap } from "./map.js";
import { notice } from "./notices.js";
import { Reader } from "./reader.js";
import { busy } from "./store.js";

const STAGES = ["upload", "ingest", "prefill", "ready"];
const SAYS = { ingest: "Taking it apart into files and tokens", prefill: "Reading it" };

export class Detail {
  #mapped = null; // what the map shows

  constructor(id, { documents, points, gone }) {
    Object.assign(this, { id, documents, points, gone });
    this.reader = new Reader();
    this.map = new FileMap({ open: (file) => this.reader.file(this.id, file.path) });
    this.state = el("span", { class: "pill" });
    this.head = el("h1", { id: "document-name" });
    this.pin = el("button", { type: "button", onclick: () => this.#pin() }, "Pin");
    this.delete = el("button", { type: "button", class: "quiet danger-text", onclick: () => this.#delete() }, "Delete");
    this.trouble = el("div", {});
    this.stages = el("ol", { class: "stages" });
    this.bar = el("progress", { max: 1, "aria-label": "Progress" });
    this.doing = el("p", { class: "doing" });
    this.cancel = el("button", { type: "button", onclick: () => this.#delete(true) }, "Cancel");
    this.progress = el("section", { class: "card progress", "aria-label": "Progress" }, this.stages, this.bar, el("div", { class: "row" }, this.doing, el("span", { class: "grow" }), this.cancel));
    this.facts = el("dl", { class: "facts" });
    this.times = el("div", {});
    this.timing = el("section", { class: "card", "aria-labelledby": "times-title" }, el("div", { class: "card-head" }, el("h2", { id: "times-title" }, "Time to first token")), this.times);
    this.left_out = el("details", { class: "card skipped", hidden: true });
    this.root = [
      el("header", { class: "document-head" }, el("div", { class: "document-title" }, this.head, this.state), el("div", { class: "row" }, this.pin, this.delete)),
      this.trouble,
      this.progress,
      this.facts,
      this.reader.root,
      this.map.root,
      this.timing,
      this.left_out,
    ];
  }

  update(view) {
    this.view = view;
    this.head.replaceChildren(name(view.filename));
    this.state.textContent = { ready: "ready", error: "failed", stored: "stored" }[view.state] ?? view.state;
    this.state.className = `pill ${view.state}`;
    this.pin.textContent = view.pin ? "Unpin" : "Pin";
    this.pin.setAttribute("aria-pressed", String(view.pin));
    this.pin.hidden = view.state === "error";
    this.progress.hidden = !busy(view);
    if (busy(view)) this.show({ stage: view.state, state: view.job?.state ?? "queued", progress: view.progress, eta: view.eta_s, attempt: view.job?.attempts ?? 1 });
    this.trouble.replaceChildren(...(view.error ? [notice(view.error, [{ label: "Delete it", run: () => this.#delete() }])] : []));
    this.#facts(view);
    this.#times(view);
    this.#contents(view);
  }

  /** One look at its progress, as `watch` tells it. */
  show({ stage, state, progress, eta, attempt }) {
    const at = STAGES.indexOf(stage);
    this.stages.replaceChildren(
      ...STAGES.map((step, index) => {
        const status = index < at ? "done" : index === at ? "now" : "to come";
        const mark = { done: " (done)", now: " (now)", "to come": "" }[status];
        return el("li", { class: status.replace(" ", "-") }, step, el("span", { class: "unseen" }, mark));
      }),
    );
    if (state === "queued") this.bar.removeAttribute("value");
    else this.bar.value = progress;
    const parts = state === "queued" ? [attempt > 1 ? "Waiting to go on where it was" : "Waiting for its turn"] : [`${SAYS[stage]}: ${share(progress, 0)}`, left(eta)];
    this.doing.textContent = parts.filter(Boolean).join(", ");
    const step = `${stage} ${state} ${Math.floor(progress * 4)}`;
    if (step !== this.step) announce(this.doing.textContent);
    this.step = step;
  }

  waiting(error) {
    this.doing.textContent = error.name === "Unreachable" ? "The connection was lost; this page goes on as soon as it is back" : "Waiting for the server";
  }

  #facts(view) {
    const fact = (term, value, note) => el("div", { class: "fact" }, el("dt", {}, term), el("dd", {}, value, note ? el("span", { class: "fact-note" }, note) : null));
    const stored = Object.values(view.kv_bytes).reduce((a, b) => Math.max(a, b), 0);
    const measured = view.state === "ready";
    this.facts.hidden = view.num_tokens === null;
    this.facts.replaceChildren(
      ...[
        view.num_tokens === null ? null : fact("Tokens", count(view.num_tokens), bytes(view.bytes)),
        measured ? recallFact(view, fact) : null,
        view.density === null || fromStore(view) ? null : fact("Density", share(view.density), "of all attention computed"),
        measured ? fact("KV", { none: "none", stale: "stale", stored: bytes(stored) }[view.kv], { none: "the next question reads it again", stale: "the model has changed", stored: view.pin ? "kept, pinned" : "kept" }[view.kv]) : null,
        view.stage_seconds.prefill === undefined ? null : fact("Read in", seconds(view.stage_seconds.prefill), `${view.fidelity} · ${when(view.created_at)}`),
      ].filter(Boolean),
    );
  }

  #times(view) {
    const cold = view.cold_ttft_s === null ? [] : [{ label: "cold read", seconds: view.cold_ttft_s, state: "cold" }];
    const points = [...cold, ...this.points];
    this.timing.hidden = !points.length;
    this.times.replaceChildren(...(points.length ? [chart(points)] : []));
  }

  timed() {
    this.#times(this.view);
  }

  async #contents(view) {
    const done = view.num_tokens !== null && view.state !== "error";
    this.map.root.hidden = !done;
    const key = `${view.document_id} ${view.state}`;
    if (!done || this.#mapped === key) return;
    this.#mapped = key;
    const at = `/v1/documents/${encodeURIComponent(this.id)}`;
    try {
      const [manifest, recall] = await patiently(() => Promise.all([get(`${at}/manifest`), get(`${at}/recall`)]));
      if (this.#mapped !== key) return;
      this.map.show(readFiles(manifest, recall.data), recall.recall?.target, view.state === "ready" ? "KV from the store, not measured anew" : "not read yet");
      this.#skipped(manifest);
    } catch (error) {
      this.#mapped = null;
      if (error.status !== 404) this.trouble.replaceChildren(notice(error));
    }
  }

  #skipped(manifest) {
    const rows = manifest.files.filter((row) => row.status === "skipped");
    this.left_out.hidden = !rows.length;
    this.left_out.replaceChildren(
      el("summary", {}, `${plural(rows.length, "file")} left out`),
      el("ul", {}, rows.slice(0, 200).map((row) => el("li", {}, name(row.path), ` · ${row.detail ?? row.reason}`))),
    );
  }

  async #pin() {
    try {
      this.documents.put(await patiently(() => send("PATCH", `/v1/documents/${encodeURIComponent(this.id)}`, { pin: !this.view.pin })));
      announce(this.documents.get(this.id).pin ? "Pinned: its KV is never evicted" : "No longer pinned");
    } catch (error) {
      this.trouble.replaceChildren(notice(error));
    }
  }

  async #delete(cancelling = false) {
    if (!cancelling && !(await sure(this.view))) return;
    try {
      await patiently(() => send("DELETE", `/v1/documents/${encodeURIComponent(this.id)}`));
    } catch (error) {
      if (error.status !== 404) return this.trouble.replaceChildren(notice(error));
    }
    announce(cancelling ? "Cancelled; what was uploaded is removed" : "Deleted");
    this.gone(this.id);
  }
}

/** All of its KV was there already: this read computed, and measured, nothing. */
const fromStore = (view) => view.cached_tokens > 0 && view.cached_tokens >= view.prefix_tokens;

function recallFact(view, fact) {
  const { recall } = view;
  if (recall) {
    const short = recall.below_target ? " · below target" : "";
    return fact("Recall", share(recall.mean), `p5 ${share(recall.p5)} · worst ${share(recall.worst)}${short}`);
  }
  return view.cached_tokens > 0 ? fact("Recall", "–", "KV from the store") : fact("Recall", "100 %", "read densely");
}

async function sure(view) {
  const dialog = find("sure");
  find("sure-text").replaceChildren(name(view.filename), " and all that was remembered of it will be gone.");
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes";
}
