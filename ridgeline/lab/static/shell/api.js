// How does the page ask Python? JSON, or events where an answer takes long; a key where one is needed.
import { signal } from "@preact/signals";

/** The API key of this tab; it is forgotten with the tab. */
export const key = signal(sessionStorage.getItem("ridgeline-key") ?? "");
/** Whether the server refused the key. */
export const needsKey = signal(false);

/** @param {string} text */
export function setKey(text) {
  sessionStorage.setItem("ridgeline-key", text);
  needsKey.value = false;
  key.value = text;
}

/** No server stands behind the pages. */
export const isStatic = document.querySelector('meta[name="ridgeline-edition"]') !== null;

/** An error with the words of the server. */
export class Failure extends Error {}

/** @param {string} path @param {RequestInit} [options] */
export async function reach(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.value) headers.set("authorization", `Bearer ${key.value}`);
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (fault) {
    if (options.signal?.aborted) throw fault;
    throw new Failure("The server is gone. Is it still running? The page tries again when you move something.");
  }
  if (reply.ok) return reply;
  if (reply.status === 401) needsKey.value = true;
  const told = await reply.json().catch(() => null);
  throw new Failure(told?.error?.message ?? `The server answered ${reply.status}.`);
}

/** The records of a stream of server-sent events. @param {Response} reply */
export async function* events(reply) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (reply.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = /** @type {string} */ (blocks.pop());
      for (const block of blocks)
        for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** All pages, and whether an engine can be watched. */
export async function pages() {
  return (await reach(isStatic ? "api/index.json" : "api")).json();
}

/** The answer of a page. @param {any} page @param {object} inputs @param {AbortSignal} signal
 * @param {(share: number) => void} onProgress @param {(answer: any) => void} onAnswer hears of an answer that will be completed, too */
export async function ask(page, inputs, signal, onProgress, onAnswer) {
  if (isStatic) return (await import("./edition.js")).answer(page, inputs, signal);
  const reply = await reach(`api/${page.name}`, {
    method: "POST", body: JSON.stringify(inputs), signal, headers: { "content-type": "application/json" },
  });
  if (!page.long) return reply.json();
  let last = null;
  for await (const text of events(reply)) {
    const told = JSON.parse(text);
    if (told.error) throw new Failure(told.error.message);
    if (told.answer) onAnswer((last = told.answer));
    else onProgress(told.progress);
  }
  if (last) return last;
  throw new Failure("The answer broke off. Move something to ask again.");
}

/** The text of a page. @param {string} name */
export async function text(name) {
  return (await reach(`pages/${name}.html`)).text();
}
