// The squarified treemap of Bruls, Huizing and van Wijk (2000): areas in proportion, cells as square as they come.

/** Rectangles {x, y, width, height} for `sizes` (positive, largest first) that fill the given one. */
export function squarify(sizes, { x, y, width, height }) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  if (total <= 0 || width <= 0 || height <= 0) return sizes.map(() => ({ x, y, width: 0, height: 0 }));
  const scale = (width * height) / total;
  const out = [];
  let row = [];
  for (const size of sizes) {
    const area = size * scale;
    const side = Math.min(width, height);
    if (row.length && worst([...row, area], side) > worst(row, side)) {
      ({ x, y, width, height } = place(row, { x, y, width, height }, out));
      row = [];
    }
    row.push(area);
  }
  if (row.length) place(row, { x, y, width, height }, out);
  return out;
}

function worst(row, side) {
  const sum = row.reduce((total, area) => total + area, 0);
  return Math.max((side ** 2 * Math.max(...row)) / sum ** 2, sum ** 2 / (side ** 2 * Math.min(...row)));
}

/** Lay the row along the shorter side; returns what is left. */
function place(row, { x, y, width, height }, out) {
  const sum = row.reduce((total, area) => total + area, 0);
  const across = width >= height;
  const depth = sum / (across ? height : width);
  let at = across ? y : x;
  for (const area of row) {
    const length = area / depth;
    out.push(across ? { x, y: at, width: depth, height: length } : { x: at, y, width: length, height: depth });
    at += length;
  }
  return across ? { x: x + depth, y, width: width - depth, height } : { x, y: y + depth, width, height: height - depth };
}
