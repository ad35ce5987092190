// Who answers where no server stands behind the pages? What was computed beforehand; then Python in a worker.
import { Failure } from "./api.js";

/** @type {Map<string, Promise<any[]>>} */
const known = new Map();
/** @type {Promise<Worker | null> | null} */
let starting = null;
let number = 0;

/** Equal inputs, equal words. @param {any} inputs */
const canonical = (inputs) => JSON.stringify(Object.entries(inputs).sort(([a], [b]) => (a < b ? -1 : 1)));

/** @param {any} page @param {any} inputs @param {AbortSignal} signal */
export async function answer(page, inputs, signal) {
  if (!known.has(page.name)) known.set(page.name, fetch(`api/${page.name}.json`).then((reply) => reply.json()));
  const found = (await known.get(page.name))?.find((one) => canonical(one.inputs) === canonical(inputs));
  if (found) return found.answer;
  if (page.needs_model) throw new Failure("This page reads the bundled model. Here it knows the answers of the presets; `ridgeline lab` computes all others.");
  starting ??= start();
  const worker = await starting;
  if (signal.aborted) throw new Failure("");
  if (!worker) throw new Failure("This edition knows the answers of the presets. `ridgeline lab` computes all others.");
  return new Promise((done, fail) => {
    const id = ++number;
    const listen = (/** @type {MessageEvent} */ event) => {
      if (event.data.id !== id) return;
      worker.removeEventListener("message", listen);
      const told = JSON.parse(event.data.text);
      if (told.error) fail(new Failure(told.error.message)); else done(told.answer);
    };
    worker.addEventListener("message", listen);
    worker.postMessage({ id, name: page.name, inputs: JSON.stringify(inputs) });
  });
}

/** Python, if it lies beside the pages; it takes some seconds. */
async function start() {
  const reply = await fetch("pyodide/edition.json");
  if (!reply.ok) return null;
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.postMessage(await reply.json());
  return worker;
}
