// A passage, or a file, in the document's own words with line numbers.

import { get, patiently } from "./api.js";
import { announce, el, name } from "./dom.js";
import { notice } from "./notices.js";

const LINES = 120;
const CONTEXT = 16;

export class Reader {
  #back = null; // what to return to
  #turn = 0;

  constructor() {
    this.title = el("h2", { id: "reader-title", tabIndex: -1 });
    this.place = el("p", { class: "reader-place" });
    this.text = el("div", { class: "reader-text", tabIndex: 0, role: "group", "aria-label": "Text with line numbers" });
    this.more = el("button", { type: "button", class: "quiet", onclick: () => this.#continue() }, "Show more");
    this.root = el(
      "section",
      { class: "card reader", hidden: true, "aria-labelledby": "reader-title" },
      el(
        "div",
        { class: "card-head" },
        el("div", { class: "reader-head" }, this.title, this.place),
        el("button", { type: "button", class: "quiet", onclick: () => this.close(true) }, "Close"),
      ),
      this.text,
      this.more,
    );
    this.root.addEventListener("keydown", (event) => event.key === "Escape" && this.close(true));
  }

  /** The passage that a citation names. */
  cited(id, { token_start: start, token_end: end, filename }) {
    return this.#open(id, filename, `token_start=${start}&token_end=${end}&context=${CONTEXT}`, true);
  }

  /** A file from its first line. */
  file(id, path) {
    return this.#open(id, path, `file=${encodeURIComponent(path)}&lines=${LINES}`, false);
  }

  close(andReturn = false) {
    this.#turn += 1;
    this.root.hidden = true;
    if (andReturn && this.#back?.isConnected) this.#back.focus();
  }

  async #open(id, path, query, marked) {
    const turn = (this.#turn += 1);
    if (!this.root.contains(document.activeElement)) this.#back = document.activeElement;
    this.root.hidden = false;
    this.title.replaceChildren(name(path));
    this.place.textContent = "";
    try {
      const found = await patiently(() => get(`/v1/documents/${encodeURIComponent(id)}/passage?${query}`));
      if (turn !== this.#turn) return;
      this.#show(id, found, marked);
    } catch (error) {
      if (turn === this.#turn) this.text.replaceChildren(notice(error));
    }
    this.more.hidden = this.next === null;
    this.title.focus({ preventScroll: true });
    this.root.scrollIntoView({ block: "nearest" });
  }

  #show(id, found, marked) {
    const page = found.page === null ? "" : `page ${found.page_label ?? found.page}, `;
    this.title.replaceChildren(name(found.filename));
    this.place.textContent = marked ? `${page}line ${found.line}` : page ? `${page}line 1` : "from its first line";
    this.text.replaceChildren(lines(found, marked));
    this.#follow(id, found);
    const mark = this.text.querySelector("mark");
    this.text.scrollTop = mark ? Math.max(0, mark.offsetTop - this.text.clientHeight / 3) : 0;
    announce(`${found.filename}, ${this.place.textContent}`);
  }

  #follow(id, found) {
    const shown = (found.before + found.text + found.after).split("\n").length;
    const page = found.page === null ? "" : `&page=${found.page}`;
    const query = `file=${encodeURIComponent(found.filename)}${page}&line=${found.first_line + shown - 1}&lines=${LINES}`;
    this.next = found.more ? { id, query } : null;
    this.more.hidden = this.next === null;
  }

  async #continue() {
    const { id, query } = this.next;
    const turn = this.#turn;
    try {
      const found = await patiently(() => get(`/v1/documents/${encodeURIComponent(id)}/passage?${query}`));
      if (turn !== this.#turn) return;
      this.text.append(lines(found, false));
      this.#follow(id, found);
    } catch (error) {
      if (turn === this.#turn) this.text.append(notice(error));
    }
  }
}

/** Lines with their numbers; what is cited in a mark. */
function lines({ before, text, after, first_line: first }, marked) {
  // Tokens begin with the space before their word; the mark needn't.
  const [space, core] = [text.match(/^\s*/)[0], text.trim()];
  const rest = text.slice(space.length + core.length);
  const parts = [[before + space, false], [core, marked], [rest + after, false]];
  const rows = [[]];
  for (const [part, inMark] of parts) {
    part.split("\n").forEach((piece, index) => {
      if (index) rows.push([]);
      if (piece) rows.at(-1).push(inMark ? el("mark", {}, piece) : piece);
    });
  }
  if (!rows.at(-1).length) rows.pop(); // a line end ends its line, it begins none
  return el(
    "div",
    { class: "lines" },
    rows.map((row, index) =>
      el("div", { class: "line" }, el("span", { class: "line-number", "aria-hidden": "true" }, String(first + index)), el("code", {}, row)),
    ),
  );
}
