// Light or dark? As the system has it, until somebody says another; that is kept in this browser.
import { useLayoutEffect, useState } from "preact/hooks";
import { html } from "./html.js";

const THEMES = ["auto", "light", "dark"], SIGNS = ["◐", "○", "●"];

export function Theme() {
  const [at, setAt] = useState(Math.max(0, THEMES.indexOf(localStorage.getItem("ridgeline-theme") ?? "")));
  useLayoutEffect(() => {
    document.documentElement.dataset.theme = THEMES[at];
    localStorage.setItem("ridgeline-theme", THEMES[at]);
  }, [at]);
  return html`<button type="button" class="theme" onClick=${() => setAt((at + 1) % THEMES.length)} aria-label="theme: ${THEMES[at]}">
    <span aria-hidden="true">${SIGNS[at]} </span><span class="word">${THEMES[at]}</span></button>`;
}
