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

/** An error with the words of the server; asking again may help after `retryS` seconds, if that is not 0. */
export class Failure extends Error {
  /** @param {string} message @param {number} [retryS] */
  constructor(message, retryS = 0) { super(message); this.retryS = retryS; }
}

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
  const retryS = reply.status === 429 || reply.status === 503 ? Number(reply.headers.get("retry-after")) : 0;
  throw new Failure(told?.error?.message ?? `The server answered ${reply.status}.`, retryS);
}

/** @param {number} ms @param {AbortSignal} signal which ends it with an error */
export function pause(ms, signal) {
  return new Promise((done, fail) => {
    const leave = () => { clearTimeout(timer); fail(signal.reason); };
    const timer = setTimeout(() => { signal.removeEventListener("abort", leave); done(null); }, ms);
    if (signal.aborted) leave();
    else signal.addEventListener("abort", leave);
  });
}

/** The same, asked again for as long as the server has too much to do. @param {string} path @param {RequestInit & {signal: AbortSignal}} options
 * @param {(message: string) => void} onWait */
export async function patient(path, options, onWait) {
  for (;;) {
    try {
      return await reach(path, options);
    } catch (fault) {
      if (!(fault instanceof Failure) || !fault.retryS) throw fault;
      onWait(`The lab is busy: ${fault.message}. This page does.`);
      await pause(1000 * fault.retryS * (1 + Math.random() / 4), options.signal);
    }
  }
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
 * @param {(share: number) => void} onProgress @param {(answer: any) => void} onAnswer hears of an answer that will be completed, too
 * @param {(message: string) => void} onWait hears why an answer comes later */
export async function ask(page, inputs, signal, onProgress, onAnswer, onWait) {
  if (isStatic) return (await import("./edition.js")).answer(page, inputs, signal);
  const reply = await patient(`api/${page.name}`, {
    method: "POST", body: JSON.stringify(inputs), signal, headers: { "content-type": "application/json" },
  }, onWait);
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
