// The console: puts the parts together and keeps them in step with the server.

import { get, key, patiently, pause, signals, untilReachable } from "./api.js";
import { Detail } from "./detail.js";
import { announce, el, find, name } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { Shelf } from "./list.js";
import { notice } from "./notices.js";
import { busy, Documents } from "./store.js";
import { Talk } from "./talk.js";
import { chosen, dropped, MAX_FILES, title, upload } from "./upload.js";
import { watch } from "./watch.js";
import { tooLarge, tooManyFiles } from "./words.js";

const REFRESH_MS = 4000;
const SENDABLE = /^[\x21-\x7e]+$/; // what a header can carry of a key

const documents = new Documents();
const shelf = new Shelf(documents, { open: (id) => open(id) });
const talks = new Map(); // file id → Talk
const points = new Map(); // file id → first tokens of its questions
let settings = { max_upload_bytes: Infinity, model: "default", keys: false, version: "" };
let current = null; // {id, detail, stop}

// --- one document ----------------------------------------------------------------------------------------------

function open(id) {
  if (current?.id === id) return;
  const view = documents.get(id);
  close();
  if (!view) return;
  const detail = new Detail(id, { documents, points: pointsOf(id), gone: forget });
  current = { id, detail, stop: new AbortController() };
  find("welcome").hidden = true;
  find("document").replaceChildren(...detail.root);
  find("document").hidden = false;
  find("talk").replaceChildren(talkOf(id).root);
  find("talk").hidden = view.state === "error";
  detail.update(view);
  shelf.select(id);
  if (location.hash !== `#${id}`) history.replaceState(null, "", `#${id}`);
  document.title = `${view.filename} · Foreword`;
  find("main").scrollTop = 0;
  if (busy(view)) follow(current);
}

function close() {
  current?.stop.abort();
  current = null;
  shelf.select(null);
  find("document").hidden = true;
  find("talk").hidden = true;
  find("welcome").hidden = false;
  document.title = "Foreword";
}

async function follow({ id, detail, stop }) {
  const { signal } = stop;
  try {
    const view = await watch(id, { signal, told: (now) => detail.show(now), waiting: (error) => detail.waiting(error) });
    documents.put(view);
    announce(view.state === "ready" ? `${view.filename} is ready` : `${view.filename} could not be read`);
  } catch (error) {
    if (error.status === 404) forget(id);
    else if (!signal.aborted && error.status !== 401) detail.trouble.replaceChildren(notice(error));
  }
}

function forget(id) {
  talks.get(id)?.close();
  talks.delete(id);
  points.delete(id);
  documents.remove(id);
  if (current?.id === id) {
    close();
    history.replaceState(null, "", location.pathname);
    find("main").focus();
  }
}

function pointsOf(id) {
  if (!points.has(id)) points.set(id, []);
  return points.get(id);
}

function talkOf(id) {
  if (!talks.has(id)) {
    const cite = (note) => current?.detail.reader.cited(id, note);
    const measured = (point) => {
      pointsOf(id).push(point);
      if (current?.id === id) current.detail.timed();
    };
    talks.set(id, new Talk(id, { model: settings.model, cite, measured }));
  }
  return talks.get(id);
}

documents.addEventListener("change", ({ detail: ids }) => {
  if (!current || !ids.includes(current.id)) return;
  const view = documents.get(current.id);
  if (!view) return forget(current.id);
  const wasBusy = busy(current.detail.view);
  current.detail.update(view);
  find("talk").hidden = view.state === "error";
  if (busy(view) && !wasBusy) follow(current);
});

// --- uploads ---------------------------------------------------------------------------------------------------

async function take(files) {
  if (!files.length) return;
  const size = files.reduce((sum, { file }) => sum + file.size, 0);
  const called = title(files);
  const row = new UploadRow(called, size);
  find("uploads").append(row.root);
  if (files.length > MAX_FILES) return row.failed(tooManyFiles(MAX_FILES));
  if (size > settings.max_upload_bytes) return row.failed(tooLarge(size, settings.max_upload_bytes));
  const options = { fidelity: find("fidelity").value, idempotencyKey: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
  const run = async () => {
    row.begin();
    try {
      const view = await patiently(
        () => upload(files, { ...options, signal: row.signal, progress: (sent, total) => row.sent(sent, total) }),
        { signal: row.signal, waiting: (error) => row.waiting(error) },
      );
      row.root.remove();
      documents.put(view);
      open(view.id);
      announce(`${called} is uploaded`);
    } catch (error) {
      if (error.name === "AbortError") row.root.remove();
      else row.failed(error, run);
    }
  };
  await run();
}

class UploadRow {
  constructor(called, size) {
    this.bar = el("progress", { max: 1, "aria-label": `Upload of ${called}` });
    this.line = el("p", { class: "row-line" });
    this.trouble = el("div", {});
    this.cancel = el("button", { type: "button", class: "quiet", onclick: () => this.control?.abort() }, "Cancel");
    this.close = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.root.remove() }, "Dismiss");
    this.root = el("li", { class: "upload" }, el("p", { class: "row-name" }, name(called)), this.bar, el("div", { class: "row" }, this.line, el("span", { class: "grow" }), this.cancel, this.close), this.trouble);
    this.line.textContent = bytes(size);
  }

  get signal() {
    return this.control.signal;
  }

  begin() {
    this.control = new AbortController();
    this.started = performance.now();
    this.trouble.replaceChildren();
    this.bar.hidden = this.cancel.hidden = false;
    this.close.hidden = true;
  }

  sent(sent, total) {
    this.bar.value = sent / total;
    const eta = ((performance.now() - this.started) / 1000) * (total / sent - 1);
    const much = `${bytes(sent)} of ${bytes(total)}`;
    this.line.textContent = sent === total ? "Uploaded, being kept" : eta > 1 ? `${much}, about ${seconds(eta)} left` : much;
    this.trouble.replaceChildren();
  }

  waiting(error) {
    this.trouble.replaceChildren(notice(error));
    this.started = performance.now();
  }

  failed(error, again) {
    this.bar.hidden = this.cancel.hidden = true;
    this.close.hidden = false;
    this.line.textContent = "Not uploaded";
    this.trouble.replaceChildren(notice(error, again ? [{ label: "Try again", run: again }] : []));
  }
}

