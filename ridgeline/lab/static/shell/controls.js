// How is an input shown? A slider with its typed value, a choice, a switch, a text.
import { html } from "./html.js";
import { number } from "./format.js";

const SEGMENTS = 4; // so many choices are shown side by side, if they are short
const VISIBLE = 6;

/** The values that a slider stops at. @param {any} one */
export function stops(one) {
  if (one.scale === "linear") return null;
  const found = new Set([one.low, one.high]), isWhole = one.kind === "integer";
  const start = one.low > 0 ? one.low : (one.step ?? 1);
  for (let base = 2 ** Math.floor(Math.log2(start)); base < one.high; base *= 2)
    for (const part of one.scale === "log" ? [1, 1.25, 1.5, 1.75] : [1]) {
      const value = isWhole ? Math.round(base * part) : Number((base * part).toPrecision(4));
      if (value > one.low && value < one.high) found.add(value);
    }
  return [...found].sort((a, b) => a - b);
}

/** @param {number[]} values @param {number} value */
function nearest(values, value) {
  let best = 0;
  values.forEach((each, i) => { if (Math.abs(each - value) < Math.abs(values[best] - value)) best = i; });
  return best;
}

/** @param {any} one @param {string} typed */
function read(one, typed) {
  const value = one.kind === "integer" ? Math.round(Number(typed)) : Number(typed);
  if (typed.trim() === "" || Number.isNaN(value)) return one.default;
  return Math.min(one.high ?? value, Math.max(one.low ?? value, value));
}

/** @param {{one: any, value: any, set: (value: any) => void}} props */
function Slider({ one, value, set }) {
  const id = `in-${one.name}`, at = stops(one);
  const step = one.step ?? (one.kind === "integer" ? 1 : (one.high - one.low) / 200);
  const hasRange = one.low !== null && one.high !== null;
  const range = at
    ? { min: 0, max: at.length - 1, step: 1, value: nearest(at, value), onInput: (/** @type {any} */ e) => set(at[+e.target.value]) }
    : { min: one.low, max: one.high, step, value, onInput: (/** @type {any} */ e) => set(+e.target.value) };
  return html`<div class="control">
    <label for=${id} title=${one.meaning}>${one.label}</label>
    <span class="typed">
      <input id=${id} type="number" min=${one.low} max=${one.high} step="any" value=${value}
        onChange=${(/** @type {any} */ e) => { const next = read(one, e.target.value); e.target.value = next; set(next); }} />
      ${one.unit && html`<span class="unit">${one.unit}</span>`}
    </span>
    ${hasRange && html`<input type="range" ...${range} aria-label=${one.label}
      aria-valuetext=${`${number(value)} ${one.unit}`} />`}
  </div>`;
}

/** @param {{one: any, value: any, set: (value: any) => void}} props */
function Choice({ one, value, set }) {
  const id = `in-${one.name}`, letters = one.choices.join("").length;
  const isNumber = typeof one.default === "number";
  const pick = (/** @type {any} */ e) => set(isNumber ? +e.target.value : e.target.value);
  if (one.choices.length > SEGMENTS || letters > 34)
    return html`<div class="control">
      <label for=${id} title=${one.meaning}>${one.label}</label>
      <select id=${id} value=${value} onChange=${pick}>
        ${one.choices.map((/** @type {any} */ each) => html`<option value=${each}>${each}</option>`)}
      </select></div>`;
  return html`<fieldset class="control segments">
    <legend title=${one.meaning}>${one.label}</legend>
    <div>${one.choices.map((/** @type {any} */ each) => html`<label>
      <input type="radio" name=${id} value=${each} checked=${each === value} onChange=${pick} /><span>${each}</span>
    </label>`)}</div></fieldset>`;
}

/** @param {{one: any, value: any, set: (value: any) => void}} props */
function Control({ one, value, set }) {
  const id = `in-${one.name}`;
  if (one.choices.length) return html`<${Choice} ...${{ one, value, set }} />`;
  if (one.kind === "boolean")
    return html`<div class="control switch"><label title=${one.meaning}>
      <input id=${id} type="checkbox" role="switch" checked=${value} onChange=${(/** @type {any} */ e) => set(e.target.checked)} />
      ${one.label}</label></div>`;
  if (one.kind === "integer" || one.kind === "number") return html`<${Slider} ...${{ one, value, set }} />`;
  const onChange = (/** @type {any} */ e) => set(e.target.value);
  return html`<div class="control text">
    <label for=${id} title=${one.meaning}>${one.label}</label>
    ${(one.high ?? 0) > 200
      ? html`<textarea id=${id} rows="4" maxlength=${one.high} value=${value} onChange=${onChange} spellcheck=${false} placeholder=${one.meaning}></textarea>`
      : html`<input id=${id} type="text" maxlength=${one.high} value=${value} onChange=${onChange} />`}
  </div>`;
}

/** All inputs of a page: presets, the first six, and the rest folded.
 * @param {{page: any, inputs: any, act: (changes: any) => void, reset: (inputs: any) => void}} props */
export function Controls({ page, inputs, act, reset }) {
  const shown = page.inputs.filter((/** @type {any} */ one) => !one.is_hidden);
  const first = shown.filter((/** @type {any} */ one) => !one.is_folded).slice(0, VISIBLE);
  const rest = shown.filter((/** @type {any} */ one) => !first.includes(one));
  const row = (/** @type {any} */ one) => html`<${Control} key=${one.name} one=${one} value=${inputs[one.name]}
    set=${(/** @type {any} */ value) => act({ [one.name]: value })} />`;
  return html`<form class="inputs" aria-label="inputs" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
    ${page.presets.length > 0 && html`<div class="presets" role="group" aria-label="presets">
      ${page.presets.map((/** @type {any} */ one) => html`<button type="button" key=${one.name} onClick=${() => reset(one.inputs)}>${one.name}</button>`)}
    </div>`}
    ${first.map(row)}
    ${rest.length > 0 && html`<details><summary>more (${rest.length})</summary>${rest.map(row)}</details>`}
  </form>`;
}
