// Where do the names of the import map lie, for Node? node --import ./vendored.mjs --test
import { register } from "node:module";

const FOLDER = new URL("../../../ridgeline/lab/static/", import.meta.url);
const HOOK = `const at = ${JSON.stringify(FOLDER.href)};
const names = { "preact": "vendor/preact.mjs", "preact/hooks": "vendor/preact-hooks.mjs", "htm": "vendor/htm.mjs",
  "@preact/signals": "vendor/signals.mjs", "@preact/signals-core": "vendor/signals-core.mjs" };
export const resolve = (name, context, next) => next(names[name] ? at + names[name] : name.startsWith("lab/") ? at + "shell/" + name.slice(4) : name, context);
export const load = (url, context, next) => next(url, url.startsWith(at) ? { ...context, format: "module" } : context);`;
register(`data:text/javascript,${encodeURIComponent(HOOK)}`);
