// How does a browser run the pages' own Python? Pyodide, beside the page so that it stays quick.

/** @type {Promise<(name: string, inputs: string) => string> | null} */
let ready = null;

/** @param {{wheel: string}} edition */
async function start(edition) {
  const base = new URL("../pyodide/", import.meta.url);
  const { loadPyodide } = await import(new URL("pyodide.mjs", base).href);
  const python = await loadPyodide({ indexURL: base.href });
  await python.loadPackage(new URL(edition.wheel, base).href);
  const archive = await (await fetch(new URL("ridgeline.zip", base))).arrayBuffer();
  python.unpackArchive(archive, "zip");
  return python.runPython("from ridgeline.lab.page import answer_json; answer_json");
}

addEventListener("message", async (event) => {
  if (event.data.wheel) { ready = start(event.data); return; }
  const { id, name, inputs } = event.data;
  try {
    postMessage({ id, text: (await /** @type {NonNullable<typeof ready>} */ (ready))(name, inputs) });
  } catch (fault) {
    postMessage({ id, text: JSON.stringify({ error: { message: String(fault).split("\n").at(-2) ?? String(fault) } }) });
  }
});