function listenForFiles() {
  for (const id of ["files", "folder"]) {
    find(id).addEventListener("change", ({ target }) => {
      const files = chosen(target);
      target.value = "";
      take(files);
    });
  }
  let depth = 0;
  const over = (inside) => document.body.classList.toggle("dropping", inside);
  addEventListener("dragenter", () => over((depth += 1) > 0));
  addEventListener("dragleave", () => over((depth -= 1) > 0));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", async (event) => {
    event.preventDefault();
    over((depth = 0));
    const files = await dropped(event.dataTransfer).catch(() => null);
    if (files) return take(files);
    const row = new UploadRow("What was dropped", 0);
    find("uploads").append(row.root);
    row.failed({ code: "unreadable_drop" });
  });
}

// --- the server ------------------------------------------------------------------------------------------------

let away = false;

signals.addEventListener("reached", () => {
  if (!away) return;
  away = false;
  find("away").hidden = true;
  tellServer();
  load();
});

signals.addEventListener("unreachable", () => {
  if (away) return;
  away = true;
  find("away").textContent = "The server can't be reached. What was uploaded is safe there; this page tries again by itself and goes on where it was.";
  find("away").hidden = false;
  find("server").textContent = "away";
  find("server").className = "server away";
  untilReachable();
});

async function tellServer() {
  const answer = await fetch("/readyz", { cache: "no-store" }).catch(() => null);
  if (!answer) return signals.dispatchEvent(new Event("unreachable"));
  find("server").className = `server ${answer.ok ? "ok" : "starting"}`;
  find("server").textContent = answer.ok ? settings.model : "the worker is starting";
  if (!answer.ok) setTimeout(tellServer, 1500);
}

async function load() {
  try {
    await patiently(() => documents.load());
    find("documents").classList.add("loaded");
  } catch (error) {
    if (error.status !== 401) find("uploads").append(el("li", {}, notice(error)));
  }
}

async function keepUp() {
  for (;;) {
    await pause(REFRESH_MS);
    if (document.hidden || away || find("key-dialog").open) continue;
    const others = documents.all.some((view) => busy(view));
    if (!others && (keepUp.idle = (keepUp.idle ?? 0) + 1) % 4) continue;
    await documents.refresh().catch(() => {}); // said by the signals above
  }
}

// --- key and theme ---------------------------------------------------------------------------------------------

function askForKey(why) {
  const dialog = find("key-dialog");
  if (dialog.open) return;
  if (why) find("key-why").textContent = why;
  find("key").value = "";
  dialog.showModal();
}

signals.addEventListener("unauthorized", () =>
  askForKey(
    key.get()
      ? "The server did not accept this key: it may be mistyped or expired. Enter another one; it stays in this tab only."
      : "This server asks for a key. It stays in this tab and is forgotten when you close it.",
  ),
);

function listenForKey() {
  find("key-button").addEventListener("click", () => askForKey());
  find("key-cancel").addEventListener("click", () => find("key-dialog").close());
  find("key-form").addEventListener("submit", (event) => {
    const value = find("key").value.trim();
    if (!value) return;
    if (!SENDABLE.test(value)) {
      event.preventDefault(); // the dialog stays: a browser can't send such a key, which would look like a lost connection
      find("key-why").textContent = "This can't be a key: it has spaces or characters that keys never have. Copy it again.";
      return;
    }
    key.set(value);
    const id = current?.id ?? location.hash.slice(1);
    close();
    talks.clear();
    documents.clear();
    begin(id);
  });
}

function listenForTheme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const show = () => find("theme-button").setAttribute("aria-pressed", String(isDark()));
  find("theme-button").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("foreword.theme", root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
}

async function learn() {
  settings = await patiently(() => get("/console/settings"));
  find("drop-title").title = `Up to ${bytes(settings.max_upload_bytes)} at once`;
  find("key-button").hidden = !settings.keys;
  tellServer();
}

async function begin(id) {
  await load();
  if (id && documents.get(id)) open(id);
}

async function start() {
  listenForFiles();
  listenForKey();
  listenForTheme();
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  // Side by side, so that rows are there at once; where a key is missing, the answer says so.
  await Promise.all([learn(), begin(location.hash.slice(1))]);
  keepUp();
}

start();
