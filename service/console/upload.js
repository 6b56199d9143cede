// From what a person drops to a file handle. XMLHttpRequest, because fetch doesn't tell how much it has sent.

import { headers, lost, refusal, Unreachable } from "./api.js";

export const MAX_FILES = 9000;

/** Files of a drop, folders walked, each as {file, path}. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) {
    return [...transfer.files].map((file) => ({ file, path: file.name }));
  }
  const found = [];
  for (const entry of entries) await walk(entry, found);
  return found;
}

export const chosen = (input) =>
  [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));

async function walk(entry, found) {
  if (found.length > MAX_FILES) return;
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    found.push({ file, path: entry.fullPath.replace(/^\//, "") });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!batch.length) return;
    for (const child of batch) await walk(child, found);
  }
}

/** What to call them together. */
export function title(files) {
  const folder = files[0].path.split("/")[0];
  if (files.length > 1 && files.every(({ path }) => path.startsWith(`${folder}/`))) return folder;
  return files.length > 1 ? `${files[0].path} and ${files.length - 1} more` : files[0].path;
}

/**
 * Send all files as one document; resolves with its view. The same `idempotencyKey` sent again, after a lost
 * connection, makes no second document.
 */
export function upload(files, { fidelity, idempotencyKey, signal, progress }) {
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("fidelity", fidelity);
  if (files.length > 1) form.append("filename", title(files));
  for (const { file, path } of files) form.append("file", file, path);
  return new Promise((resolve, reject) => {
    const xhr = new XMLHttpRequest();
    xhr.open("POST", "/v1/documents");
    for (const [name, value] of Object.entries(headers({ "idempotency-key": idempotencyKey }))) {
      xhr.setRequestHeader(name, value);
    }
    xhr.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded, event.total);
    xhr.onload = async () => {
      if (xhr.status >= 200 && xhr.status < 300) resolve(JSON.parse(xhr.responseText));
      else reject(await refusal(xhr.status, (name) => xhr.getResponseHeader(name), () => xhr.responseText));
    };
    xhr.onerror = () => reject(lost(new Unreachable("upload broke off")));
    xhr.onabort = () => reject(new DOMException("cancelled", "AbortError"));
    signal.addEventListener("abort", () => xhr.abort(), { once: true });
    if (signal.aborted) reject(new DOMException("cancelled", "AbortError"));
    else xhr.send(form);
  });
}
