// Elements from data. Text is only ever text: nothing here, or anywhere in the console, parses markup.

/** An element; `props` are properties, `aria-…`, `data-…` and `role` attributes, `on…` listeners. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "role" || name.includes("-")) node.setAttribute(name, value);
    else if (name === "class") node.className = value;
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const find = (id) => document.getElementById(id);

/** A name that somebody else chose: its direction marks must not turn the text around it. */
export const name = (text) => el("bdi", {}, text);

/** For screen readers; said once things have settled. */
export function announce(text) {
  const region = find("live");
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => (region.textContent = text), 60);
}
