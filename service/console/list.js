// The shelf: every document as a row, kept in step with the store. The browser lays out only the rows in sight.

import { el, find, name } from "./dom.js";
import { count, plural, share, when } from "./format.js";
import { busy } from "./store.js";

export class Shelf {
  #rows = new Map(); // file id → {item, button, line}
  #selected = null;

  constructor(documents, { open }) {
    this.documents = documents;
    this.open = open;
    this.list = find("documents");
    this.search = find("search");
    this.search.addEventListener("input", () => this.#filter());
    this.list.addEventListener("keydown", (event) => this.#move(event));
    documents.addEventListener("change", (event) => this.#update(event.detail));
  }

  select(id) {
    for (const [other, row] of this.#rows) {
      if (other === id) row.button.setAttribute("aria-current", "true");
      else if (other === this.#selected) row.button.removeAttribute("aria-current");
    }
    this.#selected = id;
  }

  #update(ids) {
    for (const id of ids) {
      const view = this.documents.get(id);
      const row = this.#rows.get(id);
      if (!view) {
        row?.item.remove();
        this.#rows.delete(id);
      } else {
        this.#show(row ?? this.#add(view), view);
      }
    }
    this.#sort();
    this.#filter();
  }

  #add(view) {
    const title = el("span", { class: "row-name" });
    const line = el("span", { class: "row-line" });
    const button = el("button", { type: "button", class: "row-button", onclick: () => this.open(view.id) }, title, line);
    const row = { item: el("li", {}, button), button, title, line };
    if (view.id === this.#selected) button.setAttribute("aria-current", "true");
    this.#rows.set(view.id, row);
    return row;
  }

  #show(row, view) {
    row.title.replaceChildren(name(view.filename));
    row.line.replaceChildren(el("span", { class: `dot ${view.state}` }), summary(view));
    row.name = view.filename.toLowerCase();
    row.created = view.created_at;
  }

  /** Rows stand newest first; most updates change no place, and then nothing is moved. */
  #sort() {
    let at = this.list.firstElementChild;
    for (const { id } of this.documents.all) {
      const { item } = this.#rows.get(id);
      if (item === at) at = at.nextElementSibling;
      else this.list.insertBefore(item, at);
    }
  }

  #filter() {
    const wanted = this.search.value.trim().toLowerCase();
    let shown = 0;
    for (const row of this.#rows.values()) {
      row.item.hidden = wanted !== "" && !row.name.includes(wanted);
      shown += !row.item.hidden;
    }
    const all = this.documents.size;
    find("count").textContent = wanted ? `${count(shown)} of ${count(all)}` : count(all);
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...this.list.querySelectorAll("li:not([hidden]) .row-button")];
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }
}

function summary(view) {
  if (busy(view)) {
    const queued = view.job?.state === "queued" || !view.job;
    return `${view.state} · ${queued ? "waiting" : share(view.progress, 0)}`;
  }
  if (view.state === "error") return "could not be read";
  const parts = [view.num_tokens === null ? null : plural(view.num_tokens, "token"), when(view.created_at)];
  if (view.pin) parts.push("pinned");
  return parts.filter(Boolean).join(" · ");
}
