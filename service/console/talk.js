// Questions about one document and their answers, streamed, with citations that open what they cite.

import { patiently, stream } from "./api.js";
import { kind } from "./chart.js";
import { announce, el, name } from "./dom.js";
import { count, seconds, share } from "./format.js";
import { notice } from "./notices.js";

const MAX_TOKENS = 256;

export class Talk {
  #running = null; // AbortController of the answer under way

  /** `model` is asked; `cite` opens an annotation; `measured` is told of each first token. */
  constructor(id, { model, cite, measured }) {
    Object.assign(this, { id, model, cite, measured });
    this.number = 0;
    this.log = el("div", { class: "log", role: "log", "aria-label": "Answers", tabIndex: 0 });
    this.question = el("textarea", {
      rows: 2,
      placeholder: "What are the parameters of …?",
      id: "question",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          this.#submit();
        }
      },
    });
    this.ask = el("button", { type: "submit", class: "primary" }, "Ask");
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.#running?.abort() }, "Stop");
    this.length = el(
      "select",
      { "aria-label": "Length of the summary" },
      ["short", "medium", "long"].map((length) => el("option", { value: length }, length)),
    );
    const summarize = el("button", { type: "button", class: "quiet", onclick: () => this.#summarize() }, "Summarize");
    this.root = el(
      "div",
      { class: "talk-inner" },
      el("h2", {}, "Ask"),
      this.log,
      el(
        "form",
        { class: "composer", onsubmit: (event) => (event.preventDefault(), this.#submit()) },
        el("label", { class: "unseen", htmlFor: "question" }, "Your question"),
        this.question,
        el("div", { class: "row" }, summarize, this.length, el("span", { class: "grow" }), this.stop, this.ask),
        el("p", { class: "hint" }, "Each question is asked on its own."),
      ),
    );
  }

  close() {
    this.#running?.abort();
  }

  #submit() {
    const text = this.question.value.trim();
    if (!text || this.#running) return;
    this.question.value = "";
    const content = [{ type: "file", file: { file_id: this.id } }, { type: "text", text }];
    this.#exchange(text, "/v1/chat/completions", {
      model: this.model,
      messages: [{ role: "user", content }],
      max_tokens: MAX_TOKENS,
      temperature: 0,
    });
  }

  #summarize() {
    if (this.#running) return;
    const length = this.length.value;
    this.#exchange(`Summary, ${length}`, `/v1/documents/${encodeURIComponent(this.id)}/summary`, { length });
  }

  async #exchange(asked, path, body) {
    const turn = new Turn(asked, (this.number += 1), this.cite);
    this.log.append(turn.root);
    this.log.scrollTop = this.log.scrollHeight;
    this.#running = new AbortController();
    const { signal } = this.#running;
    this.#busy(true);
    try {
      await patiently(() => this.#read(turn, path, body, signal), { signal, waiting: (error) => turn.trouble(error) });
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) turn.stopped();
      else turn.failed(error, () => (turn.root.remove(), this.#exchange(asked, path, body)));
    } finally {
      this.#running = null;
      this.#busy(false);
    }
  }

  async #read(turn, path, body, signal) {
    turn.begin();
    const request = { ...body, stream: true, stream_options: { include_usage: true } };
    for await (const event of stream(path, { method: "POST", body: request, signal })) {
      if (event.comment) turn.waits(event.comment);
      const choice = event.data?.choices?.[0];
      if (choice?.delta.content) {
        turn.add(choice.delta.content);
        this.log.scrollTop = this.log.scrollHeight;
      }
      if (choice?.finish_reason) turn.cited(choice.delta.annotations ?? []);
      if (event.data?.usage) {
        turn.measured(event.data);
        this.measured({ label: `question ${turn.number}`, seconds: event.data.foreword.ttft_s, state: event.data.foreword.cache_state });
      }
      if (event.name === "end") return turn.end();
    }
    throw Object.assign(new Error("the answer broke off"), { name: "Unreachable" });
  }

  #busy(is) {
    this.ask.hidden = is;
    this.stop.hidden = !is;
  }
}

class Turn {
  constructor(asked, number, cite) {
    Object.assign(this, { number, cite });
    this.answer = el("div", { class: "answer" });
    this.status = el("p", { class: "answer-status" });
    this.notes = el("div", {});
    this.root = el(
      "article",
      { class: "turn", "aria-label": `Question ${number}` },
      el("p", { class: "asked" }, el("span", { class: "asked-number" }, String(number)), el("span", {}, asked)),
      this.answer,
      this.status,
      this.notes,
    );
  }

  begin() {
    this.text = "";
    this.answer.replaceChildren();
    this.notes.replaceChildren();
    this.root.classList.add("running");
    this.status.textContent = "waiting for the first token";
  }

  waits(comment) {
    if (!this.text) this.status.textContent = comment === "waiting" ? "waiting" : `still being read: ${comment}`;
  }

  add(piece) {
    if (!this.text) this.status.textContent = "answering";
    this.text += piece;
    this.answer.append(piece);
  }

  /** Indices of annotations count characters, not UTF-16 units. */
  cited(annotations) {
    if (!annotations.length) return;
    const characters = Array.from(this.text);
    const pieces = [];
    let at = 0;
    annotations.forEach((note, index) => {
      if (note.start_index < at) return;
      pieces.push(characters.slice(at, note.start_index).join(""));
      const quote = characters.slice(note.start_index, note.end_index).join("");
      pieces.push(this.#link(note, index, el("q", {}, quote), el("sup", {}, String(index + 1))));
      at = note.end_index;
    });
    pieces.push(characters.slice(at).join(""));
    this.answer.replaceChildren(...pieces);
    this.notes.append(
      el(
        "ol",
        { class: "sources", "aria-label": "Sources" },
        annotations.map((note, index) => el("li", {}, this.#link(note, index, name(note.filename), `, ${place(note)}`))),
      ),
    );
  }

  #link(note, index, ...content) {
    return el(
      "button",
      {
        type: "button",
        class: "cite",
        "aria-label": `Source ${index + 1}: ${note.filename}, ${place(note)}. Open the passage`,
        onclick: () => this.cite(note),
      },
      content,
    );
  }

  measured({ usage, foreword }) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    this.status.textContent = [
      `first token ${seconds(foreword.ttft_s)}`,
      kind(foreword.cache_state),
      `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from KV`,
      foreword.recall ? `recall ${share(foreword.recall.mean)}` : null,
    ]
      .filter(Boolean)
      .join(" · ");
  }

  end() {
    this.root.classList.remove("running");
    if (!this.text) this.answer.append(el("em", {}, "The model gave no answer."));
    announce(`Answer ${this.number} is complete`);
  }

  trouble(error) {
    this.notes.replaceChildren(notice(error));
    this.status.textContent = "";
  }

  stopped() {
    this.root.classList.remove("running");
    this.status.textContent = "stopped";
  }

  failed(error, again) {
    this.root.classList.remove("running");
    this.status.textContent = "";
    this.notes.replaceChildren(notice(error, [{ label: "Ask again", run: again }]));
  }
}

function place({ page, page_label: label, line }) {
  return page === null ? `line ${line}` : `page ${label ?? page}, line ${line}`;
}
