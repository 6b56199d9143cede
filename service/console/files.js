// The files of a document, with what is known of how each was read.

/** Rows of the manifest that hold text of their own, with density and recall; `segments` as /recall gives them. */
export function readFiles(manifest, segments) {
  return manifest.files
    .filter((row) => row.status === "included" && !row.duplicate_of && row.token_end > row.token_start)
    .map((row) => ({
      path: row.path,
      tokens: row.token_end - row.token_start,
      start: row.token_start,
      end: row.token_end,
      pages: row.pages?.length ?? 0,
      ...keptIn(segments, row.token_start, row.token_end),
    }));
}

/**
 * Recall of tokens [start, end): the mean over the segments that they lie in, by tokens. Null where none was measured:
 * `how` says whether that is because all of it was read densely, or because its KV came from the store.
 */
export function keptIn(segments, start, end) {
  let covered = 0;
  let measured = 0;
  let recall = 0;
  let density = 0;
  for (const segment of segments) {
    const tokens = Math.min(end, segment.token_end) - Math.max(start, segment.token_start);
    if (tokens <= 0) continue;
    covered += tokens;
    density += tokens * segment.density;
    if (segment.recall === null) continue;
    measured += tokens;
    recall += tokens * segment.recall;
  }
  return {
    recall: measured ? recall / measured : null,
    density: covered ? density / covered : null,
    how: measured ? "measured" : covered ? "dense" : "unknown",
  };
}

/** Folders and files as a tree, {name, path, tokens, children | file}; folders with a single child are joined to it. */
export function tree(files) {
  const root = { name: "", path: "", tokens: 0, children: new Map() };
  for (const file of files) {
    let node = root;
    const parts = file.path.split("/");
    parts.forEach((part, depth) => {
      node.tokens += file.tokens;
      const last = depth === parts.length - 1;
      const key = last ? `file:${part}` : part;
      if (!node.children.has(key)) {
        const path = parts.slice(0, depth + 1).join("/");
        node.children.set(key, { name: part, path, tokens: 0, ...(last ? { file } : { children: new Map() }) });
      }
      node = node.children.get(key);
    });
    node.tokens += file.tokens;
  }
  return settle(root);
}

function settle(node) {
  if (node.file) return node;
  const children = [...node.children.values()].map(settle).sort((a, b) => b.tokens - a.tokens);
  if (children.length === 1 && children[0].children && node.name) {
    return { ...children[0], name: `${node.name}/${children[0].name}` };
  }
  return { ...node, children };
}
