// Time to first token of this document: its cold read, then each question, on a logarithmic scale.

import { el, svg } from "./dom.js";
import { seconds } from "./format.js";

const ROW = 22;
const LEFT = 92;
const RIGHT = 64;
const WIDTH = 720;
const SHOWN = 8;
const KINDS = { cold: "cold", partial: "partly warm" };

const kind = (state) => KINDS[state] ?? state.replace("warm_", "warm, ");
const tone = (state) => (state in KINDS ? state : "warm");

/** `points` are {label, seconds, state}, the cold read first. */
export function chart(points) {
  const shown = points.length > SHOWN ? [points[0], ...points.slice(1 - SHOWN)] : points;
  const least = 10 ** Math.floor(Math.log10(Math.min(...shown.map((point) => point.seconds)) * 0.7));
  const most = Math.max(...shown.map((point) => point.seconds), least * 10);
  const along = (value) => (Math.log10(value / least) / Math.log10(most / least)) * (WIDTH - LEFT - RIGHT);
  const height = shown.length * ROW + 24;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "chart", "aria-hidden": "true" });
  for (let tick = least; tick <= most * 1.0001; tick *= 10) {
    const x = LEFT + along(tick);
    picture.append(
      svg("line", { x1: x, x2: x, y1: 0, y2: height - 20, class: "chart-line" }),
      svg("text", { x, y: height - 6, class: "chart-tick" }, tick < 0.995 ? `${Math.round(tick * 1000)} ms` : `${Math.round(tick)} s`),
    );
  }
  shown.forEach((point, index) => {
    const y = index * ROW + 3;
    const length = Math.max(2, along(point.seconds));
    picture.append(
      svg("text", { x: LEFT - 10, y: y + 12, class: "chart-label" }, point.label),
      svg("rect", { x: LEFT, y, width: length, height: ROW - 7, rx: 3, class: `chart-bar ${tone(point.state)}` }),
      svg("text", { x: LEFT + length + 7, y: y + 12, class: "chart-value" }, seconds(point.seconds)),
    );
  });
  return el("div", {}, picture, table(points));
}

/** The same for those who don't see the picture. */
function table(points) {
  const cell = (tag, text) => el(tag, {}, text);
  return el(
    "table",
    { class: "unseen" },
    el("caption", {}, "Time to first token"),
    el("thead", {}, el("tr", {}, cell("th", "What"), cell("th", "Seconds"), cell("th", "State"))),
    el(
      "tbody",
      {},
      points.map((point) =>
        el("tr", {}, cell("td", point.label), cell("td", point.seconds.toFixed(3)), cell("td", kind(point.state))),
      ),
    ),
  );
}

export { kind };
