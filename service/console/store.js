// The documents that this page knows, newest first, as the API shows them.

import { get } from "./api.js";

const FIRST_PAGE = 60;
const NEXT_PAGE = 400;

export class Documents extends EventTarget {
  #views = new Map(); // file id → view
  #loading = 0;

  get all() {
    return [...this.#views.values()].sort((a, b) => b.created_at - a.created_at || (a.id < b.id ? 1 : -1));
  }

  get(id) {
    return this.#views.get(id);
  }

  get size() {
    return this.#views.size;
  }

  put(...views) {
    for (const view of views) if (view.purpose !== "batch") this.#views.set(view.id, view);
    this.#changed(views.map((view) => view.id));
  }

  remove(id) {
    if (this.#views.delete(id)) this.#changed([id]);
  }

  clear() {
    this.#loading += 1;
    const ids = [...this.#views.keys()];
    this.#views.clear();
    this.#changed(ids);
  }

  /** Everything, a short page first so that there is something to see; whatever is gone meanwhile goes. */
  async load() {
    const turn = (this.#loading += 1);
    const seen = new Set();
    let after = null;
    for (let limit = FIRST_PAGE; ; limit = NEXT_PAGE) {
      const page = await get(`/v1/documents?limit=${limit}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
      if (turn !== this.#loading) return;
      for (const view of page.data) seen.add(view.id);
      this.put(...page.data);
      if (!page.has_more || !page.last_id) break;
      after = page.last_id;
    }
    const gone = [...this.#views.keys()].filter((id) => !seen.has(id));
    for (const id of gone) this.#views.delete(id);
    if (gone.length) this.#changed(gone);
  }

  /** The newest ones, and those that are under way. */
  async refresh() {
    const page = await get(`/v1/documents?limit=${FIRST_PAGE}`);
    const known = new Set(page.data.map((view) => view.id));
    const oldest = page.data.at(-1)?.created_at ?? Infinity;
    const gone = this.all.filter((view) => !known.has(view.id) && (!page.has_more || view.created_at > oldest));
    for (const view of gone) this.#views.delete(view.id);
    const changed = page.data.filter((view) => JSON.stringify(view) !== JSON.stringify(this.#views.get(view.id)));
    if (gone.length) this.#changed(gone.map((view) => view.id));
    if (changed.length) this.put(...changed);
  }

  #changed(ids) {
    this.dispatchEvent(new CustomEvent("change", { detail: ids }));
  }
}

export const busy = (view) => view.state === "ingest" || view.state === "prefill";
