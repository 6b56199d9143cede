// A document as a map of its files: areas are tokens, colours tokens or recall. The same as a table, for other ways to read.

import { el, name } from "./dom.js";
import { tree } from "./files.js";
import { count, plural, share } from "./format.js";
import { squarify } from "./treemap.js";

const HEADER = 20;
const LEAST = 3; // pixels; smaller cells can't be seen
const MAX_CELLS = 900;
const MAX_ROWS = 400;

export class FileMap {
  #files = [];
  #target = 0.95;
  #unmeasured = "";
  #folder = ""; // path of the folder that is zoomed into
  #colour = "recall";
  #as = "map";

  constructor({ open }) {
    this.open = open;
    this.canvas = el("div", { class: "map", role: "group", "aria-label": "Files by tokens; arrow keys move between them" });
    this.rows = el("div", { class: "map-table", tabIndex: 0, role: "region", "aria-label": "Files" });
    this.legend = el("p", { class: "legend" });
    this.crumbs = el("p", { class: "crumbs" });
    this.said = el("p", { class: "map-said" });
    this.root = el(
      "section",
      { class: "card", "aria-labelledby": "map-title" },
      el(
        "div",
        { class: "card-head" },
        el("h2", { id: "map-title" }, "Map"),
        switcher("Colour", [["recall", "Recall"], ["tokens", "Tokens"]], this.#colour, (value) => this.#paint(value)),
        switcher("Show as", [["map", "Map"], ["table", "Table"]], this.#as, (value) => this.#switch(value)),
      ),
      this.crumbs,
      this.canvas,
      this.rows,
      el("div", { class: "map-foot" }, this.legend, this.said),
    );
    this.canvas.addEventListener("keydown", (event) => this.#move(event));
    for (const kind of ["focusin", "pointerover"]) {
      this.canvas.addEventListener(kind, (event) => this.#tell(event.target.closest("button")));
    }
    new ResizeObserver(() => this.#draw()).observe(this.canvas);
  }

  /** `unmeasured` says why a file has no recall. */
  show(files, target, unmeasured) {
    this.#files = files;
    this.#unmeasured = unmeasured;
    this.#target = target ?? 0.95;
    this.#folder = "";
    this.#switch(this.#as);
  }

  #switch(as) {
    this.#as = as;
    this.canvas.hidden = as !== "map";
    this.rows.hidden = as !== "table";
    this.#draw();
  }

  #paint(colour) {
    this.#colour = colour;
    this.#draw();
  }

  #draw() {
    this.#legend();
    this.said.textContent = "";
    if (this.#as === "table") {
      this.crumbs.hidden = true;
      this.rows.replaceChildren(this.#table());
      return;
    }
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    const focused = this.canvas.contains(document.activeElement) ? document.activeElement.dataset.path : null;
    let node = tree(this.#files);
    const trail = [node];
    while (node.path !== this.#folder) {
      const next = node.children?.find((child) => child.children && `${this.#folder}/`.startsWith(`${child.path}/`));
      if (!next) break;
      trail.push((node = next));
    }
    this.cells = [];
    this.most = Math.max(1, ...this.#files.map((file) => file.tokens));
    this.#place(node, { x: 0, y: 0, width, height });
    this.canvas.replaceChildren(...this.cells);
    this.#crumbs(trail);
    const first = this.cells.find((cell) => cell.dataset.path === focused) ?? this.cells[0];
    if (first) {
      first.tabIndex = 0;
      if (focused) first.focus();
    }
  }

  /** What is too small to be seen stays the colour of its folder, and can be zoomed into. */
  #place(node, box) {
    const boxes = squarify(node.children.map((child) => child.tokens), box);
    node.children.forEach((child, index) => {
      const at = boxes[index];
      if (at.width < LEAST || at.height < LEAST || this.cells.length >= MAX_CELLS) return;
      if (child.file) this.#cell(child, at);
      else this.#frame(child, at);
    });
  }

  #frame(node, at) {
    const header = at.height > 3 * HEADER && at.width > 56 ? HEADER : 0;
    const label = `Folder ${node.path}: ${plural(node.tokens, "token")}. Zoom in`;
    const frame = el("button", { type: "button", class: "cell frame", tabIndex: -1, "aria-label": label, "data-path": node.path });
    if (header) frame.append(el("span", { class: "cell-name" }, name(node.name)));
    frame.addEventListener("click", () => this.#zoom(node.path));
    frame.said = `${node.path}/ · ${plural(node.tokens, "token")}`;
    put(frame, at, 1);
    this.cells.push(frame);
    this.#place(node, { x: at.x + 2, y: at.y + (header || 2), width: at.width - 4, height: at.height - (header || 2) - 2 });
  }

  #cell(node, at) {
    const { file } = node;
    const cell = el("button", {
      type: "button",
      class: `cell ${this.#class(file)}`,
      tabIndex: -1,
      "aria-label": `${file.path}: ${plural(file.tokens, "token")}, ${recallOf(file)}`,
      "data-path": file.path,
    });
    if (at.width > 44 && at.height > 20) cell.append(el("span", { class: "cell-name" }, name(node.name)));
    if (at.width > 64 && at.height > 40) cell.append(el("span", { class: "cell-size" }, count(file.tokens)));
    cell.said = `${file.path} · ${plural(file.tokens, "token")} · ${recallOf(file)}`;
    cell.addEventListener("click", () => this.open(file));
    put(cell, at, 1);
    this.cells.push(cell);
  }

  #class(file) {
    if (this.#colour === "tokens") {
      return `t${Math.min(4, Math.floor((5 * Math.log1p(file.tokens)) / Math.log1p(this.most) / 1.0001))}`;
    }
    if (file.how !== "measured") return file.how;
    return `r${grade(file.recall, this.#target)}`;
  }

  #legend() {
    const entry = (kind, text) => el("span", { class: "legend-entry" }, el("span", { class: `swatch ${kind}` }), text);
    const percent = (value) => share(value, value * 100 === Math.round(value * 100) ? 0 : 1);
    const goal = this.#target;
    const entries =
      this.#colour === "tokens"
        ? [entry("t0", "few tokens"), entry("t2", ""), entry("t4", "many")]
        : [
            entry("dense", "dense: all kept"),
            entry("r3", `from ${percent(goal + (1 - goal) * 0.5)}`),
            entry("r2", `from target ${percent(goal)}`),
            entry("r1", `from ${percent(goal - (1 - goal) * 0.5)}`),
            entry("r0", "below"),
            ...(this.#files.some((file) => file.how === "unknown") ? [entry("unknown", this.#unmeasured)] : []),
          ];
    this.legend.replaceChildren(...entries);
  }

  #crumbs(trail) {
    this.crumbs.hidden = trail.length < 2;
    this.crumbs.replaceChildren(
      ...trail.flatMap((node, index) => {
        const title = name(index ? node.name : "All files");
        const last = index === trail.length - 1;
        if (last) return [el("span", { "aria-current": "true" }, title)];
        return [el("button", { type: "button", class: "link", onclick: () => this.#zoom(node.path) }, title), " / "];
      }),
    );
  }

  #zoom(path) {
    this.#folder = path;
    this.#draw();
    (this.cells[0] ?? this.canvas).focus();
  }

  #tell(cell) {
    if (cell?.said) this.said.replaceChildren(name(cell.said));
  }

  /** The next cell in that direction: nearest first, straight ahead before aside. */
  #move(event) {
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    const from = event.target.closest("button");
    if (!way || !from) return;
    event.preventDefault();
    const middle = (cell) => [cell.offsetLeft + cell.offsetWidth / 2, cell.offsetTop + cell.offsetHeight / 2];
    const [x, y] = middle(from);
    let best = null;
    for (const cell of this.cells) {
      const [dx, dy] = [middle(cell)[0] - x, middle(cell)[1] - y];
      const ahead = dx * way[0] + dy * way[1];
      const aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
      if (cell !== from && ahead > 1 && (!best || ahead + 3 * aside < best.cost)) best = { cell, cost: ahead + 3 * aside };
    }
    if (!best) return;
    from.tabIndex = -1;
    best.cell.tabIndex = 0;
    best.cell.focus();
  }

  #table() {
    const files = [...this.#files].sort((a, b) => b.tokens - a.tokens);
    const head = ["File", "Tokens", "Recall", "Density"];
    const row = (file) =>
      el(
        "tr",
        {},
        el("td", {}, el("button", { type: "button", class: "link", onclick: () => this.open(file) }, name(file.path))),
        el("td", {}, count(file.tokens)),
        el("td", {}, file.how === "measured" ? share(file.recall) : file.how === "dense" ? "dense" : "not measured"),
        el("td", {}, file.density === null ? "–" : share(file.density)),
      );
    const more = files.length - MAX_ROWS;
    return el(
      "table",
      {},
      more > 0 ? el("caption", {}, `The ${count(MAX_ROWS)} largest of ${plural(files.length, "file")}`) : null,
      el("thead", {}, el("tr", {}, head.map((title) => el("th", { scope: "col" }, title)))),
      el("tbody", {}, files.slice(0, MAX_ROWS).map(row)),
    );
  }
}

/** 3: less than half of the allowed loss; 2: within it; 1: up to half more than allowed; 0: beyond. */
export function grade(recall, target) {
  const loss = (1 - recall) / Math.max(1e-9, 1 - target);
  return loss <= 0.5 ? 3 : loss <= 1 ? 2 : loss <= 1.5 ? 1 : 0;
}

function recallOf(file) {
  if (file.how === "measured") return `recall ${share(file.recall)}`;
  return file.how === "dense" ? "read densely, all kept" : "recall not measured";
}

function put(node, { x, y, width, height }, gap) {
  Object.assign(node.style, {
    left: `${x}px`,
    top: `${y}px`,
    width: `${Math.max(1, width - gap)}px`,
    height: `${Math.max(1, height - gap)}px`,
  });
}

let groups = 0;

function switcher(label, options, value, changed) {
  const group = `switch-${(groups += 1)}`;
  return el(
    "fieldset",
    { class: "switch" },
    el("legend", { class: "unseen" }, label),
    options.map(([option, text]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name: group, value: option, checked: option === value, onchange: () => changed(option) }),
        el("span", {}, text),
      ),
    ),
  );
}
