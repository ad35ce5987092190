// How is a piece of the page written? As a template: html`<p>${text}</p>`.
import { createElement } from "preact";
import htm from "htm";

export const html = htm.bind(createElement);
