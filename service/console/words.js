// What went wrong, in plain words, and what to do next.

import { bytes, count, seconds } from "./format.js";

const ARCHIVE = "Pack it again as a zip and drop that, or drop the files themselves.";
const AGAIN = "Try it again. If it keeps happening, the server's log has the request id.";

const NEXT = {
  archive_bomb: ["The archive unpacks to far more than it holds.", "Pack only the files that should be read."],
  archive_corrupt: ["The archive is damaged.", ARCHIVE],
  archive_unsafe_path: ["The archive has paths that lead out of it.", ARCHIVE],
  archive_encrypted: ["The archive is locked with a password.", "Unlock it, then drop it again."],
  context_length_exceeded: ["That is longer than the model can read at once.", "Drop a part of it, or ask a shorter question."],
  document_corrupt: ["The file is damaged.", "Open it in its own program, save it anew, and drop that."],
  document_deleted: ["The document was deleted meanwhile.", "Drop it again if you still need it."],
  document_not_found: ["The document is not there any more.", "It was deleted or has expired; drop it again if you need it."],
  document_not_ready: ["The document is still being read.", "Wait for it to be ready."],
  empty_input: ["There is nothing in it to read.", "Check that the file is the one you meant."],
  encrypted: ["The file is locked with a password.", "Remove the password, then drop it again."],
  file_not_found: ["The document is not there any more.", "It was deleted or has expired; drop it again if you need it."],
  file_too_large: ["The file is too large for this server.", "Drop a smaller one, or split it."],
  forbidden_host: ["The server does not know the name that this page was opened by.", "Open it by localhost, or ask whoever runs it to allow this name."],
  forbidden_origin: ["The server refused a request that did not come from its own page.", "Open the console by its own address and try again."],
  ingest_failed: ["The program that takes files apart failed on this one.", "Save it anew in its own program, or as PDF or text, and drop that."],
  ingest_timeout: ["The file took too long to take apart.", "Split it, or save it in a simpler format."],
  internal_error: ["The server failed on this.", AGAIN],
  io_error: ["The server could not read or write its files.", AGAIN],
  invalid_api_key: ["The server did not accept the API key.", "It may be mistyped or expired: enter another one."],
  needs_ocr: ["Its pages are pictures without text.", "Run text recognition on it, then drop the result."],
  no_text: ["There is no text in it.", "If it is a scan, run text recognition on it first."],
  out_of_memory: ["The worker ran out of memory.", "Split the document, or try again when less is running."],
  request_in_progress: ["The server still works on the first try.", "This page waits for it to end."],
  insufficient_quota: ["This key has used up what it may keep here.", "Delete documents that are no longer needed, then try again."],
  storage_full: ["The server has no room left.", "Delete documents that are no longer needed, then try again."],
  tokenizer_changed: ["The server now runs another model than the one that read this document.", "Drop the document again."],
  too_many_entries: ["The archive holds too many files.", "Pack only those that should be read."],
  too_many_parts: ["These are too many files at once.", "Pack them as one zip and drop that."],
  unreadable_drop: ["The browser could not read what was dropped.", "Drop it again, or choose it with the buttons above."],
  unsupported_format: ["This kind of file can't be read.", "PDF, office documents, mail, HTML, text, source code and archives of them can."],
  unsupported_media_type: ["The server did not understand what was sent.", AGAIN],
};

/** {what, next, detail}: what happened, what to do, and the server's own words where they add something. */
export function explain(error) {
  if (error.name === "Unreachable") {
    return {
      what: "The connection to the server was lost.",
      next: "Nothing that was uploaded is lost. This page tries again by itself and goes on where it was.",
      detail: "",
    };
  }
  if (error.code === "rate_limit_exceeded") {
    return {
      what: "That were too many requests for this key.",
      next: `The server takes more in ${seconds(error.retryAfter ?? 1)}; this page waits and then goes on.`,
      detail: error.message,
    };
  }
  const known = NEXT[error.code] ?? (/encrypt|password/.test(error.code ?? "") ? NEXT.encrypted : null);
  if (known) return { what: known[0], next: known[1], detail: error.message ?? "" };
  if (error.status >= 500) return { what: "The server could not do that just now.", next: AGAIN, detail: error.message ?? "" };
  return { what: error.message || "That did not work.", next: "Change what was asked for, or try again.", detail: error.code ?? "" };
}

/** Before any byte is sent. */
export function tooLarge(size, limit) {
  return {
    code: "file_too_large",
    message: `It has ${bytes(size)}; this server takes ${bytes(limit)} at once.`,
  };
}

export const tooManyFiles = (limit) => ({
  code: "too_many_parts",
  message: `The folder has more than ${count(limit)} files.`,
});
