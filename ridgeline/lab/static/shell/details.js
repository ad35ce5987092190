// What stands around a drawing? Its figures with their formulas, tables, questions, a guess, files.
import { useState } from "preact/hooks";
import { html } from "./html.js";
import { amount, both, number } from "./format.js";

const KINDS = /** @type {Record<string, string>} */ ({
  ideal: "from data sheets and counts alone", assumed: "with efficiencies that are assumed",
  calibrated: "with efficiencies measured on such a machine", measured: "measured in a run",
});

/** @param {{figures: any[]}} props */
export function Figures({ figures }) {
  return html`<section class="figures" aria-label="figures">
    ${figures.map((one) => html`<details class="figure" key=${one.name}>
      <summary>
        <span class="name">${one.name}</span>
        <b title=${both(one.value, one.unit)}>${amount(one.value, one.unit)}</b>
        <span class="badge ${one.kind}" title=${KINDS[one.kind]}>${one.kind}</span>
      </summary>
      <p class="formula">${one.formula} = ${amount(one.value, one.unit)}</p>
      <p class="where">${one.where}</p>
    </details>`)}
  </section>`;
}

/** @param {any} cell */
const shown = (cell) => (typeof cell === "number" ? number(cell) : cell === null ? "–" : cell);

/** @param {{tables: any[]}} props */
export function Tables({ tables }) {
  return tables.map((one) => html`<details class="table" key=${one.title}>
    <summary>${one.title}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${one.title}><table>
      <thead><tr>${one.columns.map((/** @type {string} */ name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${one.rows.map((/** @type {any[]} */ row) => html`<tr>${row.map((cell) => html`<td class=${typeof cell === "number" ? "number" : cell?.length > 36 ? "long" : ""}>${shown(cell)}</td>`)}</tr>`)}</tbody>
    </table></div>
  </details>`);
}

/** @param {{questions: any[]}} props */
export function Questions({ questions }) {
  return questions.length > 0 && html`<section class="questions"><h2>Questions</h2>
    ${questions.map((one) => html`<details key=${one.ask}><summary>${one.ask}</summary><p>${one.answer}</p></details>`)}
  </section>`;
}

/** What the reader believes, before he sees it. @param {{guess: any}} props */
export function Guess({ guess }) {
  const [given, setGiven] = useState(/** @type {number | null} */ (null));
  const submit = (/** @type {any} */ event) => {
    event.preventDefault();
    const typed = event.target.elements.guess.value;
    setGiven(typed === "" ? null : Number(typed));
  };
  return html`<form class="guess" onSubmit=${submit}>
    <label for="guess"><b>Guess first.</b> ${guess.ask}</label>
    <span class="typed"><input id="guess" name="guess" type="number" step="any" /><span class="unit">${guess.unit}</span></span>
    <button>compare</button>
    <output>${given !== null && verdict(given, guess)}</output>
  </form>`;
}

/** @param {number} given @param {any} guess */
function verdict(given, guess) {
  const is = amount(guess.value, guess.unit), off = guess.value ? given / guess.value : 1;
  if (Math.abs(given - guess.value) <= 0.1 * Math.abs(guess.value)) return `Yes: it is ${is}.`;
  const times = number(off > 1 ? off : 1 / Math.max(off, 1e-9));
  return `It is ${is}: your guess is ${off > 1 ? "too high" : "too low"}${off > 0 ? `, ${times} times` : ""}.`;
}

/** All tables as one file. @param {any[]} tables */
export function asCsv(tables) {
  const cell = (/** @type {any} */ value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return tables.map((one) => [[one.title], one.columns, ...one.rows].map((row) => row.map(cell).join(",")).join("\n")).join("\n\n");
}

/** @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font", "text-anchor", "font-weight", "paint-order"];

/** The drawing as it looks now, twice as large. @param {Element} stage @returns {Promise<Blob>} */
export async function asPng(stage) {
  const canvas = document.createElement("canvas"), pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const parts = [...stage.querySelectorAll("svg, canvas")].filter((one) => !one.parentElement?.closest("svg"));
  const frame = stage.getBoundingClientRect();
  canvas.width = 2 * frame.width; canvas.height = 2 * frame.height;
  pen.scale(2, 2);
  pen.fillStyle = getComputedStyle(stage).backgroundColor;
  pen.fillRect(0, 0, frame.width, frame.height);
  for (const part of parts) {
    const box = part.getBoundingClientRect();
    const picture = part instanceof HTMLCanvasElement ? part : await asImage(/** @type {SVGSVGElement} */ (part), box);
    pen.drawImage(picture, box.x - frame.x, box.y - frame.y, box.width, box.height);
  }
  return new Promise((done) => canvas.toBlob((blob) => done(/** @type {Blob} */ (blob))));
}

/** @param {SVGSVGElement} svg @param {DOMRect} box */
async function asImage(svg, box) {
  const copy = /** @type {SVGSVGElement} */ (svg.cloneNode(true));
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((one, i) => {
    const style = getComputedStyle(one);
    for (const name of STYLES) /** @type {SVGElement} */ (to[i]).style.setProperty(name, style.getPropertyValue(name));
  });
  copy.setAttribute("width", String(2 * box.width));
  copy.setAttribute("height", String(2 * box.height));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  await image.decode();
  URL.revokeObjectURL(image.src);
  return image;
}
